import numpy as np
import pytest
import torch

from vllm_dsa import ops
from vllm_dsa.ops import IndexKCacheLayout, RopeStyle, ScaleFormat
from vllm_dsa.reference import apply_rope, dequantize_fp8, hadamard_transform, make_cos_sin

D = 128
POISON = 0x7F
BLOCK_SIZES = [32, 64]


def interleaved_layer(layout, num_blocks, num_layers, layer):
    """One layer of a pool whose pages lie block by block, layer by layer."""
    pool = torch.full((num_blocks, num_layers, layout.page_bytes), POISON, dtype=torch.uint8)
    shape = (num_blocks, layout.block_size, 1, layout.token_bytes)
    return pool, pool[:, layer].unflatten(1, shape[1:])


def read_token(page_bytes, layout, token):
    """One token of a page, read byte by byte with numpy."""
    raw = page_bytes.numpy()
    values = torch.from_numpy(raw[token * layout.head_dim :][: layout.head_dim].copy())
    at = layout.block_size * layout.head_dim + 4 * token
    return values.view(torch.float8_e4m3fn), float(np.frombuffer(raw[at : at + 4].tobytes(), np.float32)[0])


def test_sizes():
    layout = IndexKCacheLayout()
    assert (layout.block_size, layout.head_dim) == (64, 128)
    assert (layout.token_bytes, layout.page_bytes) == (132, 64 * 132)
    cache = layout.allocate(3, "cpu", fill=POISON)
    assert cache.shape == (3, 64, 1, 132)
    assert (cache == POISON).all()
    assert layout.allocate(3, "cpu").dtype == torch.uint8
    assert IndexKCacheLayout.of(cache) == layout


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 16}, "block_size is 16"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 130}, "head_dim is 130"),
    ],
)
def test_layout_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        IndexKCacheLayout(**sizes)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_views_share_the_memory_of_an_interleaved_pool(block_size, layer):
    layout = IndexKCacheLayout(block_size)
    pool, cache = interleaved_layer(layout, num_blocks=4, num_layers=3, layer=layer)
    values, scales = layout.views(cache)
    assert values.shape == (4, block_size, D)
    assert scales.shape == (4, block_size)
    values[2, 5] = torch.full((D,), 2.0).to(torch.float8_e4m3fn)
    scales[2, 5] = 0.375
    found, scale = read_token(pool[2, layer], layout, 5)
    assert (found.float() == 2.0).all()
    assert scale == 0.375
    assert int((pool != POISON).sum()) == D + 4


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (torch.zeros(2, 64, 1, 132), TypeError, "cache is torch.float32"),
        (None, TypeError, "cache is NoneType"),
        (torch.zeros(2, 64, 132, dtype=torch.uint8), ValueError, "cache has shape"),
        (torch.zeros(2, 64, 2, 132, dtype=torch.uint8), ValueError, "cache has shape"),
        (torch.zeros(2, 16, 1, 132, dtype=torch.uint8), ValueError, "block_size is 16"),
        (torch.zeros(2, 64, 1, 264, dtype=torch.uint8)[..., ::2], ValueError, "strides"),
        (torch.zeros(2, 64, 1, 136, dtype=torch.uint8)[..., :132], ValueError, "strides"),
        (torch.zeros(1, 64, 1, 132, dtype=torch.uint8).expand(2, -1, -1, -1), ValueError, "page stride of 0"),
        (torch.zeros(2, 64 * 132 + 2, dtype=torch.uint8)[:, 2:].unflatten(1, (64, 1, 132)), ValueError, "mult"),
        (torch.zeros(64 * 132 + 2, dtype=torch.uint8)[2:].view(1, 64, 1, 132), ValueError, "starts at byte 2"),
    ],
)
def test_cache_refuses(cache, error, message):
    with pytest.raises(error, match=message):
        IndexKCacheLayout.of(cache)


def test_views_refuse_a_cache_of_another_layout():
    with pytest.raises(ValueError, match="block_size=32"):
        IndexKCacheLayout(64).views(IndexKCacheLayout(32).allocate(1, "cpu"))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
@pytest.mark.parametrize("style", [None, *RopeStyle])
@pytest.mark.parametrize("hadamard", [False, True])
def test_store_writes_its_tokens_and_no_other_byte(block_size, scale_format, style, hadamard, generator):
    layout = IndexKCacheLayout(block_size)
    pool, cache = interleaved_layer(layout, num_blocks=5, num_layers=2, layer=1)
    k = torch.randn(7, D, generator=generator).to(torch.bfloat16)
    slots = torch.tensor([3 * block_size, -1, block_size - 1, 4 * block_size + 7, -5, 5 * block_size - 1, 0])
    positions = torch.tensor([5, 6, 7, 8, 9, 0, 15])
    cos_sin = make_cos_sin(16, 64)
    rope = {} if style is None else {"positions": positions, "cos_sin": cos_sin, "style": style}
    ops.store_index_k(k, cache, slots, scale_format=scale_format, hadamard=hadamard, **rope)

    expected = k if style is None else apply_rope(k, positions, cos_sin, style)
    expected = hadamard_transform(expected).double() if hadamard else expected.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            values, scale = read_token(pool[slot // block_size, 1], layout, slot % block_size)
            found = values.double() * scale
            assert 1 - torch.cosine_similarity(found, expected[token], dim=0) < 2e-3
            assert found.norm().item() == pytest.approx(expected[token].norm().item(), rel=0.02)
            assert scale_format is ScaleFormat.FP32 or np.frexp(scale)[0] == 0.5
    untouched = pool.clone()
    touched_values, touched_scales = layout.views(untouched[:, 1].unflatten(1, cache.shape[1:]))
    for slot in slots[slots >= 0].tolist():
        touched_values.view(torch.uint8)[slot // block_size, slot % block_size] = POISON
        touched_scales.view(torch.int32)[slot // block_size, slot % block_size] = 0x7F7F7F7F
    assert (untouched == POISON).all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_gather_gives_back_what_was_stored_in_order(block_size, table_dtype, generator):
    layout = IndexKCacheLayout(block_size)
    _, cache = interleaved_layer(layout, num_blocks=6, num_layers=3, layer=2)
    pages = torch.tensor([4, 1, 5], dtype=table_dtype)
    length = 2 * block_size + 9
    token = torch.arange(length)
    slots = pages.long()[token // block_size] * block_size + token % block_size
    k = torch.randn(length, D, generator=generator)
    ops.store_index_k(k, cache, slots)
    # A column past the last token may hold anything.
    row = torch.cat([pages, torch.tensor([10**6], dtype=table_dtype)])
    for wanted in (0, 1, block_size, block_size + 1, length):
        values, scales = ops.gather_index_k(cache, row, wanted)
        assert values.shape == (wanted, D)
        assert scales.shape == (wanted,)
        assert torch.allclose(dequantize_fp8(values, scales), k[:wanted], rtol=1 / 15, atol=1e-2)
        assert torch.equal(scales, k[:wanted].abs().amax(-1) / 448)


def test_the_scale_of_a_tiny_k_stops_at_its_floor():
    cache = IndexKCacheLayout().allocate(1, "cpu", fill=POISON)
    ops.store_index_k(torch.full((1, D), 1e-6), cache, torch.tensor([2]))
    _, scales = IndexKCacheLayout().views(cache)
    assert scales[0, 2].item() == pytest.approx(1e-4 / 448)


def test_store_of_nothing_writes_nothing():
    cache = IndexKCacheLayout().allocate(1, "cpu", fill=POISON)
    ops.store_index_k(torch.empty(0, D), cache, torch.empty(0, dtype=torch.int64))
    ops.store_index_k(torch.zeros(2, D), cache, torch.tensor([-1, -1]))
    assert (cache == POISON).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(3, D, dtype=torch.int8)}, TypeError, "k has dtype torch.int8"),
        ({"k": torch.zeros(3, 64)}, ValueError, "cache has a head_dim of 128; allowed: 64"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, TypeError, "slot_mapping has dtype torch.int32"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, ValueError, r"slot_mapping has shape \(4,\)"),
        ({"style": RopeStyle.HALF_SPLIT}, ValueError, "positions, cos_sin is None"),
        ({"scale_format": 1}, TypeError, "scale_format is 1"),
        ({"cache": torch.zeros(1, 64, 1, 132)}, TypeError, "cache is torch.float32"),
    ],
)
def test_store_refuses_and_writes_nothing(change, error, message):
    cache = IndexKCacheLayout().allocate(2, "cpu", fill=POISON)
    good = {"k": torch.zeros(3, D), "cache": cache, "slot_mapping": torch.arange(3)}
    with pytest.raises(error, match=message):
        ops.store_index_k(**(good | change))
    assert (cache == POISON).all()


@pytest.mark.parametrize(
    ("row", "length", "error", "message"),
    [
        (torch.zeros(2, dtype=torch.int16), 1, TypeError, "block_table_row has dtype"),
        (torch.zeros(1, 2, dtype=torch.int32), 1, ValueError, "block_table_row has shape"),
        (torch.zeros(2, dtype=torch.int32), -1, ValueError, "length is -1"),
        (torch.zeros(2, dtype=torch.int32), 129, ValueError, "length is 129; allowed: at most 128"),
        (torch.zeros(2, dtype=torch.int32), 1.0, TypeError, "length is 1.0"),
    ],
)
def test_gather_refuses(row, length, error, message):
    with pytest.raises(error, match=message):
        ops.gather_index_k(IndexKCacheLayout().allocate(2, "cpu"), row, length)


def test_validate_finds_slots_and_pages_out_of_range(monkeypatch):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    cache = IndexKCacheLayout().allocate(2, "cpu", fill=POISON)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 128; allowed: below 128"):
        ops.store_index_k(torch.zeros(2, D), cache, torch.tensor([0, 128]))
    assert (cache == POISON).all()
    ops.gather_index_k(cache, torch.tensor([1, 9], dtype=torch.int32), 64)
    with pytest.raises(ValueError, match=r"block_table_row\[1\] is 9; allowed: 0 to 1"):
        ops.gather_index_k(cache, torch.tensor([1, 9], dtype=torch.int32), 65)
