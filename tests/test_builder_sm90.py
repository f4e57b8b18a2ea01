"""The decode build for our own Hopper kernel, and steps that change between it and DeepGEMM's forms."""

import dataclasses
import logging

import hypothesis.strategies as st
import pytest
import torch
from decode_steps import WIDTH_TOKENS, assert_builds_equal_fresh_ones, make_batch
from hypothesis import example, given, settings

from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import (
    DecodeForm,
    IndexerConfig,
    IndexerMetadataBuilder,
    StepCosts,
    builder,
    decode_logits,
    decode_logits_backend,
    logits,
    planner,
)
from vllm_dsa.ops import IndexKCacheLayout, LogitsBackend
from vllm_dsa.ops.row_map import rows_of_tokens, tokens_of_rows

SM90 = planned_capabilities("sm90")
CAPS = [
    SM90,
    planned_capabilities("sm90", frozenset({1, 2})),
    planned_capabilities("sm90", frozenset({4})),
    dataclasses.replace(SM90, provider=None),
]
COSTS = [
    planner.SM90_KERNEL_COSTS,
    # Dear in single rows, so that a step is anything: NATIVE, GROUPED, FLATTENED or RAGGED.
    StepCosts((1, 2, 3, 8), (1.6, 1.7, 1.8, 4.0)),
]
CONFIG = IndexerConfig(
    next_n=4, max_num_seqs=8, block_table_width=6, max_num_tokens=64, topk=16, num_heads=16, logits_backend="auto"
)
OURS = dataclasses.replace(CONFIG, logits_backend="sm90")


@st.composite
def step_sequences(draw):
    """Batches of random depths, uniform ones among them, long ones followed by short ones."""
    steps = []
    for _ in range(draw(st.integers(2, 5))):
        mixed = st.lists(st.integers(0, 8), max_size=8)
        uniform = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda step: [step[0]] * step[1])
        depths = draw(mixed | uniform)
        steps.append((depths, [draw(st.integers(0, WIDTH_TOKENS)) for _ in depths]))
    return steps


@settings(max_examples=80)
@given(step_sequences(), st.sampled_from(CAPS), st.sampled_from(COSTS))
def test_any_sequence_of_forms_equals_fresh_builds_at_fixed_addresses(steps, caps, costs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "SM90_KERNEL_COSTS", costs)
        assert_builds_equal_fresh_ones(CONFIG, caps, [make_batch(*step) for step in steps])


def test_the_sequences_reach_every_form(monkeypatch):
    monkeypatch.setattr(planner, "SM90_KERNEL_COSTS", COSTS[1])
    plan = planner.StepPlanner.of(CONFIG, SM90).plan
    forms = [plan(depths).form for depths in ([2, 2], [2, 1], [1, 0, 1], [3, 3], [5, 1])]
    assert forms == [
        DecodeForm.NATIVE,
        DecodeForm.GROUPED,
        DecodeForm.FLATTENED,
        DecodeForm.RAGGED,
        DecodeForm.RAGGED,
    ]


def test_a_step_for_our_kernel():
    built = IndexerMetadataBuilder(OURS, SM90)
    batch = make_batch([3, 0, 1, 9], [70, 0, 90, 300])
    metadata = built.build_decode(batch)
    assert (metadata.form, metadata.plan.backend, metadata.plan.kv_reads) == (
        DecodeForm.RAGGED,
        LogitsBackend.SM90,
        1 + 1 + 2,
    )
    assert metadata.context_lens.tolist() == [[68], [69], [70], [90], *([n] for n in range(292, 301))]
    assert metadata.query_start_loc.tolist() == [0, 3, 3, 4, 13]
    assert metadata.decode_lens.tolist() == [3, 0, 1, 9]
    assert metadata.block_table.data_ptr() == batch.block_table.data_ptr()
    assert metadata.block_table.shape == (4, 6)
    absent = ("schedule_metadata", "indices", "row_to_token", "token_to_row")
    assert [getattr(metadata, name) for name in absent] == [None] * 4
    buffers = built.buffers()
    assert metadata.query_start_loc.data_ptr() == buffers["query_start_loc"].data_ptr()
    assert metadata.context_lens.data_ptr() == buffers["context_lens"].data_ptr()
    # A graph captured for more requests finds them empty.
    assert buffers["query_start_loc"].tolist() == [0, 3, 3, 4, 13, 13, 13, 13, 13]
    assert not buffers["block_table"].any()


@pytest.mark.parametrize("depths", [[1] * 8, [2, 1], []])
def test_every_step_of_single_rows_leaves_what_a_graph_of_our_kernel_reads(depths):
    """What ``cudagraph_support`` relies on: a step planned for another kernel fills the same buffers alike."""
    batch = make_batch(depths, [70] * len(depths))
    flattening = planned_capabilities("sm90", frozenset({1}))
    theirs = IndexerMetadataBuilder(dataclasses.replace(CONFIG, logits_backend="deep_gemm"), flattening)
    ours = IndexerMetadataBuilder(OURS, SM90)
    assert theirs.build_decode(batch).plan.backend is LogitsBackend.DEEP_GEMM
    assert ours.build_decode(batch).plan.backend is LogitsBackend.SM90
    rows = CONFIG.max_num_tokens
    for name in ("context_lens", "query_start_loc", "decode_lens"):
        assert torch.equal(theirs.buffers()[name][:rows], ours.buffers()[name][:rows]), name


def test_no_schedule_is_made(mocker):
    schedule = mocker.patch.object(builder, "paged_mqa_schedule")
    built = IndexerMetadataBuilder(OURS, SM90)
    batch = make_batch([1, 1], [70, 80])
    built.update_draft_decode_metadata(built.build_decode(batch), batch.seq_lens, batch.block_table)
    schedule.assert_not_called()


def test_compressed_and_context_parallel_lengths():
    config = dataclasses.replace(OURS, compress_ratio=4, dcp=DcpLayout(2, 1, 4))
    metadata = IndexerMetadataBuilder(config, SM90).build_decode(make_batch([2], [300]))
    # Rank 1 of 2 holds 148 of the first 299 and 300 tokens (4 at a time), which is 37 states of 4.
    assert metadata.context_lens.tolist() == [[37], [37]]


def test_a_page_size_that_deep_gemm_lacks_is_ours():
    caps = dataclasses.replace(SM90, block_sizes=frozenset({64}))
    built = IndexerMetadataBuilder(dataclasses.replace(CONFIG, block_size=32), caps)
    assert built.build_decode(make_batch([1], [70])).plan.backend is LogitsBackend.SM90


def test_a_backend_that_cannot_run_is_refused_at_construction():
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        IndexerMetadataBuilder(OURS, planned_capabilities("sm100"))


def test_startup_line(caplog):
    with caplog.at_level(logging.INFO, logger="vllm_dsa"):
        IndexerMetadataBuilder(CONFIG, SM90)
    assert caplog.records[0].getMessage() == (
        "indexer decode: use_flattening=False supports_varlen=False next_n=4 arch=sm90 deep_gemm=planned "
        "native_next_n=1,2,4 logits_backend=sm90 forms=1:native,2:native,3:ragged,4:ragged group_size=1 "
        "schedule_slots=none num_sms=132"
    )


@pytest.mark.parametrize("config", [CONFIG, OURS], ids=["auto", "sm90"])
def test_warmup_launches_our_kernel_and_leaves_the_buffers_as_new(config, mocker):
    launch = mocker.spy(logits, "ragged_paged_mqa_logits")
    built = IndexerMetadataBuilder(config, SM90)
    built.warmup()
    assert [call.args[0].shape for call in launch.call_args_list] == [(1, 16, 128)]
    fresh = IndexerMetadataBuilder(config, SM90).buffers()
    for name, buffer in built.buffers().items():
        if name != "schedule_metadata":  # rewritten by every build
            assert torch.equal(buffer, fresh[name]), name


class TestDraftUpdate:
    @pytest.mark.parametrize("ratio", [1, 4])
    def test_equals_a_fresh_build(self, ratio):
        config = dataclasses.replace(OURS, compress_ratio=ratio)
        batch = dataclasses.replace(make_batch([1, 1, 1], [100, 64, 300]), max_seq_len=301)
        metadata = IndexerMetadataBuilder(config, SM90).build_decode(batch)
        batch.seq_lens.copy_(torch.tensor([101, -3, 301]))
        built = IndexerMetadataBuilder(config, SM90)
        built.update_draft_decode_metadata(metadata, batch.seq_lens, batch.block_table)
        expected = built.build_decode(dataclasses.replace(batch, seq_lens=batch.seq_lens.clamp(min=0)))
        for name in ("context_lens", "query_start_loc", "block_table"):
            assert torch.equal(getattr(metadata, name), getattr(expected, name)), name

    def test_only_the_engines_own_table(self):
        built = IndexerMetadataBuilder(OURS, SM90)
        batch = make_batch([1, 1], [100, 64])
        metadata = built.build_decode(batch)
        with pytest.raises(ValueError, match="tensor that the RAGGED metadata was built with"):
            built.update_draft_decode_metadata(metadata, batch.seq_lens, batch.block_table.clone())


class Layer:
    """Contents of one layer: a cache that holds every page of `make_batch`, and packed queries."""

    def __init__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        layout = IndexKCacheLayout()
        self.cache = layout.allocate(49, "cpu")
        values, scales = layout.views(self.cache)
        values.copy_(torch.randn(values.shape, generator=generator).to(torch.float8_e4m3fn))
        scales.copy_(torch.rand(scales.shape, generator=generator))
        self.q = torch.randn(tokens, 2, 128, generator=generator).to(torch.float8_e4m3fn)
        self.weights = torch.randn(tokens, 2, generator=generator)

    def logits(self, metadata):
        q, weights = rows_of_tokens(self.q, self.weights, metadata.row_to_token)
        return tokens_of_rows(decode_logits(metadata, q, weights, self.cache, SM90), metadata.token_to_row)


@settings(max_examples=25)
@given(step_sequences(), st.integers(0, 2**31))
# Eight requests of six pages, the last of which is page 48.
@example([([0] * 7 + [1], [0] * 7 + [321])], 0)
def test_every_backend_gives_a_token_the_same_logits(steps, seed):
    depths, lengths = steps[0]
    layer = Layer(sum(depths), seed)
    by_backend = {}
    for backend in ("sm90", "deep_gemm", "reference"):
        config = dataclasses.replace(CONFIG, logits_backend=backend)
        metadata = IndexerMetadataBuilder(config, SM90).build_decode(make_batch(depths, lengths))
        assert decode_logits_backend(metadata, layer.q, SM90) is LogitsBackend.REFERENCE  # on a CPU
        by_backend[backend] = layer.logits(metadata)
    for backend in ("deep_gemm", "reference"):
        torch.testing.assert_close(by_backend["sm90"], by_backend[backend], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sm90", "deep_gemm", "reference"])
def test_logits_into_the_callers_buffer(backend):
    layer = Layer(8, 0)
    config = dataclasses.replace(CONFIG, logits_backend=backend)
    metadata = IndexerMetadataBuilder(config, SM90).build_decode(make_batch([4, 4], [70, 300]))
    buffer = torch.full((10, 512), 7.0)
    out = buffer[:8, : metadata.max_context_len]
    assert decode_logits(metadata, layer.q, layer.weights, layer.cache, SM90, out=out) is out
    assert torch.equal(out, layer.logits(metadata))
    assert buffer[8:].eq(7.0).all()
