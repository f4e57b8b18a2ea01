"""Refusals of a bad batch, made before any buffer is written."""

from operator import sub

import torch

from vllm_dsa.indexer.batch import DecodeBatch, PrefillBatch
from vllm_dsa.indexer.config import IndexerConfig


def check_decode_batch(batch: DecodeBatch, config: IndexerConfig, device: torch.device) -> tuple[int, ...]:
    """Raise ``TypeError`` or ``ValueError`` unless the batch is as documented; return the depths of its requests."""
    num_reqs = batch.num_reqs
    _check_tensor("query_start_loc", batch.query_start_loc, (num_reqs + 1,), device)
    _check_tensor("seq_lens", batch.seq_lens, (num_reqs,), device)
    _check_tensor("block_table", batch.block_table, (num_reqs, None), device)
    _check_tensor("query_start_loc_cpu", batch.query_start_loc_cpu, (num_reqs + 1,), torch.device("cpu"))
    if num_reqs > config.max_num_seqs:
        raise ValueError(f"the batch has {num_reqs} requests, config.max_num_seqs is {config.max_num_seqs}")
    starts = batch.query_start_loc_cpu.tolist()
    _check_starts_at_zero(starts[0])
    num_tokens = starts[-1]
    if num_tokens > config.max_num_tokens:
        raise ValueError(f"the batch has {num_tokens} query rows, config.max_num_tokens is {config.max_num_tokens}")
    if batch.max_seq_len < 0:
        raise ValueError(f"max_seq_len must not be negative, got {batch.max_seq_len}")
    check_table_width(batch.block_table, batch.max_seq_len, config)
    return tuple(map(sub, starts[1:], starts))


def check_decode_values(batch: DecodeBatch) -> None:
    """Raise ``ValueError`` if device values break the contract. Syncs: for ``VDSA_VALIDATE=1`` only."""
    if not torch.equal(batch.query_start_loc.cpu(), batch.query_start_loc_cpu):
        raise ValueError("query_start_loc and query_start_loc_cpu differ")
    if batch.num_reqs and int(batch.seq_lens.max()) > batch.max_seq_len:
        raise ValueError(f"seq_lens reach {int(batch.seq_lens.max())}, max_seq_len says {batch.max_seq_len}")
    if batch.num_reqs and int(batch.seq_lens.min()) < 0:
        raise ValueError(f"seq_lens must not be negative, got {int(batch.seq_lens.min())}")


def check_prefill_batch(batch: PrefillBatch, config: IndexerConfig, device: torch.device) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless the batch has the documented shapes, dtypes and values."""
    cpu = torch.device("cpu")
    num_reqs = batch.seq_lens_cpu.shape[0] if batch.seq_lens_cpu.dim() == 1 else -1
    _check_tensor("seq_lens_cpu", batch.seq_lens_cpu, (None,), cpu)
    _check_tensor("query_start_loc_cpu", batch.query_start_loc_cpu, (num_reqs + 1,), cpu)
    _check_tensor("block_table", batch.block_table, (num_reqs, None), device)
    _check_starts_at_zero(int(batch.query_start_loc_cpu[0]))
    depths = batch.query_start_loc_cpu.diff()
    bad = ((depths < 0) | (depths > batch.seq_lens_cpu)).nonzero()
    if len(bad):
        request = int(bad[0])
        raise ValueError(
            f"prefill request {request} has {int(depths[request])} query rows and seq_len "
            f"{int(batch.seq_lens_cpu[request])}: rows must be in [0, seq_len]"
        )
    if num_reqs:
        check_table_width(batch.block_table, int(batch.seq_lens_cpu.max()), config)


def check_table_width(block_table: torch.Tensor, max_seq_len: int, config: IndexerConfig) -> None:
    """Raise ``ValueError`` if the table is wider than the buffers, or too narrow for `max_seq_len`."""
    width = block_table.shape[1]
    if width > config.block_table_width:
        raise ValueError(f"block_table has {width} columns, config.block_table_width is {config.block_table_width}")
    reach = width * config.max_table_len // config.block_table_width
    if max_seq_len > reach:
        raise ValueError(f"block_table has {width} columns, which reach {reach} tokens, max_seq_len is {max_seq_len}")


def _check_starts_at_zero(first: int) -> None:
    if first != 0:
        raise ValueError(f"query_start_loc_cpu must start at 0, got {first}")


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    have = tensor.shape
    # Two comparisons instead of a loop: this runs for four tensors in every step.
    if len(have) != len(shape) or shape[0] not in (None, have[0]) or shape[-1] not in (None, have[-1]):
        wanted = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")
