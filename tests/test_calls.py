import pytest
import torch

from vllm_dsa.deep_gemm_wrapper import (
    DeepGemmUnavailableError,
    calls,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
    planned_capabilities,
)

SM90 = planned_capabilities("sm90")


@pytest.fixture
def library(mocker):
    """A DeepGEMM that records its keyword calls."""
    loaded = mocker.Mock()
    functions = {
        "get_paged_mqa_logits_metadata": mocker.Mock(
            side_effect=lambda **kw: torch.arange(2 * (kw["num_sms"] + 1), dtype=torch.int32).view(-1, 2)
        ),
        "fp8_fp4_paged_mqa_logits": mocker.Mock(
            side_effect=lambda **kw: torch.zeros(kw["weights"].shape[0], kw["max_context_len"])
        ),
    }
    loaded.function.side_effect = functions.__getitem__
    mocker.patch.object(calls, "load_deep_gemm", return_value=loaded)
    return functions


def lens(rows=2, next_n=1, dtype=torch.int32):
    return torch.full((rows, next_n), 100, dtype=dtype)


def logits_arguments(next_n=4, heads=64, slots=66):
    return {
        "q": torch.zeros(2, next_n, heads, 128, dtype=torch.float8_e4m3fn),
        "kv_cache": torch.zeros(4, 64, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(2 * next_n, heads),
        "context_lens": lens(next_n=next_n),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "schedule_metadata": torch.zeros(slots + 1, 2, dtype=torch.int32),
        "max_context_len": 128,
    }


def test_next_n_comes_from_the_lens_and_num_sms_stays_the_sm_count(library):
    for next_n, slots in ((1, 132), (2, 132), (4, 66)):
        schedule = get_paged_mqa_logits_metadata(lens(next_n=next_n), 64, 132, caps=SM90)
        assert schedule.shape == (slots + 1, 2)
        call = library["get_paged_mqa_logits_metadata"].call_args
        assert call.args == ()
        assert call.kwargs["num_sms"] == slots
        assert call.kwargs["block_kv"] == 64
        assert "indices" not in call.kwargs


def test_schedule_goes_into_a_prefix_of_out(library):
    out = torch.full((133, 2), 0x7F7F7F7F, dtype=torch.int32)
    schedule = get_paged_mqa_logits_metadata(lens(next_n=4), 64, 132, caps=SM90, out=out)
    assert schedule.data_ptr() == out.data_ptr()
    assert schedule.shape == (67, 2)
    assert torch.equal(schedule.flatten(), torch.arange(134, dtype=torch.int32))
    assert (out[67:] == 0x7F7F7F7F).all()


def test_indices_are_passed_to_varlen_builds_only(library):
    indices = torch.zeros(2, dtype=torch.int32)
    get_paged_mqa_logits_metadata(lens(), 64, 148, indices=indices, caps=planned_capabilities("sm100"))
    assert library["get_paged_mqa_logits_metadata"].call_args.kwargs["indices"] is indices
    with pytest.raises(ValueError, match="no varlen kernel"):
        get_paged_mqa_logits_metadata(lens(), 64, 132, indices=indices, caps=SM90)


@pytest.mark.parametrize(
    ("context_lens", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.int32), ValueError, "2-D"),
        (torch.zeros(4, 0, dtype=torch.int32), ValueError, "2-D"),
        (torch.zeros(4, 4, dtype=torch.int32)[:, :2], ValueError, "contiguous"),
        (lens(dtype=torch.int64), TypeError, "int32"),
        (lens(next_n=3), ValueError, r"next_n 3, native here are \[1, 2, 4\] on 132 SMs: plan the step"),
    ],
)
def test_bad_lens_are_refused_before_any_call(library, context_lens, error, message):
    with pytest.raises(error, match=message):
        get_paged_mqa_logits_metadata(context_lens, 64, 132, caps=SM90)
    library["get_paged_mqa_logits_metadata"].assert_not_called()


def test_bad_page_size_and_short_out_are_refused(library):
    with pytest.raises(ValueError, match=r"block_size must be one of \[32, 64\], got 128"):
        get_paged_mqa_logits_metadata(lens(), 128, 132, caps=SM90)
    with pytest.raises(ValueError, match="needs 133 rows, got 132"):
        get_paged_mqa_logits_metadata(lens(), 64, 132, caps=SM90, out=torch.zeros(132, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="must be int32"):
        get_paged_mqa_logits_metadata(lens(), 64, 132, caps=SM90, out=torch.zeros(133, 2))
    library["get_paged_mqa_logits_metadata"].assert_not_called()


def test_logits_are_called_by_keyword(library):
    logits = fp8_paged_mqa_logits(**logits_arguments(), caps=SM90)
    assert logits.shape == (8, 128)
    call = library["fp8_fp4_paged_mqa_logits"].call_args
    assert call.args == ()
    assert call.kwargs["q"][1] is None
    assert set(call.kwargs) == {
        "q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 132}, "must have 67 rows for next_n 4 on 132 SMs, got 133"),
        ({"heads": 48}, r"q must have \[16, 32, 64\] heads"),
    ],
)
def test_mismatched_schedule_or_heads_are_refused(library, change, message):
    with pytest.raises(ValueError, match=message):
        fp8_paged_mqa_logits(**logits_arguments(**change), caps=SM90)
    library["fp8_fp4_paged_mqa_logits"].assert_not_called()


def test_q_must_match_the_lens(library):
    arguments = logits_arguments() | {"q": torch.zeros(8, 1, 64, 128, dtype=torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match="q must be"):
        fp8_paged_mqa_logits(**arguments, caps=SM90)


def test_without_a_build_the_error_is_typed():
    with pytest.raises(DeepGemmUnavailableError):
        get_paged_mqa_logits_metadata(lens(), 64, 1, caps=planned_capabilities("cpu"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 4, 64, 128)}, TypeError, "q must be torch.float8_e4m3fn, got torch.float32"),
        (
            {"q": torch.zeros(2, 8, 64, 128, dtype=torch.float8_e4m3fn)[:, ::2]},
            ValueError,
            "q must be contiguous, got strides",
        ),
        ({"kv_cache": torch.zeros(4, 64, 1, 132, dtype=torch.int8)}, TypeError, "kv_cache must be torch.uint8"),
        ({"kv_cache": torch.zeros(4, 64, 1, 576, dtype=torch.uint8)}, ValueError, r"kv_cache must have shape"),
        ({"kv_cache": torch.zeros(4, 16, 1, 132, dtype=torch.uint8)}, ValueError, r"block_size must be one of"),
        ({"weights": torch.zeros(8, 64, dtype=torch.bfloat16)}, TypeError, "weights must be torch.float32"),
        ({"weights": torch.zeros(2, 64)}, ValueError, r"weights must have shape \(8, 64\)"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "block_table must be torch.int32"),
        ({"block_table": torch.zeros(8, 2, dtype=torch.int32)}, ValueError, r"block_table must have shape \(2, 2\)"),
        (
            {"block_table": torch.zeros(2, 2, dtype=torch.int32, device="meta")},
            ValueError,
            "block_table must be on cpu like q, got meta",
        ),
    ],
)
def test_bad_tensors_never_reach_the_library(library, change, error, message):
    with pytest.raises(error, match=message):
        fp8_paged_mqa_logits(**(logits_arguments() | change), caps=SM90)
    library["fp8_fp4_paged_mqa_logits"].assert_not_called()
