from types import SimpleNamespace

import pytest
import torch

from vllm_dsa import platform
from vllm_dsa.platform import CPU, check_current_device, current_device, planned_device


def with_cuda(mocker, cuda_version="13.0", available=True):
    mocker.patch.object(platform.torch.version, "cuda", cuda_version)
    mocker.patch.object(platform.torch.cuda, "is_available", return_value=available)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H200")
    mocker.patch.object(platform.torch.cuda, "get_device_properties", return_value=properties)


def test_a_gpu(mocker):
    with_cuda(mocker)
    info = current_device()
    assert (info.family, info.num_sms, info.name, info.arch) == (9, 132, "NVIDIA H200", "sm90")


def test_no_gpu_rocm_and_explicit_cpu(mocker):
    with_cuda(mocker, available=False)
    assert current_device() is CPU
    with_cuda(mocker, cuda_version=None)
    assert current_device() is CPU
    with_cuda(mocker)
    assert current_device(torch.device("cpu")) is CPU
    assert CPU.arch == "cpu"


@pytest.mark.parametrize(("arch", "family", "num_sms"), [("sm90", 9, 132), ("sm100", 10, 148), ("cpu", None, 1)])
def test_planned_devices(arch, family, num_sms):
    device = planned_device(arch)
    assert (device.family, device.num_sms, device.arch) == (family, num_sms, arch)


def test_unknown_arch():
    with pytest.raises(ValueError, match="arch must be one of sm90, sm100, cpu, got 'sm80'"):
        planned_device("sm80")


def test_tensors_of_another_gpu_are_refused(mocker):
    mocker.patch.object(platform.torch.cuda, "current_device", return_value=0)
    check_current_device(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="the tensors are on cuda:1, the current device is cuda:0"):
        check_current_device(torch.device("cuda", 1))
