"""The logits of a built decode step: what a layer launches with the step's metadata."""

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.batch import IndexerDecodeMetadata
from vllm_dsa.ops import (
    LogitsBackend,
    paged_mqa_logits,
    paged_mqa_logits_backend,
    ragged_paged_mqa_logits,
    ragged_paged_mqa_logits_backend,
)


def decode_logits_backend(
    metadata: IndexerDecodeMetadata, row_q: torch.Tensor, caps: PagedMQALogitsCapabilities
) -> LogitsBackend:
    """Return who computes :func:`decode_logits` for these arguments: the plan's backend, or the torch twin for it."""
    if metadata.plan.backend is LogitsBackend.SM90:
        return ragged_paged_mqa_logits_backend(row_q.device)
    return paged_mqa_logits_backend(row_q, metadata.schedule_metadata, _caps_of_launch(metadata, caps))


def decode_logits(
    metadata: IndexerDecodeMetadata,
    row_q: torch.Tensor,
    row_weights: torch.Tensor,
    cache: torch.Tensor,
    caps: PagedMQALogitsCapabilities,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score a layer's cached tokens for every row of a decode step.

    Parameters
    ----------
    metadata : IndexerDecodeMetadata
        Of the step.
    row_q : torch.Tensor
        ``(G * c, heads, head_dim)`` float8_e4m3fn in the plan's row order: `fold_q` with ``metadata.row_to_token``.
    row_weights : torch.Tensor
        ``(G * c, heads)`` float32, folded; zero for dummy rows.
    cache : torch.Tensor
        The layer's paged index-K cache.
    caps : PagedMQALogitsCapabilities
        What the step was planned for.
    out : torch.Tensor, optional
        ``(G * c, max_context_len)`` float32 (for our Hopper kernel also bfloat16), last stride 1, to write into.

    Returns
    -------
    torch.Tensor
        ``(G * c, max_context_len)`` float32, or `out`. Columns at and past a row's length are undefined: do not read
        them.

    Raises
    ------
    TypeError, ValueError
        As :func:`vllm_dsa.ops.ragged_paged_mqa_logits` for a step that is planned for our Hopper kernel, and as
        :func:`vllm_dsa.ops.paged_mqa_logits` for every other.

    Notes
    -----
    No host sync. Our Hopper kernel writes straight into `out`, which may be a persistent buffer of the caller's. With
    DeepGEMM the result is the library's own allocation, whose address is stable only in a graph; `out` costs a copy.
    """
    starts = metadata.query_start_loc
    if metadata.plan.backend is LogitsBackend.SM90 and starts is not None:
        return ragged_paged_mqa_logits(
            row_q,
            cache,
            row_weights,
            metadata.context_lens.view(-1),
            starts,
            metadata.block_table,
            max_context_len=metadata.max_context_len,
            out=out,
        )
    return paged_mqa_logits(
        row_q.view(*metadata.context_lens.shape, *row_q.shape[1:]),
        cache,
        row_weights,
        metadata.context_lens,
        metadata.block_table,
        max_context_len=metadata.max_context_len,
        schedule_metadata=metadata.schedule_metadata,
        indices=metadata.indices,
        caps=_caps_of_launch(metadata, caps),
        out=out,
    )


def _caps_of_launch(
    metadata: IndexerDecodeMetadata, caps: PagedMQALogitsCapabilities
) -> PagedMQALogitsCapabilities | None:
    return caps if metadata.plan.backend is LogitsBackend.DEEP_GEMM else None
