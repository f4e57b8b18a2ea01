"""Every cubin that this package can ask for: what is precompiled, inspected and kept by a prune."""

from vllm_dsa.kernels import sm90_paged_mqa_logits, topk
from vllm_dsa.kernels.jit_source import KernelVariant


def all_variants() -> tuple[KernelVariant, ...]:
    """Return the variants of every launcher of ``csrc``."""
    return (*sm90_paged_mqa_logits.variants(), *topk.variants())
