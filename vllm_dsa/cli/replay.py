"""``vllm-dsa replay``: a request trace through the scheduler, the metadata builder and the indexer."""

import json
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_dsa.cli.errors import EXIT_CHECK_FAILED, fail, friendly_errors
from vllm_dsa.cli.replay_tables import print_report
from vllm_dsa.config import PRESETS, DsaConfig
from vllm_dsa.deep_gemm_wrapper import planned_capabilities, resolve_capabilities
from vllm_dsa.platform import is_cuda
from vllm_dsa.runner.replay import Replay, ReplayConfig
from vllm_dsa.runner.report import ReplayReport
from vllm_dsa.runner.trace import Trace, read_trace


@friendly_errors
def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake-style JSONL. Default: the sample inside the package.")
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(PRESETS)}, or a folder with a config.json.")
    ] = "deepseek-v3.2",
    num_speculative_tokens: Annotated[int, typer.Option(min=0, help="Drafts per decode step.")] = 3,
    acceptance_rate: Annotated[float, typer.Option(min=0, max=1, help="Chance that a draft is right.")] = 0.7,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests running at once.")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Query rows per step.")] = 8192,
    num_blocks: Annotated[int, typer.Option(min=1, help="Pages of 64 tokens in the index-K cache.")] = 16384,
    step_ms: Annotated[float, typer.Option(help="What a step takes on the clock of arrivals.")] = 25.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests.")] = None,
    arch: Annotated[
        str | None, typer.Option(help="Plan for another machine: sm90, sm100 or cpu. Default: this one.")
    ] = None,
    verify_every: Annotated[
        int, typer.Option(min=0, help="Run and check logits and top-k in every N-th step; 0 for never.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Of contents, acceptance and checked rows.")] = 0,
    strict: Annotated[bool, typer.Option(help="Stop at a malformed trace line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write depths, forms and bytes over time as a PNG.")] = None,
) -> None:
    """Replay a request trace and report what its decode steps ran as; exit code 1 if a checked row is wrong."""
    if plot is not None:
        _check_plot_path(plot)
    config = ReplayConfig(
        model=DsaConfig.from_name_or_path(model),
        num_speculative_tokens=num_speculative_tokens,
        acceptance_rate=acceptance_rate,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        step_ms=step_ms,
        verify_every=verify_every,
        seed=seed,
    )
    report = _run(config, arch, _read(trace, limit, strict))
    if plot is not None:
        from vllm_dsa.runner.plot import plot_report

        plot_report(report, plot)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report, Console())
    if report.mismatches:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _check_plot_path(plot: Path) -> None:
    if find_spec("matplotlib") is None:
        fail("--plot needs matplotlib: pip install 'vllm-dsa[plot]'")
    if not plot.resolve().parent.is_dir():
        fail(f"--plot: no such folder: {plot.resolve().parent}")


def _read(path: Path | None, limit: int | None, strict: bool) -> Trace:
    if path is None:
        with resources.as_file(resources.files("vllm_dsa") / "data" / "mooncake_sample.jsonl") as sample:
            return read_trace(sample, limit=limit, strict=strict)
    return read_trace(path, limit=limit, strict=strict)


def _run(config: ReplayConfig, arch: str | None, trace: Trace) -> ReplayReport:
    # Plans for another machine are checked with the reference kernels, which need no GPU.
    device = torch.device("cuda" if arch is None and is_cuda() else "cpu")
    caps = resolve_capabilities() if arch is None else planned_capabilities(arch)
    job = Replay(config, caps, device)
    job.report.skipped_lines += [f"line {line.line_number}: {line.reason}" for line in trace.skipped]
    progress = Progress(
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, step {task.fields[steps]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not Console(stderr=True).is_terminal,
    )
    with progress:
        task = progress.add_task("", total=len(trace.requests), steps=0)
        return job.run(
            trace.requests,
            on_step=lambda report: progress.update(task, completed=report.num_finished, steps=report.num_steps),
        )
