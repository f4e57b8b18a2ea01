"""What the loaded DeepGEMM can do on this GPU, as values; every gate takes them.

Public builds differ, and the wrong pair of gate and build is an assertion at the first decode, not a slow path.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_dsa.deep_gemm_wrapper.builds import DeepGemmBuild, LoadedDeepGemm, has_deep_gemm, load_deep_gemm
from vllm_dsa.deep_gemm_wrapper.probe import probe_next_n
from vllm_dsa.platform import BLACKWELL_DATACENTER, HOPPER, DeviceInfo, current_device, planned_device


class PrefillSignature(enum.Enum):
    """How a build's ``fp8_mqa_logits`` says where the valid columns end."""

    CLEAN_LOGITS = "clean_logits"
    """``clean_logits`` is the sixth parameter, ``max_seqlen_k`` an optional one after it."""
    MAX_SEQLEN_K = "max_seqlen_k"
    """``max_seqlen_k`` is the sixth parameter and must be positive."""


@dataclass(frozen=True, slots=True)
class PagedMQALogitsCapabilities:
    """What one DeepGEMM build can do on one GPU.

    Attributes
    ----------
    provider, version : str or None
        The imported module and its version; ``None`` without DeepGEMM.
    arch_family : int or None
        Major CUDA compute capability; ``None`` without CUDA.
    num_sms : int
        Streaming multiprocessors that the build schedules for. Always SMs, never slots.
    native_next_n : frozenset of int, or None
        Query rows per request that the paged kernel takes; ``None`` means any.
    paired_next_n : frozenset of int
        The schedule-slot rule: these `next_n` run on clusters of two SMs, so a schedule has one slot for each pair of
        SMs; every other has one slot for each SM.
    block_sizes : frozenset of int
        Tokens per page of the index-K cache that the kernel takes.
    num_heads : frozenset of int
        Indexer heads that the kernel takes.
    prefill_signature : PrefillSignature or None
        ``None`` without DeepGEMM.
    supports_varlen : bool
        Whether the paged kernel takes ragged depths itself, by a request index per row.
    """

    provider: str | None
    version: str | None
    arch_family: int | None
    num_sms: int
    native_next_n: frozenset[int] | None
    paired_next_n: frozenset[int]
    block_sizes: frozenset[int]
    num_heads: frozenset[int]
    prefill_signature: PrefillSignature | None
    supports_varlen: bool

    @property
    def arch(self) -> str:
        """``sm90``, ``sm100``, ...; ``cpu`` without CUDA."""
        return "cpu" if self.arch_family is None else f"sm{self.arch_family}0"

    @property
    def native_text(self) -> str:
        """The native set as one word: ``any``, or ``1,2,4``."""
        return "any" if self.native_next_n is None else ",".join(map(str, sorted(self.native_next_n)))


@dataclass(frozen=True, slots=True)
class _BuildLine:
    """The facts of one line of public builds on SM90 (docs/deepgemm_builds.md says how each was established)."""

    sm90_native_next_n: frozenset[int]
    sm90_paired_next_n: frozenset[int]
    block_sizes: frozenset[int]
    num_heads: frozenset[int]
    prefill_signature: PrefillSignature


_NV_DEV_LINE = _BuildLine(
    sm90_native_next_n=frozenset({1, 2, 4}),
    sm90_paired_next_n=frozenset({4}),
    block_sizes=frozenset({32, 64}),
    num_heads=frozenset({16, 32, 64}),
    prefill_signature=PrefillSignature.CLEAN_LOGITS,
)
_MAIN_LINE = _BuildLine(
    sm90_native_next_n=frozenset({1, 2}),
    sm90_paired_next_n=frozenset(),
    block_sizes=frozenset({64}),
    num_heads=frozenset({32, 64}),
    prefill_signature=PrefillSignature.MAX_SEQLEN_K,
)
_OLD_MAIN_LINE = dataclasses.replace(_MAIN_LINE, prefill_signature=PrefillSignature.CLEAN_LOGITS)


def static_capabilities(device: DeviceInfo, build: DeepGemmBuild | None) -> PagedMQALogitsCapabilities:
    """Return the published table's answer for a device and a build. Pure.

    SM90 takes next_n {1, 2, 4} (never 3) on the nv_dev line and {1, 2} on the main line, SM100 any, every other CUDA
    family {1, 2}; without CUDA or without DeepGEMM {1, 2}. A build that the table does not know counts as nv_dev, the
    line that the engines carry.
    """
    if build is None or device.family is None:
        return _without_deep_gemm(device)
    line = _build_line(build)
    native: frozenset[int] | None = frozenset({1, 2})
    paired: frozenset[int] = frozenset()
    if device.family == HOPPER:
        native, paired = line.sm90_native_next_n, line.sm90_paired_next_n
    elif device.family == BLACKWELL_DATACENTER:
        native = None
    return PagedMQALogitsCapabilities(
        provider=build.provider,
        version=build.version,
        arch_family=device.family,
        num_sms=device.num_sms,
        native_next_n=native,
        paired_next_n=paired,
        block_sizes=line.block_sizes if device.family in (HOPPER, BLACKWELL_DATACENTER) else frozenset({64}),
        num_heads=line.num_heads,
        prefill_signature=line.prefill_signature,
        supports_varlen=device.family == BLACKWELL_DATACENTER,
    )


def planned_capabilities(arch: str, native_next_n: frozenset[int] | None = None) -> PagedMQALogitsCapabilities:
    """Return the table's answer for a machine that is not this one.

    Parameters
    ----------
    arch : {"sm90", "sm100", "cpu"}
        The machine, see :func:`vllm_dsa.platform.planned_device`.
    native_next_n : frozenset of int, optional
        Another build's native set in place of the nv_dev line's.

    Raises
    ------
    ValueError
        If `arch` is unknown, or `native_next_n` is empty or holds a value below 1.
    """
    device = planned_device(arch)
    build = DeepGemmBuild(provider="planned", distribution=None, version=None, path=None)
    caps = static_capabilities(device, None if device.family is None else build)
    if native_next_n is None:
        return caps
    if not native_next_n or min(native_next_n) < 1:
        raise ValueError(f"native_next_n must name at least one depth of at least 1, got {sorted(native_next_n)}")
    return dataclasses.replace(
        caps, native_next_n=native_next_n, paired_next_n=caps.paired_next_n & native_next_n, supports_varlen=False
    )


def resolve_capabilities() -> PagedMQALogitsCapabilities:
    """Return the capabilities of the DeepGEMM that this process loads, on the current device.

    The table of :func:`static_capabilities`, corrected by what the loaded module itself shows: the SM count that it
    schedules for, the signature of its prefill call and, on SM90, the next_n that its paged kernel accepts. The first
    call per device asks the kernel, which compiles it (seconds); later ones remember. Without CUDA nothing is imported.

    Raises
    ------
    DeepGemmUnavailableError
        If the build can be imported but its paged kernel cannot run on this GPU.
    """
    device = current_device()
    if device.family is None or not has_deep_gemm():
        return static_capabilities(device, None)
    loaded = load_deep_gemm()
    num_sms = _library_num_sms(loaded, device.num_sms)
    table = static_capabilities(dataclasses.replace(device, num_sms=num_sms), loaded.build)
    signature = prefill_signature(loaded.function("fp8_fp4_mqa_logits"))
    if signature is not None:
        table = dataclasses.replace(table, prefill_signature=signature)
    if device.family != HOPPER:
        return table
    probed = probe_next_n(torch.cuda.current_device(), num_sms)
    return dataclasses.replace(table, native_next_n=probed.native, paired_next_n=probed.paired)


def check_num_sms(caps: PagedMQALogitsCapabilities) -> None:
    """Raise ``RuntimeError`` if the loaded library no longer schedules for the SMs that `caps` were resolved with.

    A schedule cut for another count is an assertion in the library at the next launch, or an idle part of the GPU.
    """
    if caps.provider is None:
        return
    num_sms = _library_num_sms(load_deep_gemm(), caps.num_sms)
    if num_sms != caps.num_sms:
        raise RuntimeError(
            f"{caps.provider} schedules for {num_sms} SMs now, the capabilities say num_sms={caps.num_sms}: call "
            "set_num_sms before resolve_capabilities, and make a new builder after a change"
        )


def prefill_signature(function: Callable[..., object]) -> PrefillSignature | None:
    """Read the sixth parameter of a build's prefill call; ``None`` if the function does not tell.

    Bindings differ in where they keep it: a torch operator has a schema, a pybind function a signature in the first
    line of its docstring, a Python function a real one. Passed by position, `max_seqlen_k` would bind to
    `clean_logits` on the other line without any error, and the top-k would be wrong.
    """
    schema = getattr(function, "_schema", None)
    text = str(schema) if schema is not None else (function.__doc__ or "").partition("\n")[0]
    if "clean_logits" not in text and "max_seqlen_k" not in text:
        try:
            text = str(inspect.signature(function))
        except (TypeError, ValueError):
            return None
    if "clean_logits" in text:
        return PrefillSignature.CLEAN_LOGITS
    return PrefillSignature.MAX_SEQLEN_K if "max_seqlen_k" in text else None


def _without_deep_gemm(device: DeviceInfo) -> PagedMQALogitsCapabilities:
    # The reference kernels take any shape; {1, 2} is what every peer assumes here, and keeps plans comparable.
    return PagedMQALogitsCapabilities(
        provider=None,
        version=None,
        arch_family=device.family,
        num_sms=device.num_sms,
        native_next_n=frozenset({1, 2}),
        paired_next_n=frozenset(),
        block_sizes=frozenset({32, 64}),
        num_heads=frozenset({16, 32, 64}),
        prefill_signature=None,
        supports_varlen=False,
    )


def _build_line(build: DeepGemmBuild) -> _BuildLine:
    if build.distribution == "sgl-deep-gemm":
        return _MAIN_LINE
    if build.distribution == "tokenspeed-deepgemm" and build.version is not None:
        version = _version_key(build.version)
        # 2.5.0.post20260424 is older than nv_dev's next_n 4, 2.8 left that line.
        if version < (2, 5, 0, 20260604):
            return _OLD_MAIN_LINE
        if version >= (2, 8):
            return _MAIN_LINE
    return _NV_DEV_LINE


def _version_key(version: str) -> tuple[int, ...]:
    """``2.5.0.post20260604+cu130`` -> ``(2, 5, 0, 20260604)``."""
    public = version.partition("+")[0]
    digits = ("".join(filter(str.isdigit, part)) for part in public.split("."))
    return tuple(int(part) for part in digits if part)


def _library_num_sms(loaded: LoadedDeepGemm, default: int) -> int:
    # The library's own count is what its host check compares with; set_num_sms may have changed it.
    return int(getattr(loaded.module, "get_num_sms", lambda: default)())
