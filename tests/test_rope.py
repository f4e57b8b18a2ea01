import pytest
import torch

from vllm_dsa.reference import RopeStyle, apply_rope, make_cos_sin

STYLES = list(RopeStyle)


def rotate_as_complex(x, positions, cos_sin, style):
    """The same rotation as a product of complex numbers, one pair at a time."""
    rope_dim = cos_sin.shape[1]
    half = rope_dim // 2
    out = x.double().clone()
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if style is RopeStyle.INTERLEAVED else (pair, pair + half)
            turn = torch.complex(cos_sin[position, pair].double(), cos_sin[position, pair + half].double())
            turned = torch.complex(out[token, ..., a], out[token, ..., b]) * turn
            out[token, ..., a], out[token, ..., b] = turned.real, turned.imag
    return out


def test_table_is_cos_then_sin_of_position_times_frequency():
    table = make_cos_sin(5, 8, theta=100.0)
    assert table.shape == (5, 8)
    assert table.dtype == torch.float32
    for position in range(5):
        for pair in range(4):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / 8), dtype=torch.float64)
            assert table[position, pair].item() == pytest.approx(angle.cos().item(), abs=1e-7)
            assert table[position, pair + 4].item() == pytest.approx(angle.sin().item(), abs=1e-7)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(6, 24), (6, 3, 24), (6, 2, 3, 24)])
@pytest.mark.parametrize("rope_dim", [24, 16])
def test_equals_the_complex_rotation(style, shape, rope_dim, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    positions = torch.tensor([0, 3, 3, 49, 1, 17], dtype=torch.int32)
    table = make_cos_sin(50, rope_dim)
    before = x.clone()
    out = apply_rope(x, positions, table, style)
    assert torch.allclose(out, rotate_as_complex(x, positions, table, style), atol=1e-12, rtol=0)
    assert torch.equal(x, before)
    assert torch.equal(out[..., rope_dim:], x[..., rope_dim:])
    assert torch.equal(out[0], x[0])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_the_float64_result_rounded_once(style, dtype, generator):
    x = torch.randn(9, 4, 128, generator=generator).to(dtype)
    positions = torch.arange(9) * 1000
    table = make_cos_sin(9000, 64)
    out = apply_rope(x, positions, table, style)
    exact = apply_rope(x.double(), positions, table, style)
    assert out.dtype == dtype
    float32_error = 4 * torch.finfo(torch.float32).eps * x.abs().max()
    rounding = torch.finfo(dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= rounding + float32_error).all()


@pytest.mark.parametrize("style", STYLES)
def test_dot_products_depend_on_the_distance_alone(style, generator):
    q, k = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    table = make_cos_sin(300, 64)
    query_positions = torch.tensor([10, 110, 210])
    rotated_q = apply_rope(q.expand(3, 64), query_positions, table, style)
    rotated_k = apply_rope(k.expand(3, 64), query_positions + 50, table, style)
    dots = (rotated_q * rotated_k).sum(-1)
    assert torch.allclose(dots, dots[0].expand(3), atol=1e-5)


def test_the_styles_are_one_rotation_up_to_a_permutation(generator):
    x = torch.randn(4, 16, generator=generator)
    positions = torch.tensor([1, 2, 3, 4])
    table = make_cos_sin(8, 16)
    split = torch.cat([x[:, 0::2], x[:, 1::2]], dim=-1)
    interleaved = apply_rope(x, positions, table, RopeStyle.INTERLEAVED)
    half_split = apply_rope(split, positions, table, RopeStyle.HALF_SPLIT)
    assert torch.equal(torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], dim=-1), half_split)


@pytest.mark.parametrize("style", STYLES)
def test_empty(style):
    x = torch.empty(0, 4, 32)
    assert apply_rope(x, torch.empty(0, dtype=torch.int64), make_cos_sin(4, 16), style).shape == x.shape
