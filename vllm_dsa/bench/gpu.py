"""What the GPU benchmarks share: the machine they need, its ceilings, its clock."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_dsa.bench.cases import BenchCase, bench_cases
from vllm_dsa.bench.ceilings import Ceilings, measure_ceilings
from vllm_dsa.bench.inputs import PagePool
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.results import BenchReport, Row, environment
from vllm_dsa.bench.timing import ColdL2
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, load_deep_gemm, resolve_capabilities
from vllm_dsa.ops import IndexKCacheLayout
from vllm_dsa.platform import is_cuda


@dataclass(frozen=True, slots=True)
class GpuRig:
    """A GPU with DeepGEMM, ready to be timed.

    Attributes
    ----------
    device : torch.device
    caps : PagedMQALogitsCapabilities
        Of the loaded DeepGEMM.
    flush : ColdL2
    ceilings : Ceilings
        Measured when the rig is set up.
    """

    device: torch.device
    caps: PagedMQALogitsCapabilities
    flush: ColdL2
    ceilings: Ceilings

    def describe(self) -> dict[str, str]:
        """Return the measured limits as text, for a report's environment."""
        return {
            "measured read GB/s": f"{self.ceilings.read_gb_per_s:.0f}",
            "measured copy GB/s": f"{self.ceilings.copy_gb_per_s:.0f}",
            "measured tiny graph us": f"{self.ceilings.tiny_graph_us:.1f}",
        }


def set_up_gpu(what: str) -> GpuRig:
    """Find the GPU and its DeepGEMM, and measure what its memory gives.

    Parameters
    ----------
    what : str
        Who asks, for messages.

    Raises
    ------
    NotImplementedError
        If torch sees no CUDA device.
    DeepGemmUnavailableError
        If no DeepGEMM build can be imported.
    """
    if not is_cuda():
        raise NotImplementedError(f"{what} times a GPU, and torch sees no CUDA device (bench build runs anywhere)")
    load_deep_gemm()
    device = torch.device("cuda", torch.cuda.current_device())
    flush = ColdL2(device)
    return GpuRig(device, resolve_capabilities(), flush, measure_ceilings(device, flush))


def bench_every_case(
    which: str,
    options: BenchOptions,
    on_case: Callable[[BenchCase], None],
    bench_case: Callable[[BenchCase, BenchOptions, GpuRig, PagePool, BenchReport[Row]], None],
) -> BenchReport[Row]:
    """Set up the GPU and one pool of pages, and hand every case of the options to a benchmark.

    Parameters
    ----------
    which : str
        The benchmark, as ``vllm-dsa bench`` names it.
    options : BenchOptions
        Grid and settings.
    on_case : callable
        Called before each case.
    bench_case : callable
        Measures a case into the report.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError
        As :func:`set_up_gpu`.
    """
    rig = set_up_gpu(f"bench {which}")
    report = BenchReport[Row](environment(options.command(which), rig.caps) | rig.describe())
    cases = list(bench_cases(options))
    pool = PagePool(cases, IndexKCacheLayout(options.block_size), options.seed, rig.device)
    for case in cases:
        on_case(case)
        bench_case(case, options, rig, pool, report)
    return report
