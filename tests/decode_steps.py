"""Decode batches for the tests of the builder, and the law that every build must keep."""

import dataclasses

import torch

from vllm_dsa.indexer import DecodeBatch, IndexerMetadataBuilder

WIDTH_TOKENS = 6 * 64


def make_batch(depths, lengths, width=6, first_page=1):
    starts = torch.tensor([0, *depths]).cumsum(0).to(torch.int32)
    pages = torch.arange(first_page, first_page + len(depths) * width, dtype=torch.int32).view(-1, width)
    return DecodeBatch(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=pages,
        max_seq_len=max([*lengths, 0]),
    )


def assert_builds_equal_fresh_ones(config, caps, batches):
    """Build the batches one after the other, each also by a builder that saw none before it."""
    used = IndexerMetadataBuilder(config, caps)
    addresses = {name: buffer.data_ptr() for name, buffer in used.buffers().items()}
    for batch in batches:
        metadata = used.build_decode(batch)
        fresh = IndexerMetadataBuilder(config, caps)
        expected = fresh.build_decode(batch)
        for name, buffer in used.buffers().items():
            assert buffer.data_ptr() == addresses[name], name
            if name != "schedule_metadata":  # only its prefix belongs to the step
                assert torch.equal(buffer, fresh.buffers()[name]), name
        for field in dataclasses.fields(metadata):
            have, want = getattr(metadata, field.name), getattr(expected, field.name)
            assert torch.equal(have, want) if isinstance(want, torch.Tensor) else have == want, field.name
