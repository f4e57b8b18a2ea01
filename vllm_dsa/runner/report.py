"""What a replay counted, and how it is summed up."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_dsa.indexer import StepPlan


@dataclass(slots=True)
class FormTotals:
    """Sums over the decode steps that ran in one form.

    Attributes
    ----------
    steps, rows, dummy_rows, tokens, kv_reads : int
        Steps; kernel rows, dummy ones among them; query rows of requests; passes over a request's KV.
    kv_bytes, flattened_kv_bytes : int
        Index-K bytes read by one layer, and what one pass per query row would have read.
    """

    steps: int = 0
    rows: int = 0
    dummy_rows: int = 0
    tokens: int = 0
    kv_reads: int = 0
    kv_bytes: int = 0
    flattened_kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepSample:
    """One decode step for the plot: its time on the simulated clock (ms), form, depths and one layer's bytes."""

    now_ms: float
    form: str
    depths: tuple[int, ...]
    kv_bytes: int
    flattened_kv_bytes: int


@dataclass(slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes
    ----------
    startup : dict of str to str
        Fields of the builder's startup line.
    forms : dict of str to FormTotals
        By form and group size, for example ``grouped c=4``.
    depths : Counter of int
        Decodes by their query rows.
    build_us, prefill_build_us : list of float
        Host time of each decode build and each prefill build, microseconds.
    mismatches : int
        Verified rows that differ from the float64 oracle. Must be 0.
    rejected : list of str
        Requests that can never fit, each with its reason.
    """

    startup: dict[str, str]
    num_requests: int = 0
    num_finished: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_index_layers: int = 1
    forms: dict[str, FormTotals] = field(default_factory=dict)
    depths: Counter[int] = field(default_factory=Counter)
    build_us: list[float] = field(default_factory=list)
    prefill_build_us: list[float] = field(default_factory=list)
    verified_steps: int = 0
    verified_rows: int = 0
    mismatches: int = 0
    worst_logits_error: float = 0.0
    mismatch_notes: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    skipped_lines: list[str] = field(default_factory=list)
    samples: list[StepSample] = field(default_factory=list)
    simulated_s: float = 0.0
    wall_s: float = 0.0

    def count_decode(self, now_ms: float, plan: StepPlan, depths: list[int], kv_bytes: int, flattened: int) -> None:
        """Add a decode step."""
        totals = self.forms.setdefault(form_label(plan), FormTotals())
        totals.steps += 1
        totals.rows += plan.num_rows
        totals.dummy_rows += plan.num_dummy_rows
        totals.tokens += plan.num_tokens
        totals.kv_reads += plan.kv_reads
        totals.kv_bytes += kv_bytes
        totals.flattened_kv_bytes += flattened
        self.depths.update(depths)
        self.samples.append(StepSample(now_ms, form_label(plan), tuple(depths), kv_bytes, flattened))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values: counts, sums and quantiles, without the samples."""
        return {
            "startup": self.startup,
            "requests": {
                "replayed": self.num_requests,
                "finished": self.num_finished,
                "rejected": self.rejected,
                "skipped_lines": self.skipped_lines,
                "preemptions": self.num_preemptions,
            },
            "tokens": {
                "prefilled": self.num_prefill_tokens,
                "prefix_cached": self.num_cached_tokens,
                "output": self.num_output_tokens,
                "drafts": self.num_drafts,
                "drafts_accepted": self.num_accepted,
            },
            "steps": self.num_steps,
            "decode_depths": {str(depth): self.depths[depth] for depth in sorted(self.depths)},
            "forms": {label: _form_json(totals, self.num_index_layers) for label, totals in sorted(self.forms.items())},
            "build_us": {"decode": quantiles(self.build_us), "prefill": quantiles(self.prefill_build_us)},
            "verification": {
                "steps": self.verified_steps,
                "rows": self.verified_rows,
                "mismatches": self.mismatches,
                "worst_logits_error": self.worst_logits_error,
                "notes": self.mismatch_notes,
            },
            "seconds": {"simulated": self.simulated_s, "wall": self.wall_s},
        }


def form_label(plan: StepPlan) -> str:
    """Return the form with its group size where that says more: ``native c=4``, ``flattened``."""
    return f"{plan.form.value} c={plan.group_size}" if plan.form.value in ("native", "grouped") else plan.form.value


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Return median and 99th percentile; ``None`` for no values."""
    if not values:
        return None
    return {"median": float(np.median(values)), "p99": float(np.quantile(values, 0.99)), "count": len(values)}


def _form_json(totals: FormTotals, num_layers: int) -> dict[str, Any]:
    return {
        "steps": totals.steps,
        "rows": totals.rows,
        "dummy_rows": totals.dummy_rows,
        "tokens": totals.tokens,
        "kv_reads": totals.kv_reads,
        "kv_bytes": totals.kv_bytes * num_layers,
        "flattened_kv_bytes": totals.flattened_kv_bytes * num_layers,
    }
