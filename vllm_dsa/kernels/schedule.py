"""The schedule of a paged-logits launch, in one launch for any batch size."""

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.launcher import Launcher

SPLIT_KV = 256
_SLOTS_PER_PROGRAM = 16
_BLOCK_ROWS = 256


def launch_schedule(
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    sm100_rule: bool = False,
) -> None:
    """Write DeepGEMM's schedule for a batch into a persistent buffer.

    Parameters
    ----------
    context_lens : torch.Tensor
        ``(rows, next_n)`` int32, contiguous: tokens that each query row sees; less than 0 counts as 0.
    out : torch.Tensor
        ``(slots + 1, 2)`` int32, contiguous; every element is written.
    indices : torch.Tensor, optional
        ``(rows,)`` int32 request of each row, with next_n 1 under the SM100 rule only (not checked).
    sm100_rule : bool
        Cut (split, query token) pairs, longer runs first, instead of splits, longer runs last.

    Notes
    -----
    Bit-equal to :func:`vllm_dsa.reference.sm90_schedule` and :func:`~vllm_dsa.reference.sm100_schedule`. One launch, no
    allocation, no host sync, graph safe, one compiled variant per next_n. Arguments are not checked here.
    """
    num_rows, next_n = context_lens.shape
    num_slots = out.shape[0] - 1
    _launch(
        (-(-(num_slots + 1) // _SLOTS_PER_PROGRAM), 1, 1),
        (context_lens, context_lens if indices is None else indices, out, num_rows, num_slots),
        (next_n, sm100_rule, indices is not None, SPLIT_KV, _BLOCK_ROWS, _SLOTS_PER_PROGRAM),
    )


@triton.jit
def _row_works(
    lens_ptr,
    indices_ptr,
    block_start,
    num_rows,
    run_start_before,
    NEXT_N: tl.constexpr,
    SM100_RULE: tl.constexpr,
    VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Work of a block of rows, and the first row of the run of equal indices that each belongs to."""
    row = block_start + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    length = tl.load(lens_ptr + row * NEXT_N + (NEXT_N - 1), mask=live, other=0)
    work = (tl.maximum(length, 0) + (SPLIT - 1)) // SPLIT
    run_start = row
    if VARLEN:
        index = tl.load(indices_ptr + row, mask=live, other=-1)
        before = tl.load(indices_ptr + row - 1, mask=live & (row > 0), other=-1)
        after = tl.load(indices_ptr + row + 1, mask=row + 1 < num_rows, other=-1)
        is_first = (row == 0) | (index != before)
        starts_here = tl.where(is_first, row, run_start_before)
        run_start = tl.associative_scan(starts_here, 0, _maximum)
        # A request's length is its last row's, so its work stands there.
        is_last = (row + 1 >= num_rows) | (index != after)
        work = tl.where(is_last, work * (row - run_start + 1), 0)
    elif SM100_RULE:
        work = work * NEXT_N
    return row, work, run_start


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["lens_ptr", "indices_ptr", "out_ptr"],
)
def _schedule_kernel(
    lens_ptr,
    indices_ptr,
    out_ptr,
    num_rows,
    num_slots,
    NEXT_N: tl.constexpr,
    SM100_RULE: tl.constexpr,
    VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # Every program sums all rows itself: a few loads that hit L2, against a second launch.
    total = tl.full((), 0, tl.int32)
    run_start_before = tl.full((), 0, tl.int32)
    for block_start in range(0, num_rows, BLOCK_ROWS):
        row, work, run_start = _row_works(
            lens_ptr,
            indices_ptr,
            block_start,
            num_rows,
            run_start_before,
            NEXT_N,
            SM100_RULE,
            VARLEN,
            SPLIT,
            BLOCK_ROWS,
        )
        total += tl.sum(work)
        run_start_before = tl.max(run_start)

    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    share = total // num_slots
    extra = total - share * num_slots
    if SM100_RULE:
        start = slot * share + tl.minimum(slot, extra)
    else:
        start = slot * share + tl.maximum(slot - (num_slots - extra), 0)

    owner = tl.zeros((SLOTS,), tl.int32)
    begin = tl.zeros((SLOTS,), tl.int32)
    owner_run_start = tl.zeros((SLOTS,), tl.int32)
    carried = tl.full((), 0, tl.int32)
    run_start_before = tl.full((), 0, tl.int32)
    for block_start in range(0, num_rows, BLOCK_ROWS):
        row, work, run_start = _row_works(
            lens_ptr,
            indices_ptr,
            block_start,
            num_rows,
            run_start_before,
            NEXT_N,
            SM100_RULE,
            VARLEN,
            SPLIT,
            BLOCK_ROWS,
        )
        ends = carried + tl.cumsum(work, 0)
        is_before = (ends[:, None] <= start[None, :]) & (row < num_rows)[:, None]
        owner += tl.sum(is_before.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(is_before, ends[:, None], 0), 0))
        if VARLEN:
            holds = ((ends - work)[:, None] <= start[None, :]) & (ends[:, None] > start[None, :])
            owner_run_start += tl.sum(tl.where(holds, run_start[:, None], 0), 0)
        carried += tl.sum(work)
        run_start_before = tl.max(run_start)

    first = owner
    split = start - begin
    if VARLEN:
        past_all = owner >= num_rows
        first = tl.where(past_all, owner, owner_run_start)
        split = split // tl.where(past_all, 1, owner - owner_run_start + 1)
    elif SM100_RULE:
        first = owner * NEXT_N
        split = split // NEXT_N
    tl.store(out_ptr + slot * 2, first, mask=slot <= num_slots)
    tl.store(out_ptr + slot * 2 + 1, split, mask=slot <= num_slots)


_launch = Launcher(_schedule_kernel)
