"""What the GPU is: the one place that asks torch about it."""

import functools
from dataclasses import dataclass

import torch

# Major CUDA compute capabilities.
HOPPER = 9
BLACKWELL_DATACENTER = 10
PLANNED_SM_COUNTS = {"sm90": 132, "sm100": 148}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as this package sees it.

    Attributes
    ----------
    family : int or None
        Major CUDA compute capability (9 Hopper, 10 and 12 Blackwell); ``None`` without CUDA (CPU, ROCm, ...).
    minor : int
        Minor compute capability; 0 without CUDA.
    num_sms : int
        Streaming multiprocessors; 1 without CUDA, so that a schedule still has one slot.
    name : str
        What the driver calls the device.
    """

    family: int | None
    minor: int
    num_sms: int
    name: str

    @property
    def arch(self) -> str:
        """``sm90``, ``sm100``, ...; ``cpu`` without CUDA."""
        return "cpu" if self.family is None else f"sm{self.family}{self.minor}"


CPU = DeviceInfo(family=None, minor=0, num_sms=1, name="cpu")


def is_cuda() -> bool:
    """Whether torch is a CUDA (not ROCm) build and sees a GPU."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def current_device(device: torch.device | int | None = None) -> DeviceInfo:
    """Describe a device; ``None`` means the current CUDA device, or the CPU where there is none."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return CPU
    if not is_cuda():
        return CPU
    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        family=properties.major,
        minor=properties.minor,
        num_sms=properties.multi_processor_count,
        name=properties.name,
    )


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device runs our Hopper kernels; asked once for each device."""
    return current_device(device).family == HOPPER


@functools.cache
def num_sms(ordinal: int) -> int:
    """Return the SMs of a CUDA device; asked once for each device."""
    return current_device(ordinal).num_sms


def check_current_device(device: torch.device) -> None:
    """Raise ``RuntimeError`` unless `device` is the current CUDA device, on which every launch of this package runs.

    A launch on another GPU than the tensors' reads foreign addresses there.
    """
    current = torch.cuda.current_device()
    if device.index != current:
        raise RuntimeError(
            f"the tensors are on {device}, the current device is cuda:{current}: call torch.cuda.set_device before"
        )


def planned_device(arch: str) -> DeviceInfo:
    """Describe a machine that is not this one, to plan for it.

    Parameters
    ----------
    arch : {"sm90", "sm100", "cpu"}
        ``sm90`` is an H100/H200 SXM (132 SMs), ``sm100`` a B200 (148 SMs).

    Raises
    ------
    ValueError
        If `arch` is none of them.
    """
    if arch == "cpu":
        return CPU
    if arch not in PLANNED_SM_COUNTS:
        allowed = ", ".join([*PLANNED_SM_COUNTS, "cpu"])
        raise ValueError(f"arch must be one of {allowed}, got {arch!r}")
    return DeviceInfo(family=int(arch[2:-1]), minor=0, num_sms=PLANNED_SM_COUNTS[arch], name=f"planned {arch}")
