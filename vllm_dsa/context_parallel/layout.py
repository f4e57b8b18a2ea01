"""The arithmetic of DCP: tokens go round the ranks in runs of `interleave`."""

from dataclasses import dataclass
from typing import TypeVar, overload

import torch

_IntOrTensor = TypeVar("_IntOrTensor", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """How the cached tokens of a request are spread over the ranks of a DCP group.

    Token ``t`` lives on rank ``(t // interleave) % size``, as in vLLM and (with interleave 1) SGLang. Any size, not
    only powers of two. Every method takes an int or an integer tensor of any shape and device, keeps its dtype, and is
    graph safe; negative positions and lengths are not checked. With ``size == 1`` lengths and positions are returned
    as they are: the same object.

    Attributes
    ----------
    size, rank : int
        The group's size and this process's place in it.
    interleave : int
        Neighbouring tokens that stay on one rank.

    Raises
    ------
    ValueError
        If one of them is out of range.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {self.rank}")
        if self.interleave < 1:
            raise ValueError(f"interleave must be at least 1, got {self.interleave}")

    @overload
    def local_lens(self, global_lens: int) -> int: ...
    @overload
    def local_lens(self, global_lens: torch.Tensor) -> torch.Tensor: ...
    def local_lens(self, global_lens: int | torch.Tensor) -> int | torch.Tensor:
        """Return how many of the first `global_lens` tokens live on this rank.

        Over the ranks these sum to `global_lens`, and a new token grows exactly one rank's length, its owner's. So they
        do not advance by one per query row: localise each row's own bound, never a request's length minus an offset.
        """
        if self.size == 1:
            return global_lens
        period = self.size * self.interleave
        whole = global_lens // period * self.interleave
        rest = global_lens % period - self.rank * self.interleave
        if isinstance(rest, torch.Tensor):
            return whole + rest.clamp(0, self.interleave)
        return whole + min(max(rest, 0), self.interleave)

    def local_max_len(self, max_len: int) -> int:
        """Return this rank's length where the longest global one is `max_len`, and at least 1.

        Local lengths never shrink when the global one grows, so the longest request has the longest share. A batch of
        empty shards still has to be legal for a kernel that schedules by this bound.
        """
        return max(self.local_lens(max_len), 1)

    def owner(self, positions: _IntOrTensor) -> _IntOrTensor:
        """Return the rank on which each position lives."""
        return positions // self.interleave % self.size

    def local_pos(self, positions: _IntOrTensor) -> _IntOrTensor:
        """Return where each position lies among the tokens of its owner, whichever rank that is."""
        if self.size == 1:
            return positions
        return positions // (self.size * self.interleave) * self.interleave + positions % self.interleave

    def global_pos(self, local_positions: _IntOrTensor) -> _IntOrTensor:
        """Return the positions of this rank's tokens; the inverse of :meth:`local_pos` on what this rank owns."""
        if self.size == 1:
            return local_positions
        run = local_positions // self.interleave * self.size + self.rank
        return run * self.interleave + local_positions % self.interleave

    def check_block_size(self, block_size: int) -> None:
        """Check that a page's tokens can be shared out evenly.

        A page stands for ``block_size * size`` consecutive tokens, of which every rank holds `block_size`. That needs
        whole runs: `interleave` divides `block_size` (any does where ``size == 1``).

        Raises
        ------
        ValueError
            If it does not.
        """
        if self.size > 1 and block_size % self.interleave:
            raise ValueError(f"block_size is {block_size}; allowed: multiples of the interleave, {self.interleave}")
