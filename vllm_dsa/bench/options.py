"""What to measure, and the command line that measures it again."""

from collections.abc import Collection
from dataclasses import dataclass

_FLAGS = {
    "contexts": "--contexts",
    "batches": "--batches",
    "next_ns": "--next-n",
    "mixes": "--mixes",
    "heads": "--heads",
    "block_size": "--block-size",
    "iters": "--iters",
    "seed": "--seed",
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The grid and the settings of a benchmark.

    Attributes
    ----------
    contexts : tuple of int
        Tokens that the last query row of a request sees.
    batches : tuple of int
        Requests per step.
    next_ns : tuple of int
        Query rows per request of the uniform cases.
    mixes : bool
        Also measure ragged depths and ragged lengths.
    heads : int
        Indexer heads.
    block_size : int
        Tokens per page.
    iters : int
        Timed repeats of each form.
    seed : int
        Of keys, queries and page order.

    Raises
    ------
    ValueError
        If a list is empty or repeats itself, a number is below 1, or a context is shorter than the deepest request.
    """

    contexts: tuple[int, ...] = (4096, 32768, 131072)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    next_ns: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    mixes: bool = True
    heads: int = 64
    block_size: int = 64
    iters: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("contexts", "batches", "next_ns"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(f"{_FLAGS[name]} must be distinct whole numbers of at least 1, got {list(values)}")
        for name in ("heads", "block_size", "iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_FLAGS[name]} must be at least 1, got {getattr(self, name)}")
        deepest = max(*self.next_ns, 4)
        if min(self.contexts) < deepest:
            raise ValueError(f"--contexts must be at least {deepest}, a request's rows, got {min(self.contexts)}")

    def command(self, which: str, unused: Collection[str] = ()) -> str:
        """Return the full command line of benchmark `which`, leaving out the options that it has not."""
        parts = [f"vllm-dsa bench {which}"]
        for name, flag in _FLAGS.items():
            if name in unused:
                continue
            value = getattr(self, name)
            if isinstance(value, bool):
                parts.append(flag if value else f"--no-{flag[2:]}")
            else:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                parts.append(f"{flag} {text}")
        return " ".join(parts)
