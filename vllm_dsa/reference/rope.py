"""Rotary position embedding (RoPE) of the indexer, in both layouts that DSA models use."""

import enum

import torch


class RopeStyle(enum.Enum):
    """Which two dimensions make a rotated pair."""

    HALF_SPLIT = "half_split"
    """``(i, i + rope_dim / 2)``: the indexer of DeepSeek-V3.2."""

    INTERLEAVED = "interleaved"
    """``(2 i, 2 i + 1)``: the indexer of GLM-5."""


def make_cos_sin(max_position: int, rope_dim: int, theta: float = 10000.0) -> torch.Tensor:
    """Build the table of plain RoPE: angle ``position * theta ** (-2 i / rope_dim)`` for pair ``i``.

    Parameters
    ----------
    max_position : int
        Number of positions, in tokens.
    rope_dim : int
        Number of rotated dimensions, even.
    theta : float
        Base of the frequencies.

    Returns
    -------
    torch.Tensor
        (max_position, rope_dim) float32 on the CPU: the cosines in the first half, the sines in the second.

    Notes
    -----
    Angles are computed in float64 and rounded once. A model with scaled RoPE (YaRN) needs the engine's own
    table, in this layout. No input is checked here.
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim
    angles = torch.outer(torch.arange(max_position, dtype=torch.float64), theta**-exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.float32)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, style: RopeStyle) -> torch.Tensor:
    """Rotate the first ``cos_sin.shape[1]`` dimensions of the last axis; the others pass through.

    A pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)`` and stays where it was, so an interleaved
    input gives an interleaved output.

    Parameters
    ----------
    x : torch.Tensor
        (T, ..., D) floating point, any device.
    positions : torch.Tensor
        (T,) int32 or int64, same device.
    cos_sin : torch.Tensor
        (max_position, rope_dim) float32 as `make_cos_sin` lays it out, same device, rope_dim <= D.
    style : RopeStyle
        Which dimensions are paired.

    Returns
    -------
    torch.Tensor
        Same shape and dtype as `x`, computed in float32 (float64 for a float64 `x`) and rounded once.

    Notes
    -----
    No input is checked here. No host sync. Source: the formula of RoFormer (arXiv 2104.09864).
    """
    rope_dim = cos_sin.shape[1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    inner_axes = [1] * (x.dim() - 2)
    table = cos_sin[positions].to(dtype).view(x.shape[0], *inner_axes, rope_dim)
    cos, sin = table.chunk(2, dim=-1)
    first, second = _pairs(x[..., :rope_dim].to(dtype), style)
    out = x.clone()
    out_first, out_second = _pairs(out[..., :rope_dim], style)
    out_first.copy_(first * cos - second * sin)
    out_second.copy_(second * cos + first * sin)
    return out


def _pairs(x: torch.Tensor, style: RopeStyle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the first and of the second element of each pair."""
    if style is RopeStyle.INTERLEAVED:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
