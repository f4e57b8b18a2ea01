"""One layer's decode indexer as an engine would run it: public operators over built metadata."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_dsa.bench.cases import BenchCase
from vllm_dsa.bench.forms import Form
from vllm_dsa.bench.inputs import TOPK, case_builder, decode_batch
from vllm_dsa.bench.truth import SampledTruth
from vllm_dsa.config import DsaConfig
from vllm_dsa.indexer import decode_logits
from vllm_dsa.ops import IndexKCacheLayout, RopeStyle, ScaleFormat, fold_q, store_index_k, topk_indices
from vllm_dsa.ops.row_map import tokens_of_rows
from vllm_dsa.reference import make_cos_sin
from vllm_dsa.runner.oracle import check_row

WHOLE = "whole"
STAGES = ("fold_q", "store_index_k", "logits", "topk", WHOLE)
# No index and not the -1 of an unused entry: an entry that nobody wrote shows.
_POISON = -7


class IndexerInputs:
    """What the layer's projections give for a case: the same for every form and copy.

    Parameters
    ----------
    case : BenchCase
        The step.
    heads, head_dim : int
        Of the indexer; RoPE is DeepSeek-V3.2's.
    seed : int
        Of the random values.
    device : torch.device
        Where they live.
    """

    def __init__(self, case: BenchCase, heads: int, head_dim: int, seed: int, device: torch.device) -> None:
        model = DsaConfig.from_name_or_path("deepseek-v3.2")
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        self.q = draw(case.num_tokens, heads, head_dim)
        self.weights = draw(case.num_tokens, heads)
        self.k = draw(case.num_tokens, head_dim)
        requests, bounds = zip(*case.token_bounds(), strict=True)
        self.requests = torch.tensor(requests, device=device)
        self.positions = torch.tensor(bounds, device=device) - 1
        self.cos_sin = make_cos_sin(max(bounds), model.qk_rope_head_dim, model.rope_theta).to(device)
        self.style = RopeStyle.INTERLEAVED if model.rope_interleaved else RopeStyle.HALF_SPLIT


class IndexerStep:
    """The indexer of one step in one form, over pages of its own.

    Parameters
    ----------
    case : BenchCase
        The step.
    form : Form
        What it is planned as.
    inputs : IndexerInputs
        Of the case.
    cache, table : torch.Tensor
        The pages and ``(requests, width)`` int32 the engine's table.
    """

    def __init__(
        self,
        case: BenchCase,
        form: Form,
        inputs: IndexerInputs,
        cache: torch.Tensor,
        table: torch.Tensor,
    ) -> None:
        self._case, self._caps, self._inputs = case, form.caps, inputs
        self._cache, self._table = cache, table
        layout = IndexKCacheLayout.of(cache)
        block_size = layout.block_size
        heads = inputs.q.shape[1]
        builder = case_builder(case, form.caps, layout, heads, form.plan.backend.value, table.device)
        self._metadata = builder.build_decode(decode_batch(case, table))
        pages = table[inputs.requests, inputs.positions // block_size].long()
        self._slots = pages * block_size + inputs.positions % block_size

    def stages(self) -> dict[str, Callable[[], Any]]:
        """Return each stage as a call on inputs that exist already, and the whole; in the order of `STAGES`."""
        row_q, row_weights = self._fold_rows()
        self._store()
        row_logits = self._logits(row_q, row_weights)
        calls = (
            self._fold_rows,
            self._store,
            functools.partial(self._logits, row_q, row_weights),
            functools.partial(self._topk, row_logits),
            self._whole,
        )
        return dict(zip(STAGES, calls, strict=True))

    def wrong_rows(self, whole: Callable[[], torch.Tensor], seed: int) -> list[str]:
        """Run the whole indexer over poisoned results and describe the sampled rows that are wrong.

        Parameters
        ----------
        whole : callable
            The whole indexer as it is timed; returns the logits in row order.
        seed : int
            Of the sample.
        """
        metadata = self._metadata
        whole().fill_(float("nan"))
        metadata.topk_indices.fill_(_POISON)
        logits = tokens_of_rows(whole(), metadata.token_to_row)
        q, weights = self._fold()
        truth = SampledTruth(self._case, q, weights, self._cache, self._table, seed)
        notes = []
        for token, expected in truth.rows.items():
            selected = metadata.topk_indices[token]
            check = check_row(logits[token], selected, expected, TOPK, metadata.plan.backend)
            if not check.ok or bool((selected < -1).any()):
                notes.append(
                    f"token {token}: logits are off by {check.logits_error:.1e}, {check.misplaced} indices misplaced"
                )
        return notes

    def _fold(self, row_to_token: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._inputs
        return fold_q(
            inputs.q,
            inputs.weights,
            positions=inputs.positions,
            cos_sin=inputs.cos_sin,
            style=inputs.style,
            scale_format=ScaleFormat.FP32,
            row_to_token=row_to_token,
        )

    def _fold_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._fold(self._metadata.row_to_token)

    def _store(self) -> None:
        inputs = self._inputs
        store_index_k(
            inputs.k,
            self._cache,
            self._slots,
            positions=inputs.positions,
            cos_sin=inputs.cos_sin,
            style=inputs.style,
        )

    def _logits(self, row_q: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
        return decode_logits(self._metadata, row_q, row_weights, self._cache, self._caps)

    def _topk(self, row_logits: torch.Tensor) -> None:
        metadata = self._metadata
        logits = tokens_of_rows(row_logits, metadata.token_to_row)
        lengths = tokens_of_rows(metadata.context_lens.flatten(), metadata.token_to_row)
        topk_indices(logits, lengths, TOPK, out=metadata.topk_indices)

    def _whole(self) -> torch.Tensor:
        row_q, row_weights = self._fold_rows()
        self._store()
        row_logits = self._logits(row_q, row_weights)
        self._topk(row_logits)
        return row_logits
