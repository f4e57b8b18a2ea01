"""Public operator: indexer logits of a decode step of any depths, in one launch over the engine's own block table."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.kernels.sm90_paged_mqa_logits import (
    HEAD_DIM,
    MAX_LOGITS,
    NUM_HEADS,
    OUT_DTYPES,
    launch_sm90_paged_mqa_logits,
)
from vllm_dsa.ops._checks import (
    FP8_DTYPES,
    check_cache,
    check_contiguous,
    check_int,
    check_lengths,
    check_pages,
    check_tensor,
    check_values,
)
from vllm_dsa.ops.logits_backend import LogitsBackend
from vllm_dsa.platform import check_current_device, is_hopper

_INT32 = (torch.int32,)
# What one TMA copy and one 128-bit load need.
_ALIGNMENT = 16


def ragged_paged_mqa_logits_backend(device: torch.device) -> LogitsBackend:
    """Return who computes :func:`ragged_paged_mqa_logits` on a device: our kernel on Hopper, the twin elsewhere."""
    return LogitsBackend.SM90 if device.type == "cuda" and is_hopper(device) else LogitsBackend.REFERENCE


def ragged_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_context_len: int,
    fill_to: int = 0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    early_kv: bool = False,
) -> torch.Tensor:
    """Score the cached tokens of each request against its query rows, which lie packed one request after the other.

    ``logit[row, t] = k_scale[t] * sum_h relu(q[row, h] . k[t]) * weights[row, h]`` for ``t`` below the row's length.
    Eight rows of a request share one read of its K; a deeper one is read once for every eight.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, D) float8_e4m3fn, contiguous, any device, see `fold_q`. On Hopper H is 64, 32 or 16 and D is 128.
    cache : torch.Tensor
        (num_blocks, block_size, 1, D + 4) uint8, same device, see `IndexKCacheLayout`. On Hopper pages lie a multiple
        of 16 bytes apart.
    weights : torch.Tensor
        (T, H) float32, contiguous, same device, folded.
    context_lens : torch.Tensor
        (T,) int32, contiguous, same device: tokens that each row sees. Rows of a request may have any lengths; less
        than 0 counts as 0.
    query_start_loc : torch.Tensor
        (R + 1,) int32, contiguous, same device: first row of each request, from 0 to T; any depth, 0 included.
    block_table : torch.Tensor
        (R, W) int32 page ids, last stride 1, same device. Columns past a request's longest row are not read.
    max_context_len : int
        Columns of the result, in tokens, at least 0. A longer row is cut there.
    fill_to : int
        Columns of every row to fill with -inf where they are past its length: 0 to `max_context_len`.
    out : torch.Tensor, optional
        (T, max_context_len) float32 or bfloat16, last stride 1, same device; overwritten. Its dtype stands for
        `out_dtype`.
    out_dtype : torch.dtype
        torch.float32, or torch.bfloat16, to which the float32 logits are rounded.
    early_kv : bool
        On Hopper: start before the launch before it has ended (programmatic dependent launch) and read lengths, starts,
        block table and old K at once. A promise of the caller that this predecessor writes nothing of these but the K
        of the rows' own tokens; where it is broken, logits are wrong without an error.

    Returns
    -------
    torch.Tensor
        (T, max_context_len), or `out`. On Hopper exactly these columns of a row are written: those up to the end of the
        last tile of 64 tokens that the longest row of its request reaches, and those below `fill_to`; of them the ones
        at and past the row's length are -inf. The rest is as it was (undefined where `out` is not given): do not read
        it. The torch twin writes -inf everywhere past a row's length.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, alignment, device or range that is not allowed, or on Hopper
        ``T * max_context_len`` exceeds 2**32; with ``VDSA_VALIDATE=1`` also if a start, a length or a page id that is
        read is out of range. Nothing is written then.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    Not checked otherwise: starts, lengths against `max_context_len` and against ``W * block_size``, and page ids. On
    Hopper one launch for up to 2048 requests, no host sync, and with `out` no allocation: graph safe, and a captured
    launch serves any lengths, pages and starts of as many rows and requests. The first call of a variant compiles it. A
    logit's bits do not depend on the batch that it is in. The torch twin reads starts and lengths on the host, so it
    cannot be captured. Source: `vllm_dsa.kernels.sm90_paged_mqa_logits`, and for the twin
    `vllm_dsa.reference.ragged_paged_mqa_logits`.
    """
    check_tensor("q", q, dtypes=FP8_DTYPES, shape=(None, None, None))
    num_tokens, num_heads, head_dim = q.shape
    device = q.device
    block_size = check_cache(cache, head_dim=head_dim, device=device)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(num_tokens, num_heads), device=device)
    check_tensor("context_lens", context_lens, dtypes=_INT32, shape=(num_tokens,), device=device)
    check_tensor("query_start_loc", query_start_loc, dtypes=_INT32, shape=(None,), device=device)
    num_reqs = _num_requests(query_start_loc)
    check_tensor("block_table", block_table, dtypes=_INT32, shape=(num_reqs, None), device=device)
    check_contiguous(q=q, weights=weights, context_lens=context_lens, query_start_loc=query_start_loc)
    _check_columns(max_context_len, fill_to)
    _check_out_dtype(out_dtype)
    if out is not None:
        check_tensor("out", out, dtypes=OUT_DTYPES, shape=(num_tokens, max_context_len), device=device)
    if q.is_cuda:
        check_current_device(device)
    on_hopper = ragged_paged_mqa_logits_backend(device) is LogitsBackend.SM90
    if on_hopper:
        _check_kernel_limits(q, cache, weights, max_context_len)
    if out is None:
        out = torch.empty((num_tokens, max_context_len), dtype=out_dtype, device=device)
    if out.numel() == 0:
        return out
    if envs.get("VDSA_VALIDATE"):
        _check_starts(query_start_loc, num_tokens)
        check_lengths(context_lens, max_context_len, block_table.shape[1] * block_size)
        check_pages(block_table, _longest_rows(context_lens, query_start_loc), block_size, cache.shape[0])
    if on_hopper:
        launch_sm90_paged_mqa_logits(
            q, cache, weights, context_lens, query_start_loc, block_table, out, fill_to=fill_to, early_kv=early_kv
        )
        return out
    return reference.ragged_paged_mqa_logits(
        q, cache, weights, context_lens, query_start_loc, block_table, max_context_len=max_context_len, out=out
    )


def _num_requests(query_start_loc: torch.Tensor) -> int:
    if len(query_start_loc) == 0:
        raise ValueError("query_start_loc has shape (0,); allowed: (requests + 1,)")
    return len(query_start_loc) - 1


def _check_columns(max_context_len: int, fill_to: int) -> None:
    check_int("max_context_len", max_context_len, at_least=0)
    check_int("fill_to", fill_to, at_least=0)
    if fill_to > max_context_len:
        raise ValueError(f"fill_to is {fill_to}; allowed: 0 to {max_context_len}, max_context_len")


def _check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; allowed: {', '.join(map(str, OUT_DTYPES))}")


def _check_kernel_limits(q: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, max_context_len: int) -> None:
    num_tokens, num_heads, head_dim = q.shape
    if num_heads not in NUM_HEADS or head_dim != HEAD_DIM:
        raise ValueError(f"q has shape {tuple(q.shape)}; allowed: ({num_tokens}, one of {NUM_HEADS}, {HEAD_DIM})")
    for name, tensor in (("q", q), ("cache", cache), ("weights", weights)):
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(f"{name} starts at {tensor.data_ptr():#x}; allowed: multiples of {_ALIGNMENT} bytes")
    if cache.stride(0) % _ALIGNMENT:
        raise ValueError(f"cache has pages {cache.stride(0)} bytes apart; allowed: multiples of {_ALIGNMENT}")
    if num_tokens * max_context_len > MAX_LOGITS:
        raise ValueError(
            f"q has {num_tokens} rows and max_context_len is {max_context_len}; allowed: a product of at most "
            f"{MAX_LOGITS}"
        )


def _check_starts(query_start_loc: torch.Tensor, num_tokens: int) -> None:
    wrong = (query_start_loc < 0) | (query_start_loc > num_tokens)
    wrong[1:] |= query_start_loc.diff() < 0
    wrong[0] |= query_start_loc[0] != 0
    wrong[-1] |= query_start_loc[-1] != num_tokens
    check_values("query_start_loc", query_start_loc, wrong, f"ascending from 0 to {num_tokens}, the rows of q")


def _longest_rows(context_lens: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
    depths = query_start_loc.diff()
    request = torch.arange(len(depths), device=depths.device).repeat_interleave(depths)
    return torch.zeros_like(depths).scatter_reduce_(0, request, context_lens, "amax")
