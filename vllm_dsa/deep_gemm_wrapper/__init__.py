"""DeepGEMM behind capability gates: which build is there, what it takes, and calls that cannot mismatch."""

from vllm_dsa.deep_gemm_wrapper.builds import (
    DeepGemmBuild,
    DeepGemmUnavailableError,
    find_builds,
    has_deep_gemm,
    load_deep_gemm,
)
from vllm_dsa.deep_gemm_wrapper.calls import (
    check_schedule_request,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
)
from vllm_dsa.deep_gemm_wrapper.capabilities import (
    PagedMQALogitsCapabilities,
    PrefillSignature,
    check_num_sms,
    planned_capabilities,
    resolve_capabilities,
    static_capabilities,
)
from vllm_dsa.deep_gemm_wrapper.gates import native_next_n_supported, paged_mqa_logits_schedule_slots
from vllm_dsa.deep_gemm_wrapper.prefill import fp8_mqa_logits

__all__ = [
    "DeepGemmBuild",
    "DeepGemmUnavailableError",
    "PagedMQALogitsCapabilities",
    "PrefillSignature",
    "check_num_sms",
    "check_schedule_request",
    "find_builds",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "has_deep_gemm",
    "load_deep_gemm",
    "native_next_n_supported",
    "paged_mqa_logits_schedule_slots",
    "planned_capabilities",
    "resolve_capabilities",
    "static_capabilities",
]
