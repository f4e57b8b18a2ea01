"""Compiling ahead of service: one tiny launch of everything that a configuration can meet."""

from collections.abc import Iterator

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, expanded_form, legal_group_sizes
from vllm_dsa.ops import IndexKCacheLayout, paged_mqa_logits


def warmup_plans(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> Iterator[StepPlan]:
    """Yield one plan of a single request for each compiled variant of the build."""
    if caps.supports_varlen:
        yield StepPlan(DecodeForm.RAGGED, 1, num_reqs=1, num_tokens=1, num_groups=1, kv_reads=1)
        return
    for size in legal_group_sizes(config.max_num_tokens, caps):
        for form in (DecodeForm.NATIVE, expanded_form(size)):
            yield StepPlan(
                form, size, num_reqs=1, num_tokens=min(size, config.max_num_tokens), num_groups=1, kv_reads=1
            )


def warmup_logits(
    plan: StepPlan,
    config: IndexerConfig,
    caps: PagedMQALogitsCapabilities,
    schedule_metadata: torch.Tensor,
    num_heads: int,
    head_dim: int,
) -> None:
    """Launch a plan's logits kernel on one page without a token."""
    device, rows = schedule_metadata.device, plan.num_rows
    paged_mqa_logits(
        torch.zeros(plan.num_groups, plan.group_size, num_heads, head_dim, device=device).to(torch.float8_e4m3fn),
        IndexKCacheLayout(config.block_size, head_dim).allocate(1, device),
        torch.zeros(rows, num_heads, device=device),
        torch.zeros(plan.num_groups, plan.group_size, dtype=torch.int32, device=device),
        torch.zeros(plan.num_groups, 1, dtype=torch.int32, device=device),
        max_context_len=config.block_size,
        schedule_metadata=schedule_metadata,
        indices=torch.zeros(plan.num_groups, dtype=torch.int32, device=device) if caps.supports_varlen else None,
        caps=caps,
    )
