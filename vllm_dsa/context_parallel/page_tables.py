"""Where a request's pages come from: an engine's slot of every position, or its block table."""

from dataclasses import dataclass

import torch

from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.ops._checks import INTEGER_DTYPES, check_tensor


@dataclass(frozen=True, slots=True)
class ReqToToken:
    """The slot of every position of every request, as SGLang keeps it.

    Slots are virtual: they count over all ranks. A page is ``block_size * size`` consecutive slots and holds as many
    consecutive positions of a request, both starting at a multiple of that, so that a token's slot and its position
    agree on the owner. Every rank keeps its share of page ``p`` in its own page ``p``.

    Attributes
    ----------
    req_to_token : torch.Tensor
        ``(pool, max_seq_len)`` int32 or int64, last stride 1. A slot less than 0 is taken for 0.
    req_pool_indices : torch.Tensor
        ``(R,)`` int32 or int64, same device: the row of each request of the step. A row that does not exist has no
        pages.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor


def check_page_source(
    pages: ReqToToken | torch.Tensor,
    *,
    num_reqs: int,
    layout: DcpLayout,
    block_size: int,
    max_seq_len: int,
    max_width: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Check the source of a step's page table; return it and, for slots, the row of each request.

    Parameters
    ----------
    pages : ReqToToken or torch.Tensor
        Slots, or a ``(R, C)`` block table of pages on this rank.
    num_reqs : int
        ``R``.
    layout, block_size : DcpLayout, int
        A column stands for ``block_size * layout.size`` tokens.
    max_seq_len : int
        Positions that it must reach.
    max_width : int
        Columns that it may have as a block table.
    device : torch.device
        Where it must be.

    Raises
    ------
    TypeError, ValueError
        If a tensor has another dtype, shape, stride or device, or is too narrow or too wide. A width that was divided
        by the size twice, or not at all, would else drop pages or mix rows.
    """
    if isinstance(pages, ReqToToken):
        check_tensor("req_to_token", pages.req_to_token, dtypes=INTEGER_DTYPES, shape=(None, None), device=device)
        check_tensor("req_pool_indices", pages.req_pool_indices, dtypes=INTEGER_DTYPES, shape=(None,), device=device)
        _check_count("req_pool_indices", pages.req_pool_indices, num_reqs)
        width = pages.req_to_token.shape[1]
        if width < max_seq_len:
            raise ValueError(f"req_to_token has {width} columns; allowed: at least max_seq_len, {max_seq_len}")
        return pages.req_to_token, pages.req_pool_indices
    check_tensor("block_table", pages, dtypes=INTEGER_DTYPES, shape=(None, None), device=device)
    _check_count("block_table", pages, num_reqs)
    tokens_per_page = block_size * layout.size
    least = -(-max_seq_len // tokens_per_page)
    if not least <= pages.shape[1] <= max_width:
        raise ValueError(
            f"block_table has {pages.shape[1]} columns; allowed: {least} to {max_width}, one for every "
            f"{tokens_per_page} tokens ({block_size} on each of {layout.size} ranks)"
        )
    return pages, None


def _check_count(name: str, tensor: torch.Tensor, num_reqs: int) -> None:
    if tensor.shape[0] != num_reqs:
        raise ValueError(f"{name} has {tensor.shape[0]} rows; allowed: {num_reqs}, the length of seq_lens")
