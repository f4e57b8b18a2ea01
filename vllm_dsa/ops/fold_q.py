"""Public operator: fold index q."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.ops._checks import (
    FLOAT_DTYPES,
    check_enum,
    check_hadamard,
    check_positions,
    check_rope,
    check_tensor,
)
from vllm_dsa.reference import RopeStyle, ScaleFormat


def fold_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    style: RopeStyle | None = None,
    softmax_scale: float | None = None,
    head_scale: float | None = None,
    scale_format: ScaleFormat,
    hadamard: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise index q, and fold its scale into the head weights.

    The folded weight is ``weight * q_scale * softmax_scale * head_scale``; the FP8 q needs no scale of its
    own.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, D) float32, bfloat16 or float16, last stride 1, any device.
    weights : torch.Tensor
        (T, H) float32, bfloat16 or float16, same device: straight from the weights projection, signed.
    positions, cos_sin, style : optional
        RoPE over the first rope_dim dimensions: (T,) int32 or int64, (max_position, rope_dim) float32 as
        `vllm_dsa.reference.make_cos_sin` lays it out, and `RopeStyle`. All three, or none for a q that is
        rotated already.
    softmax_scale : float, optional
        Default ``D ** -0.5``.
    head_scale : float, optional
        Default ``H ** -0.5``.
    scale_format : ScaleFormat
        Rounding of the scale of each (token, head) row.
    hadamard : bool
        Rotate by the Hadamard matrix after RoPE; K must be stored alike.

    Returns
    -------
    q_fp8 : torch.Tensor
        (T, H, D) float8_e4m3fn.
    folded_weights : torch.Tensor
        (T, H) float32.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride or device that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a position is outside the table.

    Notes
    -----
    Not checked otherwise: values of `positions`. No host sync without ``VDSA_VALIDATE=1``; the results are
    new tensors, so in a CUDA graph they belong to its pool. Source: see `vllm_dsa.reference.fold_q`.
    """
    check_tensor("q", q, dtypes=FLOAT_DTYPES, shape=(None, None, None))
    num_tokens, num_heads, head_dim = q.shape
    check_tensor("weights", weights, dtypes=FLOAT_DTYPES, shape=(num_tokens, num_heads), device=q.device)
    check_rope(q, positions, cos_sin, style)
    check_enum("scale_format", scale_format, ScaleFormat)
    check_hadamard(head_dim, hadamard)
    if q.numel() == 0:
        return q.to(torch.float8_e4m3fn), weights.to(torch.float32)
    if envs.get("VDSA_VALIDATE"):
        check_positions(positions, cos_sin)
    return reference.fold_q(
        q,
        weights,
        positions=positions,
        cos_sin=cos_sin,
        style=style,
        softmax_scale=softmax_scale,
        head_scale=head_scale,
        scale_format=scale_format,
        hadamard=hadamard,
    )
