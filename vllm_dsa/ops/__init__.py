"""The public operators: each validates its arguments once, then computes.

``VDSA_VALIDATE=1`` also checks values on the device (page ids, slots, lengths), at the price of a host sync.
"""

from vllm_dsa.kernels.topk import SlotMap
from vllm_dsa.ops.fold_q import fold_q
from vllm_dsa.ops.index_k_cache import gather_index_k, store_index_k
from vllm_dsa.ops.logits_backend import LogitsBackend, resolve_logits_backends
from vllm_dsa.ops.mla_backend import MlaBackend
from vllm_dsa.ops.mla_decode import (
    mla_decode,
    mla_decode_workspace,
    sparse_mla_decode,
    warmup_mla_decode,
    warmup_sparse_mla_decode,
)
from vllm_dsa.ops.mqa_logits import mqa_logits
from vllm_dsa.ops.paged_mqa_logits import paged_mqa_logits, paged_mqa_logits_backend
from vllm_dsa.ops.ragged_paged_mqa_logits import ragged_paged_mqa_logits, ragged_paged_mqa_logits_backend
from vllm_dsa.ops.topk import topk_indices, warmup_topk
from vllm_dsa.reference import IndexKCacheLayout, RopeStyle, ScaleFormat

__all__ = [
    "IndexKCacheLayout",
    "LogitsBackend",
    "MlaBackend",
    "RopeStyle",
    "ScaleFormat",
    "SlotMap",
    "fold_q",
    "gather_index_k",
    "mla_decode",
    "mla_decode_workspace",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_mqa_logits_backend",
    "ragged_paged_mqa_logits",
    "ragged_paged_mqa_logits_backend",
    "resolve_logits_backends",
    "sparse_mla_decode",
    "store_index_k",
    "topk_indices",
    "warmup_mla_decode",
    "warmup_sparse_mla_decode",
    "warmup_topk",
]
