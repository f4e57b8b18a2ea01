"""The expansion of a decode step into kernel rows, in one launch into persistent buffers."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.launcher import Launcher, next_power_of_2

_BLOCK_COLUMNS = 1024
_TAIL = 256


class ExpandSizes(NamedTuple):
    """How much of each buffer a step uses.

    Attributes
    ----------
    rows, tokens, reqs, groups : int
        Live elements of ``context_lens`` and ``row_to_token``, of ``token_to_row``, of ``decode_lens``, and of
        ``indices``.
    table_rows : int
        Live rows of the block table: `groups`, or 0 where the kernel reads the engine's own.
    """

    rows: int = 0
    tokens: int = 0
    reqs: int = 0
    groups: int = 0
    table_rows: int = 0


class ExpandBuffers(NamedTuple):
    """The int32 tensors that the launch writes; roles as in :class:`vllm_dsa.indexer.buffers.StepBuffers`."""

    context_lens: torch.Tensor
    block_table: torch.Tensor
    row_to_token: torch.Tensor
    token_to_row: torch.Tensor
    decode_lens: torch.Tensor
    indices: torch.Tensor
    query_start_loc: torch.Tensor


def launch_expand_decode(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    buffers: ExpandBuffers,
    *,
    group_size: int,
    step: ExpandSizes,
    previous: ExpandSizes,
    block_size: int,
    dcp: tuple[int, int, int],
    compress_ratio: int,
) -> None:
    """Write a decode step into the builder's buffers and clear what the previous step left past it.

    Parameters
    ----------
    query_start_loc, seq_lens, block_table : torch.Tensor
        As in :func:`vllm_dsa.reference.expand_decode.expand_decode`, the bit-equal twin. The table's last stride is 1.
    buffers : ExpandBuffers
        Written. Past the step they must be clean but for what `previous` names.
    group_size : int
        Query rows per group.
    step, previous : ExpandSizes
        What this step uses, and what the last one did.
    block_size : int
        Tokens per page.
    dcp : (size, rank, interleave)
        This rank's share.
    compress_ratio : int
        Tokens per cached state.

    Notes
    -----
    One launch, no allocation, no host sync. Only the live columns of a table row are read; the rest of the buffer's row
    is zeroed. Compiled once per group size, request capacity and use of the table; sizes, lengths and addresses do not
    specialise it. Arguments are not checked here.
    """
    copies_table = step.table_rows > 0
    width = buffers.block_table.shape[1]
    table_rows = max(step.table_rows, previous.table_rows)
    # Without a table one column of programs does the rows; past the step's groups a program only clears a table row.
    columns = -(-width // _BLOCK_COLUMNS) if table_rows else 1
    size, rank, interleave = dcp
    max_reqs = buffers.decode_lens.shape[0]
    _launch(
        (max(step.groups, table_rows, 1), columns, 1),
        (
            *(query_start_loc, seq_lens, block_table),
            *buffers,
            *(block_table.stride(0), block_table.shape[1], width),
            *(step.groups, step.rows, step.tokens, step.reqs),
            *(previous.rows, previous.tokens, previous.reqs, previous.groups),
            *(table_rows, max_reqs, block_size),
            *(size * interleave, rank * interleave, interleave, compress_ratio),
        ),
        (
            *(group_size, next_power_of_2(group_size), next_power_of_2(max_reqs)),
            *(copies_table, _BLOCK_COLUMNS, _TAIL),
        ),
    )


@triton.jit
def _clear_tail(ptr, live, previous, program, num_programs, value, counts_up: tl.constexpr, TAIL: tl.constexpr):
    for start in range(live + program * TAIL, previous, num_programs * TAIL):
        at = start + tl.arange(0, TAIL)
        fill = tl.full((TAIL,), 0, tl.int32) + value
        if counts_up:
            fill += at
        tl.store(ptr + at, fill, mask=at < previous)


_POINTERS = [
    *("query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "context_lens_ptr", "out_table_ptr"),
    *("row_to_token_ptr", "token_to_row_ptr", "decode_lens_ptr", "indices_ptr", "out_start_loc_ptr"),
]
_SCALARS = [
    *("table_stride", "table_width", "width", "num_groups", "num_rows", "num_tokens", "num_reqs"),
    *("previous_rows", "previous_tokens", "previous_reqs", "previous_groups", "table_rows", "max_reqs"),
    *("block_size", "dcp_period", "dcp_first", "dcp_interleave", "compress_ratio"),
]


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _expand_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    table_ptr,
    context_lens_ptr,
    out_table_ptr,
    row_to_token_ptr,
    token_to_row_ptr,
    decode_lens_ptr,
    indices_ptr,
    out_start_loc_ptr,
    table_stride,
    table_width,
    width,
    num_groups,
    num_rows,
    num_tokens,
    num_reqs,
    previous_rows,
    previous_tokens,
    previous_reqs,
    previous_groups,
    table_rows,
    max_reqs,
    block_size,
    dcp_period,
    dcp_first,
    dcp_interleave,
    compress_ratio,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    REQ_BLOCK: tl.constexpr,
    COPIES_TABLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
):
    group = tl.program_id(0)
    num_programs = tl.num_programs(0)

    # Each program finds its own request from all depths: one pass over a few cached lines, no scan kernel before.
    req = tl.arange(0, REQ_BLOCK)
    is_req = req < num_reqs
    starts = tl.load(query_start_loc_ptr + req, mask=is_req, other=0)
    depths = tl.load(query_start_loc_ptr + req + 1, mask=is_req, other=0) - starts
    groups = (depths + (GROUP - 1)) // GROUP
    request = tl.sum(((tl.cumsum(groups, 0) <= group) & is_req).to(tl.int32))
    is_mine = req == request
    first_group = tl.sum(tl.where(req < request, groups, 0))
    depth = tl.sum(tl.where(is_mine, depths, 0))
    token_start = tl.sum(tl.where(is_mine, starts, 0))
    # A device-side query_start_loc that disagrees with the host's plan leaves groups without a request.
    exists = (group < num_groups) & (request < num_reqs)
    seq_len = tl.load(seq_lens_ptr + request, mask=exists, other=0)

    lane = tl.arange(0, GROUP_BLOCK)
    row = (group - first_group) * GROUP + lane
    # The bound is taken in global space, then localised, then compressed.
    seen = tl.maximum(seq_len - depth + tl.minimum(row, depth - 1) + 1, 0)
    local = seen // dcp_period * dcp_interleave
    rest = seen % dcp_period - dcp_first
    local += tl.minimum(tl.maximum(rest, 0), dcp_interleave)
    lens = tl.where(lane < tl.where(exists, GROUP, 0), local // compress_ratio, 0)

    if tl.program_id(1) == 0:
        in_group = lane < tl.where(group < num_groups, GROUP, 0)
        is_token = in_group & (row < tl.where(exists, depth, 0))
        at = group * GROUP + lane
        tl.store(context_lens_ptr + at, lens, mask=in_group)
        tl.store(row_to_token_ptr + at, tl.where(is_token, token_start + row, -1), mask=in_group)
        tl.store(token_to_row_ptr + token_start + row, at, mask=is_token)
        tl.store(indices_ptr + group, request, mask=group < num_groups)
        if group == 0:
            tl.store(decode_lens_ptr + req, depths, mask=is_req)
            # Past the batch every request starts and ends behind the last token: a graph for more sees empty ones.
            start_loc = tl.where(is_req, tl.minimum(starts, num_tokens), num_tokens)
            tl.store(out_start_loc_ptr + req, start_loc, mask=req < max_reqs)
            tl.store(out_start_loc_ptr + max_reqs, num_tokens)
        _clear_tail(context_lens_ptr, num_rows, previous_rows, group, num_programs, 0, False, TAIL)
        _clear_tail(row_to_token_ptr, num_rows, previous_rows, group, num_programs, -1, False, TAIL)
        _clear_tail(token_to_row_ptr, num_tokens, previous_tokens, group, num_programs, 0, False, TAIL)
        _clear_tail(decode_lens_ptr, num_reqs, previous_reqs, group, num_programs, 0, False, TAIL)
        _clear_tail(indices_ptr, num_groups, previous_groups, group, num_programs, max_reqs, True, TAIL)

    if group < table_rows:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pages = tl.full((COLUMNS,), 0, tl.int32)
        if COPIES_TABLE:
            live = (tl.max(lens) + block_size - 1) // block_size
            is_live = column < tl.minimum(live, table_width)
            pages = tl.load(table_ptr + request.to(tl.int64) * table_stride + column, mask=is_live, other=0)
        tl.store(out_table_ptr + group.to(tl.int64) * width + column, pages, mask=column < width)


_launch = Launcher(_expand_kernel)
