"""Indexer logits over contiguous K (prefill), each query with its own window."""

import torch

KV_CHUNK_TOKENS = 4096
_QUERY_CHUNK_TOKENS = 16


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score every token of each query's window ``[row_starts, row_ends)``.

    ``logit[i, t] = k_scale[t] * sum_h relu(q[i, h] . k[t]) * weights[i, h]``.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, D) float8_e4m3fn, see `fold_q`.
    k : torch.Tensor
        (N, D) float8_e4m3fn: the K of all requests of the chunk, one after the other.
    k_scale : torch.Tensor
        (N,) float32.
    weights : torch.Tensor
        (T, H) float32, folded.
    row_starts, row_ends : torch.Tensor
        (T,) int32, tokens of `k`. A window with ``end <= start`` is empty.
    compute_dtype : torch.dtype
        torch.float32, or torch.float64 for a reference that decides.

    Returns
    -------
    torch.Tensor
        (T, N) of `compute_dtype`, -inf outside the window.

    Notes
    -----
    Window bounds are clipped to [0, N], not checked. Memory beyond the result is bounded by a fixed tile.
    Host syncs: the bounds are read. Source: the contract of DeepGEMM's (prefill) MQA logits, with cleaned
    logits.
    """
    num_tokens, num_kv = q.shape[0], k.shape[0]
    logits = torch.full((num_tokens, num_kv), float("-inf"), dtype=compute_dtype, device=q.device)
    for first in range(0, num_tokens, _QUERY_CHUNK_TOKENS):
        queries = slice(first, min(first + _QUERY_CHUNK_TOKENS, num_tokens))
        starts, ends = row_starts[queries], row_ends[queries]
        lowest, highest = max(0, int(starts.min())), min(num_kv, int(ends.max()))
        for chunk in range(lowest, highest, KV_CHUNK_TOKENS):
            tokens = slice(chunk, min(chunk + KV_CHUNK_TOKENS, highest))
            scores = score_tile(q[queries], k[tokens], k_scale[tokens], weights[queries], compute_dtype)
            index = torch.arange(tokens.start, tokens.stop, device=q.device)
            hidden = (index < starts[:, None]) | (index >= ends[:, None])
            logits[queries, tokens] = scores.masked_fill_(hidden, float("-inf"))
    return logits


def score_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """Score each of n queries against each of C tokens, with no mask.

    Parameters
    ----------
    q : torch.Tensor
        (n, H, D) float8_e4m3fn or wider.
    k : torch.Tensor
        (C, D) float8_e4m3fn or wider.
    k_scale : torch.Tensor
        (C,) float32.
    weights : torch.Tensor
        (n, H) float32.
    compute_dtype : torch.dtype
        Of all arithmetic; FP8 values are exact in it.

    Returns
    -------
    torch.Tensor
        (n, C) of `compute_dtype`.
    """
    num_queries, num_heads, head_dim = q.shape
    rows = q.to(compute_dtype).reshape(num_queries * num_heads, head_dim)
    per_head = (rows @ k.to(compute_dtype).T).relu_().view(num_queries, num_heads, k.shape[0])
    summed = torch.bmm(weights.to(compute_dtype).unsqueeze(1), per_head).squeeze(1)
    return summed * k_scale.to(compute_dtype)
