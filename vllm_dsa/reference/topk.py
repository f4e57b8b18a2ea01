"""Deterministic top-k of indexer logits."""

import torch

# Logits of the rows that are worked on together. On a CPU each work array of a group (1 MiB) stays in the cache; on a
# GPU few groups are few launches, and all work arrays take some 130 MiB.
_GROUP_ELEMENTS_CPU = 1 << 18
_GROUP_ELEMENTS_GPU = 1 << 22


def topk_indices(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the indices of the k highest logits of each row's window, in ascending order.

    Parameters
    ----------
    logits : torch.Tensor
        (rows, width) float32, bfloat16, float16 or float64. Only the window of a row is read.
    lengths : torch.Tensor
        (rows,) int32, tokens of the window; clamped to ``[0, width - start]``.
    k : int
        Tokens to choose, at least 1.
    starts : torch.Tensor, optional
        (rows,) int32, first column of the window; default 0.
    out : torch.Tensor, optional
        (rows, k) int32, overwritten, every element of it.

    Returns
    -------
    torch.Tensor
        (rows, k) int32 (or `out`), relative to the row's start. The first ``min(length, k)`` of a row are
        unique, in range and ascending; the rest is -1.

    Notes
    -----
    The highest value wins and ties go to the lowest index. ``-0.0`` equals ``0.0``; NaN ranks below
    ``-inf``. The result of a row depends on that row alone. Starts are not checked here. Work is cut into groups of
    rows by shapes and device alone, without a host sync, so it may be captured in a CUDA graph, whose pool then keeps
    the work arrays of one group (about 30 bytes a logit). Source: this project's rule on order and ties.
    """
    num_rows, width = logits.shape
    if starts is None:
        starts = torch.zeros_like(lengths)
    if out is None:
        out = torch.empty((num_rows, k), dtype=torch.int32, device=logits.device)
    elements = _GROUP_ELEMENTS_CPU if logits.device.type == "cpu" else _GROUP_ELEMENTS_GPU
    group = max(1, elements // max(1, width))
    for first in range(0, num_rows, group):
        rows = slice(first, first + group)
        _write_topk(logits[rows], starts[rows], lengths[rows], k, out[rows])
    return out


def logits_of_indices(logits: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of chosen tokens.

    Parameters
    ----------
    logits : torch.Tensor
        (rows, width), any float dtype.
    indices : torch.Tensor
        (rows, k) int32 from `topk_indices`, same device.
    starts : torch.Tensor, optional
        (rows,) int32, first column of each row's window; default 0.

    Returns
    -------
    torch.Tensor
        (rows, k) float32, -inf where the index is -1.
    """
    columns = indices.long() if starts is None else indices.long() + starts.unsqueeze(1)
    if logits.shape[1] == 0:
        return torch.full(indices.shape, float("-inf"), device=logits.device)
    found = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)).float()
    return found.masked_fill(indices < 0, float("-inf"))


def slots_of_indices(
    indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    request_of_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the slots of a paged cache that chosen tokens are in.

    Parameters
    ----------
    indices : torch.Tensor
        (rows, k) int32 from `topk_indices`.
    block_table : torch.Tensor
        (R, W) int32 page ids, same device. Only the columns of chosen tokens matter.
    block_size : int
        Tokens of a page.
    request_of_row : torch.Tensor, optional
        (rows,) int32 rows of the table, same device; by default row i is request i.

    Returns
    -------
    torch.Tensor
        (rows, k) int32, -1 where the index is -1.
    """
    if block_table.shape[1] == 0:
        return torch.full_like(indices, -1)
    table = block_table if request_of_row is None else block_table[request_of_row.long()]
    pages = (indices.clamp(min=0) // block_size).clamp(max=table.shape[1] - 1)
    slots = table.gather(1, pages.long()) * block_size + indices % block_size
    return slots.masked_fill(indices < 0, -1)


def _write_topk(logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int, out: torch.Tensor) -> None:
    num_rows, width = logits.shape
    index = torch.arange(width, dtype=torch.int32, device=logits.device) - starts.unsqueeze(1)
    visible = (index >= 0) & (index < lengths.unsqueeze(1))
    keys = _sortable_keys(logits)
    keys = keys.masked_fill(~visible, torch.iinfo(keys.dtype).min)
    chosen = _choose(keys, min(k, width)) & visible

    # Every column writes somewhere, those not chosen into slot 0, which is thrown away: to list the chosen ones alone,
    # the host would have to know their number.
    slot = chosen.cumsum(dim=1).mul_(chosen)
    compact = torch.full((num_rows, k + 1), -1, dtype=torch.int32, device=logits.device)
    compact.scatter_(1, slot, index)
    out.copy_(compact[:, 1:])


def _choose(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the k highest keys of each row: all above the k-th, and the first of those that equal it."""
    if k == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = keys.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = keys > threshold
    tied = keys == threshold
    room = k - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1, dtype=torch.int32) <= room))


def _sortable_keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the logits: NaN lowest but one (the lowest is left for hidden columns)."""
    bits_dtype = torch.int64 if logits.dtype == torch.float64 else torch.int32
    wide = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    # Adding zero turns -0.0 into 0.0. Below zero, floats grow in magnitude as their bits do, so those are
    # flipped.
    bits = (wide + 0.0).view(bits_dtype)
    limits = torch.iinfo(bits_dtype)
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    return keys.masked_fill(wide.isnan(), limits.min + 1)
