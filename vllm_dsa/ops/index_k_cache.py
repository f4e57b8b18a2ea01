"""Public operators: write index K to its paged cache, and read it back."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.kernels.store_index_k import launch_store_index_k
from vllm_dsa.ops._checks import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    check_cache,
    check_enum,
    check_hadamard,
    check_int,
    check_positions,
    check_rope,
    check_tensor,
    check_values,
)
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference import K_AMAX_FLOOR, IndexKCacheLayout, RopeStyle, ScaleFormat


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
        (T, D) float32, bfloat16 or float16, last stride 1, any device: after the LayerNorm.
    cache : torch.Tensor
        (num_blocks, block_size, 1, D + 4) uint8, same device, see `IndexKCacheLayout`; written.
    slot_mapping : torch.Tensor
        (T,) int64, same device: page ``slot // block_size``, token ``slot % block_size`` of it. A negative
        slot is skipped. When two tokens share a slot, which one stays is not specified.
    positions, cos_sin, style : optional
        RoPE as in `fold_q`; all three, or none for a K that is rotated already.
    scale_format : ScaleFormat
        Rounding of the stored float32 scale.
    hadamard : bool
        Rotate by the Hadamard matrix after RoPE; q must be folded alike.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride or device that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a slot or a position is out of range. Nothing is written then.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    Not checked otherwise: values of `slot_mapping` and `positions`. CUDA tensors go to one Triton launch: no
    allocation, no host sync without ``VDSA_VALIDATE=1``, and a graph can capture it once a first call has
    compiled the kernel. Other tensors go to the torch twin, with the same bytes. Source: see
    `vllm_dsa.reference.store_index_k`.
    """
    check_tensor("k", k, dtypes=FLOAT_DTYPES, shape=(None, None))
    num_tokens, head_dim = k.shape
    block_size = check_cache(cache, head_dim=head_dim, device=k.device)
    check_tensor("slot_mapping", slot_mapping, dtypes=(torch.int64,), shape=(num_tokens,), device=k.device)
    check_rope(k, positions, cos_sin, style)
    check_enum("scale_format", scale_format, ScaleFormat)
    check_hadamard(head_dim, hadamard)
    if num_tokens == 0:
        return
    if envs.get("VDSA_VALIDATE"):
        num_slots = cache.shape[0] * block_size
        check_values("slot_mapping", slot_mapping, slot_mapping >= num_slots, f"below {num_slots}")
        check_positions(positions, cos_sin)
    if k.is_cuda:
        check_current_device(k.device)
        launch_store_index_k(
            k,
            cache,
            slot_mapping,
            positions=positions,
            cos_sin=cos_sin,
            interleaved=style is RopeStyle.INTERLEAVED,
            amax_floor=K_AMAX_FLOOR,
            power_of_two_scale=scale_format is ScaleFormat.UE8M0,
            hadamard=hadamard,
        )
        return
    reference.store_index_k(
        k,
        cache,
        slot_mapping,
        positions=positions,
        cos_sin=cos_sin,
        style=style,
        scale_format=scale_format,
        hadamard=hadamard,
    )


def gather_index_k(
    cache: torch.Tensor, block_table_row: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the first `length` tokens of one request out of its pages.

    Parameters
    ----------
    cache : torch.Tensor
        (num_blocks, block_size, 1, head_dim + 4) uint8, any device, see `IndexKCacheLayout`.
    block_table_row : torch.Tensor
        (W,) int32 or int64 page ids, same device. Columns past the last token are not read.
    length : int
        Tokens, 0 to ``W * block_size``.

    Returns
    -------
    values : torch.Tensor
        (length, head_dim) float8_e4m3fn.
    scales : torch.Tensor
        (length,) float32.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, device or range that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a page id that is read is not one of the cache.

    Notes
    -----
    Not checked otherwise: page ids. No host sync without ``VDSA_VALIDATE=1``. Source: see
    `vllm_dsa.reference.gather_index_k`.
    """
    layout = IndexKCacheLayout.of(cache)
    check_tensor("block_table_row", block_table_row, dtypes=INTEGER_DTYPES, shape=(None,), device=cache.device)
    check_int("length", length, at_least=0)
    capacity = block_table_row.shape[0] * layout.block_size
    if length > capacity:
        raise ValueError(f"length is {length}; allowed: at most {capacity}, what block_table_row holds")
    if envs.get("VDSA_VALIDATE"):
        pages = block_table_row[: -(-length // layout.block_size)]
        wrong = (pages < 0) | (pages >= cache.shape[0])
        check_values("block_table_row", pages, wrong, f"0 to {cache.shape[0] - 1}")
    return reference.gather_index_k(cache, block_table_row, length)
