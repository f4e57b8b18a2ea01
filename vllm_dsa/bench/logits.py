"""``bench logits``: the paged logits of a step in every legal form, checked, then timed in turns."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_dsa.bench.cases import BenchCase
from vllm_dsa.bench.ceilings import gb_per_s
from vllm_dsa.bench.forms import FLATTENED, Form, bench_planner, legal_forms
from vllm_dsa.bench.gpu import GpuRig, bench_every_case
from vllm_dsa.bench.inputs import PagePool, case_builder, decode_batch, random_queries
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.results import BenchReport
from vllm_dsa.bench.timing import CapturedGraph, Timing, capture, measure_interleaved, speedup
from vllm_dsa.bench.truth import TOLERANCE, SampledTruth
from vllm_dsa.indexer import IndexerDecodeMetadata, decode_logits
from vllm_dsa.ops import IndexKCacheLayout
from vllm_dsa.ops.row_map import rows_of_tokens


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One form of one case.

    Attributes
    ----------
    case, context, batch
        The step, see ``BenchCase``.
    form, variant : str
        As the planner names it, and the same word over all depths, see ``Form``; ``flattened`` is what vLLM does for
        depths that are not native.
    group_size : int
        Query rows per kernel row.
    chosen : bool
        Whether the planner takes this form.
    tokens, rows, kv_reads : int
        Query rows of the step, of the launch (dummies included), and passes over a request's pages.
    median_us, p10_us, p90_us : float
        Time of the logits alone: the schedule is built before.
    kv_bytes : int
        Bytes of the pages, each read once, whatever the form reads.
    floor_bytes : int
        The fewest bytes that any form can move: pages, queries and weights read once, each logit written once.
    floor_gb_per_s : float
        ``floor_bytes`` over the median.
    bandwidth_share : float
        That over the bandwidth measured on the same machine in the same run.
    speedup : float or None
        Flattened over this form; ``None`` if the flattened answer was wrong.
    """

    case: str
    context: int
    batch: int
    form: str
    variant: str
    group_size: int
    chosen: bool
    tokens: int
    rows: int
    kv_reads: int
    median_us: float
    p10_us: float
    p90_us: float
    kv_bytes: int
    floor_bytes: int
    floor_gb_per_s: float
    bandwidth_share: float
    speedup: float | None


def bench_logits(options: BenchOptions, on_case: Callable[[BenchCase], None]) -> BenchReport[LogitsRow]:
    """Measure every legal form of every case.

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
    return bench_every_case("logits", options, on_case, _bench_case)


def _bench_case(
    case: BenchCase, options: BenchOptions, rig: GpuRig, pool: PagePool, report: BenchReport[LogitsRow]
) -> None:
    q, weights = random_queries(case.num_tokens, options.heads, pool.layout.head_dim, options.seed, rig.device)
    tables = pool.tables(case)
    truths = [SampledTruth(case, q, weights, pool.cache, table, options.seed) for table in tables]
    graphs: dict[str, list[CapturedGraph]] = {}
    planner = bench_planner(rig.caps, options.heads, options.block_size)
    forms = legal_forms(case.depths, planner.caps, planner.ragged_costs)
    for form in forms:
        steps = []
        worst = 0.0
        for table, truth in zip(tables, truths, strict=True):
            builder = case_builder(case, form.caps, pool.layout, options.heads, form.plan.backend.value, rig.device)
            metadata = builder.build_decode(decode_batch(case, table))
            row_q, row_weights = rows_of_tokens(q, weights, metadata.row_to_token)
            graph = capture(functools.partial(decode_logits, metadata, row_q, row_weights, pool.cache, form.caps))
            worst = max(worst, _error_of_a_replay(graph, truth, metadata))
            steps.append(graph)
        if worst > TOLERANCE:
            report.errors.append(f"{case.label}, {form.name}: logits are off by {worst:.1e} of the float64 answer")
        else:
            graphs[form.variant] = steps
    replays = {variant: [step.replay for step in steps] for variant, steps in graphs.items()}
    timings = measure_interleaved(replays, rig.flush, options.iters)
    report.rows += logits_rows(case, forms, timings, pool.layout, options.heads, rig.ceilings.gb_per_s)


def _error_of_a_replay(graph: CapturedGraph, truth: SampledTruth, metadata: IndexerDecodeMetadata) -> float:
    # The graph that is timed is the one that is checked, and only what its replay writes can pass.
    graph.result.fill_(float("nan"))
    graph.replay()
    return truth.worst_error(graph.result, metadata.token_to_row)


def logits_rows(
    case: BenchCase,
    forms: Sequence[Form],
    timings: dict[str, Timing],
    layout: IndexKCacheLayout,
    heads: int,
    ceiling_gb_per_s: float,
) -> list[LogitsRow]:
    """Return a row for each timed variant."""
    floor = case.floor_bytes(layout, heads)
    flattened = timings.get(FLATTENED)
    return [
        LogitsRow(
            case=case.name,
            context=case.context,
            batch=case.batch,
            form=form.name,
            variant=form.variant,
            group_size=form.plan.group_size,
            chosen=form.chosen,
            tokens=form.plan.num_tokens,
            rows=form.plan.num_rows,
            kv_reads=form.plan.kv_reads,
            median_us=timing.median_us,
            p10_us=timing.p10_us,
            p90_us=timing.p90_us,
            kv_bytes=case.kv_bytes(layout),
            floor_bytes=floor,
            floor_gb_per_s=gb_per_s(floor, timing.median_us),
            bandwidth_share=gb_per_s(floor, timing.median_us) / ceiling_gb_per_s,
            speedup=speedup(flattened, timing),
        )
        for form in forms
        if (timing := timings.get(form.variant)) is not None
    ]
