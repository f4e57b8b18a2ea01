"""Compiling ahead of service: one tiny launch of everything that a configuration can meet."""

import functools
from collections.abc import Iterator

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.batch import IndexerDecodeMetadata
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.logits import decode_logits
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, expanded_form, legal_group_sizes
from vllm_dsa.indexer.planner import StepPlanner
from vllm_dsa.ops import IndexKCacheLayout, LogitsBackend


def warmup_plans(config: IndexerConfig, planner: StepPlanner) -> Iterator[StepPlan]:
    """Yield one plan of a single request for each compiled variant of the build and of the logits."""
    caps = planner.caps
    backend = LogitsBackend.REFERENCE if caps.provider is None else LogitsBackend.DEEP_GEMM
    one = functools.partial(StepPlan, num_reqs=1, num_groups=1, kv_reads=1)
    if planner.ragged_costs is not None:
        yield one(DecodeForm.RAGGED, 1, num_tokens=1, max_depth=1, backend=LogitsBackend.SM90)
    if caps.supports_varlen:
        yield one(DecodeForm.RAGGED, 1, num_tokens=1, max_depth=1, backend=backend)
        return
    for size in legal_group_sizes(config.max_num_tokens, caps):
        for form in (DecodeForm.NATIVE, expanded_form(size)):
            depth = min(size, config.max_num_tokens)
            yield one(form, size, num_tokens=depth, max_depth=depth, backend=backend)


def warmup_logits(metadata: IndexerDecodeMetadata, config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> None:
    """Launch the float32 logits of a step without cached tokens on one page."""
    device, rows = metadata.context_lens.device, metadata.plan.num_rows
    decode_logits(
        metadata,
        torch.zeros(rows, config.num_heads, config.head_dim, device=device).to(torch.float8_e4m3fn),
        torch.zeros(rows, config.num_heads, device=device),
        IndexKCacheLayout(config.block_size, config.head_dim).allocate(1, device),
        caps,
    )
