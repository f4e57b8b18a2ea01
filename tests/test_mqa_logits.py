import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.ops import ScaleFormat
from vllm_dsa.reference import quantize_fp8

H, D = 32, 128


def make_inputs(num_tokens, num_kv, generator):
    q, weights = ops.fold_q(
        torch.randn(num_tokens, H, D, generator=generator),
        torch.randn(num_tokens, H, generator=generator),
        scale_format=ScaleFormat.UE8M0,
    )
    k, k_scale = quantize_fp8(
        torch.randn(num_kv, D, generator=generator), scale_format=ScaleFormat.FP32, amax_floor=1e-4
    )
    return {"q": q, "k": k, "k_scale": k_scale, "weights": weights}


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def expected_logits(q, k, k_scale, weights, row_starts, row_ends):
    keys = k.double() * k_scale.double()[:, None]
    logits = torch.full((q.shape[0], k.shape[0]), float("-inf"), dtype=torch.float64)
    for row, (start, end) in enumerate(zip(row_starts.tolist(), row_ends.tolist(), strict=True)):
        for head in range(q.shape[1]) if end > start else ():
            score = (keys[start:end] @ q[row, head].double()).clamp(min=0) * weights[row, head].double()
            logits[row, start:end] = logits[row, start:end].nan_to_num(neginf=0.0) + score
    return logits


WINDOWS = {
    "causal": ([0] * 40, list(range(1, 41))),
    "two_requests": ([0] * 20 + [30] * 20, list(range(11, 31)) + list(range(31, 51))),
    "empty_windows": ([5] * 20 + [50] * 20, [5] * 20 + [9] * 20),
    "mixed": ([7, 0] * 20, [7, 50] * 20),
}


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_equals_the_loop_over_heads(windows, generator):
    inputs = make_inputs(40, 50, generator) | {"row_starts": int32(windows[0]), "row_ends": int32(windows[1])}
    found, expected = ops.mqa_logits(**inputs), expected_logits(**inputs)
    visible = expected != float("-inf")
    assert torch.equal(found != float("-inf"), visible)
    assert found.dtype == torch.float32
    error = (found[visible].double() - expected[visible]).norm()
    assert error <= 5e-6 * expected[visible].norm()
    exact = reference.mqa_logits(**inputs, compute_dtype=torch.float64)
    assert exact.dtype == torch.float64
    assert torch.allclose(exact[visible], expected[visible], rtol=1e-12, atol=1e-14)


def test_more_tokens_than_one_chunk(generator):
    inputs = make_inputs(3, 8300, generator)
    inputs |= {"row_starts": int32([0, 4090, 8200]), "row_ends": int32([8300, 4100, 8300])}
    found, expected = ops.mqa_logits(**inputs), expected_logits(**inputs)
    visible = expected != float("-inf")
    assert torch.equal(found != float("-inf"), visible)
    assert (found[visible].double() - expected[visible]).norm() <= 5e-6 * expected[visible].norm()


def test_bounds_are_clipped_to_the_keys(generator):
    inputs = make_inputs(2, 50, generator)
    wide = ops.mqa_logits(**inputs, row_starts=int32([-5, 40]), row_ends=int32([10, 99]))
    clipped = ops.mqa_logits(**inputs, row_starts=int32([0, 40]), row_ends=int32([10, 50]))
    assert torch.equal(wide, clipped)


def test_a_poisoned_key_outside_every_window_never_shows(generator):
    inputs = make_inputs(2, 50, generator)
    inputs["k_scale"][10:20] = float("nan")
    found = ops.mqa_logits(**inputs, row_starts=int32([0, 20]), row_ends=int32([10, 50]))
    assert not found.isnan().any()


@pytest.mark.parametrize(("num_tokens", "num_kv"), [(0, 5), (3, 0), (0, 0)])
def test_empty(num_tokens, num_kv, generator):
    bounds = int32([0] * num_tokens)
    found = ops.mqa_logits(**make_inputs(num_tokens, num_kv, generator), row_starts=bounds, row_ends=bounds)
    assert found.shape == (num_tokens, num_kv)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, H, D)}, TypeError, "q has dtype"),
        ({"k": torch.zeros(50, 64).to(torch.float8_e4m3fn)}, ValueError, r"k has shape \(50, 64\)"),
        ({"k_scale": torch.zeros(49)}, ValueError, r"k_scale has shape \(49,\); allowed: \(50\)"),
        ({"weights": torch.zeros(2, 1)}, ValueError, "weights has shape"),
        ({"row_starts": torch.zeros(2, dtype=torch.int64)}, TypeError, "row_starts has dtype"),
        ({"row_ends": int32([1])}, ValueError, "row_ends has shape"),
    ],
)
def test_refuses(change, error, message, generator):
    good = make_inputs(2, 50, generator) | {"row_starts": int32([0, 0]), "row_ends": int32([1, 2])}
    with pytest.raises(error, match=message):
        ops.mqa_logits(**(good | change))


def test_validate_finds_bounds_out_of_range(monkeypatch, generator):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    inputs = make_inputs(2, 50, generator)
    with pytest.raises(ValueError, match=r"row_ends\[1\] is 51; allowed: 0 to 50"):
        ops.mqa_logits(**inputs, row_starts=int32([0, 0]), row_ends=int32([50, 51]))
