"""What this GPU's memory gives to the plainest kernels: the scale for every bandwidth share."""

from dataclasses import dataclass

import torch

from vllm_dsa.bench.timing import ColdL2, capture, measure_interleaved

# The size of the largest step's pages (batch 64, context 131072).
_BUFFER_BYTES = 1 << 30
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of the machine.

    Attributes
    ----------
    read_gb_per_s : float
        A sum over 1 GiB of float32.
    copy_gb_per_s : float
        A copy of 1 GiB, bytes read plus bytes written.
    tiny_graph_us : float
        Events around a graph of one one-element kernel: what is in every time besides the work.
    """

    read_gb_per_s: float
    copy_gb_per_s: float
    tiny_graph_us: float

    @property
    def gb_per_s(self) -> float:
        """The better of reading and copying."""
        return max(self.read_gb_per_s, self.copy_gb_per_s)


def measure_ceilings(device: torch.device, flush: ColdL2) -> Ceilings:
    """Measure on random data, cold, by CUDA graphs. Takes 2 GiB of device memory for a moment."""
    source = torch.randn(_BUFFER_BYTES // 4, device=device)
    target = torch.empty_like(source)
    total, tiny = torch.zeros((), device=device), torch.zeros(1, device=device)
    graphs = {
        "read": capture(lambda: torch.sum(source, dim=0, out=total)),
        "copy": capture(lambda: target.copy_(source)),
        "tiny": capture(lambda: tiny.add_(1)),
    }
    timings = measure_interleaved({name: [graph.replay] for name, graph in graphs.items()}, flush, _REPEATS)
    return Ceilings(
        read_gb_per_s=gb_per_s(_BUFFER_BYTES, timings["read"].median_us),
        copy_gb_per_s=gb_per_s(2 * _BUFFER_BYTES, timings["copy"].median_us),
        tiny_graph_us=timings["tiny"].median_us,
    )


def gb_per_s(num_bytes: int, microseconds: float) -> float:
    """Return decimal gigabytes per second."""
    return num_bytes / microseconds / 1e3
