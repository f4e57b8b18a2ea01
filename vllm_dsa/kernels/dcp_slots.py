"""Virtual slots to the local slots of one DCP rank, in one launch."""

from collections import defaultdict

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.launcher import Launcher

_BLOCK = 256


def launch_localize_slots(slot_mapping: torch.Tensor, out: torch.Tensor, *, dcp: tuple[int, int, int]) -> None:
    """Write the local slots of what this rank owns, and -1 elsewhere and past the end.

    Parameters
    ----------
    slot_mapping : torch.Tensor
        ``(T,)`` int32 or int64, contiguous, as in :func:`vllm_dsa.reference.dcp_slots.localize_slots`, the twin.
    out : torch.Tensor
        ``(N,)`` int32 or int64, contiguous, ``N >= T``. Written whole.
    dcp : (size, rank, interleave)
        This rank's share.

    Notes
    -----
    One launch, no allocation, no host sync; graph safe. Compiled once per pair of dtypes. Arguments are not checked
    here.
    """
    size, rank, interleave = dcp
    # A compiled kernel belongs to the dtypes of its pointers.
    _launchers[slot_mapping.dtype, out.dtype](
        (-(-out.shape[0] // _BLOCK), 1, 1),
        (slot_mapping, out, slot_mapping.shape[0], out.shape[0], size, rank, interleave),
        (_BLOCK,),
    )


@triton.jit(
    do_not_specialize=["num_slots", "num_out", "dcp_size", "dcp_rank", "dcp_interleave"],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "out_ptr"],
)
def _localize_slots_kernel(
    slot_mapping_ptr, out_ptr, num_slots, num_out, dcp_size, dcp_rank, dcp_interleave, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping_ptr + at, mask=at < num_slots, other=-1)
    run = slot // dcp_interleave
    is_mine = (slot >= 0) & (run % dcp_size == dcp_rank)
    local = run // dcp_size * dcp_interleave + slot % dcp_interleave
    tl.store(out_ptr + at, tl.where(is_mine, local, -1).to(out_ptr.dtype.element_ty), mask=at < num_out)


_launchers: defaultdict[tuple[torch.dtype, torch.dtype], Launcher] = defaultdict(
    lambda: Launcher(_localize_slots_kernel)
)
