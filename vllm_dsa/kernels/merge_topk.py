"""The global top-k of a DCP group, around `ops.topk_indices`: candidates into global order, the choice made local."""

import torch
import triton
import triton.language as tl

_BLOCK = 256
_LOCALIZE_BLOCK = 1024


def launch_order_candidates(
    candidates: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor, *, interleave: int
) -> None:
    """Put the candidates of all ranks into the order of their global indices.

    Parameters
    ----------
    candidates : torch.Tensor
        ``(W, 2, rows, k)`` int32, contiguous: each rank's local indices, ascending and then -1, and the bits of their
        float32 logits.
    values : torch.Tensor
        ``(rows, W * k)`` float32, contiguous: their logits, by global index; only the first ``lengths[row]`` are
        written.
    ids : torch.Tensor
        ``(rows, W * k)`` int32, contiguous: their global indices, ascending; written likewise.
    lengths : torch.Tensor
        ``(rows,)`` int32: candidates of each row.
    interleave : int
        Of the layout.

    Notes
    -----
    Twin: :func:`vllm_dsa.reference.merge_topk.order_candidates`. Merges W ordered lists: the place of a candidate is
    its place in its own list plus, for each other list, the entries below it, which a binary search counts. One
    launch, no allocation, no host sync; graph safe once compiled, for each W, k and interleave. Not checked.
    """
    size, _, num_rows, k = candidates.shape
    _order_kernel[(num_rows, -(-k // _BLOCK), size)](
        *(candidates, values.view(torch.int32), ids, lengths),
        *(num_rows, k, interleave),
        SIZE=size,
        STEPS=k.bit_length(),
        BLOCK=_BLOCK,
    )


def launch_localize_indices(
    indices: torch.Tensor, local_indices: torch.Tensor, counts: torch.Tensor, *, dcp: tuple[int, int, int]
) -> None:
    """Keep the indices that a rank owns, as local ones.

    Parameters
    ----------
    indices : torch.Tensor
        ``(rows, k)`` int32, contiguous: global indices, ascending; -1 for none.
    local_indices : torch.Tensor
        ``(rows, k)`` int32, contiguous: what is owned, ascending, then -1. Every element is written.
    counts : torch.Tensor
        ``(rows,)`` int32: how many are owned.
    dcp : (size, rank, interleave)
        This rank's share.

    Notes
    -----
    Twin: :func:`vllm_dsa.reference.merge_topk.localize_indices`. One launch, no allocation, no host sync; graph safe
    once compiled. Not checked.
    """
    num_rows, k = indices.shape
    _localize_kernel[(num_rows,)](indices, local_indices, counts, k, *dcp, BLOCK=_LOCALIZE_BLOCK)


@triton.jit
def _count_below(list_ptr, bound, mask, k, STEPS: tl.constexpr):
    """Entries of an ascending list that are below the bound; -1 ends the list."""
    count = tl.zeros_like(bound)
    for step in tl.static_range(STEPS - 1, -1, -1):
        probe = count + (1 << step)
        inside = mask & (probe <= k)
        entry = tl.load(list_ptr + probe - 1, mask=inside, other=-1)
        count = tl.where(inside & (entry >= 0) & (entry < bound), probe, count)
    return count


@triton.jit(do_not_specialize=["num_rows"])
def _order_kernel(
    candidates_ptr,
    values_ptr,
    ids_ptr,
    lengths_ptr,
    num_rows,
    k,
    interleave,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.program_id(2)
    shard_stride = num_rows.to(tl.int64) * k * 2
    lists = candidates_ptr + row * k
    mine = lists + rank * shard_stride
    index = tl.load(mine + column, mask=column < k, other=-1)
    is_candidate = index >= 0

    run = index // interleave
    position = column
    for other in range(SIZE):
        if other != rank:
            # Before this index another rank holds all earlier runs, and its run of the same round if it goes first.
            bound = (run + tl.where(other < rank, 1, 0)) * interleave
            position += _count_below(lists + other * shard_stride, bound, is_candidate, k, STEPS)

    value = tl.load(mine + num_rows.to(tl.int64) * k + column, mask=is_candidate)
    at = row * (SIZE * k) + position
    tl.store(values_ptr + at, value, mask=is_candidate)
    tl.store(ids_ptr + at, (run * SIZE + rank) * interleave + index % interleave, mask=is_candidate)

    if (tl.program_id(1) == 0) & (rank == 0):
        everything = tl.full((1,), 0x7FFFFFFF, tl.int32)
        length = tl.zeros((1,), tl.int32)
        for other in range(SIZE):
            length += _count_below(lists + other * shard_stride, everything, everything > 0, k, STEPS)
        tl.store(lengths_ptr + row + tl.arange(0, 1), length)


@triton.jit
def _localize_kernel(indices_ptr, local_ptr, counts_ptr, k, size, rank, interleave, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    indices = indices_ptr + row * k
    local = local_ptr + row * k
    count = 0
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        index = tl.load(indices + column, mask=column < k, other=-1)
        run = index // interleave
        is_owned = ((index >= 0) & (run % size == rank)).to(tl.int32)
        place = count + tl.cumsum(is_owned, 0) - 1
        tl.store(local + place, run // size * interleave + index % interleave, mask=is_owned > 0)
        count += tl.sum(is_owned, 0)
    tl.store(counts_ptr + row, count)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(local + column, -1, mask=(column >= count) & (column < k))
