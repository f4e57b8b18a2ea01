"""Virtual slots and their owners: the localised mapping, its kernel, and what a rank then reads back."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from dcp_steps import POISON, draw_requests, layouts
from hypothesis import given, settings

from vllm_dsa.context_parallel import DcpDecodeMetadata, DcpLayout, DecodeMode, localize_slot_mapping
from vllm_dsa.kernels.dcp_slots import launch_localize_slots
from vllm_dsa.reference.dcp_slots import localize_slots

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.int32, torch.int64]
LAYOUT = DcpLayout(4, 2, 8)


def ranks_of(layout):
    return [dataclasses.replace(layout, rank=rank) for rank in range(layout.size)]


@given(layouts(), st.integers(1, 4), st.integers(1, 5), st.sampled_from(DTYPES))
def test_every_virtual_slot_has_one_owner_and_one_place_on_its_own_page(layout, runs, num_pages, dtype):
    block_size = layout.interleave * runs
    slots = torch.arange(num_pages * block_size * layout.size, dtype=dtype)
    writers = torch.zeros(len(slots), dtype=torch.int64)
    for rank in ranks_of(layout):
        local = localize_slot_mapping(slots, torch.full_like(slots, POISON), rank, block_size=block_size)
        is_mine = local >= 0
        writers += is_mine
        assert torch.equal(local[~is_mine], torch.full_like(local[~is_mine], -1))
        assert torch.equal(local[is_mine], torch.arange(num_pages * block_size, dtype=dtype))
        assert torch.equal(local[is_mine] // block_size, slots[is_mine] // (block_size * layout.size))
    assert (writers == 1).all()


@given(st.integers(1, 9), st.lists(st.integers(0, 10**6), max_size=20))
def test_interleave_one_is_the_cyclic_form(size, slots):
    for rank in range(size):
        out = torch.full((len(slots),), POISON)
        local = localize_slot_mapping(torch.tensor(slots, dtype=torch.int64), out, DcpLayout(size, rank), block_size=64)
        assert local.tolist() == [slot // size if slot % size == rank else -1 for slot in slots]


@settings(max_examples=30)
@given(
    layouts(), st.integers(1, 3), st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=2), min_size=1), st.data()
)
def test_what_the_owners_write_is_what_each_rank_reads(layout, runs, growths, data):
    """Prompts and decode steps of two requests, written by localised slots and read through the page tables."""
    growths = growths[:6]
    block_size = layout.interleave * runs
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    lengths = [sum(growth) for growth in zip([30, 0], *growths, strict=True)]
    requests = draw_requests(lengths, layout, block_size, max(lengths), generator)
    num_slots = block_size * (sum(-(-n // (block_size * layout.size)) for n in lengths) + 3)
    for rank in ranks_of(layout):
        cache = torch.full((num_slots, 2), POISON)
        metadata = DcpDecodeMetadata.allocate(rank, max_reqs=3, max_seq_len=max(lengths), block_size=block_size)
        now = [0, 0]
        for growth in [[30, 0], *growths]:
            tokens = [(r, now[r] + i) for r in range(2) for i in range(growth[r])]
            now = [n + grown for n, grown in zip(now, growth, strict=True)]
            slots = torch.tensor([int(requests.req_to_token[requests.req_pool_indices[r], t]) for r, t in tokens])
            local = localize_slot_mapping(slots, torch.empty(40, dtype=torch.int64), rank, block_size=block_size)
            cache[local[local >= 0]] = torch.tensor(tokens)[local >= 0]
            for pages in requests.sources():
                metadata.refresh(DecodeMode.DECODE, torch.tensor(now), pages)
                for r in range(2):
                    at = torch.arange(int(metadata.seq_lens_k[r]))
                    read = cache[metadata.block_table[r, at // block_size] * block_size + at % block_size].tolist()
                    assert read == [[r, t] for t in range(now[r]) if rank.owner(t) == rank.rank]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_the_kernel_equals_the_twin(device, count, generator):
    for layout in (DcpLayout(), DcpLayout(2, 1), DcpLayout(7, 3, 5), DcpLayout(8, 7, 64)):
        for dtype, out_dtype in zip(DTYPES * 2, DTYPES + DTYPES[::-1], strict=True):
            slots = torch.randint(-3, 10**5, (count,), generator=generator).to(dtype)
            out = torch.full((count + 300,), POISON, dtype=out_dtype, device=device)
            dcp = (layout.size, layout.rank, layout.interleave)
            launch_localize_slots(slots.to(device), out[: count + 299], dcp=dcp)
            assert torch.equal(out[:count].cpu(), localize_slots(slots, layout).to(out_dtype))
            assert (out[count:-1] == -1).all()
            assert out[-1] == POISON


def test_one_rank_keeps_its_slots():
    slots, out = torch.tensor([5, -1, 3]), torch.full((3,), POISON)
    assert localize_slot_mapping(slots, out, DcpLayout(), block_size=64) is slots
    assert (out == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_written_by_nobody_and_the_tail_is_cleared(device):
    slots = torch.tensor([-1, 16, 17, -5, 24], device=device)
    out = torch.full((7,), POISON, device=device)
    local = localize_slot_mapping(slots, out, LAYOUT, block_size=64)
    assert local.data_ptr() == out.data_ptr()
    assert local.tolist() == [-1, 0, 1, -1, -1]
    assert out[5:].tolist() == [-1, -1]
    assert slots.tolist() == [-1, 16, 17, -5, 24]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slot_mapping": torch.zeros(3)}, TypeError, "slot_mapping has dtype torch.float32"),
        ({"slot_mapping": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, r"slot_mapping has shape \(3, 1\)"),
        ({"out": torch.zeros(2, dtype=torch.int64)}, ValueError, "out has 2 elements; allowed: at least 3"),
        ({"out": torch.zeros(9, dtype=torch.int64)[::3]}, ValueError, "out has strides"),
        ({"block_size": 12}, ValueError, "block_size is 12; allowed: multiples of the interleave, 8"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(change, error, message):
    call = {"slot_mapping": torch.zeros(3, dtype=torch.int64), "out": torch.full((3,), POISON), "block_size": 64}
    with pytest.raises(error, match=message):
        localize_slot_mapping(**{**call, **change}, layout=LAYOUT)
    assert (call["out"] == POISON).all()


def test_the_virtual_slots_are_not_overwritten():
    slots = torch.arange(3)
    with pytest.raises(ValueError, match="out is slot_mapping"):
        localize_slot_mapping(slots, slots, LAYOUT, block_size=64)
    assert slots.tolist() == [0, 1, 2]
