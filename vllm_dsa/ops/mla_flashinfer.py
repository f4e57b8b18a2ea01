"""MLA decode attention by FlashInfer: its planned wrapper, and trtllm-gen on SM100."""

import functools
import importlib
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
from vllm_dsa.platform import BLACKWELL_DATACENTER, HOPPER, current_device

_LIBRARY = "flashinfer"
_MODULE = "flashinfer.mla"
_INSTALL = "install flashinfer-python from PyPI"
_CKV, _KPE = 512, 64
_WORKSPACE_BYTES = 128 << 20
_TRTLLM_KEYWORDS = (
    *("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale", "backend", "return_lse"),
)
_TRTLLM_PAGES = (32, 64)
# Of the model, before the up-projection of the keys went into q. Nothing is computed from it.
_QK_NOPE_HEAD_DIM = 128
# Older versions want block tables of whole multiples of so many tokens.
_TRTLLM_TOKENS = 128


def flashinfer_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    softmax_scale: float,
    query_start_loc: torch.Tensor | None = None,
) -> DecodeAttnResult:
    """Attend densely by FlashInfer.

    Parameters
    ----------
    q, cache, block_table, context_lens, softmax_scale, query_start_loc
        As in :func:`vllm_dsa.ops.mla_decode`, checked there; the cache is bfloat16, on SM100 with pages of 32 or 64
        tokens. Each row becomes a request of one row with its own length.

    Returns
    -------
    DecodeAttnResult
        Of base 2, with 0 and -inf where a row sees nothing.

    Raises
    ------
    NotImplementedError
        If FlashInfer does not take the arguments.
    ImportError
        If it cannot be imported, or lacks a keyword.

    Notes
    -----
    On SM100 ``trtllm_batch_decode_with_kv_cache_mla`` with ``backend="trtllm-gen"``, without host sync of ours.
    Elsewhere ``BatchMLAPagedAttentionWrapper`` (``fa3`` on Hopper, else ``fa2``), which is planned in each call and so
    syncs with the host: not capturable. Both allocate and share one workspace a device, so calls on two streams must
    not overlap. Source: flashinfer-python 0.7.2.post1, and ``flashinfer/mla.py`` of 0.6 for what that lacks. Neither
    has been run with this package.
    """
    check_choice(_LIBRARY, "a cache of", cache.dtype, (torch.bfloat16,))
    block_size = cache.shape[1]
    table, lengths = rows_as_requests(block_table, context_lens, query_start_loc, block_size)
    if current_device(q.device).family == BLACKWELL_DATACENTER:
        out, lse = _trtllm_decode(q, cache, table, lengths, softmax_scale)
    else:
        num_pages = (lengths + block_size - 1) // block_size
        column = torch.arange(table.shape[1], device=table.device)
        pages = table[column < num_pages.unsqueeze(1)]
        out, lse = _planned_decode(q, cache, pages, num_pages, lengths, softmax_scale)
    return neutral_where_empty(out, lse, lengths == 0, LseBase.TWO)


def sparse_flashinfer_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lens: torch.Tensor | None = None,
) -> DecodeAttnResult:
    """Attend to chosen tokens by FlashInfer's wrapper, as pages of one token.

    Parameters
    ----------
    q, cache, slots, softmax_scale, topk_lens
        As in :func:`vllm_dsa.ops.sparse_mla_decode`, checked there; the cache is bfloat16 and contiguous.

    Returns
    -------
    DecodeAttnResult
        As of :func:`flashinfer_decode`.

    Raises
    ------
    NotImplementedError, ImportError
        As :func:`flashinfer_decode`; on SM100 always NotImplementedError, as the layout that trtllm-gen's sparse form
        wants is not documented clearly.

    Notes
    -----
    As :func:`flashinfer_decode`.
    """
    check_choice(_LIBRARY, "a cache of", cache.dtype, (torch.bfloat16,))
    if not cache.is_contiguous():
        raise refuse(_LIBRARY, "sparse attention over a cache with strides", cache.stride(), "a contiguous cache")
    if current_device(q.device).family == BLACKWELL_DATACENTER:
        raise refuse(_LIBRARY, "sparse attention on", current_device(q.device).arch, "other GPUs than SM100")
    live = live_slots(slots, topk_lens)
    is_live = live >= 0
    counts = is_live.sum(dim=1, dtype=torch.int32)
    out, lse = _planned_decode(q, cache.view(-1, 1, _CKV + _KPE), live[is_live], counts, counts, softmax_scale)
    return neutral_where_empty(out, lse, counts == 0, LseBase.TWO)


def _planned_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    num_pages: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = q.shape
    starts = torch.zeros(num_tokens + 1, dtype=torch.int32, device=q.device)
    starts[1:] = num_pages.cumsum(0)
    csr = {
        "qo_indptr": torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device),
        "kv_indptr": starts,
        "kv_indices": pages,
        "kv_len_arr": lengths,
    }
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim_ckv": _CKV,
        "head_dim_kpe": _KPE,
        "page_size": cache.shape[1],
        # Rows are requests here, and see all of their tokens.
        "causal": False,
        "sm_scale": softmax_scale,
        "q_data_type": q.dtype,
        "kv_data_type": cache.dtype,
    }
    query, kv_cache = (q[..., :_CKV], q[..., _CKV:]), (cache[..., :_CKV], cache[..., _CKV:])
    wrapper = _wrapper(q.device)
    metadata_class = getattr(importlib.import_module(_MODULE), "MLAPlanMetadata", None)
    found: tuple[torch.Tensor, torch.Tensor]
    if metadata_class is None:
        wrapper.plan(**csr, **shape)
        q_nope, q_pe = query
        ckv_cache, kpe_cache = kv_cache
        found = wrapper.run(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache, return_lse=True)
    else:
        layouts = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "base2"}
        wrapper.plan(metadata=metadata_class.csr(**csr), **shape, **layouts)
        found = wrapper.run(query=query, kv_cache=kv_cache, return_lse=True)
    return found


def _trtllm_decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache.shape[1]
    check_choice(_LIBRARY, "pages of", block_size, _TRTLLM_PAGES)
    table = pad(table, (0, -table.shape[1] % (_TRTLLM_TOKENS // block_size)))
    function = load_function(_MODULE, "trtllm_batch_decode_with_kv_cache_mla", _TRTLLM_KEYWORDS, _INSTALL)
    # Without the keyword trtllm-gen's own base, 2, is all there is.
    base = {"return_lse_base": "base2"} if takes_keyword(function, "return_lse_base") else {}
    out, lse = function(
        query=q.unsqueeze(1),
        kv_cache=cache,
        workspace_buffer=_zeroed_workspace(q.device),
        qk_nope_head_dim=_QK_NOPE_HEAD_DIM,
        kv_lora_rank=_CKV,
        qk_rope_head_dim=_KPE,
        block_tables=table,
        # It schedules at least one page of each request.
        seq_lens=lengths.clamp(min=1),
        max_seq_len=table.shape[1] * block_size,
        bmm1_scale=softmax_scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        return_lse=True,
        **base,
    )
    return out.view(*q.shape[:2], _CKV), lse.view(q.shape[:2])


@functools.cache
def _wrapper(device: torch.device) -> Any:
    backend = "fa3" if current_device(device).family == HOPPER else "fa2"
    make = load_function(
        _MODULE, "BatchMLAPagedAttentionWrapper", ("float_workspace_buffer", "use_cuda_graph", "backend"), _INSTALL
    )
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return make(float_workspace_buffer=workspace, use_cuda_graph=False, backend=backend)


@functools.cache
def _zeroed_workspace(device: torch.device) -> torch.Tensor:
    # The kernel counts in it and leaves its counters at 0.
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
