"""Random inputs of a step: a pool of pages, block tables of its own for each copy, queries."""

from collections.abc import Sequence

import torch

from vllm_dsa.bench.cases import BenchCase
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer import DecodeBatch, IndexerConfig, IndexerMetadataBuilder
from vllm_dsa.ops import IndexKCacheLayout, ScaleFormat, fold_q, store_index_k

TOPK = 2048
# Steps over pages of their own, so that a repeat never finds the pages of the one before it.
COPIES = 2
_FILL_TOKENS = 1 << 20


class PagePool:
    """Pages filled with random keys, enough for `COPIES` copies of the largest case.

    Parameters
    ----------
    cases : sequence of BenchCase
        Every case that will take pages.
    layout : IndexKCacheLayout
        Page geometry.
    seed : int
        Of keys and page order.
    device : torch.device
        Where the pages live.
    """

    def __init__(self, cases: Sequence[BenchCase], layout: IndexKCacheLayout, seed: int, device: torch.device) -> None:
        self.layout = layout
        self._num_pages = COPIES * max(sum(case.pages(layout.block_size)) for case in cases)
        self._page_order = torch.Generator().manual_seed(seed)
        self._device = device
        self.cache = layout.allocate(self._num_pages, device)
        self._fill(torch.Generator(device).manual_seed(seed))

    def tables(self, case: BenchCase) -> list[torch.Tensor]:
        """Return `COPIES` int32 tables ``(requests, width)`` of pages that no other row or copy has."""
        pages = case.pages(self.layout.block_size)
        order = torch.randperm(self._num_pages, generator=self._page_order).int()
        tables = torch.zeros(COPIES * case.batch, max(pages), dtype=torch.int32)
        taken = 0
        for row, count in zip(tables, pages * COPIES, strict=True):
            row[:count] = order[taken : taken + count]
            taken += count
        return list(tables.to(self._device).view(COPIES, case.batch, -1))

    def _fill(self, generator: torch.Generator) -> None:
        num_tokens = self._num_pages * self.layout.block_size
        for first in range(0, num_tokens, _FILL_TOKENS):
            slots = torch.arange(first, min(first + _FILL_TOKENS, num_tokens), device=self._device)
            k = torch.randn(len(slots), self.layout.head_dim, generator=generator, device=self._device)
            store_index_k(k, self.cache, slots)


def random_queries(
    num_tokens: int, heads: int, head_dim: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(T, heads, head_dim)`` FP8 queries and ``(T, heads)`` signed folded weights."""
    generator = torch.Generator(device).manual_seed(seed)
    q = torch.randn(num_tokens, heads, head_dim, generator=generator, device=device)
    weights = torch.randn(num_tokens, heads, generator=generator, device=device)
    return fold_q(q, weights, scale_format=ScaleFormat.FP32)


def decode_batch(case: BenchCase, table: torch.Tensor) -> DecodeBatch:
    """Return the case as an engine would hand it to the builder, on the table's device."""
    starts = torch.tensor([0, *case.depths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return DecodeBatch(
        query_start_loc=starts.to(table.device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=table.device),
        block_table=table,
        max_seq_len=max(case.seq_lens),
    )


def case_builder(
    case: BenchCase,
    caps: PagedMQALogitsCapabilities,
    layout: IndexKCacheLayout,
    heads: int,
    backend: str,
    device: torch.device,
) -> IndexerMetadataBuilder:
    """Return a builder whose buffers just fit the case, with `backend` as ``VDSA_LOGITS_BACKEND``."""
    config = IndexerConfig(
        next_n=max(case.depths),
        max_num_seqs=case.batch,
        block_table_width=max(case.pages(layout.block_size)),
        max_num_tokens=case.num_tokens,
        block_size=layout.block_size,
        num_heads=heads,
        head_dim=layout.head_dim,
        topk=TOPK,
        logits_backend=backend,
    )
    return IndexerMetadataBuilder(config, caps, device)
