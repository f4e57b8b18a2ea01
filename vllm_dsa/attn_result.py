"""What an attention kernel over a part of the tokens returns, so that parts can be merged."""

import enum
from dataclasses import dataclass

import torch

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LseBase(enum.Enum):
    """The base of a log-sum-exp: ``base ** lse`` is the sum of the exponentials of the scores.

    Attributes
    ----------
    E : LseBase
        Natural logarithm, as FlashMLA, FlashAttention, CUTLASS MLA and this package return it.
    TWO : LseBase
        Logarithm to base 2, as FlashInfer's trtllm-gen kernels return it.
    """

    E = "e"
    TWO = "2"


@dataclass(frozen=True, slots=True)
class DecodeAttnResult:
    """Attention over one shard of the tokens, with what a merge needs to weigh it.

    Attributes
    ----------
    out : torch.Tensor
        ``(tokens, heads, v_dim)`` float32, bfloat16 or float16, last stride 1: attention over the shard's own
        tokens. There may be no rows. Where the shard is empty the values do not matter (they may be NaN); producers
        here write 0.
    lse : torch.Tensor
        ``(tokens, heads)`` float32, any strides, same device: log of the sum of the exponentials of the scaled scores,
        to `base`. A row without tokens is ``-inf``; a merge takes ``+inf``, which FlashMLA writes, as the same.
    base : LseBase
        Of `lse`. It has no default: a wrong base gives plausible outputs with wrong weights. Only a merge converts.

    Raises
    ------
    TypeError
        If an attribute has another type or dtype.
    ValueError
        If shapes, strides or devices do not fit.

    Notes
    -----
    Checked once, at construction, without a host sync; values are not checked. Holds the tensors, copies nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor
    base: LseBase

    def __post_init__(self) -> None:
        _check_tensor("out", self.out, OUT_DTYPES)
        _check_tensor("lse", self.lse, (torch.float32,))
        if not isinstance(self.base, LseBase):
            raise TypeError(f"base is {self.base!r}; allowed: {', '.join(map(str, LseBase))}")
        if self.out.dim() != 3 or 0 in self.out.shape[1:]:
            allowed = "(tokens, heads, v_dim) with at least one head and a v_dim of at least 1"
            raise ValueError(f"out has shape {tuple(self.out.shape)}; allowed: {allowed}")
        if self.out.shape[2] > 1 and self.out.stride(2) != 1:
            raise ValueError(f"out has strides {self.out.stride()}; allowed: a last stride of 1")
        if self.lse.shape != self.out.shape[:2]:
            allowed = f"{tuple(self.out.shape[:2])}, the tokens and heads of out"
            raise ValueError(f"lse has shape {tuple(self.lse.shape)}; allowed: {allowed}")
        if self.lse.device != self.out.device:
            raise ValueError(f"lse is on {self.lse.device}; allowed: {self.out.device}, the device of out")


def _check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}; allowed: torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {', '.join(map(str, dtypes))}")
