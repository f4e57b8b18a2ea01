import pytest
import torch

from vllm_dsa import ops
from vllm_dsa.ops import RopeStyle, ScaleFormat
from vllm_dsa.reference import apply_rope, dequantize_fp8, hadamard_transform, make_cos_sin

T, H, D = 5, 8, 128
FORMATS = list(ScaleFormat)


@pytest.fixture
def inputs(generator):
    return {
        "q": torch.randn(T, H, D, generator=generator).to(torch.bfloat16),
        "weights": torch.randn(T, H, generator=generator).to(torch.bfloat16),
        "positions": torch.tensor([0, 1, 7, 900, 3]),
        "cos_sin": make_cos_sin(1000, 64),
        "style": RopeStyle.HALF_SPLIT,
        "scale_format": ScaleFormat.UE8M0,
    }


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize("hadamard", [False, True])
def test_values_times_folded_weights_give_back_q_times_the_weights(inputs, scale_format, style, hadamard):
    inputs |= {"scale_format": scale_format, "style": style, "hadamard": hadamard}
    q_fp8, folded = ops.fold_q(**inputs)
    assert q_fp8.dtype == torch.float8_e4m3fn
    assert folded.dtype == torch.float32
    rotated = apply_rope(inputs["q"].double(), inputs["positions"], inputs["cos_sin"], style)
    if hadamard:
        rotated = hadamard_transform(rotated)
    expected = rotated * inputs["weights"].double()[..., None] * D**-0.5 * H**-0.5
    found = dequantize_fp8(q_fp8, folded, torch.float64)
    assert 1 - torch.cosine_similarity(found, expected, dim=-1).min() < 2e-3
    assert torch.allclose(found.norm(dim=-1), expected.norm(dim=-1), rtol=0.02)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_weights_carry_exactly_the_scale_of_their_head(inputs, scale_format):
    q_fp8, folded = ops.fold_q(**(inputs | {"scale_format": scale_format, "softmax_scale": 1.0, "head_scale": 1.0}))
    rotated = apply_rope(inputs["q"], inputs["positions"], inputs["cos_sin"], inputs["style"])
    amax = rotated.float().abs().amax(-1)
    scale = folded / inputs["weights"].float()
    used = q_fp8.float().abs().amax(-1) * scale / amax
    assert torch.allclose(used, torch.ones_like(used), rtol=1 / 16)
    if scale_format is ScaleFormat.UE8M0:
        assert (folded.frexp().mantissa == inputs["weights"].float().frexp().mantissa).all()


def test_explicit_scales_multiply_the_weights(inputs):
    _, default = ops.fold_q(**inputs)
    _, explicit = ops.fold_q(**inputs, softmax_scale=2.0, head_scale=0.5)
    assert torch.allclose(explicit * D**-0.5 * H**-0.5, default, rtol=1e-6)


def test_no_rope_when_none_of_its_arguments_is_given(inputs):
    bare = {name: inputs[name] for name in ("q", "weights", "scale_format")}
    rotated = apply_rope(inputs["q"], inputs["positions"], inputs["cos_sin"], inputs["style"])
    for found, expected in zip(ops.fold_q(**(bare | {"q": rotated})), ops.fold_q(**inputs), strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize(("size", "amax"), [(1e-6, 1e-6), (1e-12, 1e-10)])
def test_the_scale_of_a_tiny_q_stops_at_its_floor(size, amax):
    q, one = torch.full((1, 1, D), size), torch.ones(1, 1)
    _, folded = ops.fold_q(q, one, softmax_scale=1.0, scale_format=ScaleFormat.FP32)
    assert folded.item() == pytest.approx(amax / 448)


def test_zero_heads_stay_finite(inputs):
    inputs["q"][2, 3] = 0
    q_fp8, folded = ops.fold_q(**inputs)
    assert (q_fp8[2, 3].float() == 0).all()
    assert folded.isfinite().all()


def test_empty(inputs):
    inputs |= {name: inputs[name][:0] for name in ("q", "weights", "positions")}
    q_fp8, folded = ops.fold_q(**inputs)
    assert (q_fp8.shape, q_fp8.dtype) == ((0, H, D), torch.float8_e4m3fn)
    assert (folded.shape, folded.dtype) == ((0, H), torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(T, H, D, dtype=torch.float8_e4m3fn)}, TypeError, "q has dtype.*allowed"),
        ({"q": torch.zeros(T, D)}, ValueError, r"q has shape \(5, 128\); allowed: \(any, any, any\)"),
        ({"q": torch.zeros(T, D, H).mT}, ValueError, "q has strides.*last stride of 1"),
        ({"q": None}, TypeError, "q is of type NoneType"),
        ({"weights": torch.zeros(T, H + 1)}, ValueError, r"weights has shape.*\(5, 8\)"),
        ({"positions": torch.zeros(T)}, TypeError, "positions has dtype torch.float32"),
        ({"positions": None}, ValueError, "positions is None"),
        ({"style": "interleaved"}, TypeError, "style is 'interleaved'; allowed: RopeStyle"),
        ({"cos_sin": torch.zeros(10, 130)}, ValueError, "cos_sin has 130 columns.*2 to 128"),
        ({"cos_sin": torch.zeros(10, 63)}, ValueError, "cos_sin has 63 columns"),
        ({"scale_format": "ue8m0"}, TypeError, "scale_format is 'ue8m0'; allowed: ScaleFormat"),
    ],
)
def test_refuses(inputs, change, error, message):
    with pytest.raises(error, match=message):
        ops.fold_q(**(inputs | change))


def test_refuses_a_hadamard_of_a_size_that_is_no_power_of_two():
    with pytest.raises(ValueError, match=r"hadamard.*96"):
        ops.fold_q(torch.zeros(1, 2, 96), torch.zeros(1, 2), scale_format=ScaleFormat.FP32, hadamard=True)


def test_validate_finds_a_position_past_the_table(inputs, monkeypatch):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    ops.fold_q(**inputs)
    inputs["positions"][3] = 1000
    with pytest.raises(ValueError, match=r"positions\[3\] is 1000; allowed: 0 to 999"):
        ops.fold_q(**inputs)
