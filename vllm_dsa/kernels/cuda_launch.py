"""Launching a CUDA kernel and describing memory to the copy engine, through the driver's Python bindings.

``cuda.core`` compiles and loads (see ``jit.py``); its launch takes no swizzled tensor map by a public name.
"""

import functools
from collections.abc import Sequence
from typing import Any


def launch(config: Any, kernel: Any, arguments: tuple[object, ...], types: tuple[object, ...]) -> None:
    """Enqueue a kernel.

    Parameters
    ----------
    config : CUlaunchConfig
        From :func:`launch_config`.
    kernel : CUfunction
        From :func:`vllm_dsa.kernels.jit.load_kernel`.
    arguments, types : tuple
        Values and their ctypes types in the kernel's order; ``None`` is the type of a tensor map.

    Raises
    ------
    RuntimeError
        If the driver refuses the launch.
    """
    driver = _driver()
    check(driver.cuLaunchKernelEx(config, kernel, (arguments, types), 0), "cuLaunchKernelEx")


@functools.lru_cache(maxsize=64)
def launch_config(
    num_ctas: int,
    threads: int,
    shared_bytes: int,
    stream: int,
    *,
    overlaps_predecessor: bool = False,
    cluster_size: int = 1,
) -> Any:
    """Return the driver's description of a launch.

    Parameters
    ----------
    num_ctas, threads, shared_bytes : int
        A one-dimensional grid and its dynamic shared memory.
    stream : int
        The stream's handle.
    overlaps_predecessor : bool
        Programmatic dependent launch: the grid may start before the one before it has ended.
    cluster_size : int
        CTAs that run together and see each other's shared memory; divides `num_ctas`.
    """
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    attributes = []
    if overlaps_predecessor:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster_size > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = cluster_size, 1, 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def byte_tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], *, box: Sequence[int]) -> Any:
    """Describe bytes in rows of 128 for the copy engine, to land under the 128-byte swizzle.

    A map holds numbers only, so one may serve any tensor of the same address and shape.

    Parameters
    ----------
    address : int
        Of the first byte, 16-byte aligned.
    sizes : sequence of int
        Bytes of a row, then rows, ...: the innermost dimension first.
    strides : sequence of int
        Bytes from one to the next in every dimension but the first, multiples of 16.
    box : sequence of int
        What one copy brings; what of it lies outside `sizes` arrives as zeros.

    Raises
    ------
    RuntimeError
        If the driver refuses the description.
    """
    driver = _driver()
    result = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return check(result, "cuTensorMapEncodeTiled")


def check(result: tuple[Any, ...], call: str) -> Any:
    """Return the value of a driver call, or raise ``RuntimeError`` naming the call and the driver's error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"{call} failed: {error.name}")
    return values[0] if values else None


@functools.cache
def _driver() -> Any:
    # Here, not at the top: importing this package must not load CUDA.
    from cuda.bindings import driver

    return driver
