"""``vllm-dsa bench``: what the decode indexer costs on this machine, checked before it is timed."""

import operator
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_dsa.bench import build as build_bench
from vllm_dsa.bench import indexer as indexer_bench
from vllm_dsa.bench import logits as logits_bench
from vllm_dsa.bench import topk as topk_bench
from vllm_dsa.bench.costs import fit_costs, ragged_costs, source_line
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.plot import Panels, build_panels, indexer_panels, logits_panels, write_plot
from vllm_dsa.bench.results import BenchReport
from vllm_dsa.bench.tables import TextTable, build_tables, indexer_tables, logits_tables, topk_tables
from vllm_dsa.bench.verdict import SHORTEST_US, SLACK, losing_cells
from vllm_dsa.cli.errors import EXIT_CHECK_FAILED, fail, friendly_errors
from vllm_dsa.cli.plan import parse_whole_numbers

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure the decode indexer on this machine: logits by form, top-k, metadata build, a whole layer.",
)
_Numbers = tuple[int, ...]
# Wider than any table: a narrow terminal wraps lines, and no column is cut in a pipe.
_WIDTH = 400


class _ListTexts(NamedTuple):
    contexts: str
    batches: str
    next_ns: str


def _list_texts(defaults: BenchOptions) -> _ListTexts:
    return _ListTexts(
        *(",".join(map(str, values)) for values in (defaults.contexts, defaults.batches, defaults.next_ns))
    )


_Contexts = Annotated[str, typer.Option(help="Tokens that the last row of a request sees.")]
_Batches = Annotated[str, typer.Option(help="Requests per step.")]
_NextNs = Annotated[str, typer.Option("--next-n", help="Query rows per request of the uniform steps.")]
_Mixes = Annotated[bool, typer.Option("--mixes/--no-mixes", help="Also ragged depths and one long request.")]
_Heads = Annotated[int, typer.Option(help="Indexer heads.")]
_BlockSize = Annotated[int, typer.Option(help="Tokens per page.")]
_Iters = Annotated[int, typer.Option(help="Timed repeats.")]
_Seed = Annotated[int, typer.Option(help="Of keys, queries and page order.")]
_Json = Annotated[Path | None, typer.Option("--json", help="Write every row and the machine as JSON.")]
_Csv = Annotated[Path | None, typer.Option("--csv", help="Write every row as CSV, the machine in # lines.")]
_Plot = Annotated[Path | None, typer.Option("--plot", help="Write the medians as a picture.")]

_LOGITS = BenchOptions()
_BUILD = build_bench.DEFAULTS
_INDEXER = indexer_bench.DEFAULTS
_LOGITS_LISTS, _BUILD_LISTS, _INDEXER_LISTS = map(_list_texts, (_LOGITS, _BUILD, _INDEXER))


@bench.command()
@friendly_errors
def logits(
    contexts: _Contexts = _LOGITS_LISTS.contexts,
    batches: _Batches = _LOGITS_LISTS.batches,
    next_ns: _NextNs = _LOGITS_LISTS.next_ns,
    mixes: _Mixes = _LOGITS.mixes,
    heads: _Heads = _LOGITS.heads,
    block_size: _BlockSize = _LOGITS.block_size,
    iters: _Iters = _LOGITS.iters,
    seed: _Seed = _LOGITS.seed,
    json: _Json = None,
    csv: _Csv = None,
    plot: _Plot = None,
    costs: Annotated[bool, typer.Option("--costs", help="Fit the planner's cost table to the results.")] = False,
) -> None:
    """Time the paged logits in every legal form of each step; exit code 1 if one is not the float64 answer.

    The schedule is built outside the timed CUDA graph, the L2 cache is made cold by reading, and the forms of a step
    take turns.
    """
    options = BenchOptions(*_lists(contexts, batches, next_ns), mixes, heads, block_size, iters, seed)
    _check_outputs(json, csv, plot)
    report = _run(logits_bench.bench_logits, options)
    console = Console(width=_WIDTH)
    _print(report, logits_tables(report.rows), console)
    _print_losses(report, console)
    _write(report, json, csv, plot, logits_panels(report.rows))
    _exit_if_wrong(report)
    if costs:
        fit = fit_costs(report.rows)
        console.print(
            f"{fit.source_line()}\nover the best form of {fit.num_cells} cells: mean {fit.mean_loss:.1%}, "
            f"worst {fit.worst_loss:.1%}\nreproduce: {report.environment['command']} --costs",
            soft_wrap=True,
        )
        ours = ragged_costs(report.rows, fit.costs)
        if ours is not None:
            console.print(f"our kernel: {source_line(ours)}", soft_wrap=True)


@bench.command()
@friendly_errors
def build(
    contexts: _Contexts = _BUILD_LISTS.contexts,
    batches: _Batches = _BUILD_LISTS.batches,
    next_ns: _NextNs = _BUILD_LISTS.next_ns,
    mixes: _Mixes = _BUILD.mixes,
    block_size: _BlockSize = _BUILD.block_size,
    iters: _Iters = _BUILD.iters,
    json: _Json = None,
    csv: _Csv = None,
    plot: _Plot = None,
) -> None:
    """Time the metadata build of a step on the host and on the GPU, and count its launches; runs on a CPU too."""
    options = BenchOptions(*_lists(contexts, batches, next_ns), mixes=mixes, block_size=block_size, iters=iters)
    _check_outputs(json, csv, plot)
    report = _run(build_bench.bench_build, options)
    _print(report, build_tables(report.rows), Console(width=_WIDTH))
    _write(report, json, csv, plot, build_panels(report.rows))


@bench.command()
@friendly_errors
def indexer(
    contexts: _Contexts = _INDEXER_LISTS.contexts,
    batches: _Batches = _INDEXER_LISTS.batches,
    next_ns: _NextNs = _INDEXER_LISTS.next_ns,
    mixes: _Mixes = _INDEXER.mixes,
    heads: _Heads = _INDEXER.heads,
    block_size: _BlockSize = _INDEXER.block_size,
    iters: _Iters = _INDEXER.iters,
    seed: _Seed = _INDEXER.seed,
    json: _Json = None,
    csv: _Csv = None,
    plot: _Plot = None,
) -> None:
    """Time one layer's decode indexer: fold q, store index K, logits, top-k; exit code 1 if a sampled row is wrong."""
    options = BenchOptions(*_lists(contexts, batches, next_ns), mixes, heads, block_size, iters, seed)
    _check_outputs(json, csv, plot)
    report = _run(indexer_bench.bench_indexer, options)
    _print(report, indexer_tables(report.rows), Console(width=_WIDTH))
    _write(report, json, csv, plot, indexer_panels(report.rows))
    _exit_if_wrong(report)


_TOPK = topk_bench.TopkOptions()


@bench.command()
@friendly_errors
def topk(
    rows: Annotated[str, typer.Option(help="Rows of logits.")] = ",".join(map(str, _TOPK.rows)),
    lengths: Annotated[str, typer.Option(help="Logits of a row.")] = ",".join(map(str, _TOPK.lengths)),
    k: Annotated[int, typer.Option("--k", help="Tokens to choose.")] = _TOPK.k,
    iters: _Iters = _TOPK.iters,
    seed: _Seed = _TOPK.seed,
    json: _Json = None,
    csv: _Csv = None,
) -> None:
    """Time the top-k beside torch.topk; exit code 1 if an index is not the twin's."""
    options = topk_bench.TopkOptions(
        rows=tuple(parse_whole_numbers("--rows", rows)),
        lengths=tuple(parse_whole_numbers("--lengths", lengths)),
        k=k,
        iters=iters,
        seed=seed,
    )
    _check_outputs(json, csv, None)
    report = _run(topk_bench.bench_topk, options, str)
    _print(report, topk_tables(report.rows), Console(width=_WIDTH))
    _write(report, json, csv, None, {})
    _exit_if_wrong(report)


def _lists(contexts: str, batches: str, next_ns: str) -> tuple[_Numbers, _Numbers, _Numbers]:
    return (
        tuple(parse_whole_numbers("--contexts", contexts)),
        tuple(parse_whole_numbers("--batches", batches)),
        tuple(parse_whole_numbers("--next-n", next_ns)),
    )


def _check_outputs(json: Path | None, csv: Path | None, plot: Path | None) -> None:
    # Found out before minutes of measuring, not after them.
    for name, path in (("--json", json), ("--csv", csv), ("--plot", plot)):
        if path is not None and not path.resolve().parent.is_dir():
            fail(f"{name}: no such folder: {path.resolve().parent}")
    if plot is not None and find_spec("matplotlib") is None:
        fail("--plot needs matplotlib: pip install 'vllm-dsa[plot]'")


def _run(
    measure: Callable[[Any, Callable[[Any], None]], BenchReport[Any]],
    options: Any,
    label: Callable[[Any], str] = operator.attrgetter("label"),
) -> BenchReport[Any]:
    stderr = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
        transient=True,
    )
    with progress:
        task = progress.add_task("measuring the machine", total=None)
        return measure(options, lambda case: progress.update(task, description=label(case)))


def _print(report: BenchReport[Any], tables: list[TextTable], console: Console) -> None:
    for key, value in report.environment.items():
        console.print(f"{key}: {value}", highlight=False, markup=False, soft_wrap=True)
    for table in tables:
        rich_table = Table(title=table.title, title_justify="left")
        for position, column in enumerate(table.columns):
            rich_table.add_column(column, no_wrap=True, justify="right" if position else "left")
        for row in table.rows:
            rich_table.add_row(*row)
        console.print(rich_table)
        console.print(f"reproduce: {report.environment['command']}", highlight=False, markup=False, soft_wrap=True)
    for error in report.errors:
        console.print(f"WRONG: {error}", highlight=False, markup=False, soft_wrap=True)


def _print_losses(report: BenchReport[Any], console: Console) -> None:
    losing = losing_cells(report.rows)
    console.print(f"steps of over {SHORTEST_US:g} us planned over {SLACK:.0%} above their best form: {len(losing)}")
    for cell in losing:
        console.print(f"  {cell.label}: {cell.chosen and cell.chosen.form} {cell.loss:+.1%} over {cell.best.form}")


def _write(report: BenchReport[Any], json: Path | None, csv: Path | None, plot: Path | None, panels: Panels) -> None:
    if json is not None:
        report.write_json(json)
    if csv is not None:
        report.write_csv(csv)
    if plot is not None and panels:
        write_plot(panels, plot, f"{report.environment['device']}: {report.environment['command']}")


def _exit_if_wrong(report: BenchReport[Any]) -> None:
    if report.errors:
        raise typer.Exit(EXIT_CHECK_FAILED)
