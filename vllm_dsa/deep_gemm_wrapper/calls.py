"""The paged calls of DeepGEMM, by keyword, checked before the library's wordless assertions see them."""

import torch

from vllm_dsa.deep_gemm_wrapper._checks import check_contiguous, check_form
from vllm_dsa.deep_gemm_wrapper.builds import load_deep_gemm
from vllm_dsa.deep_gemm_wrapper.capabilities import PagedMQALogitsCapabilities, resolve_capabilities
from vllm_dsa.deep_gemm_wrapper.gates import native_next_n_supported, paged_mqa_logits_schedule_slots


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor,
    block_size: int,
    num_sms: int,
    *,
    indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    caps: PagedMQALogitsCapabilities | None = None,
) -> torch.Tensor:
    """Compute the schedule of a paged-logits launch with the loaded DeepGEMM.

    Parameters
    ----------
    context_lens : torch.Tensor
        ``(rows, next_n)`` int32, contiguous, CUDA: tokens visible to each query row. The library reads the last
        column only, as unsigned: a negative length is not checked here and counts as four billion tokens.
    block_size : int
        Tokens per page.
    num_sms : int
        Streaming multiprocessors; where the kernel pairs them, this function halves.
    indices : torch.Tensor, optional
        ``(rows,)`` int32 request of each row, for builds with varlen support and next_n 1.
    out : torch.Tensor, optional
        ``(at least slots + 1, 2)`` int32 buffer whose first rows receive the schedule. The library allocates its own
        result all the same, so this call is graph safe only under a caching allocator's graph pool.
    caps : PagedMQALogitsCapabilities, optional
        By default the loaded DeepGEMM on the current device.

    Returns
    -------
    torch.Tensor
        ``(slots + 1, 2)`` int32: start of each slot as (query row, split of 256 tokens), then the end. A view of `out`
        when given.

    Raises
    ------
    ValueError, TypeError
        If an argument is not as above, or next_n is not native.
    DeepGemmUnavailableError
        If no build can be imported.
    """
    caps = resolve_capabilities() if caps is None else caps
    slots = check_schedule_request(context_lens, block_size, num_sms, indices=indices, out=out, caps=caps)
    # Builds without varlen may lack the keyword, so it is passed only when there is something to pass.
    varlen = {} if indices is None else {"indices": indices}
    schedule = load_deep_gemm().function("get_paged_mqa_logits_metadata")(
        context_lens=context_lens, block_kv=block_size, num_sms=slots, **varlen
    )
    if not isinstance(schedule, torch.Tensor):
        raise TypeError(f"DeepGEMM returned {type(schedule).__name__} for the schedule, expected a tensor")
    return schedule if out is None else out[: slots + 1].copy_(schedule)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_context_len: int,
    *,
    indices: torch.Tensor | None = None,
    caps: PagedMQALogitsCapabilities | None = None,
) -> torch.Tensor:
    """Score cached tokens with the loaded DeepGEMM.

    Parameters
    ----------
    q : torch.Tensor
        ``(rows, next_n, heads, head_dim)`` float8_e4m3fn, contiguous.
    kv_cache : torch.Tensor
        ``(pages, block_size, 1, head_dim + 4)`` uint8; a page holds all values, then all float32 scales.
    weights : torch.Tensor
        ``(rows * next_n, heads)`` float32, scales of q folded in.
    context_lens : torch.Tensor
        ``(rows, next_n)`` int32, contiguous.
    block_table : torch.Tensor
        ``(rows, width)`` int32 page ids.
    schedule_metadata : torch.Tensor
        The result of :func:`get_paged_mqa_logits_metadata` for the same lengths.
    max_context_len : int
        Columns of the result; no length may exceed it (not checked).
    indices, caps
        As in :func:`get_paged_mqa_logits_metadata`.

    Returns
    -------
    torch.Tensor
        ``(rows * next_n, max_context_len)`` float32; columns at and past a row's length are undefined.

    Raises
    ------
    ValueError, TypeError
        If an argument is not as above, or next_n, heads or block size are not the build's.
    DeepGemmUnavailableError
        If no build can be imported.
    """
    caps = resolve_capabilities() if caps is None else caps
    block_size = kv_cache.shape[1] if kv_cache.dim() == 4 else 0
    slots = check_schedule_request(
        context_lens, block_size, caps.num_sms, indices=indices, out=schedule_metadata, caps=caps
    )
    if schedule_metadata.shape[0] != slots + 1:
        raise ValueError(
            f"schedule_metadata must have {slots + 1} rows for next_n {context_lens.shape[1]} on {caps.num_sms} SMs, "
            f"got {schedule_metadata.shape[0]}"
        )
    if q.dim() != 4 or q.shape[:2] != context_lens.shape:
        raise ValueError(f"q must be (rows, next_n, heads, head_dim) like context_lens, got {tuple(q.shape)}")
    if q.shape[2] not in caps.num_heads:
        raise ValueError(f"q must have {sorted(caps.num_heads)} heads for {caps.provider}, got {q.shape[2]}")
    _check_launch(q, kv_cache, weights, context_lens, block_table, schedule_metadata)
    varlen = {} if indices is None else {"indices": indices}
    logits = load_deep_gemm().function("fp8_fp4_paged_mqa_logits")(
        q=(q, None),
        kv_cache=kv_cache,
        weights=weights,
        context_lens=context_lens,
        block_table=block_table,
        schedule_meta=schedule_metadata,
        max_context_len=max_context_len,
        **varlen,
    )
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"DeepGEMM returned {type(logits).__name__} for the logits, expected a tensor")
    return logits


def check_schedule_request(
    context_lens: torch.Tensor,
    block_size: int,
    num_sms: int,
    *,
    indices: torch.Tensor | None,
    out: torch.Tensor | None,
    caps: PagedMQALogitsCapabilities,
) -> int:
    """Check the arguments of a schedule and return its slots. Raises ``ValueError`` or ``TypeError``."""
    if context_lens.dtype != torch.int32:
        raise TypeError(f"context_lens must be int32, got {context_lens.dtype}")
    if context_lens.dim() != 2 or context_lens.shape[1] == 0 or not context_lens.is_contiguous():
        raise ValueError(
            "context_lens must be contiguous and 2-D (rows, next_n), got shape "
            f"{tuple(context_lens.shape)}, strides {context_lens.stride()}"
        )
    next_n = context_lens.shape[1]
    if not native_next_n_supported(next_n, caps):
        native = "any" if caps.native_next_n is None else sorted(caps.native_next_n)
        raise ValueError(
            f"context_lens has next_n {next_n}, native here are {native} on {caps.num_sms} SMs: plan the step with "
            "vllm_dsa.indexer.plan_step, which groups the rows"
        )
    if block_size not in caps.block_sizes:
        raise ValueError(f"block_size must be one of {sorted(caps.block_sizes)}, got {block_size}")
    if indices is not None:
        _check_indices(indices, context_lens, caps)
    slots = paged_mqa_logits_schedule_slots(num_sms, next_n, caps)
    if out is not None and (out.dtype != torch.int32 or out.dim() != 2 or out.shape[1] != 2):
        raise ValueError(f"the schedule must be int32 (rows, 2), got {out.dtype} {tuple(out.shape)}")
    if out is not None and out.shape[0] < slots + 1:
        raise ValueError(f"the schedule needs {slots + 1} rows, got {out.shape[0]}")
    return slots


def _check_launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_metadata: torch.Tensor,
) -> None:
    rows, next_n, heads, head_dim = q.shape
    for name, tensor, dtype, shape in (
        ("q", q, torch.float8_e4m3fn, q.shape),
        ("kv_cache", kv_cache, torch.uint8, (*kv_cache.shape[:2], 1, head_dim + 4)),
        ("weights", weights, torch.float32, (rows * next_n, heads)),
        ("context_lens", context_lens, torch.int32, (rows, next_n)),
        ("block_table", block_table, torch.int32, (rows, *block_table.shape[1:2])),
        ("schedule_metadata", schedule_metadata, torch.int32, schedule_metadata.shape),
    ):
        check_form(name, tensor, dtype, shape, q.device)
    check_contiguous("q", q)


def _check_indices(indices: torch.Tensor, context_lens: torch.Tensor, caps: PagedMQALogitsCapabilities) -> None:
    if not caps.supports_varlen:
        raise ValueError(f"indices must be None: {caps.provider} has no varlen kernel on family {caps.arch_family}")
    if indices.dtype != torch.int32:
        raise TypeError(f"indices must be int32, got {indices.dtype}")
    if context_lens.shape[1] != 1 or indices.shape != context_lens.shape[:1]:
        raise ValueError(
            f"indices must be (rows,) beside context_lens (rows, 1), got {tuple(indices.shape)} beside "
            f"{tuple(context_lens.shape)}"
        )
