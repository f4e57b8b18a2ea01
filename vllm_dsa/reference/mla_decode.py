"""MLA decode attention over the paged latent cache, dense and sparse, in float64."""

from itertools import pairwise

import torch

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.reference.latent_cache import KV_LORA_RANK, read_latent


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    softmax_scale: float,
    query_start_loc: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> DecodeAttnResult:
    """Attend with each query row to the first tokens of its request.

    ``score[row, h, t] = softmax_scale * q[row, h] . latent[t]`` for ``t`` below the row's length, and ``out[row, h] =
    sum_t softmax(score)[t] * latent[t, :512]``: the latent is key and, but for its rotated part, value.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, 576) floating point: the query that took in the up-projection of the keys (512), then its rotated part
        (64).
    cache : torch.Tensor
        (num_blocks, block_size, 576) bfloat16 or (num_blocks, block_size, 656) uint8, see `read_latent`.
    block_table : torch.Tensor
        (R, W) int32 page ids. Columns past a request's longest row are not read.
    context_lens : torch.Tensor
        (T,) int32: tokens that each row sees, in any order within a request, at most ``W * block_size`` (cut there);
        less than 1 is nothing.
    softmax_scale : float
        Of the scores.
    query_start_loc : torch.Tensor, optional
        (R + 1,) int32, first row of each request. By default every request has ``T / R`` rows.
    out_dtype : torch.dtype
        bfloat16, or float32 for a reference that decides.

    Returns
    -------
    DecodeAttnResult
        `out` (T, H, 512), `lse` (T, H) float32, natural. A row that sees nothing, or is no request's, is 0 and -inf.

    Notes
    -----
    A row's result depends on the tokens that it sees alone. Values on the device (starts, page ids) are not checked
    here. Host syncs: starts and lengths are read. Source: the absorbed form of MLA of the DeepSeek-V2 paper, 2.1.
    """
    result = _empty(q, out_dtype)
    starts = _starts(q, block_table, query_start_loc)
    block_size = cache.shape[1]
    for request, (first, stop) in enumerate(pairwise(starts)):
        lengths = context_lens[first:stop].tolist()
        longest = min(max(lengths, default=0), block_table.shape[1] * block_size)
        if longest < 1:
            continue
        position = torch.arange(longest, device=cache.device)
        slots = block_table[request, position // block_size].long() * block_size + position % block_size
        latent = read_latent(cache, slots)
        for row, length in zip(range(first, stop), lengths, strict=True):
            _attend(q, latent[: max(0, length)], softmax_scale, row, result)
    return result


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lens: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> DecodeAttnResult:
    """Attend with each query row to chosen tokens.

    Parameters
    ----------
    q, cache, softmax_scale, out_dtype
        As in `mla_decode`.
    slots : torch.Tensor
        (T, K) int32: the tokens' places in the cache, page times block_size plus place in the page; less than 0,
        anywhere in a row, is none. `slots_of_indices` makes them of `topk_indices`. A slot that comes twice counts
        twice.
    topk_lens : torch.Tensor, optional
        (T,) int32: leading columns of each row that are looked at, at most K (cut there). By default all.

    Returns
    -------
    DecodeAttnResult
        As in `mla_decode`.

    Notes
    -----
    A row's result depends on the tokens that it names alone. Slots are not checked here. Host syncs: lengths are read.
    """
    result = _empty(q, out_dtype)
    for row in range(q.shape[0]):
        chosen = slots[row] if topk_lens is None else slots[row, : max(0, int(topk_lens[row]))]
        _attend(q, read_latent(cache, chosen[chosen >= 0]), softmax_scale, row, result)
    return result


def _empty(q: torch.Tensor, out_dtype: torch.dtype) -> DecodeAttnResult:
    out = torch.zeros(*q.shape[:2], KV_LORA_RANK, dtype=out_dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    return DecodeAttnResult(out, lse, LseBase.E)


def _starts(q: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor | None) -> list[int]:
    if query_start_loc is not None:
        starts: list[int] = query_start_loc.tolist()
        return starts
    num_reqs = block_table.shape[0]
    depth = q.shape[0] // max(1, num_reqs)
    return [request * depth for request in range(num_reqs + 1)]


def _attend(q: torch.Tensor, latent: torch.Tensor, softmax_scale: float, row: int, result: DecodeAttnResult) -> None:
    if len(latent) == 0:
        return
    scores = (q[row].double() @ latent.T) * softmax_scale
    lse = scores.logsumexp(dim=1)
    weights = (scores - lse.unsqueeze(1)).exp()
    result.out[row] = (weights @ latent[:, :KV_LORA_RANK]).to(result.out.dtype)
    result.lse[row] = lse.float()
