"""The steps that are measured: a grid of uniform ones, and mixes of depths and of lengths. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.reference import IndexKCacheLayout

_DEPTH_PATTERNS = ((1, 2, 3, 4), (3, 3, 3, 1))
# The depths of one and of two drafts: the commonest, and the one that no SM90 kernel takes.
_ONE_LONG_DEPTHS = (2, 3)
_LONG_OVER_SHORT = 32


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One decode step.

    Attributes
    ----------
    name : str
        ``n=3``, ``mix 3,3,3,1`` or ``one long n=2``.
    context : int
        Tokens of the longest request.
    depths, seq_lens : tuple of int
        Query rows and tokens of each request, the rows included.
    """

    name: str
    context: int
    depths: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Requests of the step."""
        return len(self.depths)

    @property
    def num_tokens(self) -> int:
        """Query rows of the step."""
        return sum(self.depths)

    @property
    def label(self) -> str:
        """Name, context and batch, for messages."""
        return f"{self.name}, context {self.context}, batch {self.batch}"

    def pages(self, block_size: int) -> list[int]:
        """Return the pages of each request."""
        return [-(-length // block_size) for length in self.seq_lens]

    def token_bounds(self) -> list[tuple[int, int]]:
        """Return each token's request and how many tokens of it the token sees."""
        return [
            (request, length - depth + 1 + row)
            for request, (depth, length) in enumerate(zip(self.depths, self.seq_lens, strict=True))
            for row in range(depth)
        ]

    def kv_bytes(self, layout: IndexKCacheLayout) -> int:
        """Return the bytes of every request's pages, read once."""
        return sum(self.pages(layout.block_size)) * layout.page_bytes

    def floor_bytes(self, layout: IndexKCacheLayout, heads: int) -> int:
        """Return the fewest bytes that the logits can move: pages, queries and weights once, a logit per pair."""
        queries = self.num_tokens * heads * (layout.head_dim + 4)
        logits = 4 * sum(bound for _, bound in self.token_bounds())
        return self.kv_bytes(layout) + queries + logits


def bench_cases(options: BenchOptions) -> Iterator[BenchCase]:
    """Yield the cases of the options, small contexts and batches first."""
    for context in options.contexts:
        for batch in options.batches:
            yield from _uniform_cases(context, batch, options.next_ns)
            if options.mixes:
                yield from _mixed_cases(context, batch)


def _uniform_cases(context: int, batch: int, next_ns: tuple[int, ...]) -> Iterator[BenchCase]:
    for next_n in next_ns:
        yield BenchCase(f"n={next_n}", context, (next_n,) * batch, (context,) * batch)


def _mixed_cases(context: int, batch: int) -> Iterator[BenchCase]:
    for pattern in _DEPTH_PATTERNS:
        if batch >= len(pattern):
            depths = tuple(pattern[request % len(pattern)] for request in range(batch))
            yield BenchCase(f"mix {','.join(map(str, pattern))}", context, depths, (context,) * batch)
    for depth in _ONE_LONG_DEPTHS:
        if batch > 1:
            short = max(context // _LONG_OVER_SHORT, depth)
            lengths = (context, *(short,) * (batch - 1))
            yield BenchCase(f"one long n={depth}", context, (depth,) * batch, lengths)
