"""The top-k merged over simulated ranks is the top-k of all logits, index for index."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dsa import reference
from vllm_dsa.context_parallel import topk as dcp_topk
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.context_parallel.topk import TopkBuffers, merge_topk
from vllm_dsa.kernels.merge_topk import launch_localize_indices, launch_order_candidates
from vllm_dsa.reference.merge_topk import localize_indices, order_candidates
from vllm_dsa.reference.merge_topk import merge_topk as merge_topk_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INF, NAN = math.inf, math.nan
POISON = 0x7F7F7F7F
# Few values, so that ties are the rule, and every kind of them.
VALUES = [0.0, -0.0, 1.0, 1.0, 2.5, -3.0, INF, -INF, NAN, -NAN]
LAYOUTS = [(1, 1), (2, 1), (2, 64), (3, 1), (3, 5), (4, 2), (5, 1), (7, 3), (8, 1), (9, 4)]


def candidates_of_ranks(logits, lengths, k, layout):
    """(W, rows, k) indices and logits: each rank's top-k of the tokens that it holds, all else hidden from it."""
    tokens = torch.arange(logits.shape[1])
    shards = []
    for rank in range(layout.size):
        mine = replace(layout, rank=rank)
        local = logits[:, mine.owner(tokens) == rank]
        found = reference.topk_indices(local, mine.local_lens(lengths), k)
        shards.append((found, reference.logits_of_indices(local, found)))
    return tuple(torch.stack(tensors) for tensors in zip(*shards, strict=True))


def check(logits, lengths, k, size, interleave):
    """The reference by ranks, and its local part, against the top-k of one rank that holds all tokens."""
    lengths = torch.tensor(lengths, dtype=torch.int32)
    layout = DcpLayout(size, 0, interleave)
    indices, values = candidates_of_ranks(logits, lengths, k, layout)
    want = reference.topk_indices(logits, lengths, k)
    assert torch.equal(merge_topk_reference(indices, values, layout), want)
    owned = 0
    for rank in range(size):
        mine = replace(layout, rank=rank)
        local, counts = localize_indices(want, mine)
        for row, count in enumerate(counts.tolist()):
            kept = local[row, :count]
            back = want[row][(want[row] >= 0) & (mine.owner(want[row]) == rank)]
            assert torch.equal(mine.global_pos(kept), back)
            assert (kept.diff() > 0).all()
            assert (local[row, count:] == -1).all()
        owned = owned + counts
    assert torch.equal(owned, (want >= 0).sum(dim=1))
    return indices, values, want


@given(st.data())
def test_ranks_choose_what_one_rank_would(data):
    size, interleave = data.draw(st.sampled_from(LAYOUTS))
    width, k = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=3))
    row = st.lists(st.sampled_from(VALUES), min_size=width, max_size=width)
    check(torch.tensor([data.draw(row) for _ in lengths]), lengths, k, size, interleave)


@pytest.mark.parametrize(("size", "interleave"), LAYOUTS)
def test_lengths_below_the_size_and_around_k(size, interleave, generator):
    lengths = [0, 1, size - 1, size, size * interleave, 15, 16, 17, 400]
    logits = torch.randn(len(lengths), 600, generator=generator)
    for row, value in enumerate(VALUES[: len(lengths)]):
        logits[row, ::3] = value
    check(logits, [min(length, 600) for length in lengths], 16, size, interleave)


@pytest.mark.parametrize("value", [0.0, 1.5, -INF, INF, NAN])
@pytest.mark.parametrize(("size", "interleave"), LAYOUTS)
def test_of_equals_the_first_tokens_win(value, size, interleave):
    *_, want = check(torch.full((1, 200), value), [199], 64, size, interleave)
    assert torch.equal(want[0], torch.arange(64, dtype=torch.int32))


def test_a_plateau_that_every_rank_fills(generator):
    logits = torch.randn(3, 9000, generator=generator).clamp(min=0)
    check(logits, [9000, 8999, 4100], 2048, 4, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("size", "interleave", "k"),
    [*((*layout, 33) for layout in LAYOUTS), *((2, 64, k) for k in (1, 2, 300)), (3, 1, 257)],
)
def test_the_kernels_equal_their_twins(device, size, interleave, k, generator):
    layout = DcpLayout(size, 0, interleave)
    lengths = [0, size - 1, 700]
    logits = torch.tensor(VALUES)[torch.randint(len(VALUES), (len(lengths), 700), generator=generator)]
    indices, values, want = check(logits, lengths, k, size, interleave)

    found = [
        torch.full((len(lengths), size * k), POISON, dtype=torch.int32, device=device).view(torch.float32),
        torch.full((len(lengths), size * k), POISON, dtype=torch.int32, device=device),
        torch.full((len(lengths),), POISON, dtype=torch.int32, device=device),
    ]
    gathered = torch.stack([indices, values.view(torch.int32)], dim=1).contiguous().to(device)
    launch_order_candidates(gathered, *found, interleave=interleave)
    ordered, ids, counts = order_candidates(indices, values, layout)
    assert torch.equal(found[2].cpu(), counts)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(found[0][row, :count].view(torch.int32).cpu(), ordered[row, :count].view(torch.int32))
        assert torch.equal(found[1][row].cpu(), torch.cat([ids[row, :count], found[1][row, count:].cpu()]))
        assert (found[1][row, count:] == POISON).all()

    for rank in {0, size // 2, size - 1}:
        local = torch.full_like(want, POISON).to(device)
        owned = torch.full((len(lengths),), POISON, dtype=torch.int32, device=device)
        launch_localize_indices(want.to(device), local, owned, dcp=(size, rank, interleave))
        want_local, want_owned = localize_indices(want, replace(layout, rank=rank))
        assert torch.equal(local.cpu(), want_local)
        assert torch.equal(owned.cpu(), want_owned)


def test_more_indices_than_a_block_are_localized(generator):
    chosen = torch.randperm(9000, generator=generator)[:2500].sort().values.int()
    indices = torch.full((2, 2600), -1, dtype=torch.int32)
    indices[0, :2500] = chosen
    local, owned = torch.full_like(indices, POISON), torch.full((2,), POISON, dtype=torch.int32)
    launch_localize_indices(indices, local, owned, dcp=(3, 2, 4))
    want_local, want_owned = localize_indices(indices, DcpLayout(3, 2, 4))
    assert torch.equal(local, want_local)
    assert torch.equal(owned, want_owned)


@pytest.fixture
def one_rank(monkeypatch):
    """A group of one, without a process group."""
    monkeypatch.setattr(dcp_topk, "size_and_rank", lambda group: (1, 0))
    monkeypatch.setattr(dcp_topk, "all_gather", lambda gathered, mine, group: gathered[0].copy_(mine))


@pytest.mark.parametrize("by_triton", [False, True])
def test_steps_of_any_size_share_buffers(one_rank, by_triton, generator, monkeypatch):
    monkeypatch.setattr(dcp_topk, "_runs_triton", lambda device: by_triton)
    buffers = TopkBuffers.allocate(DcpLayout(), max_rows=5, k=8, device="cpu")
    for rows in (5, 2, 0, 4):
        for tensor in (buffers.sent, buffers.received, buffers.ids, buffers.lengths, *buffers.merged):
            tensor.fill_(POISON)
        logits = torch.randn(rows, 30, generator=generator)
        lengths = torch.randint(0, 31, (rows,), generator=generator, dtype=torch.int32)
        want = reference.topk_indices(logits, lengths, 8)
        indices, values = buffers.candidates(rows)
        indices.copy_(want)
        values.copy_(reference.logits_of_indices(logits, want))
        for given_indices, given_values in ((indices, values), (want.clone(), values.clone())):
            merged = merge_topk(given_indices, given_values, DcpLayout(), buffers=buffers)
            assert torch.equal(merged.indices, want)
            assert torch.equal(merged.local_indices, want)
            assert torch.equal(merged.local_counts, lengths.clamp(max=8))
            assert merged.indices.data_ptr() == buffers.merged.indices.data_ptr() or rows == 0


INDICES, LOGITS = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("indices", "values", "layout", "error", "message"),
    [
        (INDICES.long(), LOGITS, DcpLayout(), TypeError, "indices has dtype torch.int64; allowed: torch.int32"),
        (INDICES, LOGITS.bfloat16(), DcpLayout(), TypeError, "values has dtype torch.bfloat16; allowed: torch.float32"),
        (INDICES, LOGITS[:1], DcpLayout(), ValueError, "values has shape (1, 4); allowed: (2, 4)"),
        (INDICES[:, :0], LOGITS[:, :0], DcpLayout(), ValueError, "indices has shape (2, 0); allowed"),
        (INDICES, LOGITS, DcpLayout(2, 0), ValueError, "allowed: size 1 and rank 0, the group's"),
        (INDICES[:, :3], LOGITS[:, :3], DcpLayout(), ValueError, "k of indices is 3; allowed: 4"),
        (INDICES, LOGITS, DcpLayout(1, 0, 2), ValueError, "layout is DcpLayout(size=1, rank=0, interleave=2); allowed"),
        (INDICES.repeat(2, 1), LOGITS.repeat(2, 1), DcpLayout(), ValueError, "indices has 4 rows; allowed: up to 3"),
    ],
)
def test_what_does_not_fit_is_refused(one_rank, indices, values, layout, error, message):
    buffers = TopkBuffers.allocate(DcpLayout(), max_rows=3, k=4, device="cpu")
    buffers.sent.fill_(POISON)
    with pytest.raises(error) as caught:
        merge_topk(indices, values, layout, buffers=buffers)
    assert message in str(caught.value)
    assert (buffers.sent == POISON).all()


@pytest.mark.parametrize("row", [[3, 2, -1], [3, 3, 4], [-1, 2, 3], [0, -2, -1], [-5, -1, -1]])
def test_validation_finds_candidates_out_of_order(one_rank, row, monkeypatch):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    good = torch.tensor([[0, 5, 9], [7, -1, -1]], dtype=torch.int32)
    merge_topk(good, torch.ones(2, 3), DcpLayout())
    bad = torch.tensor([[0, 5, 9], row], dtype=torch.int32)
    with pytest.raises(ValueError, match="indices"):
        merge_topk(bad, torch.ones(2, 3), DcpLayout())


@settings(max_examples=10)
@given(st.integers(-3, 0), st.integers(-3, 0))
def test_buffers_of_nothing_are_refused(rows, k):
    with pytest.raises(ValueError, match="allowed: at least 1"):
        TopkBuffers.allocate(DcpLayout(), max_rows=rows, k=k, device="cpu")
