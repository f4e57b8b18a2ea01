"""Public operator: indexer logits of decode."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, fp8_paged_mqa_logits
from vllm_dsa.ops._checks import FP8_DTYPES, check_cache, check_int, check_lengths, check_pages, check_tensor
from vllm_dsa.ops.logits_backend import LogitsBackend


def paged_mqa_logits_backend(
    q: torch.Tensor, schedule_metadata: torch.Tensor | None, caps: PagedMQALogitsCapabilities | None
) -> LogitsBackend:
    """Return who computes for these arguments of :func:`paged_mqa_logits`."""
    loaded = caps is not None and caps.provider is not None
    if q.is_cuda and schedule_metadata is not None and loaded:
        return LogitsBackend.DEEP_GEMM
    return LogitsBackend.REFERENCE


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_context_len: int,
    schedule_metadata: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    caps: PagedMQALogitsCapabilities | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score the cached tokens of each request against its query rows.

    ``logit[row, t] = k_scale[t] * sum_h relu(q[row, h] . k[t]) * weights[row, h]`` for ``t`` below the row's
    length.

    Parameters
    ----------
    q : torch.Tensor
        (R, next_n, H, D) float8_e4m3fn, last stride 1, any device, see `fold_q`.
    cache : torch.Tensor
        (num_blocks, block_size, 1, D + 4) uint8, same device, see `IndexKCacheLayout`.
    weights : torch.Tensor
        (R * next_n, H) float32, same device, folded.
    context_lens : torch.Tensor
        (R, next_n) int32, same device: tokens that each row sees. Rows of a request may have any lengths, 0
        included.
    block_table : torch.Tensor
        (R, W) int32 page ids, same device. Columns past a request's longest row are not read.
    max_context_len : int
        Columns of the result, in tokens, at least 0.
    schedule_metadata, indices : torch.Tensor, optional
        The step's schedule and, for a varlen launch, the request of each row; only DeepGEMM reads them.
    caps : PagedMQALogitsCapabilities, optional
        With a DeepGEMM provider, CUDA tensors and a schedule, DeepGEMM computes; otherwise the torch twin.
    out : torch.Tensor, optional
        (R * next_n, max_context_len) float32, last stride 1, same device; overwritten, every element of it.

    Returns
    -------
    torch.Tensor
        (R * next_n, max_context_len) float32 (or `out`). Columns at and past a row's length are -inf from the
        torch twin and undefined from DeepGEMM: do not read them.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, device or range that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a length or a page id that is read is out of range. Nothing is written
        then.

    Notes
    -----
    Not checked otherwise: lengths against `max_context_len` (a longer row is cut) and against ``W *
    block_size``, and page ids. The torch backend reads the lengths on the host, so it is not capturable in
    a CUDA graph. Source: see `vllm_dsa.reference.paged_mqa_logits`.
    """
    check_tensor("q", q, dtypes=FP8_DTYPES, shape=(None, None, None, None))
    num_reqs, next_n, num_heads, head_dim = q.shape
    rows = num_reqs * next_n
    block_size = check_cache(cache, head_dim=head_dim, device=q.device)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(rows, num_heads), device=q.device)
    check_tensor("context_lens", context_lens, dtypes=(torch.int32,), shape=(num_reqs, next_n), device=q.device)
    check_tensor("block_table", block_table, dtypes=(torch.int32,), shape=(num_reqs, None), device=q.device)
    check_int("max_context_len", max_context_len, at_least=0)
    if out is not None:
        check_tensor("out", out, dtypes=(torch.float32,), shape=(rows, max_context_len), device=q.device)
    if rows == 0 or max_context_len == 0:
        return q.new_empty((rows, max_context_len), dtype=torch.float32) if out is None else out
    if envs.get("VDSA_VALIDATE"):
        check_lengths(context_lens, max_context_len, block_table.shape[1] * block_size)
        check_pages(block_table, context_lens.amax(dim=1), block_size, cache.shape[0])
    backend = paged_mqa_logits_backend(q, schedule_metadata, caps)
    if backend is LogitsBackend.DEEP_GEMM and schedule_metadata is not None:
        logits = fp8_paged_mqa_logits(
            q,
            cache,
            weights,
            context_lens,
            block_table,
            schedule_metadata,
            max_context_len,
            indices=indices,
            caps=caps,
        )
        return logits if out is None else out.copy_(logits)
    return reference.paged_mqa_logits(
        q, cache, weights, context_lens, block_table, max_context_len=max_context_len, out=out
    )
