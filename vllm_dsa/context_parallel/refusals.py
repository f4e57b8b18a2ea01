"""What a decode kernel cannot do under DCP: refused before it runs, because it would not fail but answer wrong."""

import torch

from vllm_dsa.context_parallel.layout import DcpLayout


def check_dcp_decode(
    layout: DcpLayout,
    *,
    q_len: int,
    return_lse: bool,
    causal_seqs: torch.Tensor | None = None,
    row_lens: torch.Tensor | None = None,
    takes_causal_seqs: bool = False,
) -> None:
    """Refuse a decode call that a kernel cannot answer on a rank's shard.

    One query row is safe: its causal prefix is all of the request, of which this rank's pages and length are exactly
    the visible part. Further rows each end at another token, and the ranks' lengths do not follow by subtraction.

    Parameters
    ----------
    layout : DcpLayout
        With size 1 nothing is refused.
    q_len : int
        Query rows per request.
    return_lse : bool
        Whether the call asks for the LSE that the merge over the ranks needs.
    causal_seqs : torch.Tensor, optional
        Global lengths, from which a kernel finds each row's bound itself; `DcpDecodeMetadata.global_seq_lens_k`.
    row_lens : torch.Tensor, optional
        A length on this rank for each row; `DcpDecodeMetadata.row_lens_of`.
    takes_causal_seqs : bool
        Whether the kernel knows `causal_seqs`.

    Raises
    ------
    NotImplementedError
        If rows have no bound of their own, the kernel does not know `causal_seqs`, or the LSE is not asked for. For
        kernels that know neither bound this is the table of SGLang 0.5.23's trtllm_mla.

    Notes
    -----
    Host work only; graph safe. No tensor's contents are read.
    """
    if layout.size == 1:
        return
    under = f"under DCP of size {layout.size}"
    if causal_seqs is not None and not takes_causal_seqs:
        raise NotImplementedError(f"causal_seqs is given {under}: this kernel cannot find a row's bound from it")
    if q_len > 1 and causal_seqs is None and row_lens is None:
        raise NotImplementedError(
            f"q_len is {q_len} {under}: each query row ends at another token, and this kernel takes one length per "
            "request; allowed: q_len 1, or a kernel that takes a length per row"
        )
    if not return_lse:
        raise NotImplementedError(f"return_lse is False {under}: without the LSE the ranks' outputs cannot be merged")


def check_dcp_fused_write(layout: DcpLayout, name: str, *, takes_dcp: bool) -> None:
    """Refuse a kernel that writes the cache itself and knows no owner: it would write other ranks' virtual slots.

    Parameters
    ----------
    layout : DcpLayout
        With size 1 nothing is refused.
    name : str
        The kernel's, for the message.
    takes_dcp : bool
        Whether it takes the group's size and this rank, or slots localised by :func:`localize_slot_mapping`.

    Raises
    ------
    NotImplementedError
        If it does not, under DCP.
    """
    if layout.size > 1 and not takes_dcp:
        raise NotImplementedError(
            f"{name} writes the cache by virtual slots, of which rank {layout.rank} of {layout.size} owns only its "
            "share; write with a localised slot_mapping instead"
        )
