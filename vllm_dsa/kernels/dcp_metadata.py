"""One rank's view of a decode step under DCP: both lengths, the rows' lengths and the page table, in one launch."""

from collections import defaultdict
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.launcher import Launcher, next_power_of_2

_BLOCK_COLUMNS = 1024


class DcpBuffers(NamedTuple):
    """The contiguous int32 tensors that the launch writes, each of them whole.

    Attributes
    ----------
    global_seq_lens, local_seq_lens : torch.Tensor
        ``(N,)``
    row_lens : torch.Tensor
        ``(N * D,)``
    block_table : torch.Tensor
        ``(N, W)``
    """

    global_seq_lens: torch.Tensor
    local_seq_lens: torch.Tensor
    row_lens: torch.Tensor
    block_table: torch.Tensor


def launch_dcp_metadata(
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    req_pool_indices: torch.Tensor | None,
    buffers: DcpBuffers,
    *,
    num_draft_tokens: int,
    rows_per_req: int,
    block_size: int,
    dcp: tuple[int, int, int],
) -> None:
    """Write a step into the buffers, and what a request without tokens looks like past it.

    Parameters
    ----------
    seq_lens, table, req_pool_indices : torch.Tensor
        As in :func:`vllm_dsa.reference.dcp_metadata.dcp_metadata`, the bit-equal twin.
    buffers : DcpBuffers
        Written, whatever they held.
    num_draft_tokens, rows_per_req, block_size : int
        As in the twin.
    dcp : (size, rank, interleave)
        This rank's share.

    Notes
    -----
    One launch, no allocation, no host sync. It depends on nothing that an earlier launch or the host remembers, so it
    may be captured, replayed and mixed with eager launches in any order. The price is that every table row is written
    to its full width. Compiled once per dtypes, kind of table and power of two over ``D``. Arguments are not checked
    here.
    """
    max_reqs, width = buffers.block_table.shape
    max_rows_per_req = buffers.row_lens.shape[0] // max_reqs
    size, rank, interleave = dcp
    from_slots = req_pool_indices is not None
    rows_of_requests = seq_lens if req_pool_indices is None else req_pool_indices
    # A compiled kernel belongs to the dtypes of its pointers.
    launch = _launchers[seq_lens.dtype, table.dtype, rows_of_requests.dtype]
    launch(
        (max_reqs, -(-width // _BLOCK_COLUMNS), 1),
        (
            *(seq_lens, table, rows_of_requests),
            *buffers,
            *(table.stride(0), *table.shape, width),
            *(seq_lens.shape[0], num_draft_tokens, rows_per_req, max_rows_per_req),
            *(block_size, block_size * size, size * interleave, rank * interleave, interleave),
        ),
        (from_slots, next_power_of_2(max_rows_per_req), _BLOCK_COLUMNS),
    )


@triton.jit
def _global_lens(seq_lens_ptr, request, num_reqs, num_draft_tokens):
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0).to(tl.int32)
    # A padding request stays empty in every mode: its drafts are no tokens.
    return tl.where(seq_len > 0, seq_len + num_draft_tokens, 0)


@triton.jit
def _local_lens(lens, dcp_period, dcp_first, dcp_interleave):
    rest = lens % dcp_period - dcp_first
    return lens // dcp_period * dcp_interleave + tl.minimum(tl.maximum(rest, 0), dcp_interleave)


_POINTERS = [
    *("seq_lens_ptr", "table_ptr", "req_pool_indices_ptr"),
    *("global_seq_lens_ptr", "local_seq_lens_ptr", "row_lens_ptr", "block_table_ptr"),
]
_SCALARS = [
    *("table_stride", "table_rows", "table_width", "width"),
    *("num_reqs", "num_draft_tokens", "rows_per_req", "max_rows_per_req"),
    *("block_size", "tokens_per_page", "dcp_period", "dcp_first", "dcp_interleave"),
]


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _dcp_metadata_kernel(
    seq_lens_ptr,
    table_ptr,
    req_pool_indices_ptr,
    global_seq_lens_ptr,
    local_seq_lens_ptr,
    row_lens_ptr,
    block_table_ptr,
    table_stride,
    table_rows,
    table_width,
    width,
    num_reqs,
    num_draft_tokens,
    rows_per_req,
    max_rows_per_req,
    block_size,
    tokens_per_page,
    dcp_period,
    dcp_first,
    dcp_interleave,
    FROM_SLOTS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0)
    global_len = _global_lens(seq_lens_ptr, request, num_reqs, num_draft_tokens)
    local_len = _local_lens(global_len, dcp_period, dcp_first, dcp_interleave)

    if tl.program_id(1) == 0:
        tl.store(global_seq_lens_ptr + request, global_len)
        tl.store(local_seq_lens_ptr + request, local_len)
        # Each program writes its own piece of the rows' buffer, whosever rows lie there this step: all of it is
        # rewritten, and a step's rows are contiguous.
        lane = tl.arange(0, ROWS_BLOCK)
        at = request * max_rows_per_req + lane
        seen = _global_lens(seq_lens_ptr, at // rows_per_req, num_reqs, num_draft_tokens)
        seen = tl.maximum(seen - rows_per_req + at % rows_per_req + 1, 0)
        row_lens = _local_lens(seen, dcp_period, dcp_first, dcp_interleave)
        tl.store(row_lens_ptr + at, row_lens, mask=lane < max_rows_per_req)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_live = column < (local_len + block_size - 1) // block_size
    if FROM_SLOTS:
        row = tl.load(req_pool_indices_ptr + request, mask=request < num_reqs, other=0).to(tl.int64)
        # The first of this rank's own tokens on the page; a live page has it.
        position = column * tokens_per_page + dcp_first
        row_width = tl.where((row >= 0) & (row < table_rows), table_width, 0)
        is_live = is_live & (position < row_width)
        slot = tl.load(table_ptr + row * table_stride + position, mask=is_live, other=0)
        page = tl.maximum(slot, 0) // tokens_per_page
    else:
        is_live = is_live & (column < table_width)
        page = tl.load(table_ptr + request.to(tl.int64) * table_stride + column, mask=is_live, other=0)
        page = tl.maximum(page, 0)
    tl.store(block_table_ptr + request.to(tl.int64) * width + column, page.to(tl.int32), mask=column < width)


_launchers: defaultdict[tuple[torch.dtype, ...], Launcher] = defaultdict(lambda: Launcher(_dcp_metadata_kernel))
