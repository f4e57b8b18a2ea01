"""One rank's view of a decode step under DCP: both lengths, the rows' lengths and the page table."""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_dsa.context_parallel.layout import DcpLayout


class DcpMetadata(NamedTuple):
    """What :func:`dcp_metadata` returns; ``N`` requests of up to ``D`` rows and ``W`` pages. All int32.

    Attributes
    ----------
    global_seq_lens, local_seq_lens : torch.Tensor
        ``(N,)`` tokens of each request, over all ranks and on this one.
    row_lens : torch.Tensor
        ``(N * D,)`` tokens on this rank that each query row sees, the step's rows first and packed.
    block_table : torch.Tensor
        ``(N, W)`` pages on this rank.
    """

    global_seq_lens: torch.Tensor
    local_seq_lens: torch.Tensor
    row_lens: torch.Tensor
    block_table: torch.Tensor


def dcp_metadata(
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    req_pool_indices: torch.Tensor | None,
    *,
    num_draft_tokens: int,
    rows_per_req: int,
    block_size: int,
    dcp: "DcpLayout",
    max_reqs: int,
    max_rows_per_req: int,
    width: int,
) -> DcpMetadata:
    """Localise a step's lengths and pages to a rank.

    Row ``j`` of a request's ``d`` rows sees the first ``max(global_len - d + j + 1, 0)`` tokens: the bound is taken in
    global space and then localised. Everything past the step is 0.

    Parameters
    ----------
    seq_lens : torch.Tensor
        ``(R,)`` int32 or int64 global lengths, ``R <= N``. At most 0 marks a padding request, empty in every mode.
    table : torch.Tensor
        With `req_pool_indices`: ``(P, L)`` int32 or int64, the virtual slot of each position of a request; a page is
        ``block_size * size`` consecutive slots that hold as many consecutive positions, both starting at a multiple of
        that. Without: ``(R, C)`` int32 or int64, the pages on this rank, one for ``block_size * size`` positions. The
        last stride is 1. Entries less than 0 are taken for 0.
    req_pool_indices : torch.Tensor or None
        ``(R,)`` int32 or int64: each request's row of `table`. A request whose row does not exist has no pages, as has
        a position past the row's end.
    num_draft_tokens : int
        Tokens that `seq_lens` does not count yet.
    rows_per_req : int
        ``d``, at most ``D``.
    block_size : int
        Tokens per page on a rank: a multiple of the interleave (not checked).
    dcp : DcpLayout
        This rank's share.
    max_reqs, max_rows_per_req, width : int
        ``N``, ``D`` and ``W``.

    Returns
    -------
    DcpMetadata
        Fresh tensors on the inputs' device. Not graph safe (allocates).
    """
    num_reqs = seq_lens.shape[0]
    global_lens = torch.where(seq_lens > 0, seq_lens + num_draft_tokens, 0)
    local_lens = dcp.local_lens(global_lens)
    rows = torch.arange(rows_per_req, device=seq_lens.device)
    row_lens = dcp.local_lens((global_lens[:, None] - rows_per_req + rows + 1).clamp(min=0))

    columns = torch.arange(width, device=seq_lens.device)
    is_live = columns * block_size < local_lens[:, None]
    if req_pool_indices is None:
        is_live &= columns < table.shape[1]
        pages = _lookup(table, torch.arange(num_reqs, device=seq_lens.device), columns, is_live)
    else:
        first_positions = dcp.global_pos(columns * block_size)
        is_live &= first_positions < table.shape[1]
        is_live &= ((req_pool_indices >= 0) & (req_pool_indices < table.shape[0]))[:, None]
        pages = dcp.local_pos(_lookup(table, req_pool_indices, first_positions, is_live)) // block_size
    return DcpMetadata(
        global_seq_lens=_padded(global_lens, max_reqs),
        local_seq_lens=_padded(local_lens, max_reqs),
        row_lens=_padded(row_lens.flatten(), max_reqs * max_rows_per_req),
        block_table=_padded(pages, max_reqs),
    )


def _lookup(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, is_live: torch.Tensor) -> torch.Tensor:
    row = torch.where(is_live, rows[:, None].long(), 0)
    column = torch.where(is_live, columns.long(), 0)
    return torch.where(is_live, table[row, column].clamp(min=0), 0) if table.numel() else torch.zeros_like(row)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    padded = values.new_zeros(length, *values.shape[1:], dtype=torch.int32)
    padded[: len(values)] = values
    return padded
