"""The Triton index-K store against its twin on the CPU, byte for byte: interpreted without a GPU, compiled on one."""

import numpy as np
import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.bench.timing import syncs_with_host
from vllm_dsa.kernels.store_index_k import launch_store_index_k
from vllm_dsa.reference import K_AMAX_FLOOR, IndexKCacheLayout, RopeStyle, ScaleFormat, make_cos_sin

D, MAX_POSITION = 128, 64
POISON = 0x7F
NUM_BLOCKS, NUM_LAYERS = 12, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STYLES = [None, *RopeStyle]
FORMATS = list(ScaleFormat)
devices = pytest.mark.parametrize("device", DEVICES)


def make_inputs(generator, *, num_tokens, dim=D, dtype=torch.bfloat16, style=None, rope_dim=64):
    """Rows of many magnitudes, so that small elements meet e4m3's subnormals and small rows the amax floor."""
    size = torch.rand(num_tokens, 1, generator=generator).mul(24).sub(16).exp2()
    spread = torch.rand(num_tokens, dim, generator=generator).mul(12).neg().exp2()
    inputs = {"k": (torch.randn(num_tokens, dim, generator=generator) * size * spread).to(dtype)}
    if style is not None:
        positions = torch.randint(MAX_POSITION, (num_tokens,), generator=generator)
        inputs |= {"positions": positions, "cos_sin": make_cos_sin(MAX_POSITION, rope_dim), "style": style}
    return inputs


def some_slots(generator, num_tokens, block_size):
    """Different slots, the first and the last of the cache among them, and some that are negative."""
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens]
    slots[: min(num_tokens, 2)] = torch.tensor([0, NUM_BLOCKS * block_size - 1])[:num_tokens]
    slots[2::3] = torch.tensor([-1, -77]).repeat(num_tokens)[: len(slots[2::3])]
    keep_unique = torch.isin(slots[2:], slots[:2])
    slots[2:][keep_unique] = -1
    return slots


def make_pool(layout, device):
    """One layer of a pool whose pages lie block by block, layer by layer, every byte poisoned."""
    pool = torch.full((NUM_BLOCKS, NUM_LAYERS, layout.page_bytes), POISON, dtype=torch.uint8, device=device)
    return pool, pool[:, 1].unflatten(1, (layout.block_size, 1, layout.token_bytes))


def store(inputs, device, layout, slots, *, scale_format=ScaleFormat.FP32, hadamard=False):
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    k, style = given.pop("k"), given.pop("style", None)
    # K is a part of a wider projection.
    wide = torch.full((k.shape[0], k.shape[1] + 48), torch.nan, dtype=k.dtype, device=device)
    pool, cache = make_pool(layout, device)
    launch_store_index_k(
        wide[:, 16:-32].copy_(k),
        cache,
        slots.to(device),
        **given,
        interleaved=style is RopeStyle.INTERLEAVED,
        amax_floor=K_AMAX_FLOOR,
        power_of_two_scale=scale_format is ScaleFormat.UE8M0,
        hadamard=hadamard,
    )
    return pool.cpu()


def twin(inputs, layout, slots, **how):
    pool, cache = make_pool(layout, "cpu")
    reference.store_index_k(**inputs, cache=cache, slot_mapping=slots.long(), **how)
    return pool


def size_for(device):
    return 7 if device == "cpu" else 350


@devices
@pytest.mark.parametrize("block_size", [64, 32])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_every_byte_of_the_pool_is_that_of_the_twin(device, block_size, style, scale_format, slot_dtype, generator):
    layout = IndexKCacheLayout(block_size)
    inputs = make_inputs(generator, num_tokens=size_for(device), style=style)
    slots = some_slots(generator, size_for(device), block_size).to(slot_dtype)
    found = store(inputs, device, layout, slots, scale_format=scale_format)
    assert torch.equal(found, twin(inputs, layout, slots, scale_format=scale_format))
    assert not (found[:, 1] == POISON).all()
    assert (found[:, [0, 2]] == POISON).all()


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_every_dtype(device, dtype, style, hadamard, generator):
    layout = IndexKCacheLayout()
    inputs = make_inputs(generator, num_tokens=size_for(device), dtype=dtype, style=style)
    slots = some_slots(generator, size_for(device), 64)
    for scale_format in FORMATS:
        how = {"scale_format": scale_format, "hadamard": hadamard}
        assert torch.equal(store(inputs, device, layout, slots, **how), twin(inputs, layout, slots, **how))


@devices
@pytest.mark.parametrize("style", STYLES)
def test_sizes_that_are_no_powers_of_two(device, style, generator):
    layout = IndexKCacheLayout(64, head_dim=96)
    inputs = make_inputs(generator, num_tokens=5, dim=96, style=style, rope_dim=40)
    slots = some_slots(generator, 5, 64)
    assert torch.equal(store(inputs, device, layout, slots), twin(inputs, layout, slots))


@devices
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5])
def test_any_number_of_tokens(device, num_tokens, generator):
    layout = IndexKCacheLayout()
    inputs = make_inputs(generator, num_tokens=num_tokens, style=RopeStyle.HALF_SPLIT)
    slots = some_slots(generator, num_tokens, 64)
    assert torch.equal(store(inputs, device, layout, slots), twin(inputs, layout, slots))


@devices
def test_a_skipped_token_is_not_read(device, generator):
    inputs = make_inputs(generator, num_tokens=3, style=RopeStyle.INTERLEAVED)
    slots = torch.tensor([5, -1, 7])
    expected = twin(inputs, IndexKCacheLayout(), slots)
    inputs["positions"][1] = 10**15
    inputs["k"][1] = torch.nan
    assert torch.equal(store(inputs, device, IndexKCacheLayout(), slots), expected)


@devices
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_nan_or_an_infinity_stays_in_its_token(device, scale_format, poison, generator):
    layout = IndexKCacheLayout()
    inputs = make_inputs(generator, num_tokens=4, dtype=torch.float32)
    slots = torch.tensor([0, 1, 2, 3])
    expected = twin(inputs, layout, slots, scale_format=scale_format)
    inputs["k"][2, 9] = poison
    with np.errstate(invalid="ignore"):
        found = store(inputs, device, layout, slots, scale_format=scale_format)
    pools = [x[:, 1].unflatten(1, (64, 1, layout.token_bytes)) for x in (found, expected)]
    (values, scales), (expected_values, expected_scales) = (layout.views(pool) for pool in pools)
    assert (values[0, 2].float() * scales[0, 2]).isnan().all()
    for token in (0, 1, 3):
        assert torch.equal(values[0, token].float(), expected_values[0, token].float())
        assert scales[0, token] == expected_scales[0, token]


@devices
@pytest.mark.parametrize("style", STYLES)
def test_operator_gives_the_same_on_every_device(device, style, generator):
    layout = IndexKCacheLayout(32)
    inputs = make_inputs(generator, num_tokens=7, style=style)
    slots = some_slots(generator, 7, 32)
    pool, cache = make_pool(layout, device)
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    ops.store_index_k(**given, cache=cache, slot_mapping=slots.to(device), scale_format=ScaleFormat.UE8M0)
    assert torch.equal(pool.cpu(), twin(inputs, layout, slots, scale_format=ScaleFormat.UE8M0))


@pytest.mark.gpu
def test_captured_graph_follows_new_keys_and_slots(generator):
    layout = IndexKCacheLayout()
    first, second = (make_inputs(generator, num_tokens=9, style=RopeStyle.HALF_SPLIT) for _ in range(2))
    slots = [some_slots(generator, 9, 64) for _ in range(2)]
    static = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in first.items()}
    static_slots = slots[0].cuda()
    pool, cache = make_pool(layout, "cuda")
    ops.store_index_k(**static, cache=cache, slot_mapping=static_slots)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(lambda: ops.store_index_k(**static, cache=cache, slot_mapping=static_slots))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.store_index_k(**static, cache=cache, slot_mapping=static_slots)
    for name in ("k", "positions"):
        static[name].copy_(second[name])
    static_slots.copy_(slots[1])
    pool.fill_(POISON)
    graph.replay()
    assert torch.equal(pool.cpu(), twin(second, layout, slots[1]))
