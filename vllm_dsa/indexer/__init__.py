"""The indexer's metadata: the plan of a step, the builder and its buffers, prefill chunks."""

from vllm_dsa.indexer.batch import DecodeBatch, IndexerDecodeMetadata, PrefillBatch, PrefillChunk
from vllm_dsa.indexer.builder import IndexerMetadataBuilder
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.costs import SM90_KERNEL_COSTS, StepCosts, default_costs
from vllm_dsa.indexer.logits import decode_logits, decode_logits_backend
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, plan_step
from vllm_dsa.indexer.planner import (
    CudaGraphSupport,
    StepPlanner,
    cudagraph_support,
    plannable_backends,
    schedule_slots,
    startup_fields,
)
from vllm_dsa.indexer.views import logits_width

__all__ = [
    "SM90_KERNEL_COSTS",
    "CudaGraphSupport",
    "DecodeBatch",
    "DecodeForm",
    "IndexerConfig",
    "IndexerDecodeMetadata",
    "IndexerMetadataBuilder",
    "PrefillBatch",
    "PrefillChunk",
    "StepCosts",
    "StepPlan",
    "StepPlanner",
    "cudagraph_support",
    "decode_logits",
    "decode_logits_backend",
    "default_costs",
    "logits_width",
    "plan_step",
    "plannable_backends",
    "schedule_slots",
    "startup_fields",
]
