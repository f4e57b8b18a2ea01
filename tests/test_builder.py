import dataclasses
import logging

import hypothesis.strategies as st
import pytest
import torch
from decode_steps import WIDTH_TOKENS, assert_builds_equal_fresh_ones, make_batch
from hypothesis import given, settings

from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import DecodeForm, IndexerConfig, IndexerMetadataBuilder
from vllm_dsa.ops.schedule import paged_mqa_schedule

SM90 = planned_capabilities("sm90")
SM90_MAIN = planned_capabilities("sm90", frozenset({1, 2}))
SM100 = planned_capabilities("sm100")
CONFIG = IndexerConfig(
    next_n=4, max_num_seqs=8, block_table_width=6, max_num_tokens=64, topk=16, logits_backend="deep_gemm"
)


@st.composite
def step_sequences(draw):
    """Batches of random depths, long ones followed by short ones."""
    steps = []
    for _ in range(draw(st.integers(2, 5))):
        depths = draw(st.lists(st.integers(0, 8), max_size=8))
        lengths = [draw(st.integers(0, WIDTH_TOKENS)) for _ in depths]
        steps.append((depths, lengths, draw(st.integers(1, 6)) if max([*lengths, 0]) <= 64 else 6))
    return steps


@settings(max_examples=60)
@given(step_sequences(), st.sampled_from([SM90, SM90_MAIN, SM100, planned_capabilities("sm90", frozenset({4}))]))
def test_any_sequence_of_steps_equals_fresh_builds_at_fixed_addresses(steps, caps):
    assert_builds_equal_fresh_ones(CONFIG, caps, [make_batch(*step) for step in steps])


def test_metadata_views_the_builders_buffers():
    builder = IndexerMetadataBuilder(CONFIG, SM90)
    buffers = builder.buffers()
    metadata = builder.build_decode(make_batch([3, 3, 1], [70, 80, 90]))
    assert metadata.form is DecodeForm.GROUPED
    for name in ("context_lens", "block_table", "row_to_token", "token_to_row", "decode_lens", "schedule_metadata",
                 "topk_indices"):  # fmt: skip
        assert getattr(metadata, name).data_ptr() == buffers[name].data_ptr(), name
    assert metadata.context_lens.is_contiguous()


def test_native_reads_the_engines_table():
    batch = make_batch([4, 4, 0], [70, 300, 0])
    metadata = IndexerMetadataBuilder(CONFIG, SM90).build_decode(batch)
    assert metadata.form is DecodeForm.NATIVE
    assert metadata.block_table.data_ptr() == batch.block_table.data_ptr()
    assert metadata.context_lens.tolist() == [[67, 68, 69, 70], [297, 298, 299, 300]]
    assert metadata.row_to_token is None
    assert metadata.decode_lens.tolist() == [4, 4, 0]
    assert metadata.max_context_len == WIDTH_TOKENS
    assert metadata.topk_indices.shape == (8, 16)


@pytest.mark.parametrize("depths", [[4, 4], [3, 3], [1, 1], [2, 1], [8, 8], [0, 0], []])
@pytest.mark.parametrize("caps", [SM90, SM90_MAIN, SM100])
def test_schedule_belongs_to_the_lens(depths, caps):
    metadata = IndexerMetadataBuilder(CONFIG, caps).build_decode(make_batch(depths, [300] * len(depths)))
    expected = paged_mqa_schedule(metadata.context_lens, 64, caps, indices=metadata.indices)
    assert torch.equal(metadata.schedule_metadata, expected)
    paired = metadata.plan.group_size in caps.paired_next_n
    assert len(metadata.schedule_metadata) == caps.num_sms // (2 if paired else 1) + 1


def test_ragged_rows_name_their_request_and_unused_rows_never_pair():
    builder = IndexerMetadataBuilder(CONFIG, SM100)
    metadata = builder.build_decode(make_batch([3, 0, 1], [70, 0, 90]))
    assert metadata.form is DecodeForm.RAGGED
    assert metadata.indices.tolist() == [0, 0, 0, 2]
    unused = builder.buffers()["indices"][4:]
    assert len(set(unused.tolist())) == len(unused)
    assert unused.min() >= CONFIG.max_num_seqs


def test_a_step_may_be_deeper_than_configured():
    metadata = IndexerMetadataBuilder(CONFIG, SM90).build_decode(make_batch([7, 7], [100, 200]))
    assert (metadata.form, metadata.plan.group_size, metadata.plan.num_groups) == (DecodeForm.GROUPED, 4, 4)
    assert metadata.context_lens.tolist()[1] == [98, 99, 100, 100]
    assert metadata.row_to_token.tolist()[:8] == [0, 1, 2, 3, 4, 5, 6, -1]


def test_compressed_and_context_parallel_lengths():
    config = dataclasses.replace(CONFIG, compress_ratio=4, dcp=DcpLayout(2, 1, 4))
    metadata = IndexerMetadataBuilder(config, SM90).build_decode(make_batch([2], [300]))
    # Rank 1 of 2 holds 148 of the first 299 and 300 tokens (4 at a time), which is 37 states of 4.
    assert metadata.context_lens.tolist() == [[37, 37]]
    assert metadata.max_context_len == WIDTH_TOKENS


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seq_lens": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "seq_lens must have shape"),
        ({"seq_lens": torch.zeros(2)}, TypeError, "seq_lens must be int32, got torch.float32"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int64)}, TypeError, "query_start_loc must be int32"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, ValueError, r"shape \(3,\), got \(2,\)"),
        ({"query_start_loc_cpu": torch.tensor([1, 2, 3], dtype=torch.int32)}, ValueError, "must start at 0"),
        ({"query_start_loc_cpu": torch.tensor([0, 3, 2], dtype=torch.int32)}, ValueError, "got -1 for request 1"),
        ({"query_start_loc_cpu": torch.tensor([0, 3, 99], dtype=torch.int32)}, ValueError, "99 query rows"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table must have shape"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, "4 columns, which reach 256 tokens"),
        ({"block_table": torch.zeros(2, 7, dtype=torch.int32)}, ValueError, "config.block_table_width is 6"),
        ({"block_table": torch.zeros(2, 12, dtype=torch.int32)[:, ::2]}, ValueError, "last stride of 1"),
        ({"max_seq_len": -1}, ValueError, "max_seq_len must not be negative"),
    ],
)
def test_a_bad_batch_is_refused_and_no_buffer_is_written(change, error, message):
    builder = IndexerMetadataBuilder(CONFIG, SM90)
    builder.build_decode(make_batch([3, 1], [300, 40]))
    before = {name: buffer.clone() for name, buffer in builder.buffers().items()}
    with pytest.raises(error, match=message):
        builder.build_decode(dataclasses.replace(make_batch([3, 3], [300, 20]), **change))
    assert all(torch.equal(buffer, before[name]) for name, buffer in builder.buffers().items())


def test_too_many_requests_are_refused():
    with pytest.raises(ValueError, match="9 requests"):
        IndexerMetadataBuilder(CONFIG, SM90).build_decode(make_batch([1] * 9, [1] * 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": torch.tensor([0, 2, 6], dtype=torch.int32)}, "differ"),
        ({"max_seq_len": 100}, "seq_lens reach 300"),
        ({"seq_lens": torch.tensor([300, -1], dtype=torch.int32)}, "must not be negative"),
    ],
)
def test_device_values_are_checked_on_request(monkeypatch, change, message):
    builder = IndexerMetadataBuilder(CONFIG, SM90)
    batch = dataclasses.replace(make_batch([3, 3], [300, 20]), **change)
    builder.build_decode(batch)  # not checked by default: it would cost a sync
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    with pytest.raises(ValueError, match=message):
        IndexerMetadataBuilder(CONFIG, SM90).build_decode(batch)


def test_an_unsupported_page_size_is_refused_at_construction():
    caps = dataclasses.replace(SM90, block_sizes=frozenset({64}))
    with pytest.raises(ValueError, match=r"block_size must be one of \[64\].*got 32"):
        IndexerMetadataBuilder(dataclasses.replace(CONFIG, block_size=32), caps)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"next_n": 0}, ValueError, "next_n must be at least 1, got 0"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs"),
        ({"block_table_width": 0}, ValueError, "block_table_width"),
        ({"block_size": 128}, ValueError, "block_size must be 32 or 64"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio"),
        ({"topk": 0}, ValueError, "topk"),
        ({"num_heads": 0}, ValueError, "num_heads"),
        ({"head_dim": 0}, ValueError, "head_dim"),
        ({"logits_backend": "sm100"}, ValueError, "logits_backend must be one of auto, deep_gemm, sm90, reference"),
        ({"max_num_tokens": -1}, ValueError, "max_num_tokens"),
        ({"compress_ratio": 4, "dcp": DcpLayout(2, 0, 2)}, NotImplementedError, "must divide dcp.interleave"),
    ],
)
def test_a_bad_config_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **change)


def test_default_sizes():
    config = IndexerConfig(next_n=4, max_num_seqs=8, block_table_width=6)
    assert config.max_num_tokens == 32
    assert config.max_logits_bytes == 512 << 20
    assert config.logits_backend == "auto"


def test_the_environment_names_the_backend_unless_the_config_does(monkeypatch):
    monkeypatch.setenv("VDSA_LOGITS_BACKEND", "reference")
    config = IndexerConfig(next_n=4, max_num_seqs=8, block_table_width=6)
    assert config.logits_backend == "reference"
    assert CONFIG.logits_backend == "deep_gemm"
    monkeypatch.setenv("VDSA_LOGITS_BACKEND", "sm100")
    with pytest.raises(ValueError, match="VDSA_LOGITS_BACKEND='sm100': allowed: auto"):
        dataclasses.replace(config, logits_backend="")


def test_startup_line(caplog):
    with caplog.at_level(logging.INFO, logger="vllm_dsa"):
        IndexerMetadataBuilder(CONFIG, SM90)
    (record,) = caplog.records
    assert record.getMessage() == (
        "indexer decode: use_flattening=False supports_varlen=False next_n=4 arch=sm90 deep_gemm=planned "
        "native_next_n=1,2,4 logits_backend=deep_gemm forms=1:native,2:native,3:grouped,4:native group_size=4 "
        "schedule_slots=66 num_sms=132"
    )


class TestDraftUpdate:
    @pytest.mark.parametrize("caps", [SM90, SM100])
    def test_equals_a_fresh_build(self, caps):
        builder = IndexerMetadataBuilder(CONFIG, caps)
        batch = make_batch([1, 1, 1], [100, 64, 300])
        metadata = builder.build_decode(dataclasses.replace(batch, max_seq_len=301))
        batch.seq_lens.copy_(torch.tensor([101, 65, 301]))
        builder.update_draft_decode_metadata(metadata, batch.seq_lens, batch.block_table)
        expected = IndexerMetadataBuilder(CONFIG, caps).build_decode(dataclasses.replace(batch, max_seq_len=301))
        assert torch.equal(metadata.context_lens, expected.context_lens)
        assert torch.equal(metadata.schedule_metadata, expected.schedule_metadata)
        live = -(-metadata.context_lens // 64)
        for row, columns in enumerate(live.flatten().tolist()):
            assert torch.equal(metadata.block_table[row, :columns], expected.block_table[row, :columns])

    def test_flattened_takes_a_new_table(self):
        builder = IndexerMetadataBuilder(CONFIG, planned_capabilities("sm100"))
        batch = make_batch([1, 1], [100, 64])
        metadata = builder.build_decode(batch)
        builder.update_draft_decode_metadata(metadata, batch.seq_lens, batch.block_table + 50)
        assert torch.equal(metadata.block_table, batch.block_table + 50)

    @pytest.mark.parametrize(
        ("depths", "lens", "table", "error", "message"),
        [
            ([4, 4], torch.zeros(2, dtype=torch.int32), None, ValueError, "one row per request"),
            ([2, 0], torch.zeros(2, dtype=torch.int32), None, ValueError, "one row per request"),
            ([1, 1], torch.zeros(3, dtype=torch.int32), None, ValueError, r"shape \(2,\)"),
            ([1, 1], torch.zeros(2), None, TypeError, "int32"),
            ([1, 1], torch.zeros(2, dtype=torch.int32), torch.zeros(3, 6, dtype=torch.int32), ValueError, "2 rows"),
            ([1, 1], torch.zeros(2, dtype=torch.int32), torch.zeros(2, 6, dtype=torch.int32), ValueError, "NATIVE"),
        ],
    )
    def test_refusals(self, depths, lens, table, error, message):
        builder = IndexerMetadataBuilder(CONFIG, SM90)
        batch = make_batch(depths, [100, 64])
        metadata = builder.build_decode(batch)
        with pytest.raises(error, match=message):
            builder.update_draft_decode_metadata(metadata, lens, batch.block_table if table is None else table)

    def test_not_under_dcp(self):
        builder = IndexerMetadataBuilder(dataclasses.replace(CONFIG, dcp=DcpLayout(2)), SM90)
        batch = make_batch([1], [100])
        metadata = builder.build_decode(batch)
        with pytest.raises(NotImplementedError, match="under DCP"):
            builder.update_draft_decode_metadata(metadata, batch.seq_lens, batch.block_table)
