"""Public operator: deterministic top-k of indexer logits."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.kernels.topk import ALIGNMENT, LOGITS_DTYPES, MAX_K, MAX_LENGTH, SlotMap, launch_topk, load_topk
from vllm_dsa.ops._checks import FLOAT_DTYPES, check_contiguous, check_int, check_tensor, check_values
from vllm_dsa.ops.topk_backend import LIBRARIES, topk_by_library
from vllm_dsa.platform import check_current_device, is_hopper

_INT32 = (torch.int32,)


def topk_indices(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    slots: SlotMap | None = None,
) -> torch.Tensor:
    """Return the indices of the k highest logits of each row's window, in ascending order.

    Parameters
    ----------
    logits : torch.Tensor
        (rows, width) float32, bfloat16, float16 or float64, last stride 1, any device. Only the window of a
        row counts.
    lengths : torch.Tensor
        (rows,) int32, same device: tokens of the window; clamped to ``[0, width - start]``. A row that is no longer
        than k is chosen whole, without its logits being read: they need not have been written.
    k : int
        Tokens to choose, at least 1; may be more than width.
    starts : torch.Tensor, optional
        (rows,) int32, same device: first column of the window; default 0.
    out : torch.Tensor, optional
        (rows, k) int32, last stride 1, same device; overwritten, every element of it.
    values : torch.Tensor, optional
        (rows, k) float32, last stride 1, same device: overwritten with the logits of the chosen tokens, in the order of
        the result, and -inf past them.
    slots : SlotMap, optional
        Return slots of a paged cache in place of indices: ``block_table[request, i // block_size] * block_size + i %
        block_size`` for index i.

    Returns
    -------
    torch.Tensor
        (rows, k) int32 (or `out`), relative to the row's start. The first ``min(length, k)`` of a row are
        unique, in range and ascending (by index, also where slots are returned); the rest is -1.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, device or range that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a start is not within 0 to width. Nothing is written then.
    RuntimeError
        If the tensors are on another CUDA device than the current one.
    NotImplementedError
        If ``VDSA_TOPK_BACKEND`` names our kernel (sm90) or a library, and that does not take the arguments. Nothing is
        written then.
    ImportError
        If ``VDSA_TOPK_BACKEND`` names a library that cannot be imported. Nothing is written then.

    Notes
    -----
    The highest value wins and ties go to the lowest index. ``-0.0`` equals ``0.0``; NaN ranks below
    ``-inf``. The result of a row depends on that row alone, so it is the same on every rank and in every
    batch. Not checked otherwise: values of `starts`, requests of rows and the block table's columns.

    On Hopper float32 and bfloat16 rows of up to 2**20 logits (three less where one starts off a multiple of 4 logits)
    and k up to 2048 take one launch, without host sync and with `out` without allocation: graph safe. Everything else,
    other GPUs too (all with ``VDSA_TOPK_BACKEND=reference``), is the torch twin: the same indices by many launches. It
    does not sync either, but allocates, so in a CUDA graph it takes memory of the graph's pool.

    ``VDSA_TOPK_BACKEND=flashinfer`` and ``=deep_select`` are never chosen unasked; their ties and NaN are not as above:
    see `vllm_dsa.ops.topk_backend`. Source: this project's rule on order and ties, and `vllm_dsa.kernels.topk`.
    """
    check_tensor("logits", logits, dtypes=(*FLOAT_DTYPES, torch.float64), shape=(None, None))
    num_rows, width = logits.shape
    device = logits.device
    check_tensor("lengths", lengths, dtypes=_INT32, shape=(num_rows,), device=device)
    check_int("k", k, at_least=1)
    if starts is not None:
        check_tensor("starts", starts, dtypes=_INT32, shape=(num_rows,), device=device)
    if out is not None:
        check_tensor("out", out, dtypes=_INT32, shape=(num_rows, k), device=device)
    if values is not None:
        check_tensor("values", values, dtypes=(torch.float32,), shape=(num_rows, k), device=device)
    if slots is not None:
        _check_slots(slots, num_rows, device)
    if logits.is_cuda:
        check_current_device(device)
    if out is None:
        out = logits.new_empty((num_rows, k), dtype=torch.int32)
    if num_rows == 0:
        return out
    if starts is not None and envs.get("VDSA_VALIDATE"):
        check_values("starts", starts, (starts < 0) | (starts > width), f"0 to {width}")
    backend = _backend(logits, lengths, starts, k)
    if backend == "sm90":
        launch_topk(logits, lengths, k, out, starts=starts, values=values, slots=slots)
        return out
    if backend == "reference":
        reference.topk_indices(logits, lengths, k, starts=starts, out=out)
    else:
        topk_by_library(backend, logits, lengths, k, out, starts=starts)
    if values is not None:
        values.copy_(reference.logits_of_indices(logits, out, starts))
    if slots is not None:
        out.copy_(reference.slots_of_indices(out, slots.block_table, slots.block_size, slots.request_of_row))
    return out


def warmup_topk(k: int, device: torch.device) -> None:
    """Compile what `topk_indices` of float32 logits on a device needs, before a capture or a step does.

    Parameters
    ----------
    k : int
        Of the launches to come.
    device : torch.device
        The current device, if it is a CUDA device.

    Raises
    ------
    NotImplementedError, ImportError
        If ``VDSA_TOPK_BACKEND`` names a library that does not take k, or that cannot be imported.

    Notes
    -----
    A library chooses once from one row, which also makes the buffers that it keeps. The torch twin needs nothing.
    """
    if device.type != "cuda":
        return
    choice = envs.get("VDSA_TOPK_BACKEND")
    if choice in LIBRARIES:
        _choose_once(k, device)
    elif choice != "reference" and k <= MAX_K and is_hopper(device):
        load_topk(torch.float32)


def _choose_once(k: int, device: torch.device) -> None:
    lengths = torch.full((1,), k + 1, dtype=torch.int32, device=device)
    topk_indices(torch.zeros((1, k + 1), device=device), lengths, k)


def _backend(logits: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor | None, k: int) -> str:
    """Who chooses: sm90, reference or a library."""
    choice: str = envs.get("VDSA_TOPK_BACKEND")
    if choice not in ("auto", "sm90"):
        return choice
    if _takes(logits, lengths, starts, k):
        return "sm90"
    if choice == "sm90":
        raise NotImplementedError(
            f"VDSA_TOPK_BACKEND=sm90, but the kernel does not take k {k} of {logits.dtype} logits of shape "
            f"{tuple(logits.shape)} on {logits.device}; allowed: on Hopper k up to {MAX_K}, rows of 1 to {MAX_LENGTH} "
            f"(some less off multiples of {ALIGNMENT}) and {', '.join(map(str, LOGITS_DTYPES))}"
        )
    return "reference"


def _takes(logits: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor | None, k: int) -> bool:
    """Whether the Hopper kernel takes these arguments."""
    return (
        logits.is_cuda
        and logits.dtype in LOGITS_DTYPES
        and k <= MAX_K
        and _rows_fit(logits, starts)
        and lengths.is_contiguous()
        and (starts is None or starts.is_contiguous())
        and is_hopper(logits.device)
    )


def _rows_fit(logits: torch.Tensor, starts: torch.Tensor | None) -> bool:
    width = logits.shape[1]
    if width > MAX_LENGTH - (ALIGNMENT - 1):
        is_aligned = (
            starts is None
            and logits.stride(0) % ALIGNMENT == 0
            and logits.data_ptr() % (ALIGNMENT * logits.element_size()) == 0
        )
        return is_aligned and width <= MAX_LENGTH
    return width > 0


def _check_slots(slots: SlotMap, num_rows: int, device: torch.device) -> None:
    rows = num_rows if slots.request_of_row is None else None
    check_tensor("slots.block_table", slots.block_table, dtypes=_INT32, shape=(rows, None), device=device)
    check_int("slots.block_size", slots.block_size, at_least=1)
    if slots.request_of_row is not None:
        check_tensor("slots.request_of_row", slots.request_of_row, dtypes=_INT32, shape=(num_rows,), device=device)
        check_contiguous(**{"slots.request_of_row": slots.request_of_row})
