"""The prefill logits of DeepGEMM: one meaning over builds whose sixth parameters differ."""

import torch

from vllm_dsa.deep_gemm_wrapper._checks import check_contiguous, check_form
from vllm_dsa.deep_gemm_wrapper.builds import load_deep_gemm
from vllm_dsa.deep_gemm_wrapper.capabilities import (
    PagedMQALogitsCapabilities,
    PrefillSignature,
    resolve_capabilities,
)


def fp8_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    max_seqlen_k: int,
    *,
    caps: PagedMQALogitsCapabilities | None = None,
) -> torch.Tensor:
    """Score the window ``[row_starts, row_ends)`` of gathered keys for each query row.

    Parameters
    ----------
    q : torch.Tensor
        ``(rows, heads, head_dim)`` float8_e4m3fn, contiguous, CUDA.
    k : torch.Tensor
        ``(keys, head_dim)`` float8_e4m3fn, contiguous.
    k_scale : torch.Tensor
        ``(keys,)`` float32.
    weights : torch.Tensor
        ``(rows, heads)`` float32, scales of q folded in.
    row_starts, row_ends : torch.Tensor
        ``(rows,)`` int32 positions in `k`. Values are not checked.
    max_seqlen_k : int
        Bound on ``row_ends - row_starts``, at least 1.
    caps : PagedMQALogitsCapabilities, optional
        By default the loaded DeepGEMM on the current device.

    Returns
    -------
    torch.Tensor
        ``(rows, at least max_seqlen_k)`` float32 whose column 0 is the row's start, on every build; columns at and past
        a row's window are undefined.

    Raises
    ------
    ValueError, TypeError
        If an argument is not as above, or the heads are not the build's.
    DeepGemmUnavailableError
        If no build can be imported.

    Notes
    -----
    By keyword: passed sixth by position, the width of one line of builds binds to the other's ``clean_logits`` without
    any error, and a top-k over columns that no longer start at the row's start is wrong.
    """
    caps = resolve_capabilities() if caps is None else caps
    _check(q, k, k_scale, weights, row_starts, row_ends, max_seqlen_k, caps)
    keywords = {"max_seqlen_k": max_seqlen_k}
    if caps.prefill_signature is PrefillSignature.CLEAN_LOGITS:
        # Builds that can clean refuse to in this layout.
        keywords["clean_logits"] = False
    logits = load_deep_gemm().function("fp8_fp4_mqa_logits")(
        q=(q, None),
        kv=(k, k_scale),
        weights=weights,
        cu_seq_len_k_start=row_starts,
        cu_seq_len_k_end=row_ends,
        **keywords,
    )
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"DeepGEMM returned {type(logits).__name__} for the logits, expected a tensor")
    return logits


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    max_seqlen_k: int,
    caps: PagedMQALogitsCapabilities,
) -> None:
    if q.dim() != 3 or k.dim() != 2 or q.shape[2] != k.shape[1]:
        raise ValueError(
            f"q must be (rows, heads, head_dim) and k (keys, head_dim), got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[1] not in caps.num_heads:
        raise ValueError(f"q must have {sorted(caps.num_heads)} heads for {caps.provider}, got {q.shape[1]}")
    if max_seqlen_k < 1:
        raise ValueError(f"max_seqlen_k must be at least 1, got {max_seqlen_k}")
    rows, keys = q.shape[0], k.shape[0]
    for name, tensor, dtype, shape in (
        ("q", q, torch.float8_e4m3fn, tuple(q.shape)),
        ("k", k, torch.float8_e4m3fn, tuple(k.shape)),
        ("k_scale", k_scale, torch.float32, (keys,)),
        ("weights", weights, torch.float32, (rows, q.shape[1])),
        ("row_starts", row_starts, torch.int32, (rows,)),
        ("row_ends", row_ends, torch.int32, (rows,)),
    ):
        check_form(name, tensor, dtype, shape, q.device)
        check_contiguous(name, tensor)
