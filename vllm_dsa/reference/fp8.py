"""Per-row FP8 (e4m3) quantisation with a float32 or a power-of-two scale."""

import enum

import torch

FP8_MAX = 448.0
Q_AMAX_FLOOR = 1e-10
K_AMAX_FLOOR = 1e-4

_FLOAT32_MANTISSA_MASK = 0x007F_FFFF
_FLOAT32_EXPONENT_MASK = 0x7F80_0000


class ScaleFormat(enum.Enum):
    """How the scale of a quantised row is rounded; it is stored as float32 in both formats."""

    FP32 = "fp32"
    UE8M0 = "ue8m0"


def quantize_fp8(x: torch.Tensor, *, scale_format: ScaleFormat, amax_floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row (last dimension) to FP8 with one scale.

    ``scale = max(amax(|x|), amax_floor) / 448``, rounded up to a power of two for `ScaleFormat.UE8M0`, and
    ``values = e4m3(clamp(x / scale, -448, 448))``, rounding to nearest even. All steps are in float32.

    Parameters
    ----------
    x : torch.Tensor
        (..., D), floating point, any device.
    scale_format : ScaleFormat
        Rounding of the scale.
    amax_floor : float
        Smallest amax, so that a zero row has a finite scale: `Q_AMAX_FLOOR` or `K_AMAX_FLOOR`.

    Returns
    -------
    values : torch.Tensor
        (..., D) float8_e4m3fn.
    scale : torch.Tensor
        (...) float32.

    Notes
    -----
    A row that holds an infinity or a NaN dequantises to NaN throughout. No input is checked here. No host
    sync. Source: the floors and the order of operations are those of vLLM 0.33's index q fold and index K
    writer.
    """
    row = x.to(torch.float32)
    amax = row.abs().amax(dim=-1).clamp(min=amax_floor)
    # By a tensor: torch on CUDA divides by a Python number by multiplying with its reciprocal, an ulp off the CPU.
    scale = amax / torch.full_like(amax, FP8_MAX)
    if scale_format is ScaleFormat.UE8M0:
        scale = _round_up_to_power_of_two(scale)
    values = (row / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values, scale


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ``values * scale`` in `dtype`.

    Parameters
    ----------
    values : torch.Tensor
        (..., D) float8_e4m3fn.
    scale : torch.Tensor
        (...) float32, one per row.
    dtype : torch.dtype
        Of the product and of the result. With a `ScaleFormat.UE8M0` scale the float32 product is exact.

    Notes
    -----
    No input is checked here. No host sync.
    """
    return values.to(dtype) * scale.to(dtype).unsqueeze(-1)


def _round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    # On the bits, because log2 and pow may be off by one unit in the last place just where the result jumps:
    # a non-zero mantissa carries into the exponent, and a zero one (already a power of two) does not.
    bits = scale.view(torch.int32)
    rounded = ((bits + _FLOAT32_MANTISSA_MASK) & _FLOAT32_EXPONENT_MASK).view(torch.float32)
    return torch.where(scale.isfinite(), rounded, scale)
