"""Device functions that the q fold and the k store share: rotation, Hadamard, quantisation of rows."""

import functools

import torch
import triton
import triton.language as tl

from vllm_dsa.platform import current_device


@functools.cache
def has_hardware_casts(device: torch.device) -> bool:
    """Whether kernels on `device` may cast to float8_e4m3fn and bfloat16 themselves.

    The e4m3 cast needs compute capability 8.9, and the casts of Triton's interpreter do not round to nearest even.
    """
    found = current_device(device)
    is_interpreted = triton.knobs.runtime.interpret
    return found.family is not None and (found.family, found.minor) >= (8, 9) and not is_interpreted


@triton.jit
def load_rotated_rows(
    row_ptr,
    is_live,
    table_row_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
):
    """Load rows (N, 1) of pointers, rotate them, and give (N, BLOCK_D) float32 with zeros where nothing is live."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    loaded = tl.load(row_ptr + dim, mask=is_live & (dim < D), other=0)
    x = loaded.to(tl.float32)
    if ROPE_DIM > 0:
        HALF: tl.constexpr = ROPE_DIM // 2
        if INTERLEAVED:
            pair = tl.arange(0, BLOCK_D // 2)[None, :]
            is_rotated = is_live & (pair < HALF)
            cos = tl.load(table_row_ptr + pair, mask=is_rotated, other=0)
            sin = tl.load(table_row_ptr + pair + HALF, mask=is_rotated, other=0)
            first, second = tl.split(tl.reshape(x, (x.shape[0], BLOCK_D // 2, 2)))
            rotated_first = tl.where(pair < HALF, first * cos - second * sin, first)
            rotated_second = tl.where(pair < HALF, second * cos + first * sin, second)
            x = tl.reshape(tl.join(rotated_first, rotated_second), (x.shape[0], BLOCK_D))
        else:
            # Partners come from memory again: only neighbours meet in registers for any ROPE_DIM.
            is_rotated = is_live & (dim < ROPE_DIM)
            is_first = dim < HALF
            pair = tl.where(is_first, dim, dim - HALF)
            partner_dim = tl.where(is_first, dim + HALF, dim - HALF)
            partner = tl.load(row_ptr + partner_dim, mask=is_rotated, other=0).to(tl.float32)
            cos = tl.load(table_row_ptr + pair, mask=is_rotated, other=0)
            sin = tl.load(table_row_ptr + pair + HALF, mask=is_rotated, other=0)
            # Triton negates by subtracting from 0, which turns a zero sine's sign, so no term is negated.
            turned = partner * sin
            rotated = tl.where(is_first, x * cos - turned, x * cos + turned)
            x = tl.where(dim < ROPE_DIM, rotated, x)
        x = _round_to(x, loaded.dtype, HARDWARE_CASTS)
    if HADAMARD:
        stride = 1
        while stride < BLOCK_D:
            # Each round takes the lowest bit of the index and puts it on top, so after all of them the order is back.
            low, high = tl.split(tl.reshape(x, (x.shape[0], BLOCK_D // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (x.shape[0], BLOCK_D))
            stride *= 2
        x = _round_to(x * (BLOCK_D**-0.5), loaded.dtype, HARDWARE_CASTS)
    return x


@triton.jit
def quantize_rows(x, AMAX_FLOOR: tl.constexpr, POWER_OF_TWO_SCALE: tl.constexpr, HARDWARE_CASTS: tl.constexpr):
    """Quantise (N, BLOCK_D) float32 rows to e4m3 bytes (uint8) and one float32 scale each."""
    # The bits of magnitudes are ordered as they are, with NaN on top: a float maximum would lose it.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    floor = tl.full((x.shape[0],), AMAX_FLOOR, tl.float32).to(tl.int32, bitcast=True)
    amax = tl.maximum(tl.max(magnitude, 1), floor).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full((x.shape[0],), 448.0, tl.float32))
    if POWER_OF_TWO_SCALE:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = (bits + 0x007FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, rounded, bits).to(tl.float32, bitcast=True)
        # Exact, as the inverse of a power of two is one.
        scaled = x * tl.div_rn(tl.full((x.shape[0],), 1.0, tl.float32), scale)[:, None]
    else:
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    # No clamp: the scale is at least amax / 448 but for its rounding, so nothing finite reaches 464, the end of 448.
    return _to_e4m3(scaled, HARDWARE_CASTS), scale


@triton.jit
def _to_e4m3(x, HARDWARE_CASTS: tl.constexpr):
    """Round float32 of magnitude below 464, or NaN, to the nearest e4m3, ties to even; the bytes as uint8."""
    if HARDWARE_CASTS:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        # 480 stands for NaN: it is what the NaN code would be worth.
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43F00000)
        normal = ((magnitude + 0x0007FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2 ** -6 the step is 2 ** -9, which is that of float32 just above 2 ** 14: the addition rounds.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        code = code.to(tl.uint8)
    return code


@triton.jit
def _round_to(x, dtype: tl.constexpr, HARDWARE_CASTS: tl.constexpr):
    """Round float32 to nearest even in another dtype, and give it back as float32."""
    if dtype == tl.bfloat16 and not HARDWARE_CASTS:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        x = x.to(dtype).to(tl.float32)
    return x
