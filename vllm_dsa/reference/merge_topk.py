"""The global top-k of a DCP group from each rank's own."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_dsa.reference.topk import topk_indices

if TYPE_CHECKING:
    from vllm_dsa.context_parallel.layout import DcpLayout


def order_candidates(
    indices: torch.Tensor, values: torch.Tensor, layout: "DcpLayout"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the candidates of all ranks into the order of their global indices.

    Parameters
    ----------
    indices : torch.Tensor
        ``(W, rows, k)`` int32: local indices of each rank, -1 for none; in any order.
    values : torch.Tensor
        ``(W, rows, k)`` float32: their logits.
    layout : DcpLayout
        Of the group; its rank does not matter.

    Returns
    -------
    (torch.Tensor, torch.Tensor, torch.Tensor)
        Logits ``(rows, W * k)`` float32 and global indices ``(rows, W * k)`` int32, ascending by index and then -inf
        and -1, and the candidates of each row ``(rows,)`` int32.
    """
    ids = torch.stack([replace(layout, rank=rank).global_pos(mine) for rank, mine in enumerate(indices)])
    past_every_id = torch.iinfo(torch.int32).max
    by_row = ids.masked_fill(indices < 0, past_every_id).transpose(0, 1).flatten(1)
    ids, order = by_row.sort(dim=1)
    is_candidate = ids < past_every_id
    ordered = values.transpose(0, 1).flatten(1).gather(1, order)
    lengths = is_candidate.sum(dim=1, dtype=torch.int32)
    return ordered.masked_fill(~is_candidate, float("-inf")), ids.masked_fill(~is_candidate, -1), lengths


def merge_topk(indices: torch.Tensor, values: torch.Tensor, layout: "DcpLayout") -> torch.Tensor:
    """Return the global indices of the k highest logits among the candidates of all ranks, in ascending order.

    Parameters
    ----------
    indices, values, layout
        As in `order_candidates`. Each rank's candidates are the k highest of its own logits, ties to the lowest index.

    Returns
    -------
    torch.Tensor
        ``(rows, k)`` int32, ascending, then -1: equal to `vllm_dsa.reference.topk_indices` of the logits of all ranks
        in global order.

    Notes
    -----
    Exact: what is among the k highest of all is among the k highest of its own rank, by the same rule for ties, as
    local order is global order within a rank. Highest first, ties to the lowest global index, ``-0.0`` equal to
    ``0.0``, NaN below ``-inf``.
    """
    ordered, ids, lengths = order_candidates(indices, values, layout)
    columns = topk_indices(ordered, lengths, indices.shape[2])
    return ids.gather(1, columns.clamp(min=0).long()).masked_fill(columns < 0, -1)


def localize_indices(indices: torch.Tensor, layout: "DcpLayout") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices that a rank owns, as local ones.

    Parameters
    ----------
    indices : torch.Tensor
        ``(rows, k)`` int32: global, ascending; -1 for none.
    layout : DcpLayout
        This rank's share.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        ``(rows, k)`` int32, ascending, then -1, and how many there are, ``(rows,)`` int32.
    """
    is_owned = (indices >= 0) & (layout.owner(indices) == layout.rank)
    past_every_index = torch.iinfo(torch.int32).max
    local = layout.local_pos(indices).masked_fill(~is_owned, past_every_index).sort(dim=1).values
    counts = is_owned.sum(dim=1, dtype=torch.int32)
    return local.masked_fill(local == past_every_index, -1), counts
