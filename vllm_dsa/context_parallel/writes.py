"""Writes under DCP: a virtual slot is written by its owner alone."""

import torch

from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.kernels.dcp_slots import launch_localize_slots
from vllm_dsa.ops._checks import INTEGER_DTYPES, check_tensor
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference.dcp_slots import localize_slots


def localize_slot_mapping(
    slot_mapping: torch.Tensor, out: torch.Tensor, layout: DcpLayout, *, block_size: int
) -> torch.Tensor:
    """Turn virtual slots into this rank's own, -1 for what another rank writes.

    Virtual slots count over all ranks: page ``p`` is the slots from ``p * block_size * size`` on, as many as all ranks'
    pages ``p`` together hold. With ``v`` a slot, its owner is ``(v // interleave) % size`` and its slot there is
    ``(v // (interleave * size)) * interleave + v % interleave``, which lies on the owner's page ``p``: where the
    interleave divides `block_size`, as it must, neither depends on `block_size`. With interleave 1 these are SGLang's
    ``v % size`` and ``v // size``. vLLM's runner localises by position and already hands over -1: nothing to do there.

    Parameters
    ----------
    slot_mapping : torch.Tensor
        ``(T,)`` int32 or int64, any device; less than 0 for a token that nobody writes. Never written.
    out : torch.Tensor
        ``(N,)`` int32 or int64, contiguous, same device, ``N >= T``: a persistent buffer, no memory of `slot_mapping`.
        Past ``T`` it becomes -1.
    layout : DcpLayout
        This rank's share.
    block_size : int
        Tokens per page on a rank.

    Returns
    -------
    torch.Tensor
        ``(T,)`` view of `out`. With size 1 `slot_mapping` itself, and `out` is not touched.

    Raises
    ------
    TypeError, ValueError
        If a tensor has another dtype, shape, stride or device, `out` is too short or is `slot_mapping`, or the
        interleave does not divide `block_size`. `out` is not written then.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    On a GPU one launch, no allocation and no host sync; graph safe once a first call has compiled it. Values of slots
    are not checked.
    """
    if layout.size == 1:
        return slot_mapping
    layout.check_block_size(block_size)
    check_tensor("slot_mapping", slot_mapping, dtypes=INTEGER_DTYPES, shape=(None,), device=out.device)
    check_tensor("out", out, dtypes=INTEGER_DTYPES, shape=(None,), device=slot_mapping.device)
    num_tokens = len(slot_mapping)
    if len(out) < num_tokens:
        raise ValueError(f"out has {len(out)} elements; allowed: at least {num_tokens}, the length of slot_mapping")
    if out.data_ptr() == slot_mapping.data_ptr() and num_tokens:
        raise ValueError("out is slot_mapping; allowed: another buffer, so that the virtual slots stay")
    if not out.is_cuda:
        out[:num_tokens] = localize_slots(slot_mapping, layout)
        out[num_tokens:] = -1
    elif len(out):
        check_current_device(out.device)
        launch_localize_slots(slot_mapping, out, dcp=(layout.size, layout.rank, layout.interleave))
    return out[:num_tokens]
