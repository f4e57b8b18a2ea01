"""Rotate, quantise and write index K into its paged cache, in one launch."""

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.fp8_rows import has_hardware_casts, load_rotated_rows, quantize_rows
from vllm_dsa.kernels.launcher import next_power_of_2

_TOKENS_PER_PROGRAM = 4


def launch_store_index_k(
    k: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    amax_floor: float,
    power_of_two_scale: bool,
    hadamard: bool = False,
) -> None:
    """Write index K at its slots, in place.

    Parameters
    ----------
    k : torch.Tensor
        ``(T, D)`` float32, bfloat16 or float16, last stride 1.
    cache : torch.Tensor
        ``(num_blocks, block_size, 1, D + 4)`` uint8, any page stride that is a multiple of 4; a page is
        ``block_size * D`` value bytes and then its float32 scales. Written.
    slot_mapping : torch.Tensor
        ``(T,)`` int64 or int32, contiguous; a token with a slot less than 0 is skipped, and neither it nor its position
        is read.
    positions, cos_sin : torch.Tensor, optional
        ``(T,)`` int32 or int64, contiguous, and ``(max_position, rope_dim)`` float32, last stride 1; neither for no
        RoPE.
    interleaved : bool
        RoPE pairs ``(2 i, 2 i + 1)`` instead of ``(i, i + rope_dim / 2)``.
    amax_floor : float
        Smallest amax of a quantised row.
    power_of_two_scale : bool
        Round the scale up to a power of two (UE8M0).
    hadamard : bool
        Rotate by the Hadamard matrix after RoPE; D must be a power of two.

    Notes
    -----
    Equal to :func:`vllm_dsa.reference.store_index_k` on the CPU, bit for bit (a NaN may differ in its sign). One
    launch, no allocation, no host sync; graph safe once the variant (dtypes, sizes, flags) has been compiled by a first
    call. Arguments are not checked here. On CPU tensors it runs under ``TRITON_INTERPRET=1``.
    """
    num_tokens, head_dim = k.shape
    _store_index_k_kernel[(-(-num_tokens // _TOKENS_PER_PROGRAM),)](
        k,
        cache,
        slot_mapping,
        positions,
        cos_sin,
        num_tokens,
        k.stride(0),
        cache.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        TOKENS=_TOKENS_PER_PROGRAM,
        BLOCK_SIZE=cache.shape[1],
        D=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        ROPE_DIM=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=interleaved,
        HADAMARD=hadamard,
        AMAX_FLOOR=amax_floor,
        POWER_OF_TWO_SCALE=power_of_two_scale,
        HARDWARE_CASTS=has_hardware_casts(k.device),
        num_warps=_TOKENS_PER_PROGRAM,
        # A fused multiply-add would round a rotated element once where the twin rounds twice.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr", "positions_ptr"])
def _store_index_k_kernel(
    k_ptr,
    cache_ptr,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_tokens,
    k_stride,
    page_stride,
    cos_sin_stride,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    POWER_OF_TWO_SCALE: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    is_live = slot >= 0

    table_row = cos_sin_ptr
    if ROPE_DIM > 0:
        position = tl.load(positions_ptr + token, mask=is_live, other=0).to(tl.int64)
        table_row = cos_sin_ptr + (position * cos_sin_stride)[:, None]
    x = load_rotated_rows(
        k_ptr + (token * k_stride)[:, None],
        is_live[:, None],
        table_row,
        D,
        BLOCK_D,
        ROPE_DIM,
        INTERLEAVED,
        HADAMARD,
        HARDWARE_CASTS,
    )
    values, scale = quantize_rows(x, AMAX_FLOOR, POWER_OF_TWO_SCALE, HARDWARE_CASTS)

    page_ptr = cache_ptr + slot // BLOCK_SIZE * page_stride
    token_in_page = slot % BLOCK_SIZE
    dim = tl.arange(0, BLOCK_D)[None, :]
    values_ptr = page_ptr[:, None] + token_in_page[:, None] * D + dim
    tl.store(values_ptr, values, mask=is_live[:, None] & (dim < D))
    scale_ptr = (page_ptr + BLOCK_SIZE * D + token_in_page * 4).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scale_ptr, scale, mask=is_live)
