"""Launcher of ``csrc/sm90_paged_mqa_logits.cu``: the indexer logits of a decode step of any depths, on Hopper."""

import ctypes
import functools
from typing import Any

import torch

from vllm_dsa.kernels.cuda_launch import byte_tensor_map, launch, launch_config
from vllm_dsa.kernels.jit import KernelVariant, load_kernel
from vllm_dsa.platform import num_sms

HEAD_DIM = 128
NUM_HEADS = (64, 32, 16)
BLOCK_SIZES = (64, 32)
OUT_DTYPES = (torch.float32, torch.bfloat16)
# Query rows of a request that one read of its K serves.
PASS_ROWS = 8
# Requests whose schedule a CTA keeps in shared memory; a larger batch is launched in parts.
MAX_REQUESTS = 2048
# The kernel's cost units of a launch fit 32 bits while its logits are no more than this.
MAX_LOGITS = 1 << 32

_THREADS = 384
# All that a CTA can have: one runs on each SM whatever it takes.
_SHARED_BYTES = 227 * 1024

_MAP, _POINTER, _INT64, _INT32 = None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
ARGUMENT_TYPES = (
    *(_MAP, _MAP, _MAP, _MAP),  # K, and q in groups of four, two and one rows
    *(_POINTER, _INT64),  # cache, page_stride
    *(_POINTER, _POINTER, _POINTER),  # weights, context_lens, query_start_loc
    *(_POINTER, _INT64, _INT32),  # block_table, table_stride, table_width
    *(_POINTER, _INT64),  # out, out_stride
    *(_INT32, _INT32, _INT32, _INT32, _INT32),  # width, fill_to, num_reqs, num_rows, early_kv
    ctypes.c_uint64,  # pass_costs
)

# Cost of a tile of 64 tokens for 1 to 8 rows: the kernel divides a batch of mixed depths among the SMs by these, in
# units that fit a byte. They are the times of uniform batches on an H200 (batch 64, context 32768, us); 16 heads, whose
# work for a tile grows half as fast as that of 32, are set between.
_PASS_COSTS = {
    64: (78, 82, 106, 128, 175, 190, 234, 234),
    32: (78, 81, 85, 87, 99, 110, 123, 133),
    16: (77, 78, 79, 80, 82, 83, 85, 87),
}


def launch_sm90_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    fill_to: int = 0,
    early_kv: bool = False,
    num_ctas: int | None = None,
) -> None:
    """Score the cached tokens of each request against its rows.

    Parameters
    ----------
    q : torch.Tensor
        ``(T, heads, 128)`` float8_e4m3fn, contiguous, 16-byte aligned; heads 64, 32 or 16.
    cache : torch.Tensor
        ``(pages, block_size, 1, 132)`` uint8, 16-byte aligned, a multiple of 16 bytes from page to page, dense in a
        page; block_size 64 or 32.
    weights : torch.Tensor
        ``(T, heads)`` float32, contiguous, 16-byte aligned.
    context_lens : torch.Tensor
        ``(T,)`` int32, contiguous: tokens that each row sees, in any order; less than 0 counts as 0.
    query_start_loc : torch.Tensor
        ``(R + 1,)`` int32, contiguous: first row of each request; any depth, 0 included.
    block_table : torch.Tensor
        ``(R, W)`` int32 page ids, last stride 1. Columns past a request's longest row are not read.
    out : torch.Tensor
        ``(T, width)`` float32 or bfloat16, last stride 1, at most `MAX_LOGITS` elements. Of each row the columns up to
        the end of the request's last tile of 64 tokens are written, -inf at and past the row's length.
    fill_to : int
        Also write -inf up to this column of every row, at most the width.
    early_kv : bool
        Start before the launch before it has ended, by programmatic dependent launch, and read lengths, starts, block
        table and old K at once. For a predecessor that writes nothing of these but the K of the rows' own tokens.
    num_ctas : int, optional
        By default one for each SM. Fewer for tests only.

    Notes
    -----
    One launch for up to 2048 requests, fewer where rows are very wide; no allocation, no host sync, graph safe: nothing
    of the grid depends on values on the device. A logit's bits depend neither on the batch it is in nor on the grid.
    Arguments are not checked here.
    """
    num_requests = query_start_loc.shape[0] - 1
    block_size = cache.shape[1]
    num_heads = q.shape[1]
    kernel = load_kernel(_variant(num_heads, block_size, out.dtype), dynamic_shared_bytes=_SHARED_BYTES)
    config = launch_config(
        num_ctas or num_sms(torch.cuda.current_device()),
        _THREADS,
        _SHARED_BYTES,
        torch.cuda.current_stream().cuda_stream,
        overlaps_predecessor=early_kv,
    )
    kv_map = _kv_map(cache.data_ptr(), cache.shape[0], block_size, cache.stride(0))
    q_maps = _q_maps(q.data_ptr(), q.shape[0], num_heads)
    step = _requests_per_launch(q.shape[0], out.shape[1])
    for first in range(0, num_requests, step):
        arguments = (
            kv_map,
            *q_maps,
            cache.data_ptr(),
            cache.stride(0),
            weights.data_ptr(),
            context_lens.data_ptr(),
            query_start_loc.data_ptr() + 4 * first,
            block_table.data_ptr() + 4 * first * block_table.stride(0),
            block_table.stride(0),
            block_table.shape[1],
            out.data_ptr(),
            out.stride(0),
            out.shape[1],
            fill_to,
            min(step, num_requests - first),
            q.shape[0],
            early_kv,
            _packed_costs(num_heads),
        )
        launch(config, kernel, arguments, ARGUMENT_TYPES)


def variants() -> tuple[KernelVariant, ...]:
    """Return every variant that a launch can ask for."""
    return tuple(
        _variant(num_heads, block_size, dtype)
        for num_heads in NUM_HEADS
        for block_size in BLOCK_SIZES
        for dtype in OUT_DTYPES
    )


@functools.cache
def _variant(num_heads: int, block_size: int, out_dtype: torch.dtype) -> KernelVariant:
    return KernelVariant(
        source="sm90_paged_mqa_logits",
        symbol="sm90_paged_mqa_logits",
        macros=(
            ("HEADS", str(num_heads)),
            ("BLOCK_SIZE", str(block_size)),
            ("OUT_BF16", str(int(out_dtype == torch.bfloat16))),
            ("PASS_ROWS", str(PASS_ROWS)),
            ("MAX_REQUESTS", str(MAX_REQUESTS)),
        ),
    )


@functools.cache
def _packed_costs(num_heads: int) -> int:
    return int.from_bytes(bytes(_PASS_COSTS[num_heads]), "little")


def _requests_per_launch(num_rows: int, width: int) -> int:
    """Return how many requests a launch takes so that their cost units stay below 2^32, whatever their depths."""
    tiles = max(1, -(-width // 64))
    return max(1, min(MAX_REQUESTS, (2**32 - 1) // (255 * tiles) - num_rows // PASS_ROWS))


@functools.lru_cache(maxsize=256)
def _kv_map(address: int, num_pages: int, block_size: int, page_stride: int) -> Any:
    # A page of 64 tokens is 64 rows of keys and two of scales, which ride in the same box.
    rows = 66 if block_size == 64 else block_size
    return byte_tensor_map(address, (HEAD_DIM, rows, num_pages), (HEAD_DIM, page_stride), box=(HEAD_DIM, rows, 1))


@functools.lru_cache(maxsize=1024)
def _q_maps(address: int, num_rows: int, num_heads: int) -> tuple[Any, Any, Any]:
    """Describe the queries in groups of four, two and one rows, whose heads land in the order of the kernel's lanes.

    With ``lanes`` lanes a row, lane ``part`` sums heads ``[part * num_heads / lanes, ...)`` two at a time. So from the
    inside out: two heads, the lanes of a row, the rows of the group, and the pairs of heads of a lane.
    """
    row_bytes = num_heads * HEAD_DIM

    def group_of(rows: int) -> Any:
        lanes = 4 // rows
        pairs = num_heads // lanes // 2
        lane_sizes, lane_strides = ((lanes,), (row_bytes // lanes,)) if lanes > 1 else ((), ())
        return byte_tensor_map(
            address,
            (HEAD_DIM, 2, *lane_sizes, num_rows, pairs),
            (HEAD_DIM, *lane_strides, row_bytes, 2 * HEAD_DIM),
            box=(HEAD_DIM, 2, *lane_sizes, rows, pairs),
        )

    return group_of(4), group_of(2), group_of(1)
