import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_dsa.context_parallel import DcpLayout

SIZES = st.integers(1, 9)
INTERLEAVES = st.integers(1, 64)


@given(SIZES, INTERLEAVES, st.lists(st.integers(0, 4096), min_size=1, max_size=20))
def test_local_lengths_partition_the_global_one(size, interleave, lengths):
    tensor = torch.tensor(lengths, dtype=torch.int32)
    shares = [DcpLayout(size, rank, interleave).local_lens(tensor) for rank in range(size)]
    assert torch.equal(sum(shares), tensor)
    for rank, share in enumerate(shares):
        layout = DcpLayout(size, rank, interleave)
        assert share.tolist() == [layout.local_lens(length) for length in lengths]


@given(SIZES, INTERLEAVES, st.integers(0, 4096))
def test_a_new_token_grows_its_owner_alone(size, interleave, length):
    grown = [
        DcpLayout(size, rank, interleave).local_lens(length + 1) - DcpLayout(size, rank, interleave).local_lens(length)
        for rank in range(size)
    ]
    owner = (length // interleave) % size
    assert grown == [int(rank == owner) for rank in range(size)]


def test_size_one_returns_the_same_object():
    lengths = torch.tensor([3, 4])
    assert DcpLayout().local_lens(lengths) is lengths


def test_per_token_lengths_of_the_public_fault():
    assert DcpLayout(2, 1).local_lens(torch.tensor([8, 9, 10])).tolist() == [4, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "size"), ((2, 2), "rank"), ((2, -1), "rank"), ((2, 0, 0), "interleave")],
)
def test_bad_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DcpLayout(*arguments)
