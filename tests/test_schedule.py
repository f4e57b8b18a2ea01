import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.reference import sm90_schedule, sm100_schedule

BATCHES = st.lists(st.one_of(st.just(0), st.integers(0, 2000)), max_size=40)
SLOTS = st.integers(1, 150)


def lens(lengths, next_n=1):
    """Context lengths whose last column is `lengths`; the other columns must not matter."""
    table = torch.full((len(lengths), next_n), 10**6, dtype=torch.int32)
    table[:, -1] = torch.tensor(lengths, dtype=torch.int32)
    return table


def num_splits(length, split_kv=256):
    return -(-max(length, 0) // split_kv)


def all_splits(lengths, split_kv=256):
    return [(r, s) for r, length in enumerate(lengths) for s in range(num_splits(length, split_kv))]


def sm90_by_hand(lengths, num_slots, longer_runs_first=False, split_kv=256):
    """Hand out the list of splits in order, the last slots (or the first) one more."""
    queue = [*all_splits(lengths, split_kv), (len(lengths), 0)]
    share, extra = divmod(len(queue) - 1, num_slots)
    rows, at = [], 0
    for slot in range(num_slots):
        rows.append(queue[at])
        at += share + (slot < extra if longer_runs_first else slot >= num_slots - extra)
    return [*rows, queue[at]]


def sm100_by_hand(requests, num_slots, past_all, split_kv=256):
    """The same for (first token, tokens, length) requests with a unit per split and token, first slots one more."""
    queue = [
        (first, split)
        for first, tokens, length in requests
        for split in range(num_splits(length, split_kv))
        for _ in range(tokens)
    ]
    queue.append((past_all, 0))
    share, extra = divmod(len(queue) - 1, num_slots)
    rows, at = [], 0
    for slot in range(num_slots):
        rows.append(queue[at])
        at += share + (slot < extra)
    return [*rows, queue[at]]


def walk(schedule, splits_of):
    """What each slot covers, as the kernel does: from its row up to the next one."""
    order = [(owner, split) for owner, count in splits_of for split in range(count)]
    place = {unit: i for i, unit in enumerate(order)}
    rows = [tuple(row) for row in schedule.tolist()]
    at = [place.get(row, len(order)) for row in rows]
    return [order[begin:end] for begin, end in itertools.pairwise(at)], at, order


@given(
    lengths=BATCHES,
    num_slots=SLOTS,
    next_n=st.integers(1, 4),
    longer_runs_first=st.booleans(),
    split_kv=st.sampled_from([128, 256]),
)
def test_sm90_properties(lengths, num_slots, next_n, longer_runs_first, split_kv):
    schedule = sm90_schedule(lens(lengths, next_n), num_slots, longer_runs_first=longer_runs_first, split_kv=split_kv)
    assert schedule.dtype == torch.int32
    assert schedule.shape == (num_slots + 1, 2)
    assert [tuple(row) for row in schedule.tolist()] == sm90_by_hand(lengths, num_slots, longer_runs_first, split_kv)
    covered, at, order = walk(schedule, [(r, num_splits(n, split_kv)) for r, n in enumerate(lengths)])
    assert at == sorted(at)
    assert [unit for slot in covered for unit in slot] == order
    loads = [len(slot) for slot in covered]
    assert max(loads) - min(loads) <= 1
    assert loads == sorted(loads, reverse=longer_runs_first)
    assert schedule[-1].tolist() == [len(lengths), 0]


@given(lengths=BATCHES, num_slots=SLOTS, next_n=st.integers(1, 6))
def test_sm100_properties(lengths, num_slots, next_n):
    schedule = sm100_schedule(lens(lengths, next_n), num_slots)
    assert schedule.dtype == torch.int32
    assert schedule.shape == (num_slots + 1, 2)
    requests = [(r * next_n, next_n, length) for r, length in enumerate(lengths)]
    rows = [tuple(row) for row in schedule.tolist()]
    assert rows == sm100_by_hand(requests, num_slots, len(lengths) * next_n)
    covered, at, order = walk(schedule, [(r * next_n, num_splits(n)) for r, n in enumerate(lengths)])
    assert at == sorted(at)
    assert [unit for slot in covered for unit in slot] == order


@given(
    runs=st.lists(st.tuples(st.integers(1, 6), st.one_of(st.just(0), st.integers(0, 2000))), max_size=30),
    num_slots=SLOTS,
)
def test_sm100_runs_of_equal_index_are_requests(runs, num_slots):
    indices, lengths, requests = [], [], []
    for run, (tokens, length) in enumerate(runs):
        requests.append((len(indices), tokens, length))
        # The same index again in a later run is a request of its own.
        indices += [run % 3] * tokens
        lengths += [10**6] * (tokens - 1) + [length]
    found = sm100_schedule(lens(lengths), num_slots, indices=torch.tensor(indices, dtype=torch.int32))
    assert [tuple(row) for row in found.tolist()] == sm100_by_hand(requests, num_slots, len(indices))


def test_sm100_with_runs_of_one_depth_is_the_uniform_schedule(generator):
    lengths = torch.randint(0, 5000, (20, 3), generator=generator, dtype=torch.int32)
    varlen = sm100_schedule(lengths.view(-1, 1), 132, indices=torch.arange(20).repeat_interleave(3).int())
    assert torch.equal(varlen, sm100_schedule(lengths, 132))


@pytest.mark.parametrize("num_reqs", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_batches_without_a_token_are_all_sentinel(num_reqs, next_n):
    empty = lens([0] * num_reqs, next_n)
    assert (sm90_schedule(empty, 132) == torch.tensor([num_reqs, 0])).all()
    assert (sm100_schedule(empty, 132) == torch.tensor([num_reqs * next_n, 0])).all()


@pytest.mark.parametrize("num_reqs", [31, 32, 33])
def test_one_live_request_among_empty_ones(num_reqs):
    for live in (0, num_reqs // 2, num_reqs - 1):
        lengths = [0] * num_reqs
        lengths[live] = 10 * 256
        assert sm90_schedule(lens(lengths), 4).tolist() == [
            [live, 0],
            [live, 2],
            [live, 4],
            [live, 7],
            [num_reqs, 0],
        ]
        assert sm100_schedule(lens(lengths), 4).tolist() == [
            [live, 0],
            [live, 3],
            [live, 6],
            [live, 8],
            [num_reqs, 0],
        ]


@pytest.mark.parametrize(("length", "splits"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (-4, 0)])
def test_a_split_is_256_tokens(length, splits):
    schedule = sm90_schedule(lens([length]), 1)
    assert schedule.tolist() == [[0 if splits else 1, 0], [1, 0]]
    assert sm90_schedule(lens([length, 256]), splits + 1).tolist()[splits] == [1, 0]


def test_more_slots_than_work():
    schedule = sm90_schedule(lens([1, 1, 1]), 8).tolist()
    assert schedule == [[0, 0]] * 6 + [[1, 0], [2, 0], [3, 0]]
    assert sm100_schedule(lens([1, 1, 1]), 8).tolist() == [[0, 0], [1, 0], [2, 0]] + [[3, 0]] * 6


@pytest.mark.parametrize("next_n", [1, 4])
def test_huge_batches(next_n, generator):
    lengths = torch.randint(0, 4000, (4096,), generator=generator).tolist()
    rows = [tuple(row) for row in sm90_schedule(lens(lengths, next_n), 132).tolist()]
    assert rows == sm90_by_hand(lengths, 132)
    requests = [(r * next_n, next_n, length) for r, length in enumerate(lengths)]
    rows = [tuple(row) for row in sm100_schedule(lens(lengths, next_n), 148).tolist()]
    assert rows == sm100_by_hand(requests, 148, 4096 * next_n)


def test_work_past_int32_does_not_wrap():
    longest = 2**31 - 1
    splits = num_splits(longest)
    schedule = sm100_schedule(lens([longest] * 300, next_n=4), 7)
    units = 300 * 4 * splits
    assert units > 2**31
    share, extra = divmod(units, 7)
    starts = [slot * share + min(slot, extra) for slot in range(8)]
    assert schedule.tolist() == [[start // (4 * splits) * 4, start % (4 * splits) // 4] for start in starts]


def test_num_slots_that_divide_nothing_evenly_cover_all_work():
    schedule = sm90_schedule(lens([1000, 0, 3000, 1]), 5)
    covered, _, order = walk(schedule, [(0, 4), (1, 0), (2, 12), (3, 1)])
    assert [len(slot) for slot in covered] == [3, 3, 3, 4, 4]
    assert [unit for slot in covered for unit in slot] == order
