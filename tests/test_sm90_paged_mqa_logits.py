"""What the launcher of our Hopper kernel decides on the host."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.kernels import sm90_paged_mqa_logits as sm90


@given(
    st.integers(1, 1 << 20).flatmap(lambda width: st.tuples(st.integers(1, sm90.MAX_LOGITS // width), st.just(width)))
)
def test_cost_units_of_a_launch_fit_32_bits(rows_and_width):
    num_rows, width = rows_and_width
    requests = sm90._requests_per_launch(num_rows, width)
    assert 1 <= requests <= sm90.MAX_REQUESTS
    # The costliest that the kernel can meet: every pass of eight rows, and a partial one for each request.
    assert 255 * -(-width // 64) * (num_rows // 8 + requests) < 2**32


def test_ordinary_batches_are_one_launch():
    assert sm90._requests_per_launch(8192, 131072) >= 1024
    assert sm90._requests_per_launch(256, 131072) == sm90.MAX_REQUESTS


@pytest.mark.parametrize("heads", sm90.NUM_HEADS)
def test_costs_are_packed_by_depth(heads):
    packed = sm90._packed_costs(heads)
    costs = [packed >> 8 * depth & 0xFF for depth in range(8)]
    assert costs == sorted(costs)
    assert costs[0] > 0


def test_variants_are_distinct_and_complete():
    variants = sm90.variants()
    assert len(set(variants)) == len(sm90.NUM_HEADS) * len(sm90.BLOCK_SIZES) * len(sm90.OUT_DTYPES)
    assert sm90._variant(64, 32, torch.bfloat16) in variants
