"""Indexer logits over the paged cache (decode), each request with a depth of its own."""

from itertools import pairwise

import torch

from vllm_dsa.reference.paged_mqa_logits import paged_mqa_logits


def ragged_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_context_len: int,
    compute_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score the cached tokens of each request against its query rows, which lie packed one request after the other.

    ``logit[row, t] = k_scale[t] * sum_h relu(q[row, h] . k[t]) * weights[row, h]`` for ``t`` below the row's length.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, D) float8_e4m3fn, see `fold_q`.
    cache : torch.Tensor
        (num_blocks, block_size, 1, D + 4) uint8, see `IndexKCacheLayout`.
    weights : torch.Tensor
        (T, H) float32, folded.
    context_lens : torch.Tensor
        (T,) int32: tokens that each row sees, in any order within a request; less than 0 counts as 0.
    query_start_loc : torch.Tensor
        (R + 1,) int32, first row of each request; any depth, 0 included.
    block_table : torch.Tensor
        (R, W) int32 page ids. Columns past a request's longest row are not read.
    max_context_len : int
        Columns of the result, in tokens. A longer row is cut there.
    compute_dtype : torch.dtype
        torch.float32, or torch.float64 for a reference that decides.
    out : torch.Tensor, optional
        Result to overwrite, every element of it; any float dtype, to which the logits are rounded.

    Returns
    -------
    torch.Tensor
        (T, max_context_len) of `compute_dtype` (or `out`), -inf at and past each row's length and in rows that are no
        request's.

    Notes
    -----
    Values on the device (starts, page ids, lengths against W) are not checked here. Memory beyond the result is bounded
    by a fixed tile of tokens. Host syncs: starts and lengths are read. Source: `paged_mqa_logits`, whose batch of one
    request this is, once for each request.
    """
    if out is None:
        out = torch.empty((q.shape[0], max_context_len), dtype=compute_dtype, device=q.device)
    out.fill_(float("-inf"))
    for request, (first, stop) in enumerate(pairwise(query_start_loc.tolist())):
        if first < stop:
            rows = slice(first, stop)
            paged_mqa_logits(
                q[rows].unsqueeze(0),
                cache,
                weights[rows],
                context_lens[rows].unsqueeze(0),
                block_table[request : request + 1],
                max_context_len=max_context_len,
                compute_dtype=compute_dtype,
                out=out[rows],
            )
    return out
