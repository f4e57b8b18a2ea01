"""Quantise index q and fold every scale into the head weights."""

import torch

from vllm_dsa.reference.fp8 import Q_AMAX_FLOOR, ScaleFormat, quantize_fp8
from vllm_dsa.reference.hadamard import hadamard_transform
from vllm_dsa.reference.rope import RopeStyle, apply_rope


def fold_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    style: RopeStyle | None = None,
    row_to_token: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_scale: float | None = None,
    scale_format: ScaleFormat,
    hadamard: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise q, and fold its scale into the head weights.

    The folded weight is ``weight * q_scale * softmax_scale * head_scale``. A scale is positive, so it
    passes through the ReLU of the logits; the FP8 q needs no scale tensor of its own.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, D) floating point.
    weights : torch.Tensor
        (T, H) floating point, signed, straight from the weights projection.
    positions, cos_sin, style : optional
        RoPE as in `apply_rope`; all three or, when q is rotated already, none.
    row_to_token : torch.Tensor, optional
        (rows,) int32, the token of each row of the results, or -1 for a dummy row, which is all zeros. Without
        it rows are tokens.
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
        (rows, H, D) float8_e4m3fn.
    folded_weights : torch.Tensor
        (rows, H) float32.

    Notes
    -----
    The amax floor is `Q_AMAX_FLOOR`. Values of `positions` and `row_to_token` are not checked here. No host
    sync. RoPE rounds to the dtype of q before the amax, as the fused kernels of peer engines do. Source: the
    index q fold of vLLM 0.33.
    """
    _, num_heads, head_dim = q.shape
    if positions is not None and cos_sin is not None and style is not None:
        q = apply_rope(q, positions, cos_sin, style)
    if hadamard:
        q = hadamard_transform(q)
    q_fp8, q_scale = quantize_fp8(q, scale_format=scale_format, amax_floor=Q_AMAX_FLOOR)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    head_scale = num_heads**-0.5 if head_scale is None else head_scale
    folded_weights = weights.to(torch.float32) * q_scale * softmax_scale * head_scale
    if row_to_token is None:
        return q_fp8, folded_weights
    # Float8 tensors can be neither concatenated nor indexed everywhere: the bytes are.
    rows = _rows_of_tokens(q_fp8.view(torch.uint8), row_to_token)
    return rows.view(torch.float8_e4m3fn), _rows_of_tokens(folded_weights, row_to_token)


def _rows_of_tokens(tokens: torch.Tensor, row_to_token: torch.Tensor) -> torch.Tensor:
    # The appended zeros are what index -1 finds.
    return torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])[row_to_token]
