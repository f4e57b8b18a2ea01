"""Decode steps for the tests of DCP: requests in a pool of virtual pages, as an engine would hold them."""

from dataclasses import dataclass

import hypothesis.strategies as st
import torch

from vllm_dsa.context_parallel import DcpLayout, ReqToToken

POISON = 0x7F7F7F7F


@st.composite
def layouts(draw, max_interleave=16):
    size = draw(st.integers(1, 9))
    return DcpLayout(size, draw(st.integers(0, size - 1)), draw(st.integers(1, max_interleave)))


@dataclass
class Requests:
    """Requests whose every token has a slot; what an engine never wrote is poison.

    Attributes
    ----------
    lengths : list of int
        Tokens that have a slot.
    req_to_token, req_pool_indices : torch.Tensor
        As in :class:`ReqToToken`.
    block_table : torch.Tensor
        The same pages, a column each.
    """

    lengths: list[int]
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    block_table: torch.Tensor

    def sources(self):
        return ReqToToken(self.req_to_token, self.req_pool_indices), self.block_table


def draw_requests(lengths, layout, block_size, max_seq_len, generator, *, width=None, pool_dtype=torch.int32):
    """Give requests of these lengths pages anywhere in a pool, and a row anywhere in the table of slots."""
    tokens_per_page = block_size * layout.size
    counts = [-(-length // tokens_per_page) for length in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=generator)
    pool = len(lengths) + 2
    rows = torch.randperm(pool, generator=generator)[: len(lengths)]
    req_to_token = torch.full((pool, max_seq_len), POISON, dtype=pool_dtype)
    columns = -(-max_seq_len // tokens_per_page) if width is None else width
    block_table = torch.full((len(lengths), columns), POISON, dtype=torch.int32)
    start = 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = pages[start : start + count]
        start += count
        slots = (mine[:, None] * tokens_per_page + torch.arange(tokens_per_page)).flatten()[:length]
        req_to_token[rows[request], :length] = slots.to(pool_dtype)
        block_table[request, :count] = mine.to(torch.int32)
    return Requests(lengths, req_to_token, rows, block_table)
