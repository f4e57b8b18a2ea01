"""The Triton fold of index q against its twin on the CPU, bit for bit: interpreted without a GPU, compiled on one."""

import numpy as np
import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.bench.timing import syncs_with_host
from vllm_dsa.kernels import fold_q as fold_q_module
from vllm_dsa.kernels.fold_q import launch_fold_q
from vllm_dsa.reference import Q_AMAX_FLOOR, RopeStyle, ScaleFormat, make_cos_sin

D, MAX_POSITION = 128, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STYLES = [None, *RopeStyle]
FORMATS = list(ScaleFormat)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
devices = pytest.mark.parametrize("device", DEVICES)


def make_inputs(generator, *, num_tokens, heads=16, dim=D, dtype=torch.bfloat16, style=None, rope_dim=64):
    """Rows of many magnitudes, so that small elements meet e4m3's subnormals and small rows the amax floor."""
    size = torch.rand(num_tokens, heads, 1, generator=generator).mul(24).sub(16).exp2()
    spread = torch.rand(num_tokens, heads, dim, generator=generator).mul(12).neg().exp2()
    inputs = {
        "q": (torch.randn(num_tokens, heads, dim, generator=generator) * size * spread).to(dtype),
        "weights": torch.randn(num_tokens, heads, generator=generator).to(dtype),
    }
    inputs["q"][:, 1] = 0
    if style is not None:
        positions = torch.randint(MAX_POSITION, (num_tokens,), generator=generator)
        inputs |= {"positions": positions, "cos_sin": make_cos_sin(MAX_POSITION, rope_dim), "style": style}
    return inputs


def shuffled_rows(generator, num_tokens, num_dummies=2):
    rows = torch.cat([torch.arange(num_tokens), torch.full((num_dummies,), -1)])
    return rows[torch.randperm(len(rows), generator=generator)].int()


def apart(x):
    """The same values as a slice of a larger tensor of NaN: only the last axis is dense."""
    larger = torch.full([size + 16 for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    view = larger[tuple(slice(0, size) for size in x.shape)]
    return view.copy_(x)


def poisoned(num_rows, heads, dim, device):
    q_out = torch.full((num_rows, heads, dim), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return q_out, torch.full((num_rows, heads), torch.nan, device=device)


def launch(inputs, device, *, scale_format, row_to_token=None, hadamard=False):
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    q, weights = apart(given.pop("q")), apart(given.pop("weights"))
    style = given.pop("style", None)
    num_tokens, heads, dim = q.shape
    num_rows = num_tokens if row_to_token is None else len(row_to_token)
    out = poisoned(num_rows, heads, dim, device)
    launch_fold_q(
        q,
        weights,
        *out,
        **given,
        interleaved=style is RopeStyle.INTERLEAVED,
        row_to_token=None if row_to_token is None else row_to_token.to(device),
        softmax_scale=dim**-0.5,
        head_scale=heads**-0.5,
        amax_floor=Q_AMAX_FLOOR,
        power_of_two_scale=scale_format is ScaleFormat.UE8M0,
        hadamard=hadamard,
    )
    return out


def assert_same(found, expected):
    q, weights = (x.cpu() for x in found)
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(weights.view(torch.int32), expected[1].view(torch.int32))


def assert_equals_the_twin(inputs, device, **how):
    assert_same(launch(inputs, device, **how), reference.fold_q(**inputs, **how))


def size_for(device):
    return 2 if device == "cpu" else 300


@devices
@pytest.mark.parametrize("heads", [64, 32, 16])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_equals_the_twin_in_row_order(device, heads, style, scale_format, generator):
    num_tokens = size_for(device)
    inputs = make_inputs(generator, num_tokens=num_tokens, heads=heads, style=style)
    rows = shuffled_rows(generator, num_tokens)
    assert_equals_the_twin(inputs, device, scale_format=scale_format, row_to_token=rows)


@devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_equals_the_twin_in_every_dtype(device, dtype, style, hadamard, generator):
    inputs = make_inputs(generator, num_tokens=size_for(device), dtype=dtype, style=style)
    for scale_format in FORMATS:
        assert_equals_the_twin(inputs, device, scale_format=scale_format, hadamard=hadamard)


@devices
@pytest.mark.parametrize("style", STYLES)
def test_sizes_that_are_no_powers_of_two(device, style, generator):
    inputs = make_inputs(generator, num_tokens=2, heads=21, dim=96, style=style, rope_dim=40)
    rows = shuffled_rows(generator, 2)
    assert_equals_the_twin(inputs, device, scale_format=ScaleFormat.FP32, row_to_token=rows)


@devices
@pytest.mark.parametrize("style", RopeStyle)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_keep_their_sign_where_the_sine_is_zero(device, style, dtype, generator):
    inputs = make_inputs(generator, num_tokens=2, dtype=dtype, style=style)
    inputs["positions"].zero_()
    inputs["q"][:, 2:, ::3] = -0.0
    inputs["q"][:, 2:, 1::3] = 0.0
    assert_equals_the_twin(inputs, device, scale_format=ScaleFormat.FP32)


@devices
def test_positions_may_be_int32(device, generator):
    inputs = make_inputs(generator, num_tokens=2, style=RopeStyle.HALF_SPLIT)
    inputs["positions"] = inputs["positions"].int()
    assert_equals_the_twin(inputs, device, scale_format=ScaleFormat.FP32)


def e4m3_ties():
    """Both neighbours in float32 of the middle of every two e4m3 values, and the middle: (rows, D), amax 448."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    above = torch.nextafter(middles, torch.tensor(torch.inf))
    below = torch.nextafter(middles, torch.tensor(0.0))
    rows = torch.nn.functional.pad(torch.stack([middles, above, below]), (0, 2), value=448.0)
    return torch.cat([rows, -rows])


@devices
@pytest.mark.parametrize("scale_format", FORMATS)
def test_ties_round_to_even(device, scale_format):
    ties = e4m3_ties()
    inputs = {"q": ties[None], "weights": torch.ones(1, len(ties))}
    q, weights = launch(inputs, device, scale_format=scale_format)
    assert torch.equal(q[0].view(torch.uint8).cpu(), ties.to(torch.float8_e4m3fn).view(torch.uint8))
    assert (weights.cpu() == D**-0.5 * len(ties) ** -0.5).all()


@devices
@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotated_element_rounds_ties_to_even(device, dtype, style):
    eps = torch.finfo(dtype).eps
    q = torch.zeros(1, 16, D, dtype=dtype)
    heads = torch.arange(16)
    first, second = (0, 32) if style is RopeStyle.HALF_SPLIT else (0, 1)
    # A head's largest element becomes 1 + (head + 1 / 2) eps, which its scale and so its weight show.
    q[0, :, first], q[0, :, second] = (1 + heads * eps).to(dtype), -1
    cos_sin = torch.cat([torch.ones(1, 32), torch.full((1, 32), eps / 2)], dim=1)
    inputs = {
        "q": q,
        "weights": torch.ones(1, 16),
        "positions": torch.tensor([0]),
        "cos_sin": cos_sin,
        "style": style,
    }
    _, weights = launch(inputs, device, scale_format=ScaleFormat.FP32)
    amax = 1 + (heads + heads % 2) * eps
    assert torch.equal(weights[0].cpu(), (amax / 448).float() * D**-0.5 * 16**-0.5)
    assert_equals_the_twin(inputs, device, scale_format=ScaleFormat.FP32)


@pytest.mark.gpu
def test_a_gpu_without_the_e4m3_instruction_rounds_alike(generator, monkeypatch):
    monkeypatch.setattr(fold_q_module, "has_hardware_casts", lambda _: False)
    test_ties_round_to_even("cuda", ScaleFormat.FP32)
    inputs = make_inputs(generator, num_tokens=300, style=RopeStyle.HALF_SPLIT)
    assert_equals_the_twin(inputs, "cuda", scale_format=ScaleFormat.FP32)


@devices
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_nan_or_an_infinity_dequantises_to_nan_and_its_neighbours_do_not(
    device, scale_format, poison, generator
):
    inputs = make_inputs(generator, num_tokens=2, dtype=torch.float32)
    inputs["q"][1, 3, 17] = poison
    expected = reference.fold_q(**inputs, scale_format=scale_format)
    with np.errstate(invalid="ignore"):
        q, weights = (x.cpu() for x in launch(inputs, device, scale_format=scale_format))
    bad = torch.zeros(2, 16, dtype=torch.bool)
    bad[1, 3] = True
    dequantised = q.float() * weights[..., None]
    assert torch.equal(dequantised.isnan(), bad[..., None].expand_as(q))
    assert torch.equal(q.float().isnan(), expected[0].float().isnan())
    assert_same((q[~bad], weights[~bad]), (expected[0].view(torch.uint8)[~bad], expected[1][~bad]))


@devices
def test_a_dummy_row_is_zero_whatever_the_inputs_hold(device, generator):
    inputs = make_inputs(generator, num_tokens=1, style=RopeStyle.INTERLEAVED)
    for name in ("q", "weights", "cos_sin"):
        inputs[name].fill_(torch.nan)
    inputs["positions"].fill_(-(10**15))
    rows = torch.tensor([-1, -1], dtype=torch.int32)
    q, weights = launch(inputs, device, scale_format=ScaleFormat.FP32, row_to_token=rows)
    assert not q.view(torch.uint8).any()
    assert not weights.view(torch.int32).any()


@devices
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("num_dummies", [None, 0, 2])
def test_no_tokens(device, style, num_dummies, generator):
    inputs = make_inputs(generator, num_tokens=0, style=style)
    rows = None if num_dummies is None else torch.full((num_dummies,), -1, dtype=torch.int32)
    assert_equals_the_twin(inputs, device, scale_format=ScaleFormat.FP32, row_to_token=rows)


def on(device, inputs):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@devices
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("with_out", [False, True])
def test_operator_gives_the_same_on_every_device(device, style, with_out, generator):
    inputs = make_inputs(generator, num_tokens=5, style=style)
    rows = shuffled_rows(generator, 5)
    how = {"scale_format": ScaleFormat.UE8M0, "softmax_scale": 0.3, "head_scale": -2.0}
    tokens = reference.fold_q(**inputs, **how)
    out = poisoned(7, 16, D, device) if with_out else None
    found = ops.fold_q(**on(device, inputs), row_to_token=rows.to(device), out=out, **how)
    if out is not None:
        assert [x.data_ptr() for x in found] == [x.data_ptr() for x in out]
    for row, token in enumerate(rows.tolist()):
        for per_row, per_token in zip(found, tokens, strict=True):
            expected = per_token[token].float() if token >= 0 else torch.zeros(per_token[0].shape)
            assert torch.equal(per_row[row].float().cpu(), expected)
    assert_same(ops.fold_q(**on(device, inputs), **how), tokens)


@devices
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"row_to_token": torch.zeros(3, dtype=torch.int64)}, TypeError, "row_to_token has dtype torch.int64"),
        ({"row_to_token": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, r"row_to_token has shape \(1, 3\)"),
        ({"out": poisoned(3, 16, D, "cpu")}, ValueError, r"out\[0\] has shape \(3, 16, 128\); allowed: \(2, 16, 128\)"),
        ({"out": (torch.zeros(2, 16, D), None)}, TypeError, r"out\[0\] has dtype torch.float32"),
        ({"out": (poisoned(2, 16, D, "cpu")[0], torch.zeros(2, 32)[:, :16])}, ValueError, r"out\[1\] has strides"),
    ],
)
def test_refuses(device, change, error, message, generator):
    inputs = on(device, make_inputs(generator, num_tokens=2))
    for name, value in change.items():
        change = {name: tuple(moved(x, device) for x in value) if name == "out" else moved(value, device)}
    with pytest.raises(error, match=message):
        ops.fold_q(**inputs, scale_format=ScaleFormat.FP32, **change)


def moved(x, device):
    """An uninitialised tensor of the same form, strides included."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@devices
def test_validate_finds_a_row_without_a_token(device, monkeypatch, generator):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    inputs = on(device, make_inputs(generator, num_tokens=2))
    rows = torch.tensor([0, -1, 2], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"row_to_token\[2\] is 2; allowed: below 2"):
        ops.fold_q(**inputs, scale_format=ScaleFormat.FP32, row_to_token=rows)


@pytest.mark.gpu
def test_captured_graph_follows_new_queries_and_rows(generator):
    first, second = (make_inputs(generator, num_tokens=4, heads=64, style=RopeStyle.HALF_SPLIT) for _ in range(2))
    rows = [shuffled_rows(generator, 4) for _ in range(2)]
    static, static_rows, out = on("cuda", first), rows[0].cuda(), poisoned(6, 64, D, "cuda")
    how = {"scale_format": ScaleFormat.UE8M0, "row_to_token": static_rows, "out": out}
    ops.fold_q(**static, **how)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(lambda: ops.fold_q(**static, **how))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fold_q(**static, **how)
    for name in ("q", "weights", "positions"):
        static[name].copy_(second[name])
    static_rows.copy_(rows[1])
    graph.replay()
    assert_same(out, reference.fold_q(**second, scale_format=ScaleFormat.UE8M0, row_to_token=rows[1]))
