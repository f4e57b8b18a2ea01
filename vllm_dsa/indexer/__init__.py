"""The indexer's metadata: the plan of a step, the builder and its buffers, prefill chunks."""

from vllm_dsa.indexer.batch import DecodeBatch, IndexerDecodeMetadata, PrefillBatch, PrefillChunk
from vllm_dsa.indexer.builder import IndexerMetadataBuilder
from vllm_dsa.indexer.config import CudaGraphSupport, IndexerConfig, cudagraph_support, startup_fields
from vllm_dsa.indexer.costs import StepCosts, default_costs
from vllm_dsa.indexer.logits import decode_logits
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, plan_step
from vllm_dsa.indexer.views import logits_width

__all__ = [
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
    "cudagraph_support",
    "decode_logits",
    "default_costs",
    "logits_width",
    "plan_step",
    "startup_fields",
]
