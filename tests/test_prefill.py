import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import IndexerConfig, IndexerMetadataBuilder, PrefillBatch

CONFIG = IndexerConfig(next_n=2, max_num_seqs=8, block_table_width=8)


def make_batch(rows, lengths):
    return PrefillBatch(
        query_start_loc_cpu=torch.tensor([0, *rows]).cumsum(0).to(torch.int32),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.arange(len(rows) * 8, dtype=torch.int32).view(-1, 8),
    )


def build(rows, lengths, **changes):
    builder = IndexerMetadataBuilder(dataclasses.replace(CONFIG, **changes), planned_capabilities("sm90"))
    return builder.build_prefill(make_batch(rows, lengths))


@st.composite
def prefills(draw):
    lengths = draw(st.lists(st.integers(0, 500), max_size=7))
    return [draw(st.integers(0, length)) for length in lengths], lengths


@given(prefills(), st.integers(1, 200_000), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_chunks_cover_every_row_once_with_its_own_keys(prefill, limit, size, interleave, ratio):
    rows, lengths = prefill
    shapes = []
    for rank in range(size):
        dcp = DcpLayout(size, rank, interleave * ratio)
        chunks = build(rows, lengths, max_logits_bytes=limit, dcp=dcp, compress_ratio=ratio)
        covered = [token for chunk in chunks for token in range(chunk.token_start, chunk.token_stop)]
        assert covered == list(range(sum(rows)))
        for chunk in chunks:
            check_chunk(chunk, rows, lengths, dcp, ratio)
            assert chunk.logits_bytes <= limit or chunk.token_stop - chunk.token_start == 1
        shapes.append([(c.token_start, c.token_stop, c.req_start, c.req_stop) for c in chunks])
    # Collectives follow the chunks: every rank must cut alike.
    assert all(shape == shapes[0] for shape in shapes)


def check_chunk(chunk, rows, lengths, dcp, ratio):
    starts = [sum(rows[:r]) for r in range(len(rows))]
    keys = [dcp.local_lens(length) // ratio for length in lengths[chunk.req_start : chunk.req_stop]]
    assert chunk.total_seq_lens == sum(keys)
    assert chunk.cu_seq_lens.tolist() == [sum(keys[:r]) for r in range(len(keys) + 1)]
    token = chunk.token_start
    for row_start, row_end in zip(chunk.row_starts.tolist(), chunk.row_ends.tolist(), strict=True):
        request = max(r for r in range(chunk.req_start, chunk.req_stop) if starts[r] <= token and rows[r])
        visible = lengths[request] - rows[request] + (token - starts[request]) + 1
        assert row_start == sum(keys[: request - chunk.req_start])
        assert row_end - row_start == dcp.local_lens(visible) // ratio
        token += 1


def test_small_requests_share_a_chunk():
    (chunk,) = build([3, 2], [3, 10])
    assert (chunk.token_start, chunk.token_stop, chunk.req_start, chunk.req_stop) == (0, 5, 0, 2)
    assert chunk.cu_seq_lens.tolist() == [0, 3, 13]
    assert chunk.row_starts.tolist() == [0, 0, 0, 3, 3]
    assert chunk.row_ends.tolist() == [1, 2, 3, 12, 13]
    assert not chunk.skip_kv_gather


def test_a_request_over_the_limit_is_cut_along_its_rows():
    chunks = build([5, 1], [100, 4], max_logits_bytes=2 * 100 * 4)
    assert [(c.token_start, c.token_stop, c.req_start) for c in chunks] == [(0, 2, 0), (2, 4, 0), (4, 5, 0), (5, 6, 1)]
    assert [c.skip_kv_gather for c in chunks] == [False, True, True, False]


def test_no_prefill_is_no_chunk():
    assert build([], []) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seq_lens_cpu": torch.tensor([2, 10], dtype=torch.int32)}, ValueError, r"request 0 has 3 query rows"),
        ({"seq_lens_cpu": torch.tensor([3, 10])}, TypeError, "seq_lens_cpu must be int32"),
        ({"seq_lens_cpu": torch.tensor([[3, 10]], dtype=torch.int32)}, ValueError, "seq_lens_cpu must have shape"),
        ({"query_start_loc_cpu": torch.tensor([0, 3], dtype=torch.int32)}, ValueError, "query_start_loc_cpu"),
        ({"block_table": torch.zeros(2, 9, dtype=torch.int32)}, ValueError, "block_table_width is 8"),
        ({"seq_lens_cpu": torch.tensor([3, 513], dtype=torch.int32)}, ValueError, "reach 512 tokens"),
    ],
)
def test_bad_prefills_are_refused(change, error, message):
    builder = IndexerMetadataBuilder(CONFIG, planned_capabilities("sm90"))
    with pytest.raises(error, match=message):
        builder.build_prefill(dataclasses.replace(make_batch([3, 2], [3, 10]), **change))
