"""Indexer logits over the paged cache (decode), any number of query rows a request."""

import torch

from vllm_dsa.reference.index_k_cache import IndexKCacheLayout, gather_index_k
from vllm_dsa.reference.mqa_logits import KV_CHUNK_TOKENS, score_tile


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_context_len: int,
    compute_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score the cached tokens of each request against its query rows.

    ``logit[row, t] = k_scale[t] * sum_h relu(q[row, h] . k[t]) * weights[row, h]`` for ``t`` below the row's
    length. A request's K is gathered once for all its rows.

    Parameters
    ----------
    q : torch.Tensor
        (R, next_n, H, D) float8_e4m3fn, see `fold_q`.
    cache : torch.Tensor
        (num_blocks, block_size, 1, D + 4) uint8, see `IndexKCacheLayout`.
    weights : torch.Tensor
        (R * next_n, H) float32, folded.
    context_lens : torch.Tensor
        (R, next_n) int32: tokens that each row sees. Rows of a request may have any lengths, 0 included.
    block_table : torch.Tensor
        (R, W) int32 page ids. Columns past a request's longest row are not read.
    max_context_len : int
        Columns of the result, in tokens. A longer row is cut there.
    compute_dtype : torch.dtype
        torch.float32, or torch.float64 for a reference that decides.
    out : torch.Tensor, optional
        Result to overwrite, every element of it.

    Returns
    -------
    torch.Tensor
        (R * next_n, max_context_len) of `compute_dtype` (or `out`), -inf at and past each row's length.

    Notes
    -----
    Values on the device (page ids, lengths against W) are not checked here. Memory beyond the result is
    bounded by a fixed tile of tokens. Host syncs: the lengths are read. Source: the contract of DeepGEMM's
    paged MQA logits, which leaves the columns past the length as they were; here they are -inf.
    """
    num_reqs, next_n, _, _ = q.shape
    if out is None:
        out = torch.empty((num_reqs * next_n, max_context_len), dtype=compute_dtype, device=q.device)
    out.fill_(float("-inf"))
    block_size = IndexKCacheLayout.of(cache).block_size
    longest = context_lens.amax(dim=1).clamp(max=max_context_len).tolist() if num_reqs else []
    for request, request_len in enumerate(longest):
        rows = slice(request * next_n, (request + 1) * next_n)
        for first in range(0, request_len, KV_CHUNK_TOKENS):
            chunk_len = min(KV_CHUNK_TOKENS, request_len - first)
            # A chunk starts on a page boundary: KV_CHUNK_TOKENS is a multiple of every block size.
            pages = block_table[request, first // block_size :]
            k, k_scale = gather_index_k(cache, pages, chunk_len)
            scores = score_tile(q[request], k, k_scale, weights[rows], compute_dtype)
            index = torch.arange(first, first + chunk_len, device=q.device)
            scores.masked_fill_(index >= context_lens[request].unsqueeze(1), float("-inf"))
            out[rows, first : first + chunk_len] = scores
    return out
