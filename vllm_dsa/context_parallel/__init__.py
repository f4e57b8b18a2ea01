"""Decode context parallelism (DCP): which rank holds which token, what a rank reads, writes and refuses, the merges."""

from vllm_dsa.context_parallel.decode_kernel import DcpDecodeKernel, autotune_dummy, multi_ctas_kv_counter_heads
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.context_parallel.merge import merge_lse
from vllm_dsa.context_parallel.merge_buffers import MergeBuffers, MergeMethod
from vllm_dsa.context_parallel.metadata import DcpDecodeMetadata, DecodeMode
from vllm_dsa.context_parallel.page_tables import ReqToToken
from vllm_dsa.context_parallel.refusals import check_dcp_decode, check_dcp_fused_write
from vllm_dsa.context_parallel.topk import MergedTopk, TopkBuffers, merge_topk
from vllm_dsa.context_parallel.writes import localize_slot_mapping

__all__ = [
    "DcpDecodeKernel",
    "DcpDecodeMetadata",
    "DcpLayout",
    "DecodeMode",
    "MergeBuffers",
    "MergeMethod",
    "MergedTopk",
    "ReqToToken",
    "TopkBuffers",
    "autotune_dummy",
    "check_dcp_decode",
    "check_dcp_fused_write",
    "localize_slot_mapping",
    "merge_lse",
    "merge_topk",
    "multi_ctas_kv_counter_heads",
]
