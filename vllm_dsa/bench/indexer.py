"""``bench indexer``: one layer's decode indexer, stage by stage and as a whole, in every legal form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dsa.bench.cases import BenchCase
from vllm_dsa.bench.forms import FLATTENED, Form, bench_planner, legal_forms
from vllm_dsa.bench.gpu import GpuRig, bench_every_case
from vllm_dsa.bench.indexer_step import STAGES, WHOLE, IndexerInputs, IndexerStep
from vllm_dsa.bench.inputs import PagePool
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.results import BenchReport
from vllm_dsa.bench.timing import CapturedGraph, Timing, capture, measure_interleaved, speedup, syncs_with_host

DEFAULTS = BenchOptions(contexts=(32768, 131072), batches=(1, 16, 64), next_ns=(1, 2, 3, 4, 5), iters=20)


@dataclass(frozen=True, slots=True)
class IndexerRow:
    """One stage of one form of one case.

    Attributes
    ----------
    case, context, batch
        The step, see ``BenchCase``.
    form, variant : str
        As the planner names it, and the same word over all depths, see ``Form``; ``flattened`` is what vLLM does for
        depths that are not native.
    chosen : bool
        Whether the planner takes this form.
    stage : str
        ``fold_q`` (straight into row order), ``store_index_k``, ``logits``, ``topk`` or ``whole``, which is all
        four in that order.
    mode : str
        ``graph``, or ``eager`` for a stage that syncs with the host and so cannot be captured: its time includes the
        host's gaps.
    median_us, p10_us, p90_us : float
    speedup : float or None
        The same stage flattened over this one; ``None`` if the flattened answer was wrong.
    """

    case: str
    context: int
    batch: int
    form: str
    variant: str
    chosen: bool
    stage: str
    mode: str
    median_us: float
    p10_us: float
    p90_us: float
    speedup: float | None


def bench_indexer(options: BenchOptions, on_case: Callable[[BenchCase], None]) -> BenchReport[IndexerRow]:
    """Measure every stage of every legal form of every case.

    Parameters
    ----------
    options : BenchOptions
        Grid and settings.
    on_case : callable
        Called before each case.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError
        Without a GPU or without DeepGEMM.
    ValueError
        If the build does not take the heads or the page size.
    """
    return bench_every_case("indexer", options, on_case, _bench_case)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage as it is timed: replays of a graph or, where it cannot be captured, plain calls."""

    run: Callable[[], Any]
    graph: CapturedGraph | None

    def __call__(self) -> Any:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.graph.result


def _prepare(run: Callable[[], Any]) -> _Stage:
    for _ in range(2):
        run()
    return _Stage(run, None if syncs_with_host(run) else capture(run))


def _bench_case(
    case: BenchCase, options: BenchOptions, rig: GpuRig, pool: PagePool, report: BenchReport[IndexerRow]
) -> None:
    tables = pool.tables(case)
    inputs = IndexerInputs(case, options.heads, pool.layout.head_dim, options.seed, rig.device)
    stages: dict[tuple[str, str], list[_Stage]] = {}
    planner = bench_planner(rig.caps, options.heads, options.block_size)
    forms = legal_forms(case.depths, planner.caps, planner.ragged_costs)
    for form in forms:
        prepared: dict[tuple[str, str], list[_Stage]] = {}
        wrong = []
        for table in tables:
            step = IndexerStep(case, form, inputs, pool.cache, table)
            for stage, run in step.stages().items():
                prepared.setdefault((form.variant, stage), []).append(_prepare(run))
            wrong += step.wrong_rows(prepared[form.variant, WHOLE][-1], options.seed)
        report.errors += [f"{case.label}, {form.name}: {note}" for note in wrong]
        if not wrong:
            stages |= prepared
    timings = measure_interleaved(stages, rig.flush, options.iters)
    for form in forms:
        report.rows += _form_rows(case, form, stages, timings)


def _form_rows(
    case: BenchCase,
    form: Form,
    stages: Mapping[tuple[str, str], Sequence[_Stage]],
    timings: Mapping[tuple[str, str], Timing],
) -> list[IndexerRow]:
    rows = []
    for stage in STAGES:
        timing, baseline = timings.get((form.variant, stage)), timings.get((FLATTENED, stage))
        if timing is not None:
            rows.append(
                IndexerRow(
                    case=case.name,
                    context=case.context,
                    batch=case.batch,
                    form=form.name,
                    variant=form.variant,
                    chosen=form.chosen,
                    stage=stage,
                    mode="eager" if stages[form.variant, stage][0].graph is None else "graph",
                    median_us=timing.median_us,
                    p10_us=timing.p10_us,
                    p90_us=timing.p90_us,
                    speedup=speedup(baseline, timing),
                )
            )
    return rows
