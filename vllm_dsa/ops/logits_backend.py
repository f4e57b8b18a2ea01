"""Who may compute the logits of a server's decode steps."""

import enum

from vllm_dsa.deep_gemm_wrapper import DeepGemmUnavailableError, PagedMQALogitsCapabilities
from vllm_dsa.kernels.sm90_paged_mqa_logits import BLOCK_SIZES, HEAD_DIM, NUM_HEADS
from vllm_dsa.platform import HOPPER


class LogitsBackend(enum.Enum):
    """Who computes a launch's logits."""

    DEEP_GEMM = "deep_gemm"
    """The loaded DeepGEMM."""
    SM90 = "sm90"
    """Our own Hopper kernel, which takes ragged depths."""
    REFERENCE = "reference"
    """The torch twin."""


def resolve_logits_backends(
    choice: str, caps: PagedMQALogitsCapabilities, *, block_size: int, num_heads: int, head_dim: int
) -> frozenset[LogitsBackend]:
    """Return the backends that steps may be planned for. Pure.

    Parameters
    ----------
    choice : {"auto", "deep_gemm", "sm90", "reference"}
        As ``VDSA_LOGITS_BACKEND``. auto allows every backend that can run: DeepGEMM where there is a build, our kernel
        on Hopper, and the twin where there is neither.
    caps : PagedMQALogitsCapabilities
        What DeepGEMM takes, and the GPU's architecture.
    block_size : int
        Tokens per page.
    num_heads, head_dim : int
        Of the indexer's queries.

    Returns
    -------
    frozenset of LogitsBackend
        Not empty. Under auto a DeepGEMM that does not take the heads or the page size is left out where our kernel
        does.

    Raises
    ------
    NotImplementedError
        If `choice` is sm90 and our kernel cannot run; names the reason.
    DeepGemmUnavailableError
        If `choice` is deep_gemm and there is no build.
    ValueError
        If DeepGEMM alone is left and does not take the page size. (Heads that it does not take are an error of the
        launch.)
    """
    if choice == "reference":
        return frozenset({LogitsBackend.REFERENCE})
    obstacle = _sm90_obstacle(caps, block_size, num_heads, head_dim)
    if choice == "sm90":
        if obstacle is not None:
            raise NotImplementedError(f"the sm90 logits backend {obstacle}")
        return frozenset({LogitsBackend.SM90})
    if choice == "deep_gemm" and caps.provider is None:
        raise DeepGemmUnavailableError("the deep_gemm logits backend needs a DeepGEMM build: none is loaded")
    ours = frozenset({LogitsBackend.SM90}) if choice == "auto" and obstacle is None else frozenset()
    if caps.provider is None:
        return ours or frozenset({LogitsBackend.REFERENCE})
    if ours and (block_size not in caps.block_sizes or num_heads not in caps.num_heads):
        return ours
    if block_size not in caps.block_sizes:
        raise ValueError(
            f"block_size must be one of {sorted(caps.block_sizes)} for deep_gemm {caps.provider} on {caps.arch}, "
            f"got {block_size}"
        )
    return ours | {LogitsBackend.DEEP_GEMM}


def _sm90_obstacle(caps: PagedMQALogitsCapabilities, block_size: int, num_heads: int, head_dim: int) -> str | None:
    if caps.arch_family != HOPPER:
        return f"needs a Hopper GPU (sm90), got {caps.arch}"
    for name, value, allowed in (
        ("num_heads", num_heads, NUM_HEADS),
        ("head_dim", head_dim, (HEAD_DIM,)),
        ("block_size", block_size, BLOCK_SIZES),
    ):
        if value not in allowed:
            return f"takes a {name} of {', '.join(map(str, allowed))}, got {value}"
    return None
