"""MLA decode attention over the paged latent cache, dense and sparse: split over the tokens, then combined."""

import math

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.mla_combine import launch_mla_combine
from vllm_dsa.kernels.mla_tiles import Tile, choose_splits, choose_tile, num_places

# Bytes of a vector that the kernel loads or stores.
ALIGNMENT = 16

_VALUE = 512
_LN2 = math.log(2)


def launch_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    *,
    softmax_scale: float,
    max_query_len: int,
    query_start_loc: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> None:
    """Attend with each query row to the first tokens of its request.

    Parameters
    ----------
    q : torch.Tensor
        ``(T, H, 576)`` bfloat16, last stride 1, aligned to 16 bytes.
    cache : torch.Tensor
        ``(num_blocks, block_size, 576)`` bfloat16 or ``(num_blocks, block_size, 656)`` uint8, rows of a page dense, any
        page stride, all aligned to 16 bytes; see :func:`vllm_dsa.reference.latent_cache.read_latent`.
    block_table : torch.Tensor
        ``(R, W)`` int32 page ids, last stride 1; columns past a request's longest row are not read.
    context_lens : torch.Tensor
        ``(T,)`` int32, contiguous: tokens that each row sees; less than 1 is nothing, past ``W * block_size`` is cut.
    out, lse : torch.Tensor
        ``(T, H, 512)`` bfloat16, aligned to 16 bytes, and ``(T, H)`` float32, contiguous: written, every element. A row
        that sees nothing, or is no request's, is 0 and -inf. `lse` is natural.
    workspace : torch.Tensor
        Contiguous float32, at least :func:`vllm_dsa.kernels.mla_tiles.workspace_floats` elements. What it held does not
        matter.
    softmax_scale : float
    max_query_len : int
        Rows of a request, or with `query_start_loc` of the deepest.
    query_start_loc : torch.Tensor, optional
        ``(R + 1,)`` int32, contiguous: first row of each request; without it request r has rows from
        ``r * max_query_len``.
    num_splits : int, optional
        Parts of each request's tokens. Chosen by the shapes; for tests, with a workspace of ``T * H * 513 *
        num_splits`` elements.

    Notes
    -----
    Twin: :func:`vllm_dsa.reference.mla_decode`. The rows of a request that fit one program (64 rows times heads) share
    one read of its latents; so a NaN in a token that only one of them sees reaches all of these. Nothing else that a
    row does not see reaches it. Two launches, or one where the requests alone fill the GPU; no allocation, no host
    sync. Graph safe once compiled: the grid depends on shapes alone, lengths are read on the device. The bits of a
    result depend on the number of splits, and so on the shapes of the batch. Arguments are not checked here.
    """
    num_heads = q.shape[1]
    num_reqs, width = block_table.shape
    tile = choose_tile(max_query_len * num_heads, is_sparse=False, is_fp8=cache.dtype == torch.uint8)
    is_ragged = query_start_loc is not None
    _launch(
        tile,
        *(q, cache, context_lens, query_start_loc, block_table),
        *(out, lse, workspace),
        softmax_scale=softmax_scale,
        num_requests=num_reqs,
        # Rows that are no request's have a group of their own.
        num_groups=num_reqs + is_ragged,
        blocks=-(-max_query_len * num_heads // tile.rows),
        depth=max_query_len,
        capacity=width * cache.shape[1],
        is_sparse=False,
        num_splits=num_splits,
    )


def launch_sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lens: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> None:
    """Attend with each query row to chosen tokens.

    Parameters
    ----------
    q, cache, out, lse, workspace, softmax_scale, num_splits
        As in :func:`launch_mla_decode`.
    slots : torch.Tensor
        ``(T, K)`` int32, last stride 1: page times block_size plus place in the page; less than 0, anywhere, is none.
    topk_lens : torch.Tensor, optional
        ``(T,)`` int32, contiguous: leading columns of each row to look at; by default all K.

    Notes
    -----
    Twin: :func:`vllm_dsa.reference.sparse_mla_decode`. Nothing that a row does not name reaches it. Otherwise as
    :func:`launch_mla_decode`.
    """
    num_tokens, num_heads, _ = q.shape
    tile = choose_tile(num_heads, is_sparse=True, is_fp8=cache.dtype == torch.uint8)
    _launch(
        tile,
        *(q, cache, topk_lens, None, slots),
        *(out, lse, workspace),
        softmax_scale=softmax_scale,
        num_requests=num_tokens,
        num_groups=num_tokens,
        blocks=-(-num_heads // tile.rows),
        depth=1,
        capacity=slots.shape[1],
        is_sparse=True,
        num_splits=num_splits,
    )


def _launch(
    tile: Tile,
    q: torch.Tensor,
    cache: torch.Tensor,
    lens: torch.Tensor | None,
    starts: torch.Tensor | None,
    source: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    *,
    softmax_scale: float,
    num_requests: int,
    num_groups: int,
    blocks: int,
    depth: int,
    capacity: int,
    is_sparse: bool,
    num_splits: int | None,
) -> None:
    num_tokens, num_heads, _ = q.shape
    num_rows = num_tokens * num_heads
    if num_splits is None:
        # The group of no request reads no token: it is no wave of its own.
        num_blocks = max(num_requests * blocks, -(-num_rows // tile.rows))
        num_tiles = -(-capacity // tile.tokens)
        num_splits = choose_splits(num_blocks, num_tiles, num_places(tile, q.device))
    is_split = num_splits > 1
    first_lse = num_rows * num_splits * _VALUE
    partial_out = workspace[:first_lse] if is_split else out
    partial_lse = workspace[first_lse : first_lse + num_rows * num_splits] if is_split else lse
    _attend_kernel[(blocks * num_splits * num_groups,)](
        *(q, cache, lens, starts, source, partial_out, partial_lse),
        *(q.stride(0), q.stride(1), source.stride(0), num_tokens, num_groups, depth, num_splits, capacity),
        softmax_scale / _LN2,
        HEADS=num_heads,
        BLOCKS=blocks,
        BLOCK_SIZE=cache.shape[1],
        PAGE_STRIDE=cache.stride(0),
        TOKEN_STRIDE=cache.stride(1),
        SPARSE=is_sparse,
        FP8=cache.dtype == torch.uint8,
        SPLIT=is_split,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        STAGES=tile.num_stages,
        # Triton's interpreter multiplies the bits of bfloat16.
        FACTOR=tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16,
        num_warps=tile.num_warps,
    )
    if is_split:
        launch_mla_combine(partial_out, partial_lse, out, lse, num_splits)


@triton.jit(
    do_not_specialize=["source_stride", "num_tokens", "num_groups", "depth", "num_splits", "capacity"],
    do_not_specialize_on_alignment=["lens_ptr", "starts_ptr", "source_ptr", "lse_ptr"],
)
def _attend_kernel(
    q_ptr,
    cache_ptr,
    lens_ptr,
    starts_ptr,
    source_ptr,
    out_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    source_stride,
    num_tokens,
    num_groups,
    depth,
    num_splits,
    capacity,
    scale_log2,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SPARSE: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    # Blocks of the same tokens are neighbours, so that they run at a time and the second finds them in L2.
    program = tl.program_id(0)
    block = program % BLOCKS
    split = program // BLOCKS % num_splits
    group = program // BLOCKS // num_splits
    first_token = group * depth
    num_rows = depth * HEADS
    is_orphan = False
    if starts_ptr is not None:
        is_orphan = group == num_groups - 1
        first_token = tl.load(starts_ptr + group)
        stop = tl.load(starts_ptr + group + 1, mask=group < num_groups - 1, other=0)
        num_rows = tl.where(is_orphan, num_tokens - first_token, tl.minimum(stop - first_token, depth)) * HEADS

    row = block * ROWS + tl.arange(0, ROWS)
    if is_orphan:
        for start in range(block * ROWS, num_rows, BLOCKS * ROWS):
            orphan = start + tl.arange(0, ROWS)
            at = (first_token * HEADS + orphan).to(tl.int64) * num_splits + split
            tl.store(lse_ptr + at, tl.full((ROWS,), float("-inf"), tl.float32), mask=orphan < num_rows)
            if not SPLIT:
                _store_rows(out_ptr, at, tl.zeros((ROWS, 512), tl.float32), orphan < num_rows)
    else:
        is_row = row < num_rows
        token = first_token + row // HEADS
        at = (first_token * HEADS + row).to(tl.int64) * num_splits + split
        if SPARSE:
            limit = capacity
            if lens_ptr is not None:
                limit = tl.minimum(tl.load(lens_ptr + group), capacity)
            lens = tl.full((ROWS,), 0, tl.int32) + limit
        else:
            lens = tl.minimum(tl.load(lens_ptr + token, mask=is_row, other=0), capacity)
            limit = tl.max(lens, 0)
        num_tiles = tl.cdiv(tl.maximum(limit, 0), TOKENS)
        tiles_of_split = tl.cdiv(num_tiles, num_splits)
        first_tile = split * tiles_of_split
        end_tile = tl.minimum(first_tile + tiles_of_split, num_tiles)
        if SPLIT and first_tile >= end_tile:
            # The combine reads no output of weight 0.
            tl.store(lse_ptr + at, tl.full((ROWS,), float("-inf"), tl.float32), mask=is_row)
        else:
            head = row % HEADS
            q_row_ptr = q_ptr + token.to(tl.int64) * q_token_stride + head * q_head_stride
            peak, total, acc = _attend(
                q_row_ptr[:, None],
                is_row[:, None],
                cache_ptr,
                source_ptr + group.to(tl.int64) * source_stride,
                lens,
                limit,
                first_tile,
                end_tile,
                scale_log2,
                BLOCK_SIZE,
                PAGE_STRIDE,
                TOKEN_STRIDE,
                SPARSE,
                FP8,
                ROWS,
                TOKENS,
                STAGES,
                FACTOR,
            )
            # Not by a comparison that a NaN would pass as nothing: a NaN that a row sees must show.
            is_empty = total == 0
            lse = tl.where(is_empty, float("-inf"), peak + tl.log2(tl.where(is_empty, 1.0, total)))
            if not SPLIT:
                lse *= 0.6931471805599453
            tl.store(lse_ptr + at, lse, mask=is_row)
            _store_rows(out_ptr, at, acc / tl.where(is_empty, 1.0, total)[:, None], is_row)


@triton.jit
def _attend(
    q_row_ptr,
    is_row,
    cache_ptr,
    source_ptr,
    lens,
    limit,
    first_tile,
    end_tile,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SPARSE: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Softmax of one block of rows over tiles of tokens: peak (to base 2), total and unscaled output of each row."""
    dim = tl.arange(0, 512)[None, :]
    rope_dim = tl.arange(0, 64)[None, :]
    q_nope = tl.load(q_row_ptr + dim, mask=is_row, other=0.0).to(FACTOR)
    q_rope = tl.load(q_row_ptr + 512 + rope_dim, mask=is_row, other=0.0).to(FACTOR)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, 512), tl.float32)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        position = tile * TOKENS + tl.arange(0, TOKENS)
        if SPARSE:
            slot = tl.load(source_ptr + position, mask=position < limit, other=-1)
        else:
            page = tl.load(source_ptr + position // BLOCK_SIZE, mask=position < limit, other=-1)
            slot = page * BLOCK_SIZE + position % BLOCK_SIZE
        # What is masked is 0: a weight of 0 times a NaN would be a NaN.
        is_live = slot >= 0
        latent_ptr = cache_ptr + (slot // BLOCK_SIZE).to(tl.int64) * PAGE_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE
        nope, rope = _load_latents(latent_ptr, is_live[:, None], dim, rope_dim, FP8, TOKENS, FACTOR)
        scores = tl.dot(q_nope, tl.trans(nope))
        scores = tl.dot(q_rope, tl.trans(rope), scores)
        is_seen = position[None, :] < lens[:, None]
        if SPARSE:
            is_seen = is_seen & is_live[None, :]
        scores = tl.where(is_seen, scores * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - finite_peak[:, None])
        decay = tl.exp2(peak - finite_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(FACTOR), nope, acc * decay[:, None])
        peak = new_peak
    return peak, total, acc


@triton.jit
def _load_latents(latent_ptr, is_live, dim, rope_dim, FP8: tl.constexpr, TOKENS: tl.constexpr, FACTOR: tl.constexpr):
    row_ptr = latent_ptr[:, None]
    if FP8:
        quantized = tl.load(row_ptr + dim, mask=is_live, other=0)
        scale_ptr = (row_ptr + 512).to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(scale_ptr + tl.arange(0, 4)[None, :], mask=is_live, other=0.0)
        values = quantized.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        values = tl.reshape(values, (TOKENS, 4, 128)) * scales[:, :, None]
        nope = tl.reshape(values, (TOKENS, 512)).to(FACTOR)
        rope_ptr = (row_ptr + 528).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        nope = tl.load(row_ptr + dim, mask=is_live, other=0.0).to(FACTOR)
        rope_ptr = row_ptr + 512
    return nope, tl.load(rope_ptr + rope_dim, mask=is_live, other=0.0).to(FACTOR)


@triton.jit
def _store_rows(out_ptr, at, values, is_row):
    row_ptr = out_ptr + at[:, None] * 512 + tl.arange(0, 512)[None, :]
    tl.store(row_ptr, values.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
