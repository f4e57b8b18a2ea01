"""GPU time of a callable: CUDA graphs, an L2 cache made cold by reading, events, medians."""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

# Five times the L2 of an H200. Read, not written: dirty lines would be written back inside the timed span.
FLUSH_BYTES = 256 << 20

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Timing:
    """A summary of repeats, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float


def summarize(samples_us: Sequence[float]) -> Timing:
    """Return median and spread of at least one sample."""
    p10, median, p90 = np.percentile(samples_us, (10, 50, 90)).tolist()
    return Timing(median, p10, p90)


def speedup(baseline: Timing | None, timing: Timing) -> float | None:
    """Return how many times the baseline's median is this one's; ``None`` without a baseline."""
    return None if baseline is None else baseline.median_us / timing.median_us


class ColdL2:
    """Evicts the L2 cache by reading a buffer larger than it.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._sink = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self) -> None:
        """Enqueue the read; no host sync."""
        torch.sum(self._buffer, dim=0, out=self._sink)


@dataclass(slots=True)
class CapturedGraph:
    """A CUDA graph with what must live as long as it.

    Attributes
    ----------
    run : callable
        What was captured; keeps the inputs alive.
    graph : torch.cuda.CUDAGraph
    result : object
        What `run` returned in the capture: every replay overwrites its tensors.
    """

    run: Callable[[], Any]
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    result: Any = None

    def replay(self) -> None:
        """Enqueue the graph."""
        self.graph.replay()


def capture(run: Callable[[], Any]) -> CapturedGraph:
    """Run `run` twice, then capture it. It must not sync with the host; its inputs must exist before."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    captured = CapturedGraph(run)
    with torch.cuda.graph(captured.graph):
        captured.result = run()
    return captured


def syncs_with_host(run: Callable[[], Any]) -> bool:
    """Whether torch sees a host sync in `run`, which then cannot be captured. Warm it up before.

    Asking first is safer than a failed capture, which can leave the allocator and the generators of the process in
    capture mode.
    """
    with warnings.catch_warnings():
        # torch warns that this mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return False


def event_us(run: Callable[[], Any], before: Callable[[], Any]) -> float:
    """Return the microseconds between events around `run`, enqueued while `before` still runs on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def measure_interleaved(
    runs: Mapping[_Key, Sequence[Callable[[], Any]]], flush: ColdL2, iters: int
) -> dict[_Key, Timing]:
    """Time every run `iters` times with a cold L2, taking turns so that drift of clocks hits all alike.

    Parameters
    ----------
    runs : mapping of hashable to sequence of callable
        By key, the same work over several copies of its data; repeats rotate over them.
    flush : ColdL2
        Enqueued before every repeat.
    iters : int
        Repeats of each key.
    """
    samples: dict[_Key, list[float]] = {key: [] for key in runs}
    for repeat in range(iters):
        for key, copies in runs.items():
            samples[key].append(event_us(copies[repeat % len(copies)], flush))
    return {key: summarize(values) for key, values in samples.items()}
