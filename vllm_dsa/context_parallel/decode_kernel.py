"""A decode attention kernel behind the rules of DCP."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.context_parallel.refusals import check_dcp_decode


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class DcpDecodeKernel:
    """Wraps an engine's decode kernel: refuses what it cannot do on a shard, and hands everything else on.

    Attributes
    ----------
    kernel : callable
        ``kernel(query, *args, **keywords)``, and what it returns is returned.
    layout : DcpLayout
        With size 1 every call goes to the kernel as it is.
    v_head_dim : int
        Of the kernel's output.
    lse_base : LseBase
        Of the kernel's LSE.
    out_dtype : torch.dtype
        Of the kernel's output.
    takes_causal_seqs : bool
        See :func:`check_dcp_decode`.
    is_autotuning : callable
        Whether the engine runs an autotuner's dummy pass, which discards attention and whose made-up lengths can exceed
        a kernel's workspace. Under DCP the kernel is left out of it.
    """

    kernel: Callable[..., Any]
    layout: DcpLayout
    v_head_dim: int
    lse_base: LseBase
    out_dtype: torch.dtype = torch.bfloat16
    takes_causal_seqs: bool = False
    is_autotuning: Callable[[], bool] = _never

    def __call__(self, query: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        query : torch.Tensor
            ``(R, q_len, heads, head_dim)``, or ``(R, heads, head_dim)`` for one row each.
        *args, **keywords
            Handed on, every one. `return_lse` (default False), `causal_seqs` and `row_lens` (None) are also read here.

        Raises
        ------
        ValueError
            If `query` has other axes.
        NotImplementedError
            See :func:`check_dcp_decode`. The kernel has not run then.
        """
        if self.layout.size > 1:
            if self.is_autotuning():
                return autotune_dummy(query, self.v_head_dim, self.lse_base, self.out_dtype)
            check_dcp_decode(
                self.layout,
                q_len=_q_len(query),
                return_lse=keywords.get("return_lse", False),
                causal_seqs=keywords.get("causal_seqs"),
                row_lens=keywords.get("row_lens"),
                takes_causal_seqs=self.takes_causal_seqs,
            )
        return self.kernel(query, *args, **keywords)


def autotune_dummy(
    query: torch.Tensor, v_head_dim: int, base: LseBase, out_dtype: torch.dtype = torch.bfloat16
) -> DecodeAttnResult:
    """Return zeros of a decode result's shape, for a pass whose result nobody reads.

    Parameters
    ----------
    query : torch.Tensor
        ``(R, q_len, heads, head_dim)`` or ``(T, heads, head_dim)``; only its shape and device are read.
    v_head_dim : int
        Of the output.
    base : LseBase
        Of the LSE that the kernel would have returned.
    out_dtype : torch.dtype
        Of the output: a query may be FP8, an output is not.

    Returns
    -------
    DecodeAttnResult
        `out` ``(T, heads, v_head_dim)`` and `lse` ``(T, heads)`` float32, zeros: not the ``-inf`` of an empty shard, as
        no merge weighs them. Allocates.

    Raises
    ------
    ValueError
        If `query` has other axes.
    """
    rows, heads = query.shape[0] * _q_len(query), query.shape[-2]
    return DecodeAttnResult(
        out=torch.zeros(rows, heads, v_head_dim, dtype=out_dtype, device=query.device),
        lse=torch.zeros(rows, heads, dtype=torch.float32, device=query.device),
        base=base,
    )


def multi_ctas_kv_counter_heads(num_q_heads: int, layout: DcpLayout) -> int:
    """Return the query heads for which a decode kernel's persistent counters must be sized.

    Parameters
    ----------
    num_q_heads : int
        Of this rank.
    layout : DcpLayout
        Queries are gathered over the group before a decode, so each rank's kernel runs all ranks' heads.
    """
    return num_q_heads * layout.size


def _q_len(query: torch.Tensor) -> int:
    if query.dim() not in (3, 4):
        raise ValueError(f"query has shape {tuple(query.shape)}; allowed: (R, q_len, heads, dim) or (T, heads, dim)")
    return query.shape[1] if query.dim() == 4 else 1
