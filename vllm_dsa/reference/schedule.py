"""DeepGEMM's schedule metadata: which KV splits each slot (an SM, or a cluster of two) works on."""

import torch

DEFAULT_SPLIT_KV = 256


def sm90_schedule(
    context_lens: torch.Tensor,
    num_slots: int,
    *,
    longer_runs_first: bool = False,
    split_kv: int = DEFAULT_SPLIT_KV,
) -> torch.Tensor:
    """Divide the KV splits of a batch over slots, as the SM90 kernels expect.

    A request owns ``ceil(length / split_kv)`` splits, its length being that of its last row; the list of
    all splits, request by request, is cut into `num_slots` runs whose sizes differ by at most one. Slot ``s``
    works from row ``s`` of the result up to row ``s + 1``; the kernels take any such cut, whatever its order.

    Parameters
    ----------
    context_lens : torch.Tensor
        (R, next_n) int32, tokens; any device. Only the last column is read.
    num_slots : int
        Slots, at least 1: the number of SMs, or half of it when two CTAs share a slot.
    longer_runs_first : bool
        The order that builds before next_n 4 use (2.5.0.post20260424); later ones put the longer runs last.
    split_kv : int
        Tokens of a split.

    Returns
    -------
    torch.Tensor
        (num_slots + 1, 2) int32 rows of (request, split of that request). The row past all work is (R, 0):
        the last one, and every one when no request has a token (2.5.0.post20260629 says (R - 1, 0) there, for
        all but the last row; both mean no work).

    Notes
    -----
    A request of length 0 (or less) owns nothing and is never named. No input is checked here. No host sync.
    Source: the metadata kernel of DeepGEMM (SM90), by its contract.
    """
    splits = _num_splits(context_lens[:, -1], split_kv)
    ends = splits.cumsum(dim=0)
    slot = torch.arange(num_slots + 1, device=context_lens.device)
    total = splits.sum()
    share, extra = total // num_slots, total % num_slots
    longer_before = torch.minimum(slot, extra) if longer_runs_first else (slot - (num_slots - extra)).clamp(min=0)
    start = slot * share + longer_before
    request, offset = _locate(start, ends, splits)
    return torch.stack([request, offset], dim=1).to(torch.int32)


def sm100_schedule(
    context_lens: torch.Tensor,
    num_slots: int,
    *,
    indices: torch.Tensor | None = None,
    split_kv: int = DEFAULT_SPLIT_KV,
) -> torch.Tensor:
    """Divide (split, query token) pairs over slots, as the SM100 kernels expect.

    A request owns ``ceil(length / split_kv) * num_tokens`` units, its length being that of its last row.
    All units are cut into `num_slots` runs whose sizes differ by at most one, the longer runs first; a cut
    inside a split moves back to where that split starts.

    Parameters
    ----------
    context_lens : torch.Tensor
        (R, next_n) int32, tokens; any device.
    num_slots : int
        Slots, at least 1.
    indices : torch.Tensor, optional
        (R,) int32, for batches of varying depth, with next_n 1: each row is one query token, and a run of
        rows with equal index is one request, whose length is that of its last row.
    split_kv : int
        Tokens of a split.

    Returns
    -------
    torch.Tensor
        (num_slots + 1, 2) int32 rows of (first query token of a request, split of that request). A row past
        all work is (R * next_n, 0).

    Notes
    -----
    A request of length 0 (or less) owns nothing and is never named. No input is checked here. With `indices`
    there is a host sync. Source: the metadata kernel of DeepGEMM (SM100), by its contract.
    """
    num_reqs, next_n = context_lens.shape
    if indices is None:
        first_token = torch.arange(num_reqs, device=context_lens.device) * next_n
        num_tokens = torch.full_like(first_token, next_n)
        lengths = context_lens[:, -1]
    else:
        first_token, num_tokens = _runs(indices)
        lengths = context_lens[first_token + num_tokens - 1, 0]
    work = _num_splits(lengths, split_kv) * num_tokens
    slot = torch.arange(num_slots + 1, device=context_lens.device)
    total = work.sum()
    share, extra = total // num_slots, total % num_slots
    start = slot * share + torch.minimum(slot, extra)
    request, offset = _locate(start, work.cumsum(dim=0), work)

    past_all = first_token.new_tensor([num_reqs * next_n])
    token = torch.cat([first_token, past_all])[request]
    tokens_of_request = torch.cat([num_tokens, torch.ones_like(past_all)])[request]
    return torch.stack([token, offset // tokens_of_request], dim=1).to(torch.int32)


def _num_splits(lengths: torch.Tensor, split_kv: int) -> torch.Tensor:
    return (lengths.to(torch.int64).clamp(min=0) + split_kv - 1) // split_kv


def _locate(start: torch.Tensor, ends: torch.Tensor, work: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner of each unit, and the unit's number within it; past all work that is (number of owners, 0)."""
    owner = torch.searchsorted(ends, start, right=True)
    nothing = ends.new_zeros(1)
    begins = torch.cat([ends - work, ends[-1:] if ends.numel() else nothing])
    return owner, start - begins[owner]


def _runs(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First row and number of rows of each maximal run of equal indices."""
    _, counts = torch.unique_consecutive(indices, return_counts=True)
    return counts.cumsum(dim=0) - counts, counts
