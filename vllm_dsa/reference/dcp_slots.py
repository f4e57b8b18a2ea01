"""Virtual slots to the local slots of one DCP rank."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_dsa.context_parallel.layout import DcpLayout


def localize_slots(slot_mapping: torch.Tensor, dcp: "DcpLayout") -> torch.Tensor:
    """Return where this rank writes each token, -1 where another rank does.

    Parameters
    ----------
    slot_mapping : torch.Tensor
        ``(T,)`` int32 or int64 virtual slots; less than 0 for padding. Slot ``v`` belongs to rank
        ``(v // interleave) % size``.
    dcp : DcpLayout
        This rank's share.

    Returns
    -------
    torch.Tensor
        ``(T,)`` of the same dtype and device.
    """
    is_mine = (slot_mapping >= 0) & (dcp.owner(slot_mapping) == dcp.rank)
    return torch.where(is_mine, dcp.local_pos(slot_mapping), -1)
