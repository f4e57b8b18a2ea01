"""The indexer under DCP: every rank scores the tokens that it holds, and all choose the same k of all tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from vllm_dsa import envs
from vllm_dsa.context_parallel.collectives import all_gather, size_and_rank
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.kernels.merge_topk import launch_localize_indices, launch_order_candidates
from vllm_dsa.ops import SlotMap, topk_indices
from vllm_dsa.ops._checks import check_int, check_tensor, check_values
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference.merge_topk import localize_indices, order_candidates


class MergedTopk(NamedTuple):
    """The chosen tokens, int32.

    Attributes
    ----------
    indices : torch.Tensor
        ``(rows, k)`` global, ascending, then -1; the same on every rank.
    local_indices : torch.Tensor
        ``(rows, k)`` those that this rank holds, as indices among its own tokens, ascending, then -1.
    local_counts : torch.Tensor
        ``(rows,)`` how many these are; over the ranks they sum to the chosen tokens.
    """

    indices: torch.Tensor
    local_indices: torch.Tensor
    local_counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class TopkBuffers:
    """The memory of :func:`merge_topk` on one rank, allocated once for the largest batch; make it with `allocate`.

    Attributes
    ----------
    layout : DcpLayout
        This rank's share.
    max_rows, k : int
        The largest batch; tokens to choose.
    sent, received : torch.Tensor
        int32, flat: ``(2, rows, k)`` and ``(size, 2, rows, k)`` of a step, local indices and bits of logits.
    values, ids, lengths : torch.Tensor
        ``(max_rows, size * k)`` float32 and int32, ``(max_rows,)`` int32: all candidates in global order.
    merged : MergedTopk
        The result, with `max_rows` rows.
    """

    layout: DcpLayout
    max_rows: int
    k: int
    sent: torch.Tensor
    received: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    merged: MergedTopk

    @classmethod
    def allocate(cls, layout: DcpLayout, *, max_rows: int, k: int, device: torch.device | str) -> "TopkBuffers":
        """Allocate for batches of up to `max_rows`.

        Parameters
        ----------
        layout : DcpLayout
            This rank's share.
        max_rows : int
            Query rows of the largest batch, at least 1.
        k : int
            Tokens to choose of each row, at least 1.
        device : torch.device or str
            Of the candidates.

        Raises
        ------
        TypeError, ValueError
            If an argument has a type or a value that is not allowed.
        """
        check_int("max_rows", max_rows, at_least=1)
        check_int("k", k, at_least=1)

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        message = 2 * max_rows * k
        return cls(
            layout=layout,
            max_rows=max_rows,
            k=k,
            sent=ints(message),
            received=ints(layout.size * message),
            values=ints(max_rows, layout.size * k).view(torch.float32),
            ids=ints(max_rows, layout.size * k),
            lengths=ints(max_rows),
            merged=MergedTopk(ints(max_rows, k), ints(max_rows, k), ints(max_rows)),
        )

    def candidates(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(rows, k)`` int32 indices and ``(rows, k)`` float32 logits, as they will be sent.

        What `vllm_dsa.ops.topk_indices` writes here, by its `out` and `values`, is merged without a copy.
        """
        sent = self.message(num_rows)
        return sent[0], sent[1].view(torch.float32)

    def message(self, num_rows: int) -> torch.Tensor:
        """Return ``(2, rows, k)`` int32: what this rank sends."""
        return self.sent[: 2 * num_rows * self.k].view(2, num_rows, self.k)

    def gathered(self, num_rows: int) -> torch.Tensor:
        """Return ``(size, 2, rows, k)`` int32: what all ranks sent."""
        size = self.layout.size
        return self.received[: size * 2 * num_rows * self.k].view(size, 2, num_rows, self.k)


def merge_topk(
    indices: torch.Tensor,
    values: torch.Tensor,
    layout: DcpLayout,
    group: dist.ProcessGroup | None = None,
    *,
    buffers: TopkBuffers | None = None,
) -> MergedTopk:
    """Choose the k highest logits of all ranks' tokens, from the k highest of each rank's own.

    Parameters
    ----------
    indices : torch.Tensor
        ``(rows, k)`` int32, last stride 1, any device: this rank's choice among its own tokens, as
        `vllm_dsa.ops.topk_indices` gives it: ascending, then -1. The same rows and k on every rank; a row may
        have no candidates here, or anywhere.
    values : torch.Tensor
        ``(rows, k)`` float32, last stride 1, same device: their logits (its `values`). A row that is short here may be
        long over all ranks, so the logits of rows of up to k tokens must have been written too.
    layout : DcpLayout
        This rank's share; its size and rank are the group's.
    group : torch.distributed.ProcessGroup, optional
        The DCP group; by default all processes.
    buffers : TopkBuffers, optional
        From `TopkBuffers.allocate` for this layout, k and device; otherwise the call allocates.

    Returns
    -------
    MergedTopk
        Views of the buffers, which the next merge with them overwrites.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, device or value that is not allowed; with ``VDSA_VALIDATE=1``
        also if a row of `indices` is not ascending and then -1. Nothing has been sent then, and the other ranks, if
        theirs were allowed, wait for this one.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    Equal to `vllm_dsa.ops.topk_indices` of all ranks' logits in global order: the highest value wins, ties go to the
    lowest global index, ``-0.0`` equals ``0.0``, NaN ranks below ``-inf``, and the first ``min(tokens, k)`` of a row
    are unique and in range. Exact where float32 holds the logits (all dtypes but float64), because what is among the
    k highest of all is among the k highest of its own rank by the same rule. The ranks' candidates are first put into
    the order of their global indices, so that the tie rule of `topk_indices`, lowest column first, is the global one.

    Every rank must call it, also one without tokens; with no rows (on every rank) nothing is sent. Not checked: that
    the ranks agree. One all-gather of 8 bytes a candidate, and on CUDA three launches, of which one is that of
    `topk_indices`, whose notes say for which sizes (here rows of ``size * k`` float32) it neither allocates nor syncs;
    then, with `buffers` and candidates that lie in them, this does not either and is graph safe with NCCL. Candidates
    from elsewhere are copied (two launches). Source: this project's rule on order and ties.
    """
    num_rows = _check_candidates(indices, values)
    size, rank = size_and_rank(group)
    if (layout.size, layout.rank) != (size, rank):
        raise ValueError(f"layout is {layout}; allowed: size {size} and rank {rank}, the group's")
    if buffers is None:
        buffers = TopkBuffers.allocate(layout, max_rows=max(num_rows, 1), k=indices.shape[1], device=indices.device)
    else:
        _check_buffers(buffers, indices, layout)
    if indices.is_cuda:
        check_current_device(indices.device)
    merged = MergedTopk(*(tensor[:num_rows] for tensor in buffers.merged))
    if num_rows == 0:
        return merged
    for tensor, sent in zip((indices, values), buffers.candidates(num_rows), strict=True):
        if tensor.data_ptr() != sent.data_ptr() or not tensor.is_contiguous():
            sent.copy_(tensor)
    gathered = buffers.gathered(num_rows)
    all_gather(gathered, buffers.message(num_rows), group)
    _choose(gathered, buffers, merged)
    return merged


def _choose(gathered: torch.Tensor, buffers: TopkBuffers, merged: MergedTopk) -> None:
    num_rows = len(merged.indices)
    values, ids, lengths = buffers.values[:num_rows], buffers.ids[:num_rows], buffers.lengths[:num_rows]
    _order(gathered, values, ids, lengths, buffers.layout)
    # Pages of one token: the slot of a column is its global index.
    slots = SlotMap(ids, block_size=1)
    topk_indices(values, lengths, buffers.k, out=merged.indices, slots=slots)
    _localize(merged, buffers.layout)


def _check_candidates(indices: torch.Tensor, values: torch.Tensor) -> int:
    check_tensor("indices", indices, dtypes=(torch.int32,), shape=(None, None))
    num_rows, k = indices.shape
    check_tensor("values", values, dtypes=(torch.float32,), shape=(num_rows, k), device=indices.device)
    if k < 1:
        raise ValueError(f"indices has shape {tuple(indices.shape)}; allowed: (rows, k) with k of at least 1")
    if envs.get("VDSA_VALIDATE"):
        previous = indices[:, :-1]
        in_order = (indices[:, 1:] == -1) | ((previous >= 0) & (previous < indices[:, 1:]))
        check_values("indices", indices[:, :1], indices[:, :1] < -1, "-1 or a local index")
        check_values("indices[:, 1:]", indices[:, 1:], ~in_order, "more than the index before it, or -1 to the end")
    return num_rows


def _check_buffers(buffers: TopkBuffers, indices: torch.Tensor, layout: DcpLayout) -> None:
    num_rows, k = indices.shape
    facts = {
        "layout": (layout, buffers.layout),
        "k of indices": (k, buffers.k),
        "the device of indices": (indices.device, buffers.ids.device),
    }
    for name, (value, allowed) in facts.items():
        if value != allowed:
            raise ValueError(f"{name} is {value}; allowed: {allowed}, for which buffers were allocated")
    if num_rows > buffers.max_rows:
        raise ValueError(f"indices has {num_rows} rows; allowed: up to {buffers.max_rows}, max_rows of buffers")


def _runs_triton(device: torch.device) -> bool:
    return device.type == "cuda"


def _order(
    gathered: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor, layout: DcpLayout
) -> None:
    if _runs_triton(gathered.device):
        launch_order_candidates(gathered, values, ids, lengths, interleave=layout.interleave)
        return
    found = order_candidates(gathered[:, 0], gathered[:, 1].view(torch.float32), layout)
    for out, tensor in zip((values, ids, lengths), found, strict=True):
        out.copy_(tensor)


def _localize(merged: MergedTopk, layout: DcpLayout) -> None:
    if _runs_triton(merged.indices.device):
        dcp = (layout.size, layout.rank, layout.interleave)
        launch_localize_indices(merged.indices, merged.local_indices, merged.local_counts, dcp=dcp)
        return
    local_indices, counts = localize_indices(merged.indices, layout)
    merged.local_indices.copy_(local_indices)
    merged.local_counts.copy_(counts)
