"""Public operator: fold index q."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.kernels.fold_q import launch_fold_q
from vllm_dsa.ops._checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_enum,
    check_hadamard,
    check_positions,
    check_rope,
    check_tensor,
    check_values,
)
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference import Q_AMAX_FLOOR, RopeStyle, ScaleFormat


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
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
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
    row_to_token : torch.Tensor, optional
        (rows,) int32, same device: the token of each row of the results, or -1 for a dummy row, which is all
        zeros (q and weights). Without it rows are tokens.
    softmax_scale : float, optional
        Default ``D ** -0.5``.
    head_scale : float, optional
        Default ``H ** -0.5``.
    scale_format : ScaleFormat
        Rounding of the scale of each (token, head) row.
    hadamard : bool
        Rotate by the Hadamard matrix after RoPE; K must be stored alike.

    out : tuple of torch.Tensor, optional
        Contiguous tensors of the form of the results, on the same device, to write and return; not overlapping
        the inputs.

    Returns
    -------
    q_fp8 : torch.Tensor
        (rows, H, D) float8_e4m3fn.
    folded_weights : torch.Tensor
        (rows, H) float32.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride or device that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a position is outside the table or a row's token is none of q.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    Not checked otherwise: values of `positions` and `row_to_token`, and overlap of `out`. CUDA tensors go to
    one Triton launch, other tensors to the torch twin, with the same results bit for bit. No host sync without
    ``VDSA_VALIDATE=1``. On CUDA with `out` nothing is allocated, so a graph can capture it once a first call
    has compiled the kernel. Source: see `vllm_dsa.reference.fold_q`.
    """
    check_tensor("q", q, dtypes=FLOAT_DTYPES, shape=(None, None, None))
    num_tokens, num_heads, head_dim = q.shape
    check_tensor("weights", weights, dtypes=FLOAT_DTYPES, shape=(num_tokens, num_heads), device=q.device)
    check_rope(q, positions, cos_sin, style)
    check_enum("scale_format", scale_format, ScaleFormat)
    check_hadamard(head_dim, hadamard)
    num_rows = num_tokens
    if row_to_token is not None:
        check_tensor("row_to_token", row_to_token, dtypes=(torch.int32,), shape=(None,), device=q.device)
        num_rows = row_to_token.shape[0]
    if envs.get("VDSA_VALIDATE"):
        check_positions(positions, cos_sin)
        if row_to_token is not None:
            check_values("row_to_token", row_to_token, row_to_token >= num_tokens, f"below {num_tokens}")
    if out is None:
        q_out = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float8_e4m3fn, device=q.device)
        weights_out = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    else:
        q_out, weights_out = out
        _check_out("out[0]", q_out, FP8_DTYPES, (num_rows, num_heads, head_dim), q.device)
        _check_out("out[1]", weights_out, (torch.float32,), (num_rows, num_heads), q.device)
    if q_out.numel() == 0:
        return q_out, weights_out.zero_()

    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    head_scale = num_heads**-0.5 if head_scale is None else head_scale
    if q.is_cuda:
        check_current_device(q.device)
        launch_fold_q(
            q,
            weights,
            q_out,
            weights_out,
            positions=positions,
            cos_sin=cos_sin,
            interleaved=style is RopeStyle.INTERLEAVED,
            row_to_token=row_to_token,
            softmax_scale=softmax_scale,
            head_scale=head_scale,
            amax_floor=Q_AMAX_FLOOR,
            power_of_two_scale=scale_format is ScaleFormat.UE8M0,
            hadamard=hadamard,
        )
        return q_out, weights_out
    q_fp8, folded_weights = reference.fold_q(
        q,
        weights,
        positions=positions,
        cos_sin=cos_sin,
        style=style,
        row_to_token=row_to_token,
        softmax_scale=softmax_scale,
        head_scale=head_scale,
        scale_format=scale_format,
        hadamard=hadamard,
    )
    return q_out.copy_(q_fp8), weights_out.copy_(folded_weights)


def _check_out(
    name: str, value: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    check_tensor(name, value, dtypes=dtypes, shape=shape, device=device)
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}; allowed: a contiguous tensor")
