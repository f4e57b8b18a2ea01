"""The collectives of DCP, by the names that the loaded torch wants, in the one form that gloo and NCCL both take."""

import torch
import torch.distributed as dist

# torch 2.13 renamed both and warns at the old names; torch 2.10 to 2.12 have only those. gloo has both too.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return a group's size and this process's rank in it; None is the default group.

    Raises
    ------
    ValueError
        If the process is not in the group, or torch.distributed has no default group yet.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not hold this process; allowed: a group that it is in")
    return dist.get_world_size(group), rank


def all_gather(gathered: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Write every rank's tensor to ``(W, *shape)``; all contiguous."""
    # gloo refuses a stack of tensors and takes their concatenation.
    _all_gather(gathered.flatten(0, 1), mine, group=group)


def reduce_scatter(mine: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Write to this rank's tensor the sum over the ranks of its part of ``(W, *shape)``; all contiguous."""
    _reduce_scatter(mine, parts.flatten(0, 1), group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum a contiguous tensor over the ranks, in place."""
    dist.all_reduce(tensor, group=group)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Send row r of ``(W, ...)`` to rank r, and write to row r what that one sends; all contiguous."""
    dist.all_to_all_single(received, sent, group=group)
