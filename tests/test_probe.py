import pytest
import torch

from vllm_dsa.deep_gemm_wrapper import DeepGemmBuild, DeepGemmUnavailableError
from vllm_dsa.deep_gemm_wrapper import probe as probe_module
from vllm_dsa.deep_gemm_wrapper.builds import LoadedDeepGemm
from vllm_dsa.deep_gemm_wrapper.probe import probe_next_n

REFUSAL = "Assertion error (csrc/apis/attention.hpp:390): next_n == 1 or next_n == 2"


@pytest.fixture
def library(mocker):
    """Install a library that accepts the given (next_n, schedule rows); returns the calls it saw."""
    mocker.patch.object(probe_module.torch, "device", return_value=torch.device("cpu"))
    probe_next_n.cache_clear()

    def install(accepted, error=REFUSAL):
        calls = []

        def paged(*, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
            call = (q[0].shape[1], schedule_meta.shape[0])
            calls.append(call)
            if call not in accepted:
                raise RuntimeError(error)

        module = mocker.Mock(fp8_fp4_paged_mqa_logits=paged)
        build = DeepGemmBuild("deep_gemm", None, "9.9", None)
        mocker.patch.object(probe_module, "load_deep_gemm", return_value=LoadedDeepGemm(build, module))
        return calls

    yield install
    probe_next_n.cache_clear()


@pytest.mark.parametrize(
    ("accepted", "native", "paired"),
    [
        ({(1, 133), (2, 133), (4, 67)}, {1, 2, 4}, {4}),
        ({(1, 133), (2, 133)}, {1, 2}, set()),
        ({(1, 133), (2, 133), (4, 133)}, {1, 2, 4}, set()),
    ],
)
def test_what_is_accepted_is_native(library, accepted, native, paired):
    library(accepted)
    probed = probe_next_n(0, 132)
    assert (probed.native, probed.paired) == (native, paired)


def test_it_asks_once_per_device_and_sm_count(library):
    calls = library({(1, 133), (1, 131)})
    probe_next_n(0, 132)
    asked = len(calls)
    probe_next_n(0, 132)
    assert len(calls) == asked
    probe_next_n(0, 130)
    assert len(calls) > asked


def test_a_build_that_refuses_everything_is_unavailable(library):
    library(set())
    with pytest.raises(DeepGemmUnavailableError, match=r"deep_gemm 9.9 refuses next_n \(1, 2, 4\)"):
        probe_next_n(0, 132)


@pytest.mark.parametrize(
    "error", ["Assertion error (csrc/jit/compiler.hpp:20): nvcc not found", "CUDA error: no kernel image"]
)
def test_another_failure_is_not_taken_for_a_refusal(library, error):
    library(set(), error)
    with pytest.raises(DeepGemmUnavailableError, match="cannot run its paged MQA logits"):
        probe_next_n(0, 132)
