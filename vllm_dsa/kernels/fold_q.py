"""Rotate, quantise and fold index q in the plan's row order, in one launch."""

import torch
import triton
import triton.language as tl

from vllm_dsa.kernels.fp8_rows import has_hardware_casts, load_rotated_rows, quantize_rows
from vllm_dsa.kernels.launcher import next_power_of_2

_HEADS_PER_PROGRAM = 16


def launch_fold_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    q_out: torch.Tensor,
    weights_out: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    row_to_token: torch.Tensor | None = None,
    softmax_scale: float,
    head_scale: float,
    amax_floor: float,
    power_of_two_scale: bool,
    hadamard: bool = False,
) -> None:
    """Fold index q into preallocated rows.

    Parameters
    ----------
    q : torch.Tensor
        ``(T, H, D)`` float32, bfloat16 or float16, last stride 1.
    weights : torch.Tensor
        ``(T, H)`` float32, bfloat16 or float16, last stride 1.
    q_out : torch.Tensor
        ``(rows, H, D)`` float8_e4m3fn, contiguous; every element is written.
    weights_out : torch.Tensor
        ``(rows, H)`` float32, contiguous; every element is written.
    positions, cos_sin : torch.Tensor, optional
        ``(T,)`` int32 or int64 and ``(max_position, rope_dim)`` float32, last stride 1; neither for no RoPE.
    interleaved : bool
        RoPE pairs ``(2 i, 2 i + 1)`` instead of ``(i, i + rope_dim / 2)``.
    row_to_token : torch.Tensor, optional
        ``(rows,)`` int32, less than 0 for a dummy row, which becomes all zeros; without it row i is token i.
    softmax_scale, head_scale : float
        Factors of the weights.
    amax_floor : float
        Smallest amax of a quantised row.
    power_of_two_scale : bool
        Round the scale up to a power of two (UE8M0).
    hadamard : bool
        Rotate by the Hadamard matrix after RoPE; D must be a power of two.

    Notes
    -----
    Equal to :func:`vllm_dsa.reference.fold_q` on the CPU, bit for bit (a NaN may differ in its sign). One launch, no
    allocation, no host sync; graph safe once the variant (dtypes, sizes, flags) has been compiled by a first call.
    Arguments are not checked here. On CPU tensors it runs under ``TRITON_INTERPRET=1``.
    """
    num_heads, head_dim = q.shape[1:]
    heads = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    _fold_q_kernel[(q_out.shape[0], -(-num_heads // heads))](
        q,
        weights,
        positions,
        cos_sin,
        row_to_token,
        q_out.view(torch.uint8),
        weights_out,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        float(softmax_scale),
        float(head_scale),
        NUM_HEADS=num_heads,
        HEADS=heads,
        D=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        ROPE_DIM=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=interleaved,
        HADAMARD=hadamard,
        AMAX_FLOOR=amax_floor,
        POWER_OF_TWO_SCALE=power_of_two_scale,
        HARDWARE_CASTS=has_hardware_casts(q.device),
        num_warps=4,
        # A fused multiply-add would round a rotated element once where the twin rounds twice.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "row_to_token_ptr"])
def _fold_q_kernel(
    q_ptr,
    weights_ptr,
    positions_ptr,
    cos_sin_ptr,
    row_to_token_ptr,
    q_out_ptr,
    weights_out_ptr,
    q_token_stride,
    q_head_stride,
    weights_token_stride,
    cos_sin_stride,
    softmax_scale,
    head_scale,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    POWER_OF_TWO_SCALE: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    token = row
    if row_to_token_ptr is not None:
        token = tl.load(row_to_token_ptr + row).to(tl.int64)
    is_head = head < NUM_HEADS
    # A dummy row reads nothing, so that it is zero whatever the inputs hold.
    is_live = head < tl.where(token >= 0, NUM_HEADS, 0)

    table_row = cos_sin_ptr
    if ROPE_DIM > 0:
        position = tl.load(positions_ptr + token, mask=token >= 0, other=0).to(tl.int64)
        # One pointer a head although they are equal: the same shape everywhere keeps one layout in registers.
        table_row = cos_sin_ptr + position * cos_sin_stride + tl.zeros((HEADS, 1), tl.int64)
    x = load_rotated_rows(
        q_ptr + token * q_token_stride + head[:, None] * q_head_stride,
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

    weight = tl.load(weights_ptr + token * weights_token_stride + head, mask=is_live, other=0).to(tl.float32)
    out = row * NUM_HEADS + head
    tl.store(weights_out_ptr + out, weight * scale * softmax_scale * head_scale, mask=is_head)
    dim = tl.arange(0, BLOCK_D)[None, :]
    tl.store(q_out_ptr + out[:, None] * D + dim, values, mask=is_head[:, None] & (dim < D))
