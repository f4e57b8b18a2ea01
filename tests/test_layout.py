import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_dsa.context_parallel import DcpLayout

SIZES = st.integers(1, 9)
INTERLEAVES = st.integers(1, 64)
LENGTHS = st.integers(0, 4096)
DTYPES = st.sampled_from([torch.int32, torch.int64])


def layouts(size, interleave):
    return [DcpLayout(size, rank, interleave) for rank in range(size)]


@given(SIZES, INTERLEAVES, st.lists(LENGTHS, min_size=1, max_size=20), DTYPES)
def test_local_lengths_partition_the_global_one(size, interleave, lengths, dtype):
    tensor = torch.tensor(lengths, dtype=dtype)
    shares = [layout.local_lens(tensor) for layout in layouts(size, interleave)]
    assert torch.equal(sum(shares), tensor)
    for layout, share in zip(layouts(size, interleave), shares, strict=True):
        assert share.dtype == dtype
        assert share.tolist() == [layout.local_lens(length) for length in lengths]


@given(SIZES, INTERLEAVES, LENGTHS)
def test_a_new_token_grows_its_owner_alone(size, interleave, length):
    grown = [layout.local_lens(length + 1) - layout.local_lens(length) for layout in layouts(size, interleave)]
    owner = (length // interleave) % size
    assert grown == [int(rank == owner) for rank in range(size)]
    assert DcpLayout(size, size - 1, interleave).owner(length) == owner


@given(SIZES, INTERLEAVES, LENGTHS, DTYPES)
def test_a_ranks_positions_are_its_tokens_in_order(size, interleave, length, dtype):
    positions = torch.arange(length, dtype=dtype)
    for layout in layouts(size, interleave):
        mine = positions[layout.owner(positions) == layout.rank]
        local = torch.arange(layout.local_lens(length), dtype=dtype)
        assert torch.equal(layout.local_pos(mine), local)
        assert torch.equal(layout.global_pos(local), mine)
        assert layout.local_pos(mine).dtype == layout.global_pos(local).dtype == dtype


@given(SIZES, INTERLEAVES, LENGTHS)
def test_positions_of_ints_are_those_of_tensors(size, interleave, position):
    tensor = torch.tensor(position)
    for layout in layouts(size, interleave):
        for method in (layout.owner, layout.local_pos, layout.global_pos):
            assert method(position) == int(method(tensor))
            assert isinstance(method(position), int)


@given(SIZES, INTERLEAVES, st.lists(LENGTHS, min_size=1, max_size=20))
def test_the_longest_request_bounds_every_local_length(size, interleave, lengths):
    for layout in layouts(size, interleave):
        longest = max(layout.local_lens(length) for length in lengths)
        assert layout.local_max_len(max(lengths)) == max(longest, 1)


def test_size_one_returns_the_same_object():
    lengths = torch.tensor([3, 4])
    for interleave in (1, 64):
        layout = DcpLayout(interleave=interleave)
        assert layout.local_lens(lengths) is lengths
        assert layout.local_pos(lengths) is lengths
        assert layout.global_pos(lengths) is lengths
        assert layout.owner(lengths).tolist() == [0, 0]


def test_per_token_lengths_of_the_public_fault():
    assert DcpLayout(2, 1).local_lens(torch.tensor([8, 9, 10])).tolist() == [4, 4, 5]


@given(SIZES, INTERLEAVES, st.integers(1, 128))
def test_a_page_is_shared_evenly_or_refused(size, interleave, block_size):
    shares = [layout.local_lens(block_size * size) for layout in layouts(size, interleave)]
    if size > 1 and block_size % interleave:
        with pytest.raises(ValueError, match=f"block_size is {block_size}; allowed: multiples of"):
            DcpLayout(size, 0, interleave).check_block_size(block_size)
    else:
        DcpLayout(size, 0, interleave).check_block_size(block_size)
        assert shares == [block_size] * size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "size"), ((2, 2), "rank"), ((2, -1), "rank"), ((2, 0, 0), "interleave")],
)
def test_bad_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DcpLayout(*arguments)
