"""The paged cache of MLA latents: bfloat16 rows, or FP8 rows that carry their scales (vLLM's ``fp8_ds_mla``)."""

import torch

from vllm_dsa.reference.fp8 import FP8_MAX, ScaleFormat, quantize_fp8

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
LATENT_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
FP8_GROUP = 128
FP8_LATENT_BYTES = KV_LORA_RANK + 4 * (KV_LORA_RANK // FP8_GROUP) + 2 * QK_ROPE_HEAD_DIM

_GROUPS = (KV_LORA_RANK // FP8_GROUP, FP8_GROUP)
_SCALES = slice(KV_LORA_RANK, FP8_LATENT_BYTES - 2 * QK_ROPE_HEAD_DIM)
# A group of zeros gets the smallest normal scale.
_AMAX_FLOOR = FP8_MAX * torch.finfo(torch.float32).tiny


def pack_fp8_latent(latent: torch.Tensor) -> torch.Tensor:
    """Quantise latents into rows of an FP8 cache.

    Parameters
    ----------
    latent : torch.Tensor
        (..., 576) float32 or bfloat16, any device: 512 that are keys and values, then 64 rotated ones that are keys
        only.

    Returns
    -------
    torch.Tensor
        (..., 656) uint8: 512 float8_e4m3fn, then 4 float32 scales (one for each 128 of them), then 64 bfloat16. A
        value is its FP8 times its scale.

    Notes
    -----
    Nothing is checked here. No host sync. Source: the row that FlashMLA's sparse decode reads and vLLM 0.33 writes as
    ``fp8_ds_mla``; ``amax / 448`` as scale.
    """
    groups = latent[..., :KV_LORA_RANK].reshape(*latent.shape[:-1], *_GROUPS)
    values, scales = quantize_fp8(groups, scale_format=ScaleFormat.FP32, amax_floor=_AMAX_FLOOR)
    rope = latent[..., KV_LORA_RANK:].to(torch.bfloat16).contiguous()
    return torch.cat([values.flatten(-2).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], dim=-1)


def read_latent(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy latents out of a paged cache.

    Parameters
    ----------
    cache : torch.Tensor
        (num_blocks, block_size, 576) bfloat16, or (num_blocks, block_size, 656) uint8 (see `pack_fp8_latent`).
    slots : torch.Tensor
        (n,) int32 or int64, same device: page times block_size plus place in the page.

    Returns
    -------
    torch.Tensor
        (n, 576) float64, exact.

    Notes
    -----
    Slots are not checked here. No host sync.
    """
    block_size = cache.shape[1]
    slots = slots.long()
    rows = cache[slots // block_size, slots % block_size]
    if cache.dtype != torch.uint8:
        return rows.double()
    values = rows[:, :KV_LORA_RANK].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, _SCALES].contiguous().view(torch.float32).double()
    rope = rows[:, _SCALES.stop :].contiguous().view(torch.bfloat16).double()
    scaled = values.view(len(slots), *_GROUPS) * scales.unsqueeze(2)
    return torch.cat([scaled.flatten(1), rope], dim=1)
