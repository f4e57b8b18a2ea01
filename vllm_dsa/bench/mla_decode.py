"""MLA decode attention beside a plain torch baseline and the libraries that are there: checked, then timed in turns."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.bench.ceilings import gb_per_s, measure_ceilings
from vllm_dsa.bench.gpu import GpuRig
from vllm_dsa.bench.mla_inputs import MlaInputs
from vllm_dsa.bench.results import BenchReport, environment
from vllm_dsa.bench.tables import TextTable
from vllm_dsa.bench.timing import ColdL2, capture, measure_interleaved, syncs_with_host
from vllm_dsa.deep_gemm_wrapper import resolve_capabilities
from vllm_dsa.ops import MlaBackend
from vllm_dsa.platform import is_cuda

OURS, TORCH = "ours", "torch"
LIBRARIES = {MlaBackend.FLASH_MLA: "flash_mla", MlaBackend.FLASHINFER: "flashinfer"}
MODES = ("dense", "sparse")
DTYPES = ("bf16", "fp8")
# Of a row's largest output, and of its lse: bfloat16 weights and outputs, and for FP8 bfloat16 latents.
_OUT_ERROR, _LSE_ERROR = 2.0**-6, 1e-2
_LN2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class MlaOptions:
    """What to measure: every combination.

    Attributes
    ----------
    modes : tuple of {"dense", "sparse"}
    dtypes : tuple of {"bf16", "fp8"}
        Of the cache.
    heads : tuple of int
        128 is DeepSeek-V3.2 with gathered heads, 16 a rank of eight.
    batches : tuple of int
        Requests.
    next_ns : tuple of int
        Query rows of a request.
    contexts : tuple of int
        Tokens that the last row of a request sees.
    topk : int
        Tokens that a row of the sparse mode reads, at most.
    block_size : int
    iters : int
        Timed repeats.
    seed : int

    Raises
    ------
    ValueError
        If a list is empty, a name is unknown, a number is below 1 or a context is shorter than the rows of a request.
    """

    modes: tuple[str, ...] = MODES
    dtypes: tuple[str, ...] = DTYPES
    heads: tuple[int, ...] = (128, 16)
    batches: tuple[int, ...] = (1, 8, 64)
    next_ns: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (4096, 32768)
    topk: int = 2048
    block_size: int = 64
    iters: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("modes", MODES), ("dtypes", DTYPES)):
            values = getattr(self, name)
            if not values or set(values) - set(allowed):
                raise ValueError(f"--{name} must be some of {', '.join(allowed)}, got {list(values)}")
        for name in ("heads", "batches", "next_ns", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"--{_flag(name)} must be whole numbers of at least 1, got {list(values)}")
        for name in ("topk", "block_size", "iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if min(self.contexts) < max(self.next_ns):
            raise ValueError(f"--contexts must be at least {max(self.next_ns)}, the rows of a request")

    @property
    def command(self) -> str:
        """The command line that measures this again."""
        lists = ("modes", "dtypes", "heads", "batches", "next_ns", "contexts")
        parts = [f"--{_flag(name)} {','.join(map(str, getattr(self, name)))}" for name in lists]
        parts += [f"--{_flag(name)} {getattr(self, name)}" for name in ("topk", "block_size", "iters", "seed")]
        return f"python benchmarks/bench_mla_decode.py {' '.join(parts)}"

    def cases(self) -> "Iterator[MlaCase]":
        """Yield every combination."""
        lists = (self.modes, self.dtypes, self.heads, self.batches, self.next_ns, self.contexts)
        for values in itertools.product(*lists):
            yield MlaCase(*values)


def _flag(name: str) -> str:
    return {"next_ns": "next-n"}.get(name, name.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class MlaCase:
    """One shape; see `MlaOptions`."""

    mode: str
    dtype: str
    heads: int
    batch: int
    next_n: int
    context: int

    @property
    def label(self) -> str:
        """The shape as text."""
        return (
            f"{self.mode} {self.dtype}, {self.heads} heads, batch {self.batch}, n={self.next_n}, context {self.context}"
        )


@dataclass(frozen=True, slots=True)
class MlaRow:
    """One shape's result.

    Attributes
    ----------
    mode, dtype, heads, batch, next_n, context
        As in `MlaCase`.
    median_us, p10_us, p90_us : float
        Of our kernel.
    latent_bytes : int
        Latents that must be read: once for a request if dense, for each row if sparse.
    gb_per_s : float
        These over the median.
    share : float
        Of the bandwidth that was measured in the same run.
    tflops : float
        Of both products, over the median.
    torch_us : float
        Median of two batched matrix products and a softmax over bfloat16 latents. Dense, these lie ready in a row;
        sparse, it gathers them.
    flash_mla_us, flashinfer_us : float or None
        Median of the library, if it is there, takes the shape and can be captured.
    """

    mode: str
    dtype: str
    heads: int
    batch: int
    next_n: int
    context: int
    median_us: float
    p10_us: float
    p90_us: float
    latent_bytes: int
    gb_per_s: float
    share: float
    tflops: float
    torch_us: float
    flash_mla_us: float | None
    flashinfer_us: float | None


def bench_mla_decode(options: MlaOptions, on_case: Callable[[str], None]) -> BenchReport[MlaRow]:
    """Measure every shape over random latents, queries and choices.

    Parameters
    ----------
    options : MlaOptions
    on_case : callable
        Called with a label before each shape.

    Raises
    ------
    NotImplementedError
        If torch sees no CUDA device.
    """
    rig = _set_up()
    report = BenchReport[MlaRow](environment(options.command, rig.caps) | rig.describe())
    for case in options.cases():
        on_case(case.label)
        _bench_case(case, options, rig, report)
    return report


def mla_tables(rows: Sequence[MlaRow]) -> list[TextTable]:
    """Return a table for each mode and dtype."""
    columns = (
        *("heads", "batch", "n", "context", "us", "p10-p90", "MB", "GB/s", "of peak", "TFLOP/s", "torch us"),
        *(f"{name} us" for name in LIBRARIES.values()),
    )
    tables = []
    for (mode, dtype), found in itertools.groupby(rows, key=lambda row: (row.mode, row.dtype)):
        tables.append(TextTable(f"MLA decode, {mode}, {dtype} cache", columns, tuple(map(_cells, found))))
    return tables


def _cells(row: MlaRow) -> tuple[str, ...]:
    libraries = tuple("-" if us is None else f"{us:.1f}" for us in (row.flash_mla_us, row.flashinfer_us))
    return (
        *(str(row.heads), str(row.batch), str(row.next_n), str(row.context)),
        *(f"{row.median_us:.1f}", f"{row.p10_us:.1f}-{row.p90_us:.1f}", f"{row.latent_bytes / 1e6:.1f}"),
        *(f"{row.gb_per_s:.0f}", f"{row.share:.0%}", f"{row.tflops:.0f}", f"{row.torch_us:.1f}"),
        *libraries,
    )


def _set_up() -> GpuRig:
    if not is_cuda():
        raise NotImplementedError("bench mla_decode times a GPU, and torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    flush = ColdL2(device)
    return GpuRig(device, resolve_capabilities(), flush, measure_ceilings(device, flush))


def _bench_case(case: MlaCase, options: MlaOptions, rig: GpuRig, report: BenchReport[MlaRow]) -> None:
    inputs = MlaInputs(
        *(case.heads, case.batch, case.next_n, case.context),
        topk=options.topk if case.mode == "sparse" else None,
        is_fp8=case.dtype == "fp8",
        block_size=options.block_size,
        seed=options.seed,
        device=rig.device,
    )
    expected = inputs.run(MlaBackend.REFERENCE)
    graph = capture(functools.partial(inputs.run, None, inputs.buffers()))
    # The graph that is timed is the one that is checked, and only what its replay writes can pass.
    graph.result.out.fill_(float("nan"))
    graph.result.lse.fill_(float("nan"))
    graph.replay()
    if fault := _fault(graph.result, expected):
        report.errors.append(f"{case.label}: {fault}")
        return
    graphs = {OURS: graph, TORCH: capture(inputs.torch_baseline)}
    for backend, name in LIBRARIES.items():
        run = functools.partial(inputs.run, backend)
        try:
            found = run()
        except (ImportError, NotImplementedError):
            continue
        if fault := _fault(found, expected):
            report.errors.append(f"{case.label}, {name}: {fault}")
        elif not syncs_with_host(run):
            graphs[name] = capture(run)
    timings = measure_interleaved({name: [one.replay] for name, one in graphs.items()}, rig.flush, options.iters)
    ours = timings[OURS]
    medians = {name: timings[name].median_us if name in timings else None for name in LIBRARIES.values()}
    bandwidth = gb_per_s(inputs.latent_bytes, ours.median_us)
    report.rows.append(
        MlaRow(
            *(case.mode, case.dtype, case.heads, case.batch, case.next_n, case.context),
            *(ours.median_us, ours.p10_us, ours.p90_us),
            latent_bytes=inputs.latent_bytes,
            gb_per_s=bandwidth,
            share=bandwidth / rig.ceilings.gb_per_s,
            tflops=inputs.flops / ours.median_us / 1e6,
            torch_us=timings[TORCH].median_us,
            flash_mla_us=medians["flash_mla"],
            flashinfer_us=medians["flashinfer"],
        )
    )


def _fault(found: DecodeAttnResult, expected: DecodeAttnResult) -> str | None:
    lse = found.lse * (_LN2 if found.base is LseBase.TWO else 1)
    out, want = found.out.float(), expected.out.float()
    out_error = ((out - want).abs().amax(dim=2) / want.abs().amax(dim=2)).max().item()
    lse_error = (lse - expected.lse).abs().max().item()
    # Not by what exceeds: a NaN exceeds nothing.
    if out_error <= _OUT_ERROR and lse_error <= _LSE_ERROR:
        return None
    return f"out is off by {out_error:.1e} of its row's largest, lse by {lse_error:.1e}"
