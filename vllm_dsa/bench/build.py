"""``bench build``: what the metadata of a step costs the host and the GPU, and how many launches it makes."""

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dsa.bench.cases import BenchCase, bench_cases
from vllm_dsa.bench.inputs import case_builder, decode_batch
from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.results import BenchReport, environment
from vllm_dsa.bench.timing import ColdL2, event_us, summarize
from vllm_dsa.deep_gemm_wrapper import resolve_capabilities
from vllm_dsa.ops import IndexKCacheLayout
from vllm_dsa.platform import is_cuda
from vllm_dsa.runner.report import form_label

UNUSED_OPTIONS = ("heads", "seed")
DEFAULTS = BenchOptions(contexts=(32768,), batches=(1, 16, 64, 256), next_ns=(1, 2, 3, 4, 5), iters=200)
_WARMUP = 10
# About what one cold read of the flush buffer takes on an H200; a wrong guess only changes how long the GPU is held.
_FLUSH_US = 60
_MAX_FLUSHES = 400


@dataclass(frozen=True, slots=True)
class BuildRow:
    """The build of one case.

    Attributes
    ----------
    case, context, batch
        The step, see ``BenchCase``.
    form : str
        What the planner runs it as.
    tokens : int
        Query rows.
    host_median_us, host_p99_us : float
        Wall time of ``build_decode`` on an idle GPU, without waiting for it.
    gpu_us : float or None
        Median GPU time of the build, launched while the GPU is still busy, so that launch gaps do not count unless
        the build syncs. ``None`` on the CPU.
    launches, copies : int or None
        Kernels, and memory copies and fills, of one build. ``None`` on the CPU.
    """

    case: str
    context: int
    batch: int
    form: str
    tokens: int
    host_median_us: float
    host_p99_us: float
    gpu_us: float | None
    launches: int | None
    copies: int | None


def bench_build(options: BenchOptions, on_case: Callable[[BenchCase], None]) -> BenchReport[BuildRow]:
    """Measure the build of every case on the GPU, or on the CPU where there is none.

    Parameters
    ----------
    options : BenchOptions
        Grid and settings; heads and seed play no part.
    on_case : callable
        Called before each case.

    Raises
    ------
    ValueError
        If the build of DeepGEMM does not take the page size.
    """
    caps = resolve_capabilities()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")
    flush = ColdL2(device) if is_cuda() else None
    report = BenchReport[BuildRow](environment(options.command("build", UNUSED_OPTIONS), caps))
    builds, rows = [], []
    for case in bench_cases(options):
        on_case(case)
        table = torch.arange(case.batch * max(case.pages(options.block_size)), dtype=torch.int32, device=device)
        batch = decode_batch(case, table.view(case.batch, -1))
        layout = IndexKCacheLayout(options.block_size)
        builder = case_builder(case, caps, layout, options.heads, "auto", device)
        plan = builder.build_decode(batch).plan
        build = functools.partial(builder.build_decode, batch)
        builds.append(build)
        rows.append(_on_the_host(case, form_label(plan), build, options.iters, synchronize=flush is not None))
    if flush is not None:
        rows = [
            dataclasses.replace(row, gpu_us=_gpu_us(build, row.host_median_us, options.iters, flush))
            for row, build in zip(rows, builds, strict=True)
        ]
        # Last: once a profiler has run, every launch of the process takes the host about twice as long.
        rows = [_with_launches(row, build) for row, build in zip(rows, builds, strict=True)]
    report.rows.extend(rows)
    return report


def _with_launches(row: BuildRow, build: Callable[[], object]) -> BuildRow:
    launches, copies = count_launches(build)
    return dataclasses.replace(row, launches=launches, copies=copies)


def _on_the_host(case: BenchCase, form: str, build: Callable[[], object], iters: int, *, synchronize: bool) -> BuildRow:
    host = _host_us(build, iters, synchronize=synchronize)
    return BuildRow(
        case=case.name,
        context=case.context,
        batch=case.batch,
        form=form,
        tokens=case.num_tokens,
        host_median_us=float(np.median(host)),
        host_p99_us=float(np.quantile(host, 0.99)),
        gpu_us=None,
        launches=None,
        copies=None,
    )


def _host_us(build: Callable[[], object], iters: int, *, synchronize: bool) -> list[float]:
    samples = []
    for repeat in range(_WARMUP + iters):
        if synchronize:
            # A launch queue that runs full would make the host wait inside the timed call.
            torch.cuda.synchronize()
        started = time.perf_counter()
        build()
        elapsed = time.perf_counter() - started
        if repeat >= _WARMUP:
            samples.append(elapsed * 1e6)
    return samples


def _gpu_us(build: Callable[[], object], host_us: float, iters: int, flush: ColdL2) -> float:
    flushes = min(1 + int(2 * host_us / _FLUSH_US), _MAX_FLUSHES)

    def hold_the_gpu() -> None:
        for _ in range(flushes):
            flush()

    return summarize([event_us(build, hold_the_gpu) for _ in range(iters)]).median_us
