"""The fixed side of the builder: what a server is configured for."""

import enum
from dataclasses import dataclass, field

from vllm_dsa import envs
from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import (
    PagedMQALogitsCapabilities,
    native_next_n_supported,
    paged_mqa_logits_schedule_slots,
)
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, plan_step


class CudaGraphSupport(enum.Enum):
    """For which steps a captured decode graph may be replayed (vLLM's names)."""

    UNIFORM_BATCH = "uniform_batch"
    """Steps in which every request brings the captured number of rows."""
    ALWAYS = "always"
    """Any mix of depths with the captured number of tokens."""


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """What the metadata builder is built for; sizes its buffers.

    Attributes
    ----------
    next_n : int
        Query rows per request of a full decode step, ``1 + num_speculative_tokens``. A step may be shallower or
        deeper.
    max_num_seqs : int
        Requests per decode step, padding included.
    block_table_width : int
        Columns of the engine's block table. Take it from the table itself: ``ceil(max_model_len / block_size)`` is one
        short when drafts reach past the end.
    max_num_tokens : int
        Query rows per decode step; by default ``max_num_seqs * next_n``.
    block_size : int
        Tokens (states, when compressed) per page of the index-K cache: 64 or 32.
    compress_ratio : int
        Tokens per cached state.
    topk : int
        Indices per query row.
    dcp : DcpLayout
        This rank's share of the cache.
    max_logits_bytes : int
        Largest float32 logits matrix of a prefill chunk; by default ``VDSA_MAX_LOGITS_MB``.

    Raises
    ------
    ValueError
        If a size is out of range.
    NotImplementedError
        If compression does not divide the DCP interleave: a state's tokens would lie on two ranks.
    """

    next_n: int
    max_num_seqs: int
    block_table_width: int
    max_num_tokens: int = 0
    block_size: int = 64
    compress_ratio: int = 1
    topk: int = 2048
    dcp: DcpLayout = field(default_factory=DcpLayout)
    max_logits_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("next_n", "max_num_seqs", "block_table_width", "compress_ratio", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_num_tokens", "max_logits_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 1 (0 for the default), got {getattr(self, name)}")
        if self.block_size not in (32, 64):
            raise ValueError(f"block_size must be 32 or 64, got {self.block_size}")
        if self.dcp.size > 1 and self.dcp.interleave % self.compress_ratio:
            raise NotImplementedError(
                f"compress_ratio ({self.compress_ratio}) must divide dcp.interleave ({self.dcp.interleave})"
            )
        if not self.max_num_tokens:
            object.__setattr__(self, "max_num_tokens", self.max_num_seqs * self.next_n)
        if not self.max_logits_bytes:
            object.__setattr__(self, "max_logits_bytes", envs.get("VDSA_MAX_LOGITS_MB") << 20)

    @property
    def max_table_len(self) -> int:
        """Global tokens that a full block-table row addresses over all ranks."""
        return self.block_table_width * self.block_size * self.compress_ratio * self.dcp.size


def full_step_plan(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> StepPlan:
    """Return the plan of one request at the configured depth: what most steps run as."""
    return plan_step([config.next_n], caps)


def cudagraph_support(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> CudaGraphSupport:
    """Say which decode steps a captured graph serves.

    RAGGED and FLATTENED have one kernel row per token whatever the depths, so a graph serves any mix of them; the
    rows of NATIVE and GROUPED depend on the depths, so a graph serves uniform steps.
    """
    form = full_step_plan(config, caps).form
    if form in (DecodeForm.RAGGED, DecodeForm.FLATTENED):
        return CudaGraphSupport.ALWAYS
    return CudaGraphSupport.UNIFORM_BATCH


def startup_fields(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> dict[str, str]:
    """Return the fields of the startup line, in their order.

    ``use_flattening`` means what vLLM means by it: the configured next_n is not native. This package then groups where
    it can, which ``group_size`` shows.
    """
    plan = full_step_plan(config, caps)
    return {
        "use_flattening": str(not native_next_n_supported(config.next_n, caps)),
        "supports_varlen": str(caps.supports_varlen),
        "next_n": str(config.next_n),
        "arch": caps.arch,
        "deep_gemm": ":".join(part for part in (caps.provider or "none", caps.version) if part),
        "native_next_n": caps.native_text,
        "group_size": str(plan.group_size),
        "schedule_slots": str(paged_mqa_logits_schedule_slots(caps.num_sms, plan.group_size, caps)),
        "num_sms": str(caps.num_sms),
    }
