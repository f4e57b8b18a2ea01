"""What the GPU benchmarks share: the machine they need, its ceilings, its clock."""

from dataclasses import dataclass

import torch

from vllm_dsa.bench.ceilings import Ceilings, measure_ceilings
from vllm_dsa.bench.timing import ColdL2
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, load_deep_gemm, resolve_capabilities
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
