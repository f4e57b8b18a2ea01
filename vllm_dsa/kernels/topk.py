"""Launcher of ``csrc/topk.cu``: exact top-k of rows of logits, ties to the lowest index, on Hopper."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from vllm_dsa.kernels.cuda_launch import launch, launch_config
from vllm_dsa.kernels.jit import KernelVariant, load_kernel
from vllm_dsa.platform import num_sms

LOGITS_DTYPES = (torch.float32, torch.bfloat16)
MAX_K = 2048
# Longest window of a row: 8192 groups of at most 128 logits. What it lies past a multiple of 4 logits counts too.
MAX_LENGTH = 1 << 20
ALIGNMENT = 4

_MAX_GROUPS = 8192
# Of a CTA: an SM has room for two of 512 or one of 1024, which is faster alone.
_THREADS = (512, 1024)
# The kernel's `Shared` must fit: group keys, kept keys and positions, chosen groups, histograms, sums of warps, digit.
_SHARED_BYTES = 4 * (8448 + 8448 + 8192 + MAX_K + 512 + 2 * 256 + 3 * 32 + 4)
# A CTA of a cluster reads at least so many logits: its start costs as much as their reading.
_LOGITS_PER_CTA = 4096

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
ARGUMENT_TYPES = (
    *(_POINTER, _INT64, _INT32, _POINTER, _POINTER),  # logits, stride, width, lengths, starts
    *(_INT32, _POINTER, _INT64, _POINTER, _INT64),  # k, indices, stride, values, stride
    *(_POINTER, _INT64, _POINTER, _INT32),  # block_table, stride, request_of_row, block_size
)


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Turns a token of a row into a slot of a paged cache.

    Attributes
    ----------
    block_table : torch.Tensor
        ``(R, W)`` int32 page ids, last stride 1.
    block_size : int
        Tokens of a page: token ``t`` is at ``block_table[request, t // block_size] * block_size + t % block_size``.
    request_of_row : torch.Tensor or None
        ``(rows,)`` int32 rows of the table; None if row ``i`` is request ``i``.
    """

    block_table: torch.Tensor
    block_size: int
    request_of_row: torch.Tensor | None = None


def launch_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    slots: SlotMap | None = None,
    cluster_size: int | None = None,
    threads: int | None = None,
) -> None:
    """Choose the k highest logits of each row's window.

    Parameters
    ----------
    logits : torch.Tensor
        ``(rows, width)`` float32 or bfloat16, last stride 1, any row stride; up to 12 bytes beside a window are read,
        within the 16 bytes that hold its ends.
    lengths : torch.Tensor
        ``(rows,)`` int32: tokens of the window, clamped to ``[0, width - start]``; at most `MAX_LENGTH` counted
        from the last multiple of `ALIGNMENT` logits in memory.
    k : int
        1 to `MAX_K`.
    out : torch.Tensor
        ``(rows, k)`` int32, last stride 1: indices relative to the start (or slots), ascending by index; then -1.
    starts : torch.Tensor, optional
        ``(rows,)`` int32: first column of the window, 0 to width.
    values : torch.Tensor, optional
        ``(rows, k)`` float32, last stride 1: the logits of `out`, -inf where that is -1.
    slots : SlotMap, optional
        Write slots of a paged cache in place of indices.
    cluster_size : int, optional
        CTAs that share a row's reading, a power of two up to 8; chosen by rows and width. For tests.
    threads : int, optional
        Of a CTA, 512 or 1024; chosen by rows. For tests.

    Notes
    -----
    One launch, no allocation, no host sync, no state; graph safe, since nothing of the grid depends on values on the
    device. Arguments are not checked here.
    """
    num_rows, width = logits.shape
    sms = num_sms(torch.cuda.current_device())
    if cluster_size is None:
        cluster_size = _cluster_size(num_rows, width, sms)
    if threads is None:
        threads = 1024 if num_rows * cluster_size <= sms else 512
    kernel = load_kernel(_variant(logits.dtype, threads), dynamic_shared_bytes=_SHARED_BYTES)
    config = launch_config(
        num_rows * cluster_size,
        threads,
        _SHARED_BYTES,
        torch.cuda.current_stream().cuda_stream,
        cluster_size=cluster_size,
    )
    block_table = None if slots is None else slots.block_table
    arguments = (
        *(logits.data_ptr(), logits.stride(0), width, lengths.data_ptr(), _pointer(starts)),
        *(k, out.data_ptr(), out.stride(0), _pointer(values), _row_stride(values)),
        *(_pointer(block_table), _row_stride(block_table)),
        *(_pointer(None if slots is None else slots.request_of_row), 1 if slots is None else slots.block_size),
    )
    launch(config, kernel, arguments, ARGUMENT_TYPES)


def load_topk(dtype: torch.dtype) -> None:
    """Compile and load on the current device what launches over logits of a dtype need."""
    for threads in _THREADS:
        load_kernel(_variant(dtype, threads), dynamic_shared_bytes=_SHARED_BYTES)


def variants() -> tuple[KernelVariant, ...]:
    """Return every variant that a launch can ask for."""
    return tuple(_variant(dtype, threads) for dtype in LOGITS_DTYPES for threads in _THREADS)


@functools.cache
def _variant(dtype: torch.dtype, threads: int) -> KernelVariant:
    return KernelVariant(
        source="topk",
        symbol="topk",
        macros=(
            ("LOGITS_BF16", str(int(dtype == torch.bfloat16))),
            ("THREADS", str(threads)),
            ("MAX_K", str(MAX_K)),
            ("MAX_GROUPS", str(_MAX_GROUPS)),
            ("SHARED_BYTES", str(_SHARED_BYTES)),
        ),
    )


def _cluster_size(num_rows: int, width: int, sms: int) -> int:
    """Return how many CTAs read a row: as many as keep the SMs busy and have enough to read."""
    if width <= _MAX_GROUPS:
        return 1
    most = min(sms // num_rows, width // _LOGITS_PER_CTA, 8)
    return 1 << max(0, most.bit_length() - 1)


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)
