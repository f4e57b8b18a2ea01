"""The fixed side of the builder: what a server is configured for."""

from dataclasses import dataclass, field

from vllm_dsa import envs
from vllm_dsa.context_parallel import DcpLayout


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
    num_heads, head_dim : int
        Of the indexer's queries.
    dcp : DcpLayout
        This rank's share of the cache.
    logits_backend : {"auto", "deep_gemm", "sm90", "reference"}
        Who may compute decode logits, see :func:`vllm_dsa.ops.resolve_logits_backends`; by default
        ``VDSA_LOGITS_BACKEND``.
    max_logits_bytes : int
        Largest float32 logits matrix of a prefill chunk; by default ``VDSA_MAX_LOGITS_MB``.

    Raises
    ------
    ValueError
        If a size is out of range, or there is no such backend.
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
    num_heads: int = 64
    head_dim: int = 128
    dcp: DcpLayout = field(default_factory=DcpLayout)
    logits_backend: str = ""
    max_logits_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = ("next_n", "max_num_seqs", "block_table_width", "compress_ratio", "topk", "num_heads", "head_dim")
        for name in sizes:
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
        if not self.logits_backend:
            object.__setattr__(self, "logits_backend", envs.get("VDSA_LOGITS_BACKEND"))
        if self.logits_backend not in envs.LOGITS_BACKENDS:
            raise ValueError(
                f"logits_backend must be one of {', '.join(envs.LOGITS_BACKENDS)}, got {self.logits_backend!r}"
            )
        if not self.max_num_tokens:
            object.__setattr__(self, "max_num_tokens", self.max_num_seqs * self.next_n)
        if not self.max_logits_bytes:
            object.__setattr__(self, "max_logits_bytes", envs.get("VDSA_MAX_LOGITS_MB") << 20)

    @property
    def max_table_len(self) -> int:
        """Global tokens that a full block-table row addresses over all ranks."""
        return self.block_table_width * self.block_size * self.compress_ratio * self.dcp.size
