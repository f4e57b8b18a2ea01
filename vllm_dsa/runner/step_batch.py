"""From a scheduled step to what the builder and the cache writer take."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_dsa.indexer import DecodeBatch, PrefillBatch
from vllm_dsa.runner.request import Request
from vllm_dsa.runner.scheduled_step import ScheduledDecode, ScheduledPrefill


class BlockTable:
    """The page ids of the running requests, one row each; a row grows with its request.

    Parameters
    ----------
    max_num_seqs, width : int
        Rows and columns.
    """

    def __init__(self, max_num_seqs: int, width: int) -> None:
        self._pages = np.zeros((max_num_seqs, width), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs))
        self._row_of: dict[Request, int] = {}
        self._num_pages = np.zeros(max_num_seqs, dtype=np.int64)

    def update(self, request: Request) -> None:
        """Give a scheduled request a row if it has none, and add the pages that it got since the last call."""
        if request not in self._row_of:
            self._row_of[request] = self._free_rows.pop()
        row = self._row_of[request]
        known = self._num_pages[row]
        self._pages[row, known : len(request.block_ids)] = request.block_ids[known:]
        self._num_pages[row] = len(request.block_ids)

    def remove(self, request: Request) -> None:
        """Take the row back from a request that finished or was preempted."""
        row = self._row_of.pop(request, None)
        if row is not None:
            self._num_pages[row] = 0
            self._free_rows.append(row)

    def rows(self, requests: Sequence[Request]) -> npt.NDArray[np.int32]:
        """Return a copy ``(requests, width)`` int32 in the given order. Columns past a request's pages are stale."""
        return self._pages[[self._row_of[request] for request in requests]]

    def slots(self, request: Request, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the cache slots of positions ``start .. stop - 1``."""
        positions = np.arange(start, stop)
        pages = self._pages[self._row_of[request]].astype(np.int64)
        page, offset = np.divmod(positions, request.block_size)
        slots: npt.NDArray[np.int64] = pages[page] * request.block_size + offset
        return slots


def decode_batch(decodes: Sequence[ScheduledDecode], table: BlockTable, device: torch.device) -> DecodeBatch:
    """Return the decode part of a step as the builder takes it."""
    starts = _query_start_loc([decode.depth for decode in decodes])
    seq_lens = np.array([decode.seq_len for decode in decodes], dtype=np.int32)
    pages = table.rows([decode.request for decode in decodes])
    return DecodeBatch(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=torch.from_numpy(pages).to(device),
        max_seq_len=int(seq_lens.max(initial=0)),
    )


def prefill_batch(prefills: Sequence[ScheduledPrefill], table: BlockTable, device: torch.device) -> PrefillBatch:
    """Return the prefill part of a step as the builder takes it."""
    return PrefillBatch(
        query_start_loc_cpu=_query_start_loc([prefill.stop - prefill.start for prefill in prefills]),
        seq_lens_cpu=torch.tensor([prefill.stop for prefill in prefills], dtype=torch.int32),
        block_table=torch.from_numpy(table.rows([prefill.request for prefill in prefills])).to(device),
    )


def _query_start_loc(depths: Sequence[int]) -> torch.Tensor:
    starts = np.zeros(len(depths) + 1, dtype=np.int32)
    np.cumsum(depths, out=starts[1:])
    return torch.from_numpy(starts)
