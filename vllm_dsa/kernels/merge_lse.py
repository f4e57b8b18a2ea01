"""The arithmetic of merging attention over shards of the tokens: scale, pack, combine; one launch each."""

import math

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.launcher import next_power_of_2

_HEADS_PER_PROGRAM = 4
_MAX_BLOCK_V = 512


def launch_scale_shard(
    out: torch.Tensor, lses: torch.Tensor, shard: int, scaled: torch.Tensor, lse: torch.Tensor, *, part: int
) -> None:
    """Scale one shard's output by its weight in the merge, so that the sum over the shards is the merged output.

    Parameters
    ----------
    out : torch.Tensor
        ``(T, H, V)`` float32, bfloat16 or float16, last stride 1.
    lses : torch.Tensor
        ``(W, T, H)`` float32, contiguous, natural: every shard's. Both infinities mark an empty row.
    shard : int
        Which of them `out` is.
    scaled : torch.Tensor
        ``(P, T, H / P, V)``, dtype of `out`, contiguous: the heads in P parts, as a reduce-scatter wants them.
        Every element is written; 0 where the shard is empty.
    lse : torch.Tensor
        ``(T, H / P)`` float32, contiguous: written with the merged LSE of one part's heads, -inf where all are empty.
    part : int
        Which part that is.

    Notes
    -----
    Twin: :func:`vllm_dsa.reference.merge_lse.scale_shard`. One launch, no allocation, no host sync; graph safe once
    compiled, for each set of sizes but T. Arguments are not checked here.
    """
    num_tokens, num_heads, v_dim = out.shape
    _scale_kernel[_grid(num_tokens, num_heads, v_dim)](
        *(out, lses, scaled, lse),
        *(num_tokens, out.stride(0), out.stride(1), num_heads, scaled.shape[2], shard, part),
        **_constexprs(v_dim),
        NUM_SHARDS=lses.shape[0],
    )


def launch_pack_shard(
    out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor, *, to_natural: float
) -> None:
    """Copy one shard into the messages of an all-to-all: for each rank its part of the heads.

    Parameters
    ----------
    out : torch.Tensor
        ``(T, H, V)`` float32, bfloat16 or float16, last stride 1.
    lse : torch.Tensor
        ``(T, H)`` float32, any strides.
    outs : torch.Tensor
        ``(P, T, H / P, V)``, dtype of `out`, contiguous but for the first stride; every element is written.
    lses : torch.Tensor
        ``(P, T, H / P)`` float32, contiguous but for the first stride; every element is written.
    to_natural : float
        Factor that makes `lse` natural.

    Notes
    -----
    One launch, no allocation, no host sync; graph safe once compiled, for each set of sizes but T. Arguments are not
    checked here.
    """
    num_tokens, num_heads, v_dim = out.shape
    _pack_kernel[_grid(num_tokens, num_heads, v_dim)](
        *(out, lse, outs, lses),
        *(out.stride(0), out.stride(1), lse.stride(0), lse.stride(1), outs.stride(0), lses.stride(0)),
        *(num_heads, outs.shape[2], float(to_natural)),
        **_constexprs(v_dim),
    )


def launch_combine_shards(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge all shards of some heads.

    Parameters
    ----------
    outs : torch.Tensor
        ``(W, T, H, V)`` float32, bfloat16 or float16, contiguous but for the first stride.
    lses : torch.Tensor
        ``(W, T, H)`` float32, contiguous but for the first stride, natural. Both infinities mark an empty row.
    out : torch.Tensor
        ``(T, H, V)``, dtype of `outs`, contiguous; every element is written, 0 where all shards are empty.
    lse : torch.Tensor
        ``(T, H)`` float32, contiguous; every element is written, -inf where all shards are empty.

    Notes
    -----
    Twin: :func:`vllm_dsa.reference.merge_lse.merge_lse_reference`. Sums in float32, rounds once. One launch, no
    allocation, no host sync; graph safe once compiled, for each set of sizes but T. Arguments are not checked here.
    """
    num_shards, num_tokens, num_heads, v_dim = outs.shape
    _combine_kernel[_grid(num_tokens, num_heads, v_dim)](
        *(outs, lses, out, lse),
        *(outs.stride(0), lses.stride(0), num_heads),
        **_constexprs(v_dim),
        NUM_SHARDS=num_shards,
    )


def _grid(num_tokens: int, num_heads: int, v_dim: int) -> tuple[int, int, int]:
    block_v = _constexprs(v_dim)["BLOCK_V"]
    return num_tokens, -(-num_heads // _HEADS_PER_PROGRAM), -(-v_dim // block_v)


def _constexprs(v_dim: int) -> dict[str, int]:
    return {"V": v_dim, "HEADS": _HEADS_PER_PROGRAM, "BLOCK_V": min(next_power_of_2(v_dim), _MAX_BLOCK_V)}


_EMPTY = tl.constexpr(-math.inf)


@triton.jit
def _load_lse(ptr, mask):
    # An empty shard is -inf, whichever infinity its kernel wrote.
    lse = tl.load(ptr, mask=mask, other=_EMPTY)
    return tl.where(lse == -_EMPTY, _EMPTY, lse)


@triton.jit
def _largest_and_total(ptr, shard_stride, mask, HEADS: tl.constexpr, NUM_SHARDS: tl.constexpr):
    """Largest LSE of the shards (0 where all are empty, so that no inf - inf arises) and their sum relative to it."""
    largest = tl.full((HEADS,), _EMPTY, tl.float32)
    lses = ptr
    for _ in range(NUM_SHARDS):
        largest = tl.maximum(largest, _load_lse(lses, mask))
        lses += shard_stride
    largest = tl.where(largest == _EMPTY, 0.0, largest)
    total = tl.zeros((HEADS,), tl.float32)
    lses = ptr
    for _ in range(NUM_SHARDS):
        total += tl.exp(_load_lse(lses, mask) - largest)
        lses += shard_stride
    return largest, total


@triton.jit
def _weight(lse, largest, total):
    # A total of 0 has no shards with tokens: each weighs 0 / 1.
    return tl.exp(lse - largest) / tl.where(total == 0, 1.0, total)


@triton.jit
def _merged_lse(largest, total):
    return tl.where(total == 0, _EMPTY, largest + tl.log(tl.where(total == 0, 1.0, total)))


@triton.jit
def _weighted(x, weight):
    # Not a product alone: what an empty shard left in its output may be NaN, and 0 x NaN is NaN.
    return tl.where(weight[:, None] == 0, 0.0, x.to(tl.float32) * weight[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _scale_kernel(
    out_ptr,
    lses_ptr,
    scaled_ptr,
    lse_ptr,
    num_tokens,
    out_token_stride,
    out_head_stride,
    num_heads,
    heads_per_part,
    shard,
    part,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_head = head < num_heads
    is_element = is_head[:, None] & (dim < V)[None, :]

    shard_stride = num_tokens.to(tl.int64) * num_heads
    lses = lses_ptr + token * num_heads + head
    largest, total = _largest_and_total(lses, shard_stride, is_head, HEADS, NUM_SHARDS)
    own = _load_lse(lses + shard * shard_stride, is_head)

    x = tl.load(out_ptr + token * out_token_stride + head[:, None] * out_head_stride + dim[None, :], mask=is_element)
    x = _weighted(x, _weight(own, largest, total))
    head_part = head // heads_per_part
    head_in_part = head - head_part * heads_per_part
    at = (head_part * num_tokens.to(tl.int64) + token) * heads_per_part + head_in_part
    tl.store(scaled_ptr + at[:, None] * V + dim[None, :], x.to(scaled_ptr.dtype.element_ty), mask=is_element)
    if tl.program_id(2) == 0:
        lse_at = lse_ptr + token * heads_per_part + head_in_part
        tl.store(lse_at, _merged_lse(largest, total), mask=is_head & (head_part == part))


# A head-major LSE has the number of tokens for a stride.
@triton.jit(do_not_specialize=["lse_token_stride", "lse_head_stride"])
def _pack_kernel(
    out_ptr,
    lse_ptr,
    outs_ptr,
    lses_ptr,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    outs_part_stride,
    lses_part_stride,
    num_heads,
    heads_per_part,
    to_natural,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_head = head < num_heads
    is_element = is_head[:, None] & (dim < V)[None, :]
    head_part = (head // heads_per_part).to(tl.int64)
    at = token * heads_per_part + head % heads_per_part

    x = tl.load(out_ptr + token * out_token_stride + head[:, None] * out_head_stride + dim[None, :], mask=is_element)
    row = head_part * outs_part_stride + at * V
    tl.store(outs_ptr + row[:, None] + dim[None, :], x, mask=is_element)
    if tl.program_id(2) == 0:
        lse = tl.load(lse_ptr + token * lse_token_stride + head * lse_head_stride, mask=is_head)
        tl.store(lses_ptr + head_part * lses_part_stride + at, lse * to_natural, mask=is_head)


@triton.jit
def _combine_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    outs_shard_stride,
    lses_shard_stride,
    num_heads,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_head = head < num_heads
    is_element = is_head[:, None] & (dim < V)[None, :]
    row = token * num_heads + head
    at = row[:, None] * V + dim[None, :]

    lses = lses_ptr + row
    largest, total = _largest_and_total(lses, lses_shard_stride, is_head, HEADS, NUM_SHARDS)
    merged = tl.zeros((HEADS, BLOCK_V), tl.float32)
    outs = outs_ptr + at
    for _ in range(NUM_SHARDS):
        weight = _weight(_load_lse(lses, is_head), largest, total)
        merged += _weighted(tl.load(outs, mask=is_element), weight)
        outs += outs_shard_stride
        lses += lses_shard_stride
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=is_element)
    if tl.program_id(2) == 0:
        tl.store(lse_ptr + row, _merged_lse(largest, total), mask=is_head)
