"""The float64 answer for one query row, from token contents alone: no cache, no page, no metadata."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_dsa.ops import LogitsBackend
from vllm_dsa.reference import ScaleFormat, apply_rope, fold_q, mqa_logits, quantize_fp8
from vllm_dsa.reference.fp8 import K_AMAX_FLOOR
from vllm_dsa.runner.splitmix import Uint64Array
from vllm_dsa.runner.synthetic import SyntheticIndexer

# Relative error against float64 of float32 accumulation over 64 heads of 128 dims, and of Hopper's FP8 tensor cores,
# which keep about 14 bits of each partial sum (1.7e-4 seen on an H200; a wrong page or scale costs over 1e-1).
LOGITS_TOLERANCE = {LogitsBackend.REFERENCE: 5e-6, LogitsBackend.DEEP_GEMM: 5e-4, LogitsBackend.SM90: 5e-4}


@dataclass(frozen=True, slots=True)
class RowCheck:
    """One row's verdict.

    Attributes
    ----------
    logits_error : float
        ``|step - oracle| / |oracle|`` over the row (2-norms); infinite when the step's row is not finite or has another
        length.
    misplaced : int
        Selected indices that the oracle does not select although its scores tell them apart, or the reverse.
    tolerance : float
        What the backend's arithmetic may cost.
    """

    logits_error: float
    misplaced: int
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the row counts as right."""
        return self.logits_error <= self.tolerance and self.misplaced == 0


def expected_logits(indexer: SyntheticIndexer, content_keys: Uint64Array) -> torch.Tensor:
    """Return the float64 logits of the last token of a sequence over the whole of it.

    Parameters
    ----------
    indexer : SyntheticIndexer
        Gives q, k and weights.
    content_keys : ndarray of uint64
        Contents of the tokens at positions 0 .. L - 1; the query is the last one's.
    """
    positions = torch.arange(len(content_keys), device=indexer.device)
    k = apply_rope(indexer.index_k(content_keys), positions, indexer.cos_sin, indexer.rope_style)
    values, scale = quantize_fp8(k, scale_format=ScaleFormat.FP32, amax_floor=K_AMAX_FLOOR)
    q, weights = indexer.index_q(content_keys[-1:])
    q_fp8, folded = fold_q(
        q,
        weights,
        positions=positions[-1:],
        cos_sin=indexer.cos_sin,
        style=indexer.rope_style,
        softmax_scale=indexer.head_dim**-0.5,
        head_scale=indexer.num_heads**-0.5,
        scale_format=ScaleFormat.FP32,
    )
    bounds = torch.tensor([0, len(content_keys)], dtype=torch.int32, device=indexer.device)
    return mqa_logits(q_fp8, values, scale, folded, bounds[:1], bounds[1:], compute_dtype=torch.float64)[0]


def check_row(
    logits: torch.Tensor, selected: torch.Tensor, expected: torch.Tensor, topk: int, backend: LogitsBackend
) -> RowCheck:
    """Compare a step's logits and selection with the oracle's.

    Parameters
    ----------
    logits : torch.Tensor
        ``(at least L,)`` float32, the step's row.
    selected : torch.Tensor
        ``(topk,)`` int32, its selection: ascending, then -1.
    expected : torch.Tensor
        ``(L,)`` float64.
    topk : int
        Indices asked for.
    backend : LogitsBackend
        Who computed `logits`.
    """
    tolerance = LOGITS_TOLERANCE[backend]
    return RowCheck(
        logits_error=_relative_error(logits[: len(expected)].double(), expected),
        misplaced=_misplaced(selected, expected, min(len(expected), topk), tolerance),
        tolerance=tolerance,
    )


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if np.isfinite(error) else float("inf")


def _misplaced(selected: torch.Tensor, expected: torch.Tensor, count: int, tolerance: float) -> int:
    chosen = selected[selected >= 0].long()
    if len(chosen) != count or bool((chosen.diff() <= 0).any()) or bool((chosen >= len(expected)).any()):
        return max(count, 1)
    threshold = expected.topk(count).values[-1]
    # A score may fall on the other side of the threshold only within its own error.
    slack = tolerance * expected.abs().max()
    is_chosen = torch.zeros(len(expected), dtype=torch.bool, device=expected.device)
    is_chosen[chosen] = True
    wrongly_in = is_chosen & (expected < threshold - slack)
    wrongly_out = ~is_chosen & (expected > threshold + slack)
    return int(wrongly_in.sum() + wrongly_out.sum())
