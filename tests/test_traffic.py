import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import SM90_KERNEL_COSTS, DecodeForm, plan_step
from vllm_dsa.ops import LogitsBackend
from vllm_dsa.reference import IndexKCacheLayout
from vllm_dsa.runner.traffic import flattened_kv_bytes, kv_bytes

LAYOUT = IndexKCacheLayout()


def plain_bytes(depths, lengths, group_size):
    pages = 0
    for depth, length in zip(depths, lengths, strict=True):
        for first in range(0, depth, group_size):
            last = min(first + group_size, depth) - 1
            pages += -(-max(length - depth + last + 1, 0) // 64)
    return pages * 64 * 132


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 700)), max_size=10),
    st.sampled_from([planned_capabilities("sm90"), planned_capabilities("sm90", frozenset({1, 2}))]),
)
def test_bytes_equal_a_walk_over_the_groups(batch, caps):
    depths, lengths = np.array([d for d, _ in batch], dtype=int), np.array([s for _, s in batch], dtype=int)
    plan = plan_step(depths.tolist(), caps)
    assert kv_bytes(plan, depths, lengths, LAYOUT) == plain_bytes(depths, lengths, plan.group_size)
    assert flattened_kv_bytes(depths, lengths, LAYOUT) == plain_bytes(depths, lengths, 1)
    assert kv_bytes(plan, depths, lengths, LAYOUT) <= flattened_kv_bytes(depths, lengths, LAYOUT)


def test_our_kernel_reads_a_request_once_for_every_eight_rows():
    depths, lengths = np.array([3, 0, 8, 9, 17]), np.array([640, 640, 65, 64, 1])
    plan = plan_step(depths.tolist(), planned_capabilities("sm90"), ragged_costs=SM90_KERNEL_COSTS)
    assert plan.backend is LogitsBackend.SM90
    assert kv_bytes(plan, depths, lengths, LAYOUT) == (10 + 2 + 2 * 1 + 3 * 1) * 64 * 132


def test_ragged_reads_each_request_once():
    depths, lengths = np.array([3, 0, 1]), np.array([640, 640, 65])
    plan = plan_step(depths.tolist(), planned_capabilities("sm100"))
    assert plan.form is DecodeForm.RAGGED
    assert kv_bytes(plan, depths, lengths, LAYOUT) == (10 + 2) * 64 * 132


@pytest.mark.parametrize(("depth", "reads"), [(4, 1), (3, 1), (5, 3), (8, 2)])
def test_passes_of_uniform_depths_on_sm90(depth, reads):
    depths, lengths = np.full(2, depth), np.full(2, 6400)
    plan = plan_step(depths.tolist(), planned_capabilities("sm90"))
    assert kv_bytes(plan, depths, lengths, LAYOUT) == reads * 2 * 100 * 64 * 132
