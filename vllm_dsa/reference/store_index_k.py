"""Quantise index K and write it into the paged cache."""

import torch

from vllm_dsa.reference.fp8 import K_AMAX_FLOOR, ScaleFormat, quantize_fp8
from vllm_dsa.reference.hadamard import hadamard_transform
from vllm_dsa.reference.index_k_cache import IndexKCacheLayout
from vllm_dsa.reference.rope import RopeStyle, apply_rope


def store_index_k(
    k: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    style: RopeStyle | None = None,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    hadamard: bool = False,
) -> None:
    """Rotate, quantise and write index K at its slots, in place.

    Parameters
    ----------
    k : torch.Tensor
        (T, D) floating point, after the LayerNorm.
    cache : torch.Tensor
        (num_blocks, block_size, 1, D + 4) uint8, see `IndexKCacheLayout`; written.
    slot_mapping : torch.Tensor
        (T,) int64: page ``slot // block_size``, token ``slot % block_size`` of it. A negative slot is
        skipped: padding, or a token that another rank owns. When two tokens share a slot, which one stays
        is not specified.
    positions, cos_sin, style : optional
        RoPE as in `apply_rope`; all three or, when K is rotated already, none.
    scale_format : ScaleFormat
        Rounding of the stored float32 scale.
    hadamard : bool
        Rotate by the Hadamard matrix after RoPE; q must be folded alike.

    Notes
    -----
    The amax floor is `K_AMAX_FLOOR`. Values of `slot_mapping` and `positions` are not checked here.
    Dropping the negative slots is a host sync on a GPU, so not capturable in a CUDA graph. Source: the
    index K writer of vLLM 0.33 (and SGLang 0.5.23 for the Hadamard rotation).
    """
    if positions is not None and cos_sin is not None and style is not None:
        k = apply_rope(k, positions, cos_sin, style)
    if hadamard:
        k = hadamard_transform(k)
    values, scale = quantize_fp8(k, scale_format=scale_format, amax_floor=K_AMAX_FLOOR)

    layout = IndexKCacheLayout.of(cache)
    cached_values, cached_scales = layout.views(cache)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, token = slots // layout.block_size, slots % layout.block_size
    cached_values[page, token] = values[kept]
    cached_scales[page, token] = scale[kept]
