"""The logits of a built decode step: what a layer launches with the step's metadata."""

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.batch import IndexerDecodeMetadata
from vllm_dsa.ops import paged_mqa_logits


def decode_logits(
    metadata: IndexerDecodeMetadata,
    row_q: torch.Tensor,
    row_weights: torch.Tensor,
    cache: torch.Tensor,
    caps: PagedMQALogitsCapabilities,
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

    Returns
    -------
    torch.Tensor
        ``(G * c, max_context_len)`` float32. Columns at and past a row's length are undefined: do not read them.

    Raises
    ------
    TypeError, ValueError
        As :func:`vllm_dsa.ops.paged_mqa_logits`.

    Notes
    -----
    No host sync. With DeepGEMM the result is the library's own allocation: its address is stable only in a graph.
    """
    return paged_mqa_logits(
        row_q.view(*metadata.context_lens.shape, *row_q.shape[1:]),
        cache,
        row_weights,
        metadata.context_lens,
        metadata.block_table,
        max_context_len=metadata.max_context_len,
        schedule_metadata=metadata.schedule_metadata,
        indices=metadata.indices,
        caps=caps,
    )
