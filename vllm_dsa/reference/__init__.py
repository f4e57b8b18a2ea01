"""Plain torch twins of every kernel: the meaning of each operator, on any device.

They check nothing beyond what keeps them meaningful; `vllm_dsa.ops` is the layer that validates.
"""

from vllm_dsa.reference.fold_q import fold_q
from vllm_dsa.reference.fp8 import K_AMAX_FLOOR, Q_AMAX_FLOOR, ScaleFormat, dequantize_fp8, quantize_fp8
from vllm_dsa.reference.hadamard import hadamard_transform
from vllm_dsa.reference.index_k_cache import IndexKCacheLayout, gather_index_k
from vllm_dsa.reference.mqa_logits import mqa_logits
from vllm_dsa.reference.paged_mqa_logits import paged_mqa_logits
from vllm_dsa.reference.ragged_paged_mqa_logits import ragged_paged_mqa_logits
from vllm_dsa.reference.rope import RopeStyle, apply_rope, make_cos_sin
from vllm_dsa.reference.schedule import sm90_schedule, sm100_schedule
from vllm_dsa.reference.store_index_k import store_index_k
from vllm_dsa.reference.topk import logits_of_indices, slots_of_indices, topk_indices

__all__ = [
    "K_AMAX_FLOOR",
    "Q_AMAX_FLOOR",
    "IndexKCacheLayout",
    "RopeStyle",
    "ScaleFormat",
    "apply_rope",
    "dequantize_fp8",
    "fold_q",
    "gather_index_k",
    "hadamard_transform",
    "logits_of_indices",
    "make_cos_sin",
    "mqa_logits",
    "paged_mqa_logits",
    "quantize_fp8",
    "ragged_paged_mqa_logits",
    "slots_of_indices",
    "sm90_schedule",
    "sm100_schedule",
    "store_index_k",
    "topk_indices",
]
