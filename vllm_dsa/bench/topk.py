"""``bench topk``: the top-k of rows of logits beside torch's, checked, then timed in turns."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_dsa.bench.gpu import GpuRig, set_up_gpu
from vllm_dsa.bench.results import BenchReport, environment
from vllm_dsa.bench.timing import CapturedGraph, Timing, capture, measure_interleaved
from vllm_dsa.ops import topk_indices
from vllm_dsa.reference import topk_indices as topk_twin

OURS, TORCH = "ours", "torch.topk"
_POISON = -7


@dataclass(frozen=True, slots=True)
class TopkOptions:
    """What to measure.

    Attributes
    ----------
    rows, lengths : tuple of int
        Every number of rows with every length.
    k : int
    iters : int
        Timed repeats.
    seed : int

    Raises
    ------
    ValueError
        If a list is empty or a number is below 1.
    """

    rows: tuple[int, ...] = (4, 64, 256)
    lengths: tuple[int, ...] = (4096, 32768, 131072)
    k: int = 2048
    iters: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"--{name} must be whole numbers of at least 1, got {list(values)}")
        for name in ("k", "iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if min(self.lengths) < self.k:
            raise ValueError(f"--lengths must be at least k, {self.k}, which torch.topk needs, got {min(self.lengths)}")

    @property
    def command(self) -> str:
        """The command line that measures this again."""
        rows, lengths = (",".join(map(str, values)) for values in (self.rows, self.lengths))
        return (
            f"vllm-dsa bench topk --rows {rows} --lengths {lengths} --k {self.k} --iters {self.iters} "
            f"--seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class TopkRow:
    """One shape.

    Attributes
    ----------
    rows, length, k : int
    median_us, p10_us, p90_us : float
        Of ours.
    torch_us : float
        Median of torch.topk, whose ties are in any order.
    floor_us : float
        The rows read once at the bandwidth that was measured in the same run.
    speedup : float
        torch.topk over ours.
    """

    rows: int
    length: int
    k: int
    median_us: float
    p10_us: float
    p90_us: float
    torch_us: float
    floor_us: float
    speedup: float


def bench_topk(options: TopkOptions, on_case: Callable[[str], None]) -> BenchReport[TopkRow]:
    """Measure every shape over normally distributed float32 logits.

    Parameters
    ----------
    options : TopkOptions
    on_case : callable
        Called with a label before each shape.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError
        As :func:`vllm_dsa.bench.gpu.set_up_gpu`.
    """
    rig = set_up_gpu("bench topk")
    report = BenchReport[TopkRow](environment(options.command, rig.caps) | rig.describe())
    for rows in options.rows:
        for length in options.lengths:
            on_case(f"{rows} rows of {length}")
            _bench_shape(rows, length, options, rig, report)
    return report


def _bench_shape(rows: int, length: int, options: TopkOptions, rig: GpuRig, report: BenchReport[TopkRow]) -> None:
    generator = torch.Generator(rig.device).manual_seed(options.seed)
    logits = torch.randn(rows, length, generator=generator, device=rig.device)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=rig.device)
    out = torch.empty(rows, options.k, dtype=torch.int32, device=rig.device)
    graph = capture(functools.partial(topk_indices, logits, lengths, options.k, out=out))
    # The graph that is timed is the one that is checked, and only what its replay writes can pass.
    out.fill_(_POISON)
    graph.replay()
    if not torch.equal(out, topk_twin(logits, lengths, options.k)):
        report.errors.append(f"{rows} rows of {length}: not the indices of the twin")
        return
    theirs = capture(functools.partial(torch.topk, logits, options.k, dim=1))
    report.rows.append(_row(rows, length, options, rig, {OURS: graph, TORCH: theirs}))


def _row(rows: int, length: int, options: TopkOptions, rig: GpuRig, graphs: dict[str, CapturedGraph]) -> TopkRow:
    runs: dict[str, Sequence[Callable[[], None]]] = {name: [graph.replay] for name, graph in graphs.items()}
    timings: dict[str, Timing] = measure_interleaved(runs, rig.flush, options.iters)
    ours, theirs = timings[OURS], timings[TORCH].median_us
    return TopkRow(
        rows=rows,
        length=length,
        k=options.k,
        median_us=ours.median_us,
        p10_us=ours.p10_us,
        p90_us=ours.p90_us,
        torch_us=theirs,
        floor_us=4 * rows * length / rig.ceilings.gb_per_s / 1e3,
        speedup=theirs / ours.median_us,
    )
