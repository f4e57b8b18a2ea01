"""The float64 answer for some rows of a step, from the case alone: it knows no plan and no metadata."""

import numpy as np
import torch

from vllm_dsa import reference
from vllm_dsa.bench.cases import BenchCase
from vllm_dsa.ops import LogitsBackend
from vllm_dsa.runner.oracle import LOGITS_TOLERANCE

TOLERANCE = LOGITS_TOLERANCE[LogitsBackend.DEEP_GEMM]


class SampledTruth:
    """Expected logits of the first, the last and one random token of a step.

    Parameters
    ----------
    case : BenchCase
        The step.
    q, weights : torch.Tensor
        ``(T, heads, head_dim)`` FP8 and ``(T, heads)`` float32, by token.
    cache, table : torch.Tensor
        The pages and ``(requests, width)`` the engine's table.
    seed : int
        Of the random token.
    """

    def __init__(
        self,
        case: BenchCase,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        seed: int,
    ) -> None:
        bounds = case.token_bounds()
        random_token = int(np.random.default_rng(seed).integers(case.num_tokens))
        self.rows: dict[int, torch.Tensor] = {}
        for token in sorted({0, random_token, case.num_tokens - 1}):
            request, bound = bounds[token]
            self.rows[token] = reference.paged_mqa_logits(
                q[token : token + 1].unsqueeze(0),
                cache,
                weights[token : token + 1],
                torch.tensor([[bound]], dtype=torch.int32, device=q.device),
                table[request : request + 1],
                max_context_len=bound,
                compute_dtype=torch.float64,
            )[0]

    def worst_error(self, row_logits: torch.Tensor, token_to_row: torch.Tensor | None) -> float:
        """Return the largest relative 2-norm error of a step's logits ``(rows, columns)``; infinite for NaN."""
        errors = []
        for token, expected in self.rows.items():
            row = token if token_to_row is None else int(token_to_row[token])
            got = row_logits[row, : len(expected)].double()
            error = float((got - expected).norm() / expected.norm())
            errors.append(error if np.isfinite(error) else float("inf"))
        return max(errors)
