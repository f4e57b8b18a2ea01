"""Who computes MLA decode attention, and what the adapters of libraries share."""

import enum
import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from vllm_dsa import envs
from vllm_dsa.attn_result import DecodeAttnResult, LseBase


class MlaBackend(enum.Enum):
    """Who computes a step's MLA decode attention."""

    TRITON = "triton"
    """Our own kernel."""
    FLASH_MLA = "flash_mla"
    """FlashMLA, where it is installed."""
    FLASHINFER = "flashinfer"
    """FlashInfer, where it is installed."""
    REFERENCE = "reference"
    """The torch twin."""


def resolve_mla_backend(backend: MlaBackend | None, device: torch.device) -> MlaBackend:
    """Return who computes on a device.

    Parameters
    ----------
    backend : MlaBackend, optional
        None stands for ``VDSA_MLA_BACKEND``, whose ``auto`` is our kernel on CUDA and the twin elsewhere, never a
        library.
    device : torch.device

    Returns
    -------
    MlaBackend

    Raises
    ------
    TypeError
        If `backend` is something else.
    NotImplementedError
        If it needs a CUDA device and `device` is none.
    """
    if backend is None:
        choice = envs.get("VDSA_MLA_BACKEND")
        if choice == "auto":
            return MlaBackend.TRITON if device.type == "cuda" else MlaBackend.REFERENCE
        backend = MlaBackend(choice)
    if not isinstance(backend, MlaBackend):
        raise TypeError(f"backend is {backend!r}; allowed: None, {', '.join(map(str, MlaBackend))}")
    if backend is not MlaBackend.REFERENCE and device.type != "cuda":
        raise NotImplementedError(f"the {backend.value} backend of MLA decode needs CUDA tensors, got {device}")
    return backend


@functools.cache
def load_function(module: str, name: str, keywords: tuple[str, ...], install: str) -> Callable[..., Any]:
    """Import a library's function or class that takes keywords, once per process.

    Raises
    ------
    ImportError
        If the module cannot be imported, or lacks it or a keyword.
    """
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind_partial(**dict.fromkeys(keywords))
    # An extension built for another torch raises anything from ImportError to OSError and RuntimeError.
    except Exception as error:
        raise ImportError(f"MLA decode by {module} needs {module}.{name}: {error}; {install}") from error
    return function


@functools.cache
def takes_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function has a parameter of that name."""
    return keyword in inspect.signature(function).parameters


def refuse(library: str, name: str, value: object, allowed: object) -> NotImplementedError:
    """Return the error for an argument that a library does not take."""
    return NotImplementedError(f"the {library} backend of MLA decode does not take {name} {value}; allowed: {allowed}")


def check_choice(library: str, name: str, value: object, allowed: Collection[object]) -> None:
    """Check that a library takes a value.

    Raises
    ------
    NotImplementedError
        If it is none of `allowed`.
    """
    if value not in allowed:
        raise refuse(library, name, value, ", ".join(map(str, allowed)))


def rows_as_requests(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a request of each query row, since libraries take one length per request.

    Parameters
    ----------
    block_table, context_lens, query_start_loc
        As in :func:`vllm_dsa.ops.mla_decode`.
    block_size : int
        Tokens of a page.

    Returns
    -------
    block_table : torch.Tensor
        (T, W) int32; zeros for a row that sees nothing, so that a library that looks there finds a page.
    lengths : torch.Tensor
        (T,) int32, 0 to ``W * block_size``; 0 for rows of no request.

    Notes
    -----
    No host sync.
    """
    num_tokens = context_lens.shape[0]
    num_reqs, width = block_table.shape
    lengths = context_lens.clamp(0, width * block_size)
    if query_start_loc is not None:
        row = torch.arange(num_tokens, dtype=torch.int32, device=block_table.device)
        lengths = torch.where(row < query_start_loc[-1], lengths, 0)
        request = torch.searchsorted(query_start_loc, row, right=True) - 1
        block_table = block_table[request.clamp(max=num_reqs - 1)] if num_reqs else block_table.new_zeros(num_tokens, 1)
    elif num_tokens > num_reqs:
        block_table = block_table.repeat_interleave(num_tokens // num_reqs, dim=0)
    return torch.where(lengths.unsqueeze(1) > 0, block_table, 0), lengths


def live_slots(slots: torch.Tensor, topk_lens: torch.Tensor | None) -> torch.Tensor:
    """Return the slots that count, and exactly -1 in place of the others."""
    if topk_lens is None:
        return slots.clamp(min=-1)
    column = torch.arange(slots.shape[1], device=slots.device)
    return slots.clamp(min=-1).masked_fill(column >= topk_lens.unsqueeze(1), -1)


def neutral_where_empty(
    out: torch.Tensor, lse: torch.Tensor, is_empty: torch.Tensor, base: LseBase
) -> DecodeAttnResult:
    """Return a library's result with out 0 and lse -inf for rows that see nothing.

    Parameters
    ----------
    out : torch.Tensor
        (T, H, 512).
    lse : torch.Tensor
        (T, H) float32, to `base`.
    is_empty : torch.Tensor
        (T,) bool: rows that see nothing. A library may mark such a row by +inf, or not write it at all.
    base : LseBase
    """
    is_empty = is_empty.unsqueeze(1)
    return DecodeAttnResult(
        out=out.masked_fill(is_empty.unsqueeze(2), 0), lse=lse.masked_fill(is_empty, float("-inf")), base=base
    )
