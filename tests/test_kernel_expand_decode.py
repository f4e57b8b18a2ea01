"""The Triton expansion against its twin: interpreted without a GPU, compiled on one."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import SM90_KERNEL_COSTS, DecodeBatch, IndexerConfig, buffers, plan_step
from vllm_dsa.indexer.buffers import StepBuffers

SM90 = planned_capabilities("sm90")
CAPS = {
    "sm90": SM90,
    "sm90_main": planned_capabilities("sm90", frozenset({1, 2})),
    "flattened": planned_capabilities("sm90", frozenset({1})),
    "threes": dataclasses.replace(SM90, native_next_n=frozenset({3}), paired_next_n=frozenset()),
    "sm100": planned_capabilities("sm100"),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expand(step_buffers, batch, plan, config, by_triton):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "runs_triton", lambda device: by_triton)
        step_buffers.expand(batch, plan, config)


def make_batch(depths, lengths, table, device="cpu"):
    starts = torch.tensor([0, *itertools.accumulate(depths)], dtype=torch.int32)
    return DecodeBatch(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        max_seq_len=max([*lengths, 0]),
    )


def assert_same_sequence(steps, config, caps, device="cpu", ragged_costs=None):
    kernel = StepBuffers.allocate(config, caps, torch.device(device))
    twin = StepBuffers.allocate(config, caps, torch.device("cpu"))
    for depths, lengths, table in steps:
        plan = plan_step(depths, caps, ragged_costs=ragged_costs)
        expand(kernel, make_batch(depths, lengths, table, device), plan, config, by_triton=True)
        expand(twin, make_batch(depths, lengths, table), plan, config, by_triton=False)
        for name, want in twin.tensors().items():
            assert torch.equal(kernel.tensors()[name].cpu(), want), (name, plan)


def random_steps(generator, count, max_reqs, max_depth, width, block_size=64):
    for _ in range(count):
        reqs = int(torch.randint(0, max_reqs + 1, (1,), generator=generator))
        depths = torch.randint(0, max_depth + 1, (reqs,), generator=generator).tolist()
        lengths = torch.randint(0, width * block_size + 1, (reqs,), generator=generator).tolist()
        columns = int(torch.randint(1, width + 1, (1,), generator=generator))
        lengths = [min(length, columns * block_size) for length in lengths]
        # A column-sliced table has rows further apart than its width.
        table = torch.randint(1, 1000, (reqs, width + 3), generator=generator, dtype=torch.int32)[:, :columns]
        yield depths, lengths, table


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CAPS)
def test_any_sequence_of_steps_equals_the_twin(device, name, generator):
    config = IndexerConfig(next_n=4, max_num_seqs=9, block_table_width=7, max_num_tokens=72, topk=4)
    assert_same_sequence(random_steps(generator, 8, 9, 8, 7), config, CAPS[name], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_reqs", [8, 9])  # a power of two, and one past it
def test_steps_of_our_kernel_among_others_equal_the_twin(device, max_reqs, generator):
    config = IndexerConfig(next_n=4, max_num_seqs=max_reqs, block_table_width=7, max_num_tokens=8 * max_reqs, topk=4)
    steps = list(random_steps(generator, 8, max_reqs, 8, 7))
    # Single rows are NATIVE by DeepGEMM.
    steps[1::3] = [([1] * len(depths), lengths, table) for depths, lengths, table in steps[1::3]]
    full = torch.ones(max_reqs, 7, dtype=torch.int32)
    steps.append(([2] * max_reqs, [70] * max_reqs, full))
    assert_same_sequence(steps, config, SM90, device, ragged_costs=SM90_KERNEL_COSTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [(2, 0, 1), (2, 1, 64), (4, 3, 8)])
def test_context_parallel_and_compressed_lengths(device, layout, generator):
    config = IndexerConfig(
        next_n=4,
        max_num_seqs=5,
        block_table_width=6,
        topk=4,
        dcp=DcpLayout(*layout),
        compress_ratio=min(layout[2], 4),
        block_size=32,
    )
    steps = random_steps(generator, 4, 5, 4, 6, block_size=32 * layout[0])
    assert_same_sequence(steps, config, SM90, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_wider_than_one_block_of_columns(device, generator):
    config = IndexerConfig(next_n=3, max_num_seqs=3, block_table_width=2050, topk=4)
    steps = [
        ([3, 2, 1], [2050 * 64, 70, 1], torch.randint(1, 9, (3, 2050), generator=generator, dtype=torch.int32)),
        ([3], [1000 * 64 + 1], torch.randint(1, 9, (1, 1001), generator=generator, dtype=torch.int32)),
        ([], [], torch.zeros(0, 1, dtype=torch.int32)),
    ]
    assert_same_sequence(steps, config, SM90, device)


@pytest.mark.gpu
def test_a_large_batch(generator):
    config = IndexerConfig(next_n=4, max_num_seqs=700, block_table_width=300, max_num_tokens=5600, topk=4)
    assert_same_sequence(random_steps(generator, 12, 700, 8, 300), config, SM90, "cuda")


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 200)), max_size=4), st.sampled_from(list(CAPS)))
def test_lengths_shorter_than_the_depth_clamp_at_zero(requests, name):
    config = IndexerConfig(next_n=4, max_num_seqs=4, block_table_width=4, max_num_tokens=32, topk=4)
    depths, lengths = [depth for depth, _ in requests], [length for _, length in requests]
    table = torch.arange(1, 1 + 4 * len(requests), dtype=torch.int32).view(-1, 4)
    assert_same_sequence([(depths, lengths, table)], config, CAPS[name])


def test_a_device_that_disagrees_with_the_host_reads_nothing_out_of_bounds():
    config = IndexerConfig(next_n=2, max_num_seqs=4, block_table_width=2, topk=4)
    step_buffers = StepBuffers.allocate(config, SM90, torch.device("cpu"))
    batch = make_batch([2, 2, 2], [64, 64, 64], torch.ones(3, 2, dtype=torch.int32))
    lying = dataclasses.replace(batch, query_start_loc=torch.tensor([0, 1, 1, 1], dtype=torch.int32))
    expand(step_buffers, lying, plan_step([3, 3], SM90), config, by_triton=True)
    assert step_buffers.context_lens[4:].eq(0).all()
    assert step_buffers.row_to_token[1:8].eq(-1).all()


def test_starts_past_the_hosts_tokens_are_cut_there():
    config = IndexerConfig(next_n=2, max_num_seqs=4, block_table_width=2, topk=4)
    step_buffers = StepBuffers.allocate(config, SM90, torch.device("cpu"))
    batch = make_batch([2, 2], [64, 64], torch.ones(2, 2, dtype=torch.int32))
    lying = dataclasses.replace(batch, query_start_loc=torch.tensor([0, 9, 11], dtype=torch.int32))
    plan = plan_step([2, 2], SM90, ragged_costs=SM90_KERNEL_COSTS)
    expand(step_buffers, lying, plan, config, by_triton=True)
    assert step_buffers.query_start_loc.tolist() == [0, 4, 4, 4, 4]
