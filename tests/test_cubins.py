"""Every CUDA kernel compiles for Hopper, in every variant, on a machine without a GPU, and spills nothing."""

import ctypes

import pytest

from vllm_dsa.kernels import sm90_paged_mqa_logits, topk
from vllm_dsa.kernels.jit import compile_cubin
from vllm_dsa.kernels.sass import inspect_cubin, parameter_sizes
from vllm_dsa.kernels.variants import all_variants

TENSOR_MAP_BYTES = 128
FP8_TENSOR_CORE_SOURCES = {"sm90_paged_mqa_logits"}


@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_a_variant_has_no_spills_and_uses_the_tensor_cores(variant, request, monkeypatch):
    # A variant takes seconds: one that no edit touched comes from the last run of the tests.
    monkeypatch.setenv("VDSA_CACHE_DIR", str(request.config.cache.mkdir("cubins")))
    report = inspect_cubin(compile_cubin(variant, "sm_90a").cubin, variant.symbol)
    assert not report.has_spills, report
    if variant.source in FP8_TENSOR_CORE_SOURCES:
        assert report.opcode_counts["QGMMA"], report


@pytest.mark.parametrize("launcher", [sm90_paged_mqa_logits, topk], ids=lambda module: module.__name__)
def test_a_launch_hands_over_what_the_kernel_takes(launcher, request, monkeypatch):
    monkeypatch.setenv("VDSA_CACHE_DIR", str(request.config.cache.mkdir("cubins")))
    sizes = [TENSOR_MAP_BYTES if kind is None else ctypes.sizeof(kind) for kind in launcher.ARGUMENT_TYPES]
    assert parameter_sizes(compile_cubin(launcher.variants()[0], "sm_90a").cubin) == sizes


def test_the_variants_are_distinct():
    assert len(set(all_variants())) == len(all_variants()) > 0
