"""The memory of a merge over a DCP group, and how each method lays it out."""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_dsa.attn_result import OUT_DTYPES, DecodeAttnResult, LseBase
from vllm_dsa.ops._checks import check_enum, check_int

# Messages and what lies in them start at cache lines: strides are then multiples of 16 elements for every batch size,
# which is what Triton compiles a variant for.
_ALIGNMENT = 128


class MergeMethod(enum.Enum):
    """How the shards of a DCP group come together.

    Attributes
    ----------
    REDUCE_SCATTER : MergeMethod
        All-gather of the LSE, then a reduce-scatter of the weighted outputs over the heads.
    ALL_REDUCE : MergeMethod
        All-gather of the LSE, then an all-reduce: every rank has all heads, of which there may be any number.
    ALL_TO_ALL : MergeMethod
        One exchange of outputs and LSE over the heads, then the sum in float32, rounded once.
    """

    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


class Messages(NamedTuple):
    """What goes to, or comes from, each of W ranks in one exchange, and the views of what lies in it.

    Attributes
    ----------
    data : torch.Tensor
        ``(W, bytes)`` uint8, contiguous.
    outs, lses : torch.Tensor
        ``(W, T, H / W, V)``, and ``(W, T, H / W)`` float32: contiguous but for the first stride.
    """

    data: torch.Tensor
    outs: torch.Tensor
    lses: torch.Tensor


@dataclass(frozen=True, slots=True)
class MergeBuffers:
    """The memory of :func:`merge_lse` on one rank, allocated once for the largest batch; make it with `allocate`.

    Attributes
    ----------
    method : MergeMethod
        The method that it is for.
    size : int
        Ranks of the group.
    max_tokens, num_heads, v_dim : int
        The largest batch; heads before the merge.
    dtype : torch.dtype
        Of the outputs.
    sent, received, scaled, out, lse : torch.Tensor
        uint8, flat, of which a step uses a prefix: LSE or messages to send and as received, weighted outputs to
        reduce-scatter, the result.
    """

    method: MergeMethod
    size: int
    max_tokens: int
    num_heads: int
    v_dim: int
    dtype: torch.dtype
    sent: torch.Tensor
    received: torch.Tensor
    scaled: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls,
        method: MergeMethod,
        size: int,
        *,
        max_tokens: int,
        num_heads: int,
        v_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "MergeBuffers":
        """Allocate for batches of up to `max_tokens`.

        Parameters
        ----------
        method : MergeMethod
            The method.
        size : int
            Ranks of the group, at least 1.
        max_tokens : int
            Query rows of the largest batch, at least 1.
        num_heads, v_dim : int
            Of the outputs before the merge, at least 1. Where the heads are shared out (all methods but ALL_REDUCE),
            a multiple of `size`.
        dtype : torch.dtype
            Of the outputs: float32, bfloat16 or float16.
        device : torch.device or str
            Of the outputs.

        Raises
        ------
        TypeError, ValueError
            If an argument has a type or a value that is not allowed.
        """
        check_enum("method", method, MergeMethod)
        for name, value in (("size", size), ("max_tokens", max_tokens), ("num_heads", num_heads), ("v_dim", v_dim)):
            check_int(name, value, at_least=1)
        if dtype not in OUT_DTYPES:
            raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, OUT_DTYPES))}")
        if method is not MergeMethod.ALL_REDUCE and num_heads % size:
            raise ValueError(
                f"num_heads is {num_heads}; allowed: multiples of {size}, the group's size, or MergeMethod.ALL_REDUCE"
            )

        def flat(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.uint8, device=device)

        merged_heads = num_heads if method is MergeMethod.ALL_REDUCE else num_heads // size
        merged_bytes = max_tokens * merged_heads * v_dim * dtype.itemsize
        if method is MergeMethod.ALL_TO_ALL:
            sent = received = size * sum(_message_bytes(max_tokens, merged_heads, v_dim, dtype))
        else:
            sent = max_tokens * num_heads * 4
            received = size * sent
        return cls(
            method=method,
            size=size,
            max_tokens=max_tokens,
            num_heads=num_heads,
            v_dim=v_dim,
            dtype=dtype,
            sent=flat(sent),
            received=flat(received),
            scaled=flat(size * merged_bytes if method is MergeMethod.REDUCE_SCATTER else 0),
            out=flat(merged_bytes),
            lse=flat(max_tokens * merged_heads * 4),
        )

    @property
    def merged_heads(self) -> int:
        """Heads of the result."""
        return self.num_heads if self.method is MergeMethod.ALL_REDUCE else self.num_heads // self.size

    def merged(self, num_tokens: int) -> DecodeAttnResult:
        """Return the views in which a merge leaves its result."""
        return DecodeAttnResult(
            _view(self.out, self.dtype, num_tokens, self.merged_heads, self.v_dim),
            _view(self.lse, torch.float32, num_tokens, self.merged_heads),
            LseBase.E,
        )

    def gathered_lses(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(T, H)`` and ``(W, T, H)`` float32, contiguous: where this rank's LSE, and where all ranks' go."""
        return (
            _view(self.sent, torch.float32, num_tokens, self.num_heads),
            _view(self.received, torch.float32, self.size, num_tokens, self.num_heads),
        )

    def scaled_parts(self, num_tokens: int) -> torch.Tensor:
        """Return ``(P, T, H / P, V)``, contiguous: where the weighted outputs go, that the ranks then sum."""
        if self.method is MergeMethod.ALL_REDUCE:
            return self.merged(num_tokens).out.unsqueeze(0)
        return _view(self.scaled, self.dtype, self.size, num_tokens, self.merged_heads, self.v_dim)

    def messages(self, num_tokens: int) -> tuple[Messages, Messages]:
        """Return what an exchange sends, and what it receives."""
        return self._messages(self.sent, num_tokens), self._messages(self.received, num_tokens)

    def _messages(self, memory: torch.Tensor, num_tokens: int) -> Messages:
        size, heads, v_dim = self.size, self.merged_heads, self.v_dim
        lse_bytes, out_bytes = _message_bytes(num_tokens, heads, v_dim, self.dtype)
        data = _view(memory, torch.uint8, size, lse_bytes + out_bytes)
        lses = data.view(torch.float32)[:, : num_tokens * heads]
        outs = data[:, lse_bytes:].view(self.dtype)[:, : num_tokens * heads * v_dim]
        return Messages(data, outs.view(size, num_tokens, heads, v_dim), lses.view(size, num_tokens, heads))


def _message_bytes(num_tokens: int, heads: int, v_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the LSE, which come first, and those of the outputs."""
    return _aligned(num_tokens * heads * 4), _aligned(num_tokens * heads * v_dim * dtype.itemsize)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _view(memory: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
