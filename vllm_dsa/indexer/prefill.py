"""Prefill chunks: query rows whose logits fit a memory limit."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_dsa.indexer.batch import PrefillBatch, PrefillChunk
from vllm_dsa.indexer.config import IndexerConfig

_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of one chunk: whole requests, or a run of rows of a single one."""

    req_start: int
    req_stop: int
    token_start: int
    token_stop: int
    skip_kv_gather: bool = False


def build_prefill_chunks(batch: PrefillBatch, config: IndexerConfig) -> list[PrefillChunk]:
    """Cut a checked prefill batch into chunks, in order.

    Requests are packed greedily while ``rows * keys * 4`` bytes fit ``config.max_logits_bytes``; a request that alone
    exceeds it is cut along its rows, at least one a chunk. Keys are counted as the rank with the most holds them, so
    that all DCP ranks cut alike and their collectives match.
    """
    starts = batch.query_start_loc_cpu.tolist()
    keys = [_largest_share(int(length), config) for length in batch.seq_lens_cpu]
    return [_chunk(span, batch, config) for span in _spans(starts, keys, config.max_logits_bytes // _LOGIT_BYTES)]


def _largest_share(length: int, config: IndexerConfig) -> int:
    period = config.dcp.size * config.dcp.interleave
    whole, rest = divmod(length, period)
    return (whole * config.dcp.interleave + min(rest, config.dcp.interleave)) // config.compress_ratio


def _spans(starts: list[int], keys: list[int], max_elements: int) -> Iterator[_Span]:
    request = 0
    while request < len(keys):
        stop, total_keys = request, 0
        while stop < len(keys):
            rows = starts[stop + 1] - starts[request]
            if rows * (total_keys + keys[stop]) > max_elements:
                break
            total_keys += keys[stop]
            stop += 1
        if stop > request:
            yield _Span(request, stop, starts[request], starts[stop])
        else:
            stop = request + 1
            yield from _cut_rows(request, starts[request], starts[stop], max(1, max_elements // keys[request]))
        request = stop


def _cut_rows(request: int, start: int, stop: int, rows: int) -> Iterator[_Span]:
    for token in range(start, stop, rows):
        yield _Span(request, request + 1, token, min(token + rows, stop), skip_kv_gather=token > start)


def _chunk(span: _Span, batch: PrefillBatch, config: IndexerConfig) -> PrefillChunk:
    device = batch.block_table.device
    reqs = slice(span.req_start, span.req_stop)
    seq_lens = batch.seq_lens_cpu[reqs].long()
    starts = batch.query_start_loc_cpu[span.req_start : span.req_stop + 1].long()
    local_keys = config.dcp.local_lens(seq_lens) // config.compress_ratio
    cu_seq_lens = torch.cat([local_keys.new_zeros(1), local_keys.cumsum(0)])

    tokens = torch.arange(span.token_start, span.token_stop)
    request = torch.searchsorted(starts, tokens, right=True) - 1
    # A request's last row sees its whole length, each row before it one token less.
    visible = seq_lens[request] - (starts[request + 1] - 1 - tokens)
    row_starts = cu_seq_lens[request]
    row_ends = row_starts + config.dcp.local_lens(visible) // config.compress_ratio
    return PrefillChunk(
        token_start=span.token_start,
        token_stop=span.token_stop,
        req_start=span.req_start,
        req_stop=span.req_stop,
        cu_seq_lens=cu_seq_lens.to(device, torch.int32),
        total_seq_lens=int(cu_seq_lens[-1]),
        row_starts=row_starts.to(device, torch.int32),
        row_ends=row_ends.to(device, torch.int32),
        block_table=batch.block_table[reqs],
        skip_kv_gather=span.skip_kv_gather,
    )
