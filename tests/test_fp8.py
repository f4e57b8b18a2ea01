import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.reference import K_AMAX_FLOOR, Q_AMAX_FLOOR, ScaleFormat, dequantize_fp8, quantize_fp8

FORMATS = list(ScaleFormat)


def quantize_row(row: list[float], scale_format: ScaleFormat) -> tuple[torch.Tensor, float]:
    values, scale = quantize_fp8(
        torch.tensor(row, dtype=torch.float32), scale_format=scale_format, amax_floor=Q_AMAX_FLOOR
    )
    return values, scale.item()


def smallest_power_of_two_at_least(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shapes_dtypes_and_error_of_a_round_trip(scale_format, dtype, generator):
    x = torch.randn(3, 5, 128, generator=generator).to(dtype)
    values, scale = quantize_fp8(x, scale_format=scale_format, amax_floor=Q_AMAX_FLOOR)
    assert values.shape == x.shape
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == x.shape[:-1]
    assert scale.dtype == torch.float32
    back = dequantize_fp8(values, scale, torch.float64)
    # Half a step of a 3-bit mantissa, or half of the smallest subnormal.
    bound = torch.maximum(x.abs().double() / 16, scale.double()[..., None] * 2.0**-10)
    assert ((back - x.double()).abs() <= bound * (1 + 1e-6)).all()


def test_fp32_scale_is_amax_over_448(generator):
    x = torch.randn(7, 128, generator=generator)
    _, scale = quantize_fp8(x, scale_format=ScaleFormat.FP32, amax_floor=Q_AMAX_FLOOR)
    assert torch.equal(scale, x.abs().amax(-1) / 448)


@given(amax=st.floats(min_value=2.0**-30, max_value=2.0**127, width=32))
def test_ue8m0_scale_is_the_next_power_of_two(amax):
    _, scale = quantize_row([amax, 0.0], ScaleFormat.UE8M0)
    plain = (torch.tensor(amax, dtype=torch.float32) / 448).item()
    assert scale == smallest_power_of_two_at_least(plain)


@pytest.mark.parametrize("exponent", [-30, -13, -1, 0, 1, 20, 100])
def test_ue8m0_scale_jumps_exactly_at_powers_of_two(exponent):
    power = math.ldexp(1.0, exponent)
    exact = torch.tensor(448 * power)
    above = torch.nextafter(exact, torch.tensor(math.inf))
    assert quantize_row([exact.item()], ScaleFormat.UE8M0)[1] == power
    # One unit above may still divide to the same float32; two scales apart it may not.
    plain = (above / 448).item()
    assert quantize_row([above.item()], ScaleFormat.UE8M0)[1] == (power if plain == power else 2 * power)
    assert quantize_row([(exact * 1.001).item()], ScaleFormat.UE8M0)[1] == 2 * power


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("floor", [Q_AMAX_FLOOR, K_AMAX_FLOOR])
def test_a_zero_row_gets_the_floor_and_stays_zero(scale_format, floor):
    values, scale = quantize_fp8(torch.zeros(2, 16), scale_format=scale_format, amax_floor=floor)
    assert (values.float() == 0).all()
    assert (scale > 0).all()
    if scale_format is ScaleFormat.FP32:
        assert torch.equal(scale, torch.full((2,), floor) / 448)


def test_rounds_to_nearest_even():
    values, scale = quantize_row([448.0, 17.0, 19.0, -17.0, 17.1, 0.0], ScaleFormat.FP32)
    assert scale == 1.0
    assert values.float().tolist() == [448.0, 16.0, 20.0, -16.0, 18.0, 0.0]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16))
def test_never_overflows_to_nan(row):
    for scale_format in FORMATS:
        values, _ = quantize_row(row, scale_format)
        assert values.float().isfinite().all()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_visible_and_harms_no_other(scale_format, bad):
    x = torch.ones(3, 8)
    x[1, 4] = bad
    back = dequantize_fp8(*quantize_fp8(x, scale_format=scale_format, amax_floor=Q_AMAX_FLOOR))
    assert back[1].isnan().all()
    assert torch.allclose(back[[0, 2]], torch.ones(2, 8))


def test_empty():
    values, scale = quantize_fp8(torch.empty(0, 128), scale_format=ScaleFormat.FP32, amax_floor=1.0)
    assert values.shape == (0, 128)
    assert scale.shape == (0,)
