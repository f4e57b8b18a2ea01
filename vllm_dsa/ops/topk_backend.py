"""Top-k by another library, where ``VDSA_TOPK_BACKEND`` names one: FlashInfer or DeepSelect."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# FlashInfer's TopKTieBreak.SMALL.
_PREFER_LOWER_INDEX = 1
# DeepSelect writes it as the first index of a row in which it met a NaN. No row that it takes is so long.
_NAN_MARK = 0x3F3F3F3F
_PAST_EVERY_INDEX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a library takes, by its documentation and its own checks."""

    dtypes: tuple[torch.dtype, ...]
    max_k: int
    max_width: int
    takes_starts: bool


_LIMITS = {
    # The path that FlashInfer calls safe for CUDA graphs ends at 2048.
    "flashinfer": _Limits((torch.float32, torch.bfloat16, torch.float16), 2048, 2**31 - 1, takes_starts=True),
    "deep_select": _Limits((torch.float32, torch.bfloat16), 4096, 2**23 - 1, takes_starts=False),
}
LIBRARIES = tuple(_LIMITS)


def topk_by_library(
    library: str,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
) -> None:
    """Choose the k highest logits of each row's window by a library, and put the indices into this package's order.

    Parameters
    ----------
    library : {"flashinfer", "deep_select"}
    logits : torch.Tensor
        (rows, width), last stride 1, CUDA: float32, bfloat16 or, for FlashInfer, float16. Logits whose row stride the
        library does not take are copied first: FlashInfer takes contiguous ones, DeepSelect a stride that is a multiple
        of ``deep_select.get_stride_requirement()[0]`` bytes.
    lengths : torch.Tensor
        (rows,) int32, same device: tokens of the window, clamped on the device to ``[0, width - start]``. A row that is
        no longer than k is chosen whole, whatever its logits.
    k : int
        1 to 2048 (FlashInfer) or 4096 (DeepSelect).
    out : torch.Tensor
        (rows, k) int32, same device, overwritten: indices relative to the start, ascending, then -1.
    starts : torch.Tensor, optional
        (rows,) int32, same device: first column of the window, 0 to width (not checked). Only FlashInfer takes it.

    Raises
    ------
    NotImplementedError
        If the library does not take the arguments. Nothing is written then.
    ImportError
        If the library cannot be imported, or lacks a keyword. Nothing is written then.

    Notes
    -----
    Only this package's kernel and twin give its ties: the lowest index first, -0.0 equal to 0.0, NaN below -inf.

    FlashInfer (``top_k_ragged_transform`` with ``tie_break=1, dsa_graph_safe=True``) promises that of equal logits the
    lower index is chosen. It promises nothing for NaN, nor that -0.0 equals 0.0; its own radix kernels rank logits by
    their bits, 0.0 above -0.0 and NaN above inf (a NaN with its sign set below -inf).

    DeepSelect (``topk`` with ``abort_when_nan_found=False``) promises nothing for ties: which of the logits that equal
    the k-th are chosen may change from run to run and from rank to rank. From a row longer than k that holds a NaN it
    does not choose: such a row is -1 throughout.

    Where no row can be longer than k (width up to k) the library is not called. There is no host sync here, but
    allocations, and both libraries allocate too: whether their calls can be captured in a CUDA graph is theirs to say,
    and one call of the same shape must come before, since they compile and make buffers that outlive it. FlashInfer's
    state is one buffer a device: its calls on two streams must not overlap.

    Source: FlashInfer's ``flashinfer/topk.py`` (these keywords: 0.6.10) and ``csrc/topk.cu``; DeepSelect 1.0's
    ``deep_select/interface.py``, ``csrc/api.cpp`` and README. Neither has been run with this package.
    """
    _check_limits(library, logits, k, starts)
    width = logits.shape[1]
    visible = lengths.clamp(0, width) if starts is None else torch.minimum(lengths, width - starts).clamp(min=0)
    if width <= k:
        found = torch.full_like(out, -1)
    elif library == "flashinfer":
        found = _flashinfer(logits, visible, k, starts)
    else:
        found = _deep_select(logits, visible, k)
    out.copy_(_in_order(found, visible))


def _check_limits(library: str, logits: torch.Tensor, k: int, starts: torch.Tensor | None) -> None:
    limits = _LIMITS[library]
    takes = (
        logits.is_cuda
        and logits.dtype in limits.dtypes
        and k <= limits.max_k
        and logits.shape[1] <= limits.max_width
        and (starts is None or limits.takes_starts)
    )
    if not takes:
        raise NotImplementedError(
            f"VDSA_TOPK_BACKEND={library}, but it does not take k {k} of {logits.dtype} logits of shape "
            f"{tuple(logits.shape)} on {logits.device} {'with' if starts is not None else 'without'} starts; allowed: "
            f"on CUDA k up to {limits.max_k}, rows of up to {limits.max_width} logits, "
            f"{', '.join(map(str, limits.dtypes))}, {'with or ' if limits.takes_starts else ''}without starts"
        )


def _flashinfer(logits: torch.Tensor, visible: torch.Tensor, k: int, starts: torch.Tensor | None) -> torch.Tensor:
    arguments = {
        "input": logits.contiguous(),
        "offsets": torch.zeros_like(visible),
        "lengths": visible,
        "k": k,
        "tie_break": _PREFER_LOWER_INDEX,
        "dsa_graph_safe": True,
        "row_starts": None if starts is None else starts.contiguous(),
    }
    install = "install flashinfer-python 0.6.10 or later from PyPI"
    found: torch.Tensor = _load("flashinfer", "top_k_ragged_transform", tuple(arguments), install)(**arguments)
    return found


def _deep_select(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    install = "install DeepSelect for this GPU from https://github.com/deepseek-ai/DeepSelect"
    stride_bytes, _ = _load("deep_select", "get_stride_requirement", (), install)()
    arguments = {
        "input": _with_row_stride(logits, stride_bytes // logits.element_size()),
        "topk": k,
        "end": visible,
        "indices_type": torch.int32,
        "idx_oob_fill_value": -1,
        "return_value": False,
        # It would end the process: warm-up and idle ranks may feed NaN.
        "abort_when_nan_found": False,
    }
    found: torch.Tensor
    _, found = _load("deep_select", "topk", tuple(arguments), install)(**arguments)
    return found.masked_fill(found[:, :1] == _NAN_MARK, -1)


@functools.cache
def _load(module: str, name: str, keywords: tuple[str, ...], install: str) -> Callable[..., Any]:
    """Import a function that takes the keywords, once per process."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind_partial(**dict.fromkeys(keywords))
    # An extension built for another torch raises anything from ImportError to OSError and RuntimeError.
    except Exception as error:
        raise ImportError(f"VDSA_TOPK_BACKEND={module} needs {module}.{name}: {error}; {install}") from error
    return function


def _with_row_stride(logits: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return the logits, copied if their row stride is not a multiple of so many of them."""
    num_rows, width = logits.shape
    if logits.stride(0) % multiple == 0:
        return logits
    stride = -(-width // multiple) * multiple
    return logits.new_empty((num_rows, stride))[:, :width].copy_(logits)


def _in_order(found: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Sort each row by index, -1 last; choose rows whole that are no longer than it."""
    k = found.shape[1]
    length = visible.unsqueeze(1)
    is_token = (found >= 0) & (found < length)
    ordered = found.masked_fill(~is_token, _PAST_EVERY_INDEX).sort(dim=1).values
    index = torch.arange(k, dtype=torch.int32, device=found.device)
    chosen = torch.where(length <= k, index, ordered)
    return chosen.masked_fill(chosen >= length, -1)
