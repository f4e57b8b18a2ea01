"""The indexer of a step, run through the metadata, and the check of some of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer import IndexerDecodeMetadata, PrefillChunk, decode_logits, decode_logits_backend
from vllm_dsa.ops import (
    LogitsBackend,
    ScaleFormat,
    fold_q,
    gather_index_k,
    mqa_logits,
    topk_indices,
)
from vllm_dsa.ops.row_map import tokens_of_rows
from vllm_dsa.runner.oracle import RowCheck, check_row, expected_logits
from vllm_dsa.runner.splitmix import Uint64Array
from vllm_dsa.runner.synthetic import SyntheticIndexer


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Query rows of one request in a step.

    Attributes
    ----------
    request_index : int
        For messages.
    contents : ndarray of uint64
        Contents of the whole sequence, positions 0 .. stop - 1, as the step feeds it.
    start : int
        Position of the first query row; rows are ``start .. len(contents) - 1``.
    """

    request_index: int
    contents: Uint64Array
    start: int


class StepVerifier:
    """Runs the indexer of a step and compares rows with the oracle.

    Parameters
    ----------
    indexer : SyntheticIndexer
        Gives the queries.
    cache : torch.Tensor
        The paged index-K cache.
    topk : int
        Indices per row.
    caps : PagedMQALogitsCapabilities
        What the steps were planned for; decides who computes the decode logits.
    rows_per_step : int
        Rows checked in each part (decode, prefill) of a step.
    seed : int
        Of the choice of rows.
    """

    def __init__(
        self,
        indexer: SyntheticIndexer,
        cache: torch.Tensor,
        topk: int,
        caps: PagedMQALogitsCapabilities,
        rows_per_step: int,
        seed: int,
    ) -> None:
        self._caps = caps
        self._indexer = indexer
        self._cache = cache
        self._topk = topk
        self._rows_per_step = rows_per_step
        self._random = np.random.default_rng(seed)

    def check_decode(
        self, metadata: IndexerDecodeMetadata, requests: Sequence[QueryRows]
    ) -> Iterator[tuple[str, RowCheck]]:
        """Run logits and top-k of all decode rows, then yield a verdict for each checked one."""
        positions = np.concatenate([np.arange(r.start, len(r.contents)) for r in requests])
        contents = np.concatenate([r.contents[r.start :] for r in requests])
        row_q, row_weights = self._queries(contents, positions, metadata.row_to_token)
        backend = decode_logits_backend(metadata, row_q, self._caps)
        row_logits = decode_logits(metadata, row_q, row_weights, self._cache, self._caps)
        logits = tokens_of_rows(row_logits, metadata.token_to_row)
        lens = tokens_of_rows(metadata.context_lens.flatten(), metadata.token_to_row)
        topk_indices(logits, lens, self._topk, out=metadata.topk_indices)
        starts = np.cumsum([0] + [len(r.contents) - r.start for r in requests])
        for token in self._sample(len(positions)):
            which = int(np.searchsorted(starts, token, side="right")) - 1
            request, position = requests[which], int(positions[token])
            expected = expected_logits(self._indexer, request.contents[: position + 1])
            check = check_row(logits[token], metadata.topk_indices[token], expected, self._topk, backend)
            yield f"decode, request {request.request_index}, position {position}", check

    def check_prefill(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[QueryRows]
    ) -> Iterator[tuple[str, RowCheck]]:
        """Run logits and top-k of some prefill rows and yield a verdict for each.

        All rows of a long chunk would be hours on a CPU: a row is run alone, over the keys that its chunk gathers.
        """
        positions = np.concatenate([np.arange(r.start, len(r.contents)) for r in requests])
        owner = np.repeat(np.arange(len(requests)), [len(r.contents) - r.start for r in requests])
        for token in self._sample(len(positions)):
            request, position = requests[owner[token]], int(positions[token])
            chunk = next(c for c in chunks if c.token_start <= token < c.token_stop)
            logits, selected = self._prefill_row(chunk, token, request.contents[position], position)
            expected = expected_logits(self._indexer, request.contents[: position + 1])
            check = check_row(logits, selected, expected, self._topk, LogitsBackend.REFERENCE)
            yield f"prefill, request {request.request_index}, position {position}", check

    def _prefill_row(
        self, chunk: PrefillChunk, token: int, content: np.uint64, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = chunk.cu_seq_lens.diff().tolist()
        gathered = [
            gather_index_k(self._cache, row, length) for row, length in zip(chunk.block_table, lengths, strict=True)
        ]
        k, k_scale = (torch.cat(parts) for parts in zip(*gathered, strict=True))
        row = slice(token - chunk.token_start, token - chunk.token_start + 1)
        starts, ends = chunk.row_starts[row], chunk.row_ends[row]
        q, weights = self._queries(np.array([content]), np.array([position]))
        logits = mqa_logits(q, k, k_scale, weights, starts, ends)
        selected = topk_indices(logits, ends - starts, self._topk, starts=starts)
        return logits[0, int(starts) :], selected[0]

    def _queries(
        self, contents: Uint64Array, positions: np.ndarray, row_to_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indexer = self._indexer
        q, weights = indexer.index_q(contents)
        return fold_q(
            q,
            weights,
            positions=torch.from_numpy(positions).to(indexer.device),
            cos_sin=indexer.cos_sin,
            style=indexer.rope_style,
            scale_format=ScaleFormat.FP32,
            row_to_token=row_to_token,
        )

    def _sample(self, count: int) -> list[int]:
        size = min(self._rows_per_step, count)
        return sorted(self._random.choice(count, size=size, replace=False).tolist())
