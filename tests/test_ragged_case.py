"""The random steps that prove the ragged kernel: the twin passes them, and each kind of fault is seen."""

import itertools

import pytest
import torch

from vllm_dsa import reference
from vllm_dsa.bench.ragged_case import RaggedCase, RaggedShape

SHAPES = [
    RaggedShape((1, 3, 0, 8, 2), 300),
    RaggedShape((2, 9, 4), 200, heads=32, block_size=32, page_gap=112, shares_pages=True),
    RaggedShape((5,) * 3, 130, heads=16, page_gap=16),
]


def twin_logits(case, width):
    rows = [
        reference.paged_mqa_logits(
            case.q[first:end].unsqueeze(0),
            case.cache,
            case.weights[first:end],
            case.context_lens[first:end].unsqueeze(0),
            case.block_table[request : request + 1],
            max_context_len=width,
        )
        for request, (first, end) in enumerate(itertools.pairwise(case.query_start_loc.tolist()))
        if end > first
    ]
    logits = torch.cat(rows)
    past_tiles = torch.arange(width) >= case.tile_ends.unsqueeze(1)
    return logits.masked_fill(past_tiles, float("nan"))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_twin_has_no_fault(shape, seed):
    case = RaggedCase(shape, seed, torch.device("cpu"))
    assert case.faults(twin_logits(case, shape.longest + 3)) == []


def test_faults_are_seen(seed):
    shape = RaggedShape((4, 4, 4), 300)
    case = RaggedCase(shape, seed, torch.device("cpu"))
    row = int(case.context_lens.argmax())
    length, tile_end = int(case.context_lens[row]), int(case.tile_ends[row])
    good = twin_logits(case, shape.longest + 64)
    spoiled = {(row, length - 1): 1e4, (row, tile_end - 1): 0.0, (row, tile_end): float("-inf")}
    messages = ("a logit is off", "no -inf", "written past")
    for (place, value), message in zip(spoiled.items(), messages, strict=True):
        bad = good.clone()
        bad[place] = value
        if message == "no -inf" and length == tile_end:
            continue
        assert [fault for fault in case.faults(bad) if fault.startswith(message)], message
    nan = good.clone()
    nan[row, 0] = float("nan")
    assert case.faults(nan)


def test_many_small_errors_are_seen_where_each_is_within_the_bound(seed):
    shape = RaggedShape((4, 4, 4), 300)
    case = RaggedCase(shape, seed, torch.device("cpu"))
    expected, bounds = case.expected()
    good = twin_logits(case, shape.longest)
    live = torch.arange(shape.longest) < case.context_lens.unsqueeze(1)
    bad = torch.where(live, (expected + bounds / 2).float(), good)
    (fault,) = case.faults(bad)
    assert fault.startswith("too many logits are off")
    one_bad = good.clone()
    row = int(case.context_lens.argmax())
    one_bad[row, 0] = bad[row, 0]
    assert case.faults(one_bad) == []
