"""Public operator: deterministic top-k of indexer logits."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.ops._checks import FLOAT_DTYPES, check_int, check_tensor, check_values


def topk_indices(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the indices of the k highest logits of each row's window, in ascending order.

    Parameters
    ----------
    logits : torch.Tensor
        (rows, width) float32, bfloat16, float16 or float64, last stride 1, any device. Only the window of a
        row counts.
    lengths : torch.Tensor
        (rows,) int32, same device: tokens of the window; clamped to ``[0, width - start]``.
    k : int
        Tokens to choose, at least 1; may be more than width.
    starts : torch.Tensor, optional
        (rows,) int32, same device: first column of the window; default 0.
    out : torch.Tensor, optional
        (rows, k) int32, last stride 1, same device; overwritten, every element of it.

    Returns
    -------
    torch.Tensor
        (rows, k) int32 (or `out`), relative to the row's start. The first ``min(length, k)`` of a row are
        unique, in range and ascending; the rest is -1.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, device or range that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a start is not within 0 to width. Nothing is written then.

    Notes
    -----
    The highest value wins and ties go to the lowest index. ``-0.0`` equals ``0.0``; NaN ranks below
    ``-inf``. The result of a row depends on that row alone, so it is the same on every rank and in every
    batch. Not checked otherwise: values of `starts`. The torch backend syncs on a GPU, so it is not
    capturable in a CUDA graph. Source: this project's rule on order and ties.
    """
    check_tensor("logits", logits, dtypes=(*FLOAT_DTYPES, torch.float64), shape=(None, None))
    num_rows, width = logits.shape
    check_tensor("lengths", lengths, dtypes=(torch.int32,), shape=(num_rows,), device=logits.device)
    check_int("k", k, at_least=1)
    if starts is not None:
        check_tensor("starts", starts, dtypes=(torch.int32,), shape=(num_rows,), device=logits.device)
    if out is not None:
        check_tensor("out", out, dtypes=(torch.int32,), shape=(num_rows, k), device=logits.device)
    if num_rows == 0:
        return logits.new_empty((0, k), dtype=torch.int32) if out is None else out
    if starts is not None and envs.get("VDSA_VALIDATE"):
        check_values("starts", starts, (starts < 0) | (starts > width), f"0 to {width}")
    return reference.topk_indices(logits, lengths, k, starts=starts, out=out)
