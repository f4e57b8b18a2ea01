"""MLA decode attention by FlashMLA."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.ops.mla_backend import (
    check_choice,
    live_slots,
    load_function,
    neutral_where_empty,
    refuse,
    rows_as_requests,
    takes_keyword,
)

_LIBRARY = "flash_mla"
_INSTALL = "install FlashMLA for this GPU from https://github.com/deepseek-ai/FlashMLA, or sgl-flash-mla from PyPI"
_KEYWORDS = (
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
    *("softmax_scale", "causal", "is_fp8_kvcache", "indices"),
)
_HEAD_DIM_V = 512
_PAGE = 64
_SPARSE_HEADS = (64, 128)
# Its sparse kernels take whole blocks of columns.
_SPARSE_COLUMNS = 128


def flash_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    softmax_scale: float,
    query_start_loc: torch.Tensor | None = None,
) -> DecodeAttnResult:
    """Attend densely by ``flash_mla.flash_mla_with_kvcache``.

    Parameters
    ----------
    q, cache, block_table, context_lens, softmax_scale, query_start_loc
        As in :func:`vllm_dsa.ops.mla_decode`, checked there; the cache is bfloat16 with pages of 64 tokens. Each row
        becomes a request of one row with its own length, so rows of a request read its latents once each.

    Returns
    -------
    DecodeAttnResult
        Of base e. Rows that see nothing are 0 and -inf (FlashMLA: +inf).

    Raises
    ------
    NotImplementedError
        If FlashMLA does not take the arguments.
    ImportError
        If it cannot be imported, or lacks a keyword.

    Notes
    -----
    Allocates; no host sync of ours. Its tile metadata depend on the lengths, so they are made anew in each call: a
    captured call follows its lengths. Source: ``flash_mla_interface.py`` and ``csrc/api/dense_decode.h`` of
    deepseek-ai/FlashMLA (Hopper; its release of 2026-09-30 dropped that) and sgl-flash-mla 1.0.0. It has not been run
    with this package.
    """
    check_choice(_LIBRARY, "dense attention over a cache of", cache.dtype, (torch.bfloat16,))
    check_choice(_LIBRARY, "pages of", cache.shape[1], (_PAGE,))
    table, lengths = rows_as_requests(block_table, context_lens, query_start_loc, cache.shape[1])
    metadata, num_splits = _metadata(lengths, q.shape[1], 1)
    out, lse = _attend()(
        q=q.unsqueeze(1),
        k_cache=cache.unsqueeze(2),
        block_table=table,
        cache_seqlens=lengths,
        head_dim_v=_HEAD_DIM_V,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
    )
    return neutral_where_empty(out.squeeze(1), lse.squeeze(2), lengths == 0, LseBase.E)


def sparse_flash_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lens: torch.Tensor | None = None,
) -> DecodeAttnResult:
    """Attend to chosen tokens by ``flash_mla.flash_mla_with_kvcache``.

    Parameters
    ----------
    q, cache, slots, softmax_scale, topk_lens
        As in :func:`vllm_dsa.ops.sparse_mla_decode`, checked there; the cache is FP8. Up to 128 heads, padded to 64 or
        128 here.

    Returns
    -------
    DecodeAttnResult
        As of :func:`flash_mla_decode`.

    Raises
    ------
    NotImplementedError, ImportError
        As :func:`flash_mla_decode`.

    Notes
    -----
    As :func:`flash_mla_decode`; source: ``csrc/api/sparse_decode.h`` too.
    """
    check_choice(_LIBRARY, "sparse attention over a cache of", cache.dtype, (torch.uint8,))
    num_tokens, num_heads, _ = q.shape
    padded_heads = next((heads for heads in _SPARSE_HEADS if num_heads <= heads), None)
    if padded_heads is None:
        raise refuse(_LIBRARY, "heads", num_heads, f"up to {_SPARSE_HEADS[-1]}")
    live = live_slots(slots, topk_lens)
    padded = pad(live, (0, -live.shape[1] % _SPARSE_COLUMNS), value=-1)
    # Versions that do not ignore these two read nothing of them but their shapes.
    lengths = torch.full((num_tokens,), padded.shape[1], dtype=torch.int32, device=q.device)
    table = torch.zeros((num_tokens, 1), dtype=torch.int32, device=q.device)
    metadata, num_splits = _metadata(lengths, padded_heads, 1, padded_heads, True, padded.shape[1])
    out, lse = _attend()(
        q=pad(q, (0, 0, 0, padded_heads - num_heads)).unsqueeze(1),
        k_cache=cache.unsqueeze(2),
        block_table=table,
        cache_seqlens=lengths,
        head_dim_v=_HEAD_DIM_V,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        causal=False,
        is_fp8_kvcache=True,
        indices=padded.unsqueeze(1),
    )
    out, lse = out.squeeze(1)[:, :num_heads], lse.squeeze(2)[:, :num_heads]
    return neutral_where_empty(out, lse, (live < 0).all(dim=1), LseBase.E)


def _metadata(*arguments: object) -> tuple[Any, Any]:
    # By position: the first versions name the arguments otherwise, and later ones take and ignore any.
    found: tuple[Any, Any] = load_function(_LIBRARY, "get_mla_metadata", (), _INSTALL)(*arguments)
    return found


@functools.cache
def _attend() -> Callable[..., Any]:
    function = load_function(_LIBRARY, "flash_mla_with_kvcache", _KEYWORDS, _INSTALL)
    # sgl-flash-mla keeps Hopper, dense attention and this FP8 row behind it.
    return functools.partial(function, use_legacy=True) if takes_keyword(function, "use_legacy") else function
