"""CUDA kernels at run time: compiled once by NVRTC, kept in a disk cache, loaded on a device."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dsa import envs
from vllm_dsa.kernels.cuda_launch import check
from vllm_dsa.kernels.jit_cache import CubinCache, CubinMeta, cache_root
from vllm_dsa.kernels.jit_compile import OPTION_TEXTS, compile_source, compiler_version
from vllm_dsa.kernels.jit_errors import JitDisabledError, KernelLoadError
from vllm_dsa.kernels.jit_once import OncePerKey
from vllm_dsa.kernels.jit_source import DEFAULT_ARCH, KernelSource, KernelVariant, cache_key, read_source
from vllm_dsa.kernels.jit_store import CubinStore
from vllm_dsa.platform import DeviceInfo, current_device

__all__ = ["CompiledKernel", "KernelVariant", "clear_cache", "compile_cubin", "load_kernel", "prune_cache"]

_ARCH = re.compile(r"sm_\d{2,3}[af]?")
# More than this must be asked for, kernel by kernel.
_DEFAULT_SHARED_BYTES = 48 * 1024

_store = CubinStore()
_loaded: OncePerKey[tuple[KernelVariant, int, int], "_LoadedKernel"] = OncePerKey()


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin.

    Attributes
    ----------
    variant : KernelVariant
        What it was made from.
    arch : str
        For example ``sm_90a``.
    key : str
        Digest of everything that decides `cubin`.
    cubin : bytes
        An ELF file.
    log : str
        Of the compiler, with the report of ptxas; kept in the cache too.
    """

    variant: KernelVariant
    arch: str
    key: str
    cubin: bytes
    log: str

    @property
    def entry_name(self) -> str:
        """Folder of its entry in the cache."""
        return _entry_name(self.variant, self.key)


@dataclass(frozen=True, slots=True)
class _LoadedKernel:
    function: Any
    # Owns the module that `function` is in.
    kernel: Any


def compile_cubin(variant: KernelVariant, arch: str = DEFAULT_ARCH) -> CompiledKernel:
    """Return a variant's cubin, from the cache if it has it. Needs no GPU.

    Parameters
    ----------
    variant : KernelVariant
        Its source is in ``csrc``.
    arch : str
        ``sm_`` and a compute capability, with ``a`` for what that architecture alone has.

    Raises
    ------
    ValueError
        If `arch` has another form, or the source or a header of it is not there.
    JitUnavailableError
        If ``cuda.core`` or NVRTC is missing.
    JitDisabledError
        If the cache lacks it and ``VDSA_DISABLE_JIT=1``.
    KernelCompileError
        If the compiler refuses it.
    """
    if not _ARCH.fullmatch(arch):
        raise ValueError(f"arch must be of the form sm_90a, got {arch!r}")
    source = read_source(variant)
    key = _key(variant, source, arch)
    name = _entry_name(variant, key)
    cached = _store.load(name)
    if cached is None:
        if envs.get("VDSA_DISABLE_JIT"):
            raise JitDisabledError(
                f"VDSA_DISABLE_JIT=1 and the cache has no entry for {variant} on {arch}: "
                f"run `vllm-dsa precompile --arch {arch}` without VDSA_DISABLE_JIT, with the same VDSA_CACHE_DIR"
            )
        cubin, log = compile_source(variant, source, arch)
        meta = CubinMeta(str(variant), arch, compiler_version(), list(OPTION_TEXTS), log)
        cached = _store.keep(name, source.text, cubin, meta)
    cubin, meta = cached
    return CompiledKernel(variant, arch, key, cubin, meta.log)


def load_kernel(variant: KernelVariant, *, dynamic_shared_bytes: int = 0) -> Any:
    """Return a variant ready to launch on the current device. Once per device it compiles and loads.

    Parameters
    ----------
    variant : KernelVariant
        Its source is in ``csrc``.
    dynamic_shared_bytes : int
        Of the largest launch.

    Returns
    -------
    cuda.bindings.driver.CUfunction
        Of the device's primary context, valid as long as the process.

    Raises
    ------
    KernelLoadError
        If there is no CUDA device, or the driver refuses the cubin or the shared memory.
    ValueError, JitUnavailableError, JitDisabledError, KernelCompileError
        As :func:`compile_cubin`.

    Notes
    -----
    Thread-safe; other kernels load at the same time. The first call must not be in a graph capture.
    """
    ordinal = _current_ordinal()
    key = (variant, ordinal, dynamic_shared_bytes)
    return _loaded.get(key, lambda: _load(variant, ordinal, dynamic_shared_bytes)).function


def clear_cache() -> int:
    """Remove every entry of the disk cache, and return how many there were.

    Raises
    ------
    OSError
        If the cache's folder is not to be trusted or cannot be written.
    """
    return CubinCache(cache_root()).clear()


def prune_cache(variants: Iterable[KernelVariant]) -> int:
    """Remove the entries that are not of `variants` as they are now, for any architecture, and the quarantine.

    Returns
    -------
    int
        How many entries went.

    Raises
    ------
    OSError
        If the cache's folder is not to be trusted or cannot be written.
    ValueError, JitUnavailableError
        As :func:`compile_cubin`.
    """
    cache = CubinCache(cache_root())
    archs = {entry.meta.arch for entry in cache.entries() if entry.meta is not None}
    current = {
        _entry_name(variant, _key(variant, source, arch))
        for variant, source in ((variant, read_source(variant)) for variant in variants)
        for arch in archs
    }
    return cache.prune(current)


def _key(variant: KernelVariant, source: KernelSource, arch: str) -> str:
    return cache_key(variant, source, arch, OPTION_TEXTS, compiler_version())


def _entry_name(variant: KernelVariant, key: str) -> str:
    return f"{variant.source}-{key}"


def _current_ordinal() -> int:
    try:
        return torch.cuda.current_device()
    # torch without CUDA asserts.
    except (AssertionError, RuntimeError) as error:
        raise KernelLoadError(f"loading a kernel needs a CUDA device: {error}") from error


def _load(variant: KernelVariant, ordinal: int, dynamic_shared_bytes: int) -> _LoadedKernel:
    from cuda.core import Device, ObjectCode

    device = current_device(ordinal)
    compiled = compile_cubin(variant, _native_arch(device))
    try:
        Device(ordinal).set_current()
        kernel = ObjectCode.from_cubin(compiled.cubin, name=variant.source).get_kernel(variant.symbol)
        return _LoadedKernel(_function(kernel, ordinal, dynamic_shared_bytes), kernel)
    # The class of the driver's errors is private to cuda.core.
    except Exception as error:
        raise KernelLoadError(
            f"{device.name} (driver for CUDA {_driver_version()}) refuses {variant} for {compiled.arch} "
            f"with {dynamic_shared_bytes} bytes of dynamic shared memory: {error}"
        ) from error


def _function(kernel: Any, ordinal: int, dynamic_shared_bytes: int) -> Any:
    from cuda.bindings import driver

    if dynamic_shared_bytes > _DEFAULT_SHARED_BYTES:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        check(
            driver.cuKernelSetAttribute(attribute, dynamic_shared_bytes, kernel.handle, device), "cuKernelSetAttribute"
        )
    return check(driver.cuKernelGetFunction(kernel.handle), "cuKernelGetFunction")


def _native_arch(device: DeviceInfo) -> str:
    if device.family is None:
        raise KernelLoadError(f"loading a kernel needs a CUDA device, the current one is {device.name}")
    # Hopper is the first whose own instructions need the suffix.
    return f"sm_{device.family}{device.minor}{'a' if device.family >= 9 else ''}"


def _driver_version() -> str:
    from cuda.bindings import driver

    version = check(driver.cuDriverGetVersion(), "cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"
