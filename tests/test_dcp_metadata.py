"""A rank's view of decode steps: its laws over ranks, modes and sequences of steps."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from dcp_steps import POISON, draw_requests, layouts
from hypothesis import given

from vllm_dsa.context_parallel import DcpDecodeMetadata, DcpLayout, DecodeMode, ReqToToken

MAX_REQS, MAX_SEQ_LEN, NEXT_N = 5, 150, 3
MODES = st.sampled_from(list(DecodeMode))
LENGTHS = st.lists(st.integers(0, MAX_SEQ_LEN), max_size=MAX_REQS)
SEEDS = st.integers(0, 2**31)


def allocate(layout, block_size, **changes):
    sizes = {"max_reqs": MAX_REQS, "max_seq_len": MAX_SEQ_LEN, "block_size": block_size, "next_n": NEXT_N}
    return DcpDecodeMetadata.allocate(layout, **{**sizes, **changes})


def tokens_of(mode, length):
    """Tokens of a request in this step, by the definition."""
    return length + NEXT_N if mode is DecodeMode.TARGET_VERIFY and length else length


def make_step(mode, lengths, layout, block_size, seed):
    """What an engine hands over: global lengths as the mode counts them, and slots for every token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [tokens_of(mode, length) for length in lengths]
    requests = draw_requests(tokens, layout, block_size, MAX_SEQ_LEN + NEXT_N, generator)
    dtype = (torch.int32, torch.int64)[seed % 2]
    return torch.tensor(lengths, dtype=dtype), requests


def owned(layout, count):
    """The rank's tokens among the first `count`, by the definition."""
    return [t for t in range(count) if t // layout.interleave % layout.size == layout.rank]


@given(layouts(), st.integers(1, 3), MODES, LENGTHS, SEEDS)
def test_lengths_and_pages_are_those_of_the_definition(layout, runs, mode, lengths, seed):
    block_size = layout.interleave * runs
    seq_lens, requests = make_step(mode, lengths, layout, block_size, seed)
    rows = 1 if mode is DecodeMode.DECODE else NEXT_N
    for pages in requests.sources():
        metadata = allocate(layout, block_size)
        metadata.refresh(mode, seq_lens, pages)
        for request in range(MAX_REQS):
            count = tokens_of(mode, lengths[request]) if request < len(lengths) else 0
            mine = owned(layout, count)
            assert metadata.global_seq_lens_k[request] == count
            assert metadata.seq_lens_k[request] == len(mine)
            bounds = [len(owned(layout, max(count - rows + j + 1, 0))) for j in range(rows)]
            assert metadata.row_lens_of(mode, MAX_REQS)[request].tolist() == bounds
            table = metadata.block_table[request].tolist()
            for local, token in enumerate(mine):
                slot = int(requests.req_to_token[requests.req_pool_indices[request], token])
                assert table[local // block_size] == slot // (block_size * layout.size)
            assert not any(table[-(-len(mine) // block_size) :])


@given(layouts(), MODES, LENGTHS, SEEDS)
def test_ranks_share_every_length_and_every_rows_bound(layout, mode, lengths, seed):
    seq_lens, requests = make_step(mode, lengths, layout, layout.interleave, seed)
    ranks = []
    for rank in range(layout.size):
        ranks.append(allocate(dataclasses.replace(layout, rank=rank), layout.interleave))
        ranks[-1].refresh(mode, seq_lens, requests.block_table)
    assert torch.equal(sum(rank.seq_lens_k for rank in ranks), ranks[0].global_seq_lens_k)
    rows = sum(rank.row_lens_of(mode, MAX_REQS) for rank in ranks)
    assert torch.equal(rows[:, -1], ranks[0].global_seq_lens_k)
    steps = rows.diff(dim=1)
    assert ((steps == 1) | (rows[:, :-1] == 0)).all(), "a row sees one token more than the row before it"
    for rank in ranks:
        # A kernel that schedules by a request's last row schedules enough.
        assert (rank.row_lens_of(mode, MAX_REQS) <= rank.seq_lens_k[:, None]).all()
        assert torch.equal(rank.row_lens_of(mode, MAX_REQS)[:, -1], rank.seq_lens_k)
        assert rank.seq_lens_k.max() <= rank.max_seq_len_k


def test_rows_of_a_verify_step_are_localised_one_by_one():
    metadata = allocate(DcpLayout(2, 1), 4)
    seq_lens = torch.tensor([7], dtype=torch.int32)
    metadata.refresh(DecodeMode.TARGET_VERIFY, seq_lens, torch.zeros(1, 19, dtype=torch.int32))
    assert metadata.global_seq_lens_k.tolist() == [10, 0, 0, 0, 0]
    assert metadata.seq_lens_k.tolist() == [5, 0, 0, 0, 0]
    # Global bounds 8, 9, 10; a request's local length less an offset would give 3, 4, 5.
    assert metadata.row_lens_of(DecodeMode.TARGET_VERIFY, 1).tolist() == [[4, 4, 5]]
    assert seq_lens.tolist() == [7]


@given(
    layouts(),
    st.lists(st.tuples(MODES, LENGTHS, SEEDS, st.booleans()), min_size=2, max_size=6),
)
def test_any_sequence_of_refreshes_equals_fresh_ones_at_fixed_addresses(layout, steps):
    used = allocate(layout, layout.interleave)
    addresses = {name: buffer.data_ptr() for name, buffer in used.buffers().items()}
    for mode, lengths, seed, from_slots in steps:
        seq_lens, requests = make_step(mode, lengths, layout, layout.interleave, seed)
        pages = requests.sources()[0 if from_slots else 1]
        fresh = allocate(layout, layout.interleave)
        for metadata in (used, fresh):
            metadata.refresh(mode, seq_lens, pages)
        for name, buffer in used.buffers().items():
            assert buffer.data_ptr() == addresses[name]
            assert torch.equal(buffer, fresh.buffers()[name]), name


def test_a_long_step_leaves_nothing_to_a_short_one():
    layout = DcpLayout(2, 0)
    metadata = allocate(layout, 4)
    for buffer in metadata.buffers().values():
        buffer.fill_(POISON)
    table = torch.arange(1, 1 + MAX_REQS * 19, dtype=torch.int32).view(MAX_REQS, 19)
    metadata.refresh(DecodeMode.DRAFT_EXTEND, torch.full((MAX_REQS,), MAX_SEQ_LEN, dtype=torch.int32), table)
    assert all((buffer != POISON).all() for buffer in metadata.buffers().values())
    metadata.refresh(DecodeMode.DECODE, torch.tensor([3, 0], dtype=torch.int32), table[:2])
    assert metadata.global_seq_lens_k.tolist() == [3, 0, 0, 0, 0]
    assert metadata.seq_lens_k.tolist() == [2, 0, 0, 0, 0]
    assert metadata.row_lens_k.tolist() == [2] + [0] * (MAX_REQS * NEXT_N - 1)
    assert metadata.block_table.flatten().nonzero().tolist() == [[0]]


@pytest.mark.parametrize("mode", DecodeMode)
@pytest.mark.parametrize("length", [0, -1, -7])
def test_a_padding_request_is_empty_in_every_mode(mode, length):
    metadata = allocate(DcpLayout(2, 0), 4)
    metadata.refresh(mode, torch.tensor([length, 9]), torch.ones(2, 19, dtype=torch.int32))
    assert metadata.global_seq_lens_k[0] == metadata.seq_lens_k[0] == 0
    assert not metadata.row_lens_of(mode, 2)[0].any()
    assert not metadata.block_table[0].any()
    assert metadata.block_table[1].any()


def test_one_rank_sees_everything():
    metadata = allocate(DcpLayout(interleave=7), 4)
    table = torch.arange(1, 77, dtype=torch.int32).view(2, 38)
    metadata.refresh(DecodeMode.DECODE, torch.tensor([9, 4]), table)
    assert torch.equal(metadata.seq_lens_k, metadata.global_seq_lens_k)
    assert metadata.block_table[:2, :4].tolist() == [[1, 2, 3, 0], [39, 0, 0, 0]]


@pytest.mark.parametrize("layout", [DcpLayout(), DcpLayout(2, 0), DcpLayout(2, 1), DcpLayout(9, 8, 4), DcpLayout(9, 0)])
def test_the_host_bound_is_the_longest_that_a_verify_step_reaches(layout):
    metadata = allocate(layout, 4)
    table = torch.zeros(1, metadata.block_table.shape[1], dtype=torch.int32)
    metadata.refresh(DecodeMode.TARGET_VERIFY, torch.tensor([MAX_SEQ_LEN]), table)
    assert metadata.max_seq_len_k == metadata.seq_lens_k[0] == len(owned(layout, MAX_SEQ_LEN + NEXT_N))
    # A group larger than its longest request leaves ranks without a token, for which a kernel still has to be planned.
    few = DcpDecodeMetadata.allocate(DcpLayout(9, 8), max_reqs=1, max_seq_len=2, block_size=4)
    assert few.max_seq_len_k == 1


def test_drafts_past_the_end_of_a_table_have_room():
    # 200000 tokens are 3125 pages of 64; the drafts behind them need one more.
    metadata = DcpDecodeMetadata.allocate(DcpLayout(), max_reqs=1, max_seq_len=200_000, block_size=64, next_n=4)
    assert metadata.block_table.shape == (1, 3126)
    table = torch.arange(1, 3126, dtype=torch.int32)[None]
    metadata.refresh(DecodeMode.TARGET_VERIFY, torch.tensor([200_000]), table)
    assert metadata.block_table[0, 3124:].tolist() == [3125, 0]


def test_missing_rows_and_freed_pages_become_page_zero():
    metadata = allocate(DcpLayout(2, 1), 4, max_reqs=4)
    slots = torch.full((3, MAX_SEQ_LEN), 80)
    slots[1] = -1
    pages = ReqToToken(slots, torch.tensor([0, 1, 3, -1]))
    metadata.refresh(DecodeMode.DECODE, torch.tensor([20, 20, 20, 20]), pages)
    assert metadata.block_table[:, :3].tolist() == [[10, 10, 10], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    table = torch.full((1, 19), -1, dtype=torch.int32)
    metadata.refresh(DecodeMode.DECODE, torch.tensor([20]), table)
    assert not metadata.block_table.any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "decode"}, TypeError, "mode is 'decode'; allowed: DecodeMode.DECODE"),
        ({"seq_lens": [1]}, TypeError, "seq_lens is of type list"),
        ({"seq_lens": torch.ones(2)}, TypeError, "seq_lens has dtype torch.float32; allowed: torch.int32, torch.int64"),
        (
            {"seq_lens": torch.ones(2, 1, dtype=torch.int32)},
            ValueError,
            r"seq_lens has shape \(2, 1\)",
        ),
        ({"seq_lens": torch.ones(4, dtype=torch.int32)[::2]}, ValueError, "seq_lens has strides"),
        ({"seq_lens": torch.ones(6, dtype=torch.int32)}, ValueError, "seq_lens has 6 requests; allowed: at most"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, ValueError, "block_table has 2 rows; allowed: 3"),
        ({"pages": torch.ones(2, 18, dtype=torch.int32)}, ValueError, "block_table has 18 columns; allowed: 19 to 20"),
        ({"pages": torch.ones(2, 38, dtype=torch.int32)}, ValueError, "block_table has 38 columns; allowed: 19 to 20"),
        ({"pages": torch.ones(2, 19)}, TypeError, "block_table has dtype"),
        (
            {"pages": ReqToToken(torch.ones(9, 149, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))},
            ValueError,
            "req_to_token has 149 columns; allowed: at least max_seq_len, 150",
        ),
        (
            {"pages": ReqToToken(torch.ones(9, 150, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))},
            ValueError,
            "req_pool_indices has 3 rows; allowed: 2",
        ),
    ],
)
def test_a_bad_step_is_refused_and_no_buffer_is_written(change, error, message):
    metadata = allocate(DcpLayout(2, 1), 4, block_table_width=20)
    step = {"mode": DecodeMode.DECODE, "seq_lens": torch.tensor([9, 8]), "pages": torch.ones(2, 19, dtype=torch.int32)}
    metadata.refresh(**step)
    before = {name: buffer.clone() for name, buffer in metadata.buffers().items()}
    with pytest.raises(error, match=message):
        metadata.refresh(**{**step, "seq_lens": torch.tensor([3, 3]), **change})
    assert all(torch.equal(buffer, before[name]) for name, buffer in metadata.buffers().items())


@pytest.mark.parametrize("name", ["seq_lens_k", "global_seq_lens_k"])
def test_its_own_lengths_are_no_input(name):
    metadata = allocate(DcpLayout(2, 1), 4)
    with pytest.raises(ValueError, match="never written"):
        metadata.refresh(DecodeMode.DECODE, metadata.buffers()[name][:2], torch.ones(2, 19, dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[151, 1], [-1, 1]])
def test_lengths_are_checked_on_request(monkeypatch, lengths):
    table = torch.ones(2, 19, dtype=torch.int32)
    allocate(DcpLayout(2, 1), 4).refresh(DecodeMode.DECODE, torch.tensor(lengths), table)
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    metadata = allocate(DcpLayout(2, 1), 4)
    with pytest.raises(ValueError, match="allowed: 0 to max_seq_len, 150"):
        metadata.refresh(DecodeMode.DECODE, torch.tensor(lengths), table)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_reqs": 0}, ValueError, "max_reqs is 0; allowed: at least 1"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len"),
        ({"block_size": 6}, ValueError, "block_size is 6; allowed: multiples of the interleave, 4"),
        ({"next_n": True}, TypeError, "next_n is True; allowed: an int"),
        ({"block_table_width": 19}, ValueError, "block_table_width is 19; allowed: at least 20"),
    ],
)
def test_a_bad_size_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        allocate(DcpLayout(2, 0, 4), **{"block_size": 4, **change})
