import dataclasses

import pytest
import torch

from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import DecodeBatch, IndexerConfig, IndexerMetadataBuilder
from vllm_dsa.runner.graphs import DecodeGraphs, PaddedDecodeInputs

CONFIG = IndexerConfig(next_n=4, max_num_seqs=8, block_table_width=6, topk=16)
SM90 = planned_capabilities("sm90")


def make_batch(lens, width=6, value=1):
    starts = torch.arange(len(lens) + 1, dtype=torch.int32) * 2
    table = torch.full((len(lens), width), value, dtype=torch.int32)
    return DecodeBatch(starts, starts.clone(), torch.tensor(lens, dtype=torch.int32), table, max(lens))


@pytest.mark.parametrize("backend", ["deep_gemm", "sm90"])
def test_padding_requests_see_nothing(backend):
    config = dataclasses.replace(CONFIG, logits_backend=backend)
    padded = PaddedDecodeInputs(config, "cpu").load(make_batch([100, 200]), [2, 2])
    metadata = IndexerMetadataBuilder(config, SM90).build_decode(padded)
    assert metadata.context_lens.flatten().tolist() == [99, 100, 199, 200, 0, 0, 0, 0]
    assert metadata.decode_lens.tolist() == [2, 2, 2, 2]


def test_a_long_batch_leaves_nothing_to_a_short_one_at_the_same_addresses():
    inputs = PaddedDecodeInputs(CONFIG, "cpu")
    before = inputs.load(make_batch([300] * 8, value=9), [])
    after = inputs.load(make_batch([10], value=3), [2])
    assert after.seq_lens.tolist() == [10, 0]
    assert after.block_table[1].eq(0).all()
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(after, name).data_ptr() == getattr(before, name).data_ptr()


def test_a_table_too_narrow_for_its_lengths_is_refused():
    with pytest.raises(ValueError, match="2 columns, which reach 128 tokens, max_seq_len is 200"):
        PaddedDecodeInputs(CONFIG, "cpu").load(make_batch([200], width=2), [])


def test_a_cpu_builder_is_refused():
    with pytest.raises(ValueError, match="builder must be on a CUDA device, got cpu"):
        DecodeGraphs(IndexerMetadataBuilder(CONFIG, SM90), lambda metadata: None, [4])


def test_warmup_leaves_the_buffers_as_new():
    builder = IndexerMetadataBuilder(CONFIG, SM90)
    builder.warmup()
    fresh = IndexerMetadataBuilder(CONFIG, SM90).buffers()
    for name, buffer in builder.buffers().items():
        if name != "schedule_metadata":  # rewritten by every build
            assert torch.equal(buffer, fresh[name]), name
