"""What of the builder's buffers a step uses: views that depend on the plan alone, so they are made once per plan."""

from typing import NamedTuple

import torch

from vllm_dsa.indexer.buffers import StepBuffers
from vllm_dsa.indexer.plan import DecodeForm, StepPlan
from vllm_dsa.ops import LogitsBackend

_NARROWEST_LOGITS = 1024


class StepViews(NamedTuple):
    """Views of one plan, named as in :class:`vllm_dsa.indexer.batch.IndexerDecodeMetadata`.

    ``block_table`` is ``None`` where the kernel reads the engine's own; ``schedule_metadata`` is the part that the
    group size's launches use, ``None`` where they use none.
    """

    context_lens: torch.Tensor
    block_table: torch.Tensor | None
    schedule_metadata: torch.Tensor | None
    row_to_token: torch.Tensor | None
    token_to_row: torch.Tensor | None
    decode_lens: torch.Tensor
    indices: torch.Tensor | None
    query_start_loc: torch.Tensor | None
    topk_indices: torch.Tensor


def make_views(buffers: StepBuffers, plan: StepPlan, num_slots: int | None) -> StepViews:
    """Cut the buffers to a plan whose launches have `num_slots` schedule slots, or no schedule."""
    is_ours = plan.backend is LogitsBackend.SM90
    return StepViews(
        context_lens=buffers.context_lens[: plan.num_rows].view(plan.num_groups, plan.group_size),
        block_table=None if plan.reads_engine_table else buffers.block_table[: plan.num_groups],
        schedule_metadata=None if num_slots is None else buffers.schedule_metadata[: num_slots + 1],
        row_to_token=None if plan.rows_are_tokens else buffers.row_to_token[: plan.num_rows],
        token_to_row=None if plan.rows_are_tokens else buffers.token_to_row[: plan.num_tokens],
        decode_lens=buffers.decode_lens[: plan.num_reqs],
        indices=buffers.indices[: plan.num_groups] if plan.form is DecodeForm.RAGGED and not is_ours else None,
        query_start_loc=buffers.query_start_loc[: plan.num_reqs + 1] if is_ours else None,
        topk_indices=buffers.topk_indices[: plan.num_tokens],
    )


def logits_width(max_context_len: int, table_len: int) -> int:
    """Return the columns to give a step's logits: the next power of two, at most what the table reaches.

    Parameters
    ----------
    max_context_len : int
        Longest row of the step, cached states.
    table_len : int
        States that a whole block-table row reaches.

    Notes
    -----
    A server for 128K contexts whose batch is at 5K needs 8K columns in every layer, not 128K; and a graph captured for
    a width serves every step of its bucket, so there are few to capture.
    """
    width = _NARROWEST_LOGITS
    while width < max_context_len:
        width *= 2
    return min(width, table_len)
