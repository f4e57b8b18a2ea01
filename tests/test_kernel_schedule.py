"""The Triton schedule kernel against its twins: interpreted without a GPU, compiled on one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dsa.kernels import schedule
from vllm_dsa.platform import is_cuda
from vllm_dsa.reference import sm90_schedule, sm100_schedule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """The interpreter runs scans element by element: few rows per block, yet several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_cuda():
            patch.setattr(schedule, "_BLOCK_ROWS", 16)
        yield


def scheduled(lens, num_slots, device="cpu", **rule):
    out = torch.full((num_slots + 1, 2), -7, dtype=torch.int32, device=device)
    indices = rule.pop("indices", None)
    schedule.launch_schedule(lens.to(device), out, indices=None if indices is None else indices.to(device), **rule)
    return out.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_slots", [132, 66, 1])
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 700])
def test_equals_the_twins(device, generator, rows, num_slots):
    rows = rows if device == "cuda" else min(rows, 40)
    for next_n in (1, 4):
        for longest in (0, 257, 140_000):
            lens = torch.randint(-1, longest + 1, (rows, next_n), generator=generator, dtype=torch.int32)
            lens[torch.rand(rows, generator=generator) < 0.2] = 0
            assert torch.equal(scheduled(lens, num_slots, device), sm90_schedule(lens, num_slots))
            assert torch.equal(scheduled(lens, num_slots, device, sm100_rule=True), sm100_schedule(lens, num_slots))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_runs", [1, 7, 300])
def test_varlen_equals_the_twin(device, generator, num_runs):
    num_runs = num_runs if device == "cuda" else min(num_runs, 20)
    depths = torch.randint(1, 9, (num_runs,), generator=generator)
    indices = torch.arange(num_runs).repeat_interleave(depths).int()
    lens = torch.randint(0, 3000, (len(indices), 1), generator=generator, dtype=torch.int32)
    want = sm100_schedule(lens, 148, indices=indices)
    assert torch.equal(scheduled(lens, 148, device, indices=indices, sm100_rule=True), want)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2000)), max_size=20), st.integers(1, 40))
def test_varlen_runs_that_return_are_requests_of_their_own(runs, num_slots):
    indices = torch.tensor([i % 3 for i, (depth, _) in enumerate(runs) for _ in range(depth)], dtype=torch.int32)
    lens = torch.tensor([length for depth, length in runs for _ in range(depth)], dtype=torch.int32).view(-1, 1)
    want = sm100_schedule(lens, num_slots, indices=indices)
    assert torch.equal(scheduled(lens, num_slots, indices=indices, sm100_rule=True), want)
