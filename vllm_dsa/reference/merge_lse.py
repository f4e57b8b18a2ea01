"""The merge of attention over shards of the tokens, in float64."""

import math
from collections.abc import Sequence

import torch

from vllm_dsa.attn_result import DecodeAttnResult, LseBase


def natural_lse(result: DecodeAttnResult) -> torch.Tensor:
    """Return the LSE of a shard in natural logarithm, ``(tokens, heads)`` float64, -inf where it is empty."""
    lse = result.lse.double()
    if result.base is LseBase.TWO:
        lse = lse * math.log(2)
    return lse.masked_fill(lse.isinf(), -math.inf)


def scale_shard(out: torch.Tensor, lses: torch.Tensor, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a shard's output times its weight in the merge, and the merged LSE.

    Parameters
    ----------
    out : torch.Tensor
        ``(T, H, V)``, any float dtype.
    lses : torch.Tensor
        ``(W, T, H)``, any float dtype, natural: every shard's. Both infinities mark an empty row.
    shard : int
        Which of them `out` is.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        ``(T, H, V)`` float64 and ``(T, H)`` float64. Where the shard is empty its output counts as 0, whatever it
        holds; where all are, the LSE is -inf.

    Notes
    -----
    With ``s_r = exp(lse_r)`` the weight is ``s_r / sum(s)`` and the merged LSE ``log(sum(s))``. NaN in an LSE, or in
    the output of a shard that has a weight, stays NaN. A weight that underflows to 0 counts as empty.
    """
    lses = lses.double()
    lses = lses.masked_fill(lses.isinf(), -math.inf)
    merged = lses.logsumexp(dim=0)
    weight = (lses[shard] - merged.masked_fill(merged == -math.inf, 0)).exp().unsqueeze(-1)
    return torch.where(weight == 0, 0, weight * out.double()), merged


def merge_lse_reference(results: Sequence[DecodeAttnResult]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over shards of the tokens into attention over all of them.

    Parameters
    ----------
    results : sequence of DecodeAttnResult
        One per shard, of one shape; each may state a base of its own.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        Output ``(T, H, V)`` float64 and natural LSE ``(T, H)`` float64. A row that is empty in every shard is
        ``(0, -inf)``.

    Notes
    -----
    The order of the shards does not matter but for rounding. See `scale_shard` for the formula, NaN and infinities.
    """
    lses = torch.stack([natural_lse(result) for result in results])
    scaled = [scale_shard(result.out, lses, shard) for shard, result in enumerate(results)]
    return torch.stack([out for out, _ in scaled]).sum(dim=0), scaled[0][1]
