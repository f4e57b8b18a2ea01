"""How many kernels a call launches, as the driver saw them."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def count_launches(run: Callable[[], object]) -> tuple[int, int]:
    """Return the kernels, and the memory copies and fills, that `run` enqueues on the GPU.

    Parameters
    ----------
    run : callable
        Already warm: a compilation launches nothing, but an autotuner would.
    """
    # The first profile of a process can miss events while CUPTI starts.
    _device_activities(run)
    names = _device_activities(run)
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - copies, copies


def _device_activities(run: Callable[[], object]) -> list[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
