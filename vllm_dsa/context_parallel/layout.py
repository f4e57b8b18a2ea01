"""The arithmetic of DCP: tokens go round the ranks in runs of `interleave`."""

from dataclasses import dataclass
from typing import overload

import torch


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """How the cached tokens of a request are spread over the ranks of a DCP group.

    Token ``t`` lives on rank ``(t // interleave) % size``, as in vLLM and (with interleave 1) SGLang.

    Attributes
    ----------
    size, rank : int
        The group's size and this process's place in it.
    interleave : int
        Neighbouring tokens that stay on one rank.
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

        With ``size == 1`` the argument itself is returned. Lengths must not be negative (not checked). A new token
        grows exactly one rank's length, its owner's. Works on an int or an integer tensor of any shape; graph safe.
        """
        if self.size == 1:
            return global_lens
        period = self.size * self.interleave
        whole = global_lens // period * self.interleave
        rest = global_lens % period - self.rank * self.interleave
        if isinstance(rest, torch.Tensor):
            return whole + rest.clamp(0, self.interleave)
        return whole + min(max(rest, 0), self.interleave)
