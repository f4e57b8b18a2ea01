"""Random ragged decode steps full of poison, and what their logits must be: the proof of the ragged kernel."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dsa.ops import IndexKCacheLayout
from vllm_dsa.reference import gather_index_k

TILE = 64
# Hopper's FP8 tensor cores keep about 14 bits of a sum of products, counted from the largest of them. Of 5 million
# logits the worst was off by 0.53 of this share of its products' sizes, and one of 13000 by more than a quarter of it.
ACCUMULATION_ERROR = 2.0**-13
_LARGE_ERROR, _MOST_LARGE_ERRORS = 0.25, 1e-3
_POISON_PAGE = 0x7FFFFFFF
_FP8_NAN = 0x7F
_BORDERS = (0, 1, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True, slots=True)
class RaggedShape:
    """What a random case is drawn for.

    Attributes
    ----------
    depths : tuple of int
        Query rows of each request, 0 included.
    longest : int
        Upper limit of the rows' lengths.
    heads, block_size : int
    page_gap : int
        Bytes from the end of a page to the next, a multiple of 16.
    shares_pages : bool
        Whether all requests have the first pages of request 0.
    """

    depths: tuple[int, ...]
    longest: int
    heads: int = 64
    block_size: int = 64
    page_gap: int = 0
    shares_pages: bool = False


class RaggedCase:
    """One random step. Everything that must not be read is NaN, or a page id that does not exist.

    Parameters
    ----------
    shape : RaggedShape
    seed : int
    device : torch.device
        A CUDA device.
    """

    def __init__(self, shape: RaggedShape, seed: int, device: torch.device) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        generator = torch.Generator(device).manual_seed(seed)
        self.lens = _random_lens(shape, rng)
        self._starts = starts = np.concatenate([[0], np.cumsum(shape.depths)])
        self._longest = longest = [int(self.lens[a:b].max(initial=0)) for a, b in itertools.pairwise(starts)]
        pages, table, used = _deal_pages(shape, longest, rng)
        self.context_lens = torch.from_numpy(self.lens).to(device)
        self.query_start_loc = torch.from_numpy(starts.astype(np.int32)).to(device)
        self.block_table = torch.from_numpy(table).to(device)
        self.cache = _poisoned_cache(shape, pages, torch.from_numpy(used).to(device), generator)
        rows = len(self.lens)
        q = 4 * torch.randn(rows, shape.heads, 128, generator=generator, device=device)
        self.q = q.to(torch.float8_e4m3fn)
        self.weights = torch.randn(rows, shape.heads, generator=generator, device=device)
        self.tile_ends = torch.from_numpy(-(-np.repeat(longest, shape.depths) // TILE) * TILE).to(device)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float64 logits ``(rows, longest)`` and how far the tensor cores may be off each of them."""
        rows = torch.zeros(2, len(self.lens), self.shape.longest, dtype=torch.float64, device=self.q.device)
        for request, ((first, end), length) in enumerate(
            zip(itertools.pairwise(self._starts.tolist()), self._longest, strict=True)
        ):
            if length:
                rows[:, first:end, :length] = self._expected_of(request, slice(first, end), length)
        return rows[0], rows[1]

    def _expected_of(self, request: int, rows: slice, length: int) -> torch.Tensor:
        values, scales = gather_index_k(self.cache, self.block_table[request], length)
        keys = values.double()
        q, weights = self.q[rows].double(), self.weights[rows].double().unsqueeze(1)
        logits = (weights @ (q @ keys.T).clamp_(min=0)).squeeze(1)
        sizes = (weights.abs() @ (q.abs() @ keys.abs().T)).squeeze(1)
        return torch.stack([logits, ACCUMULATION_ERROR * sizes]) * scales.double()

    def faults(self, out: torch.Tensor, fill_to: int = 0) -> list[str]:
        """Say what is wrong with a result that was NaN before, as text; nothing if it is right.

        Parameters
        ----------
        out : torch.Tensor
            ``(rows, width)``.
        fill_to : int
            As it was asked of the kernel.
        """
        width = out.shape[1]
        logits, bounds = (_fit(values, width) for values in self.expected())
        errors = (out.double() - logits).abs()
        if out.dtype == torch.bfloat16:
            errors = (errors - logits.abs() * 2.0**-8).clamp(min=0)
        column = torch.arange(width, device=out.device)
        live = column < self.context_lens.clamp(min=0).unsqueeze(1)
        written = column < self.tile_ends.clamp(min=fill_to).unsqueeze(1)
        checks = {
            "a logit is off": live & ~(errors <= bounds),
            "too many logits are off": _if_many(live & ~(errors <= _LARGE_ERROR * bounds), of=live),
            "no -inf past a length": ~live & written & (out != float("-inf")),
            "written past the last tile": ~written & ~out.isnan(),
        }
        return [f"{what}, first at {wrong.nonzero()[0].tolist()}" for what, wrong in checks.items() if wrong.any()]


def _if_many(wrong: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    # A few may be in a small case.
    return wrong & (wrong.sum() > 3 + _MOST_LARGE_ERRORS * of.sum())


def _random_lens(shape: RaggedShape, rng: np.random.Generator) -> np.ndarray:
    lens: list[int] = []
    for depth in shape.depths:
        around = int(rng.choice([*_BORDERS, shape.longest, int(rng.integers(0, shape.longest + 1))]))
        lens += (around + rng.integers(-70, 71, depth) * rng.integers(0, 2)).tolist()
    return np.clip(lens, 0, shape.longest).astype(np.int32)


def _deal_pages(
    shape: RaggedShape, longest: Sequence[int], rng: np.random.Generator
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return how many pages there are, the block table and which tokens of each page are live."""
    block_size = shape.block_size
    counts = [-(-length // block_size) for length in longest]
    pages = sum(counts) + 2
    order = rng.permutation(pages).astype(np.int32)
    table = np.full((len(counts), max(counts, default=0) + 2), _POISON_PAGE, dtype=np.int32)
    used = np.zeros((pages, block_size), dtype=bool)
    taken = 0
    for request, (count, length) in enumerate(zip(counts, longest, strict=True)):
        table[request, :count] = order[taken : taken + count]
        taken += count
        shared = min(count, counts[0]) // 2 if shape.shares_pages else 0
        table[request, :shared] = table[0, :shared]
        for page, first in zip(table[request, :count], range(0, length, block_size), strict=True):
            used[page, : length - first] = True
    return pages, table, used


def _poisoned_cache(shape: RaggedShape, pages: int, used: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    block_size, device = shape.block_size, used.device
    page_bytes = IndexKCacheLayout(block_size).page_bytes
    memory = torch.full((pages, page_bytes + shape.page_gap), _FP8_NAN, dtype=torch.uint8, device=device)
    keys = torch.randn(pages, block_size, 128, generator=generator, device=device).to(torch.float8_e4m3fn)
    keys = torch.where(used.unsqueeze(2), keys.view(torch.uint8), _FP8_NAN)
    scales = torch.rand(pages, block_size, generator=generator, device=device) + 0.5
    scales = torch.where(used, scales, float("nan"))
    memory[:, : block_size * 128] = keys.view(pages, -1)
    memory[:, block_size * 128 : page_bytes] = scales.view(torch.uint8)
    return memory.as_strided((pages, block_size, 1, 132), (memory.stride(0), 132, 132, 1))


def _fit(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, max(0, width - values.shape[1])))[:, :width]
