"""Plain torch twins of every kernel: the meaning of each operator, on any device.

They check nothing beyond what keeps them meaningful; `vllm_dsa.ops` is the layer that validates.
"""

from vllm_dsa.reference.fold_q import fold_q
from vllm_dsa.reference.fp8 import K_AMAX_FLOOR, Q_AMAX_FLOOR, ScaleFormat, dequantize_fp8, quantize_fp8
from vllm_dsa.reference.hadamard import hadamard_transform
from vllm_dsa.reference.index_k_cache import IndexKCacheLayout, gather_index_k
from vllm_dsa.reference.latent_cache import (
    FP8_LATENT_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    pack_fp8_latent,
    read_latent,
)
from vllm_dsa.reference.merge_lse import merge_lse_reference
from vllm_dsa.reference.merge_topk import merge_topk
from vllm_dsa.reference.mla_decode import mla_decode, sparse_mla_decode
from vllm_dsa.reference.mqa_logits import mqa_logits
from vllm_dsa.reference.paged_mqa_logits import paged_mqa_logits
from vllm_dsa.reference.ragged_paged_mqa_logits import ragged_paged_mqa_logits
from vllm_dsa.reference.rope import RopeStyle, apply_rope, make_cos_sin
from vllm_dsa.reference.schedule import sm90_schedule, sm100_schedule
from vllm_dsa.reference.store_index_k import store_index_k
from vllm_dsa.reference.topk import logits_of_indices, slots_of_indices, topk_indices

__all__ = [
    "FP8_LATENT_BYTES",
    "KV_LORA_RANK",
    "K_AMAX_FLOOR",
    "LATENT_DIM",
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
    "merge_lse_reference",
    "merge_topk",
    "mla_decode",
    "mqa_logits",
    "pack_fp8_latent",
    "paged_mqa_logits",
    "quantize_fp8",
    "ragged_paged_mqa_logits",
    "read_latent",
    "slots_of_indices",
    "sm90_schedule",
    "sm100_schedule",
    "sparse_mla_decode",
    "store_index_k",
    "topk_indices",
]
