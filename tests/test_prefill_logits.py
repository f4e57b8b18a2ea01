import dataclasses

import pytest
import torch

from vllm_dsa.deep_gemm_wrapper import PrefillSignature, fp8_mqa_logits, planned_capabilities, prefill

SM90 = planned_capabilities("sm90")


@pytest.fixture
def library(mocker):
    function = mocker.Mock(side_effect=lambda **known: torch.zeros(known["weights"].shape[0], known["max_seqlen_k"]))
    loaded = mocker.Mock()
    loaded.function.return_value = function
    mocker.patch.object(prefill, "load_deep_gemm", return_value=loaded)
    return function


def arguments(**changes):
    known = {
        "q": torch.zeros(3, 64, 128, dtype=torch.float8_e4m3fn),
        "k": torch.zeros(10, 128, dtype=torch.float8_e4m3fn),
        "k_scale": torch.ones(10),
        "weights": torch.zeros(3, 64),
        "row_starts": torch.zeros(3, dtype=torch.int32),
        "row_ends": torch.full((3,), 10, dtype=torch.int32),
        "max_seqlen_k": 10,
    }
    return {**known, **changes}


@pytest.mark.parametrize("signature", PrefillSignature)
def test_the_width_goes_by_keyword_and_nothing_by_position(library, signature):
    caps = dataclasses.replace(SM90, prefill_signature=signature)
    fp8_mqa_logits(**arguments(), caps=caps)
    (call,) = library.call_args_list
    assert call.args == ()
    assert call.kwargs["max_seqlen_k"] == 10
    # A build without the parameter would refuse it; a build with it cleans, at a price, unless told not to.
    assert call.kwargs.get("clean_logits") is (False if signature is PrefillSignature.CLEAN_LOGITS else None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, 48, 128, dtype=torch.float8_e4m3fn)}, ValueError, "heads for planned, got 48"),
        ({"q": torch.zeros(3, 128, dtype=torch.float8_e4m3fn)}, ValueError, "q must be"),
        ({"k": torch.zeros(10, 64, dtype=torch.float8_e4m3fn)}, ValueError, "k \\(keys, head_dim\\)"),
        ({"k_scale": torch.ones(9)}, ValueError, "k_scale must have shape \\(10,\\)"),
        ({"weights": torch.zeros(3, 64, dtype=torch.bfloat16)}, TypeError, "weights must be torch.float32"),
        ({"row_ends": torch.zeros(3, dtype=torch.int64)}, TypeError, "row_ends must be torch.int32"),
        ({"row_starts": torch.zeros(6, dtype=torch.int32)[::2]}, ValueError, "row_starts must be contiguous"),
        ({"row_starts": torch.zeros(3, dtype=torch.int32, device="meta")}, ValueError, "row_starts must be on cpu"),
        ({"max_seqlen_k": 0}, ValueError, "max_seqlen_k must be at least 1, got 0"),
    ],
)
def test_bad_arguments_never_reach_the_library(library, change, error, message):
    with pytest.raises(error, match=message):
        fp8_mqa_logits(**arguments(**change), caps=SM90)
    library.assert_not_called()
