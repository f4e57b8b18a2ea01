"""MLA decode at the shapes of DeepSeek-V3.2: 128 heads, or 16 of a tensor-parallel rank, and a top-k of 2048."""

import functools
import random

import pytest
import torch
from mla_cases import NAN, SCALE, assert_close, make_dense, make_sparse, naive

from vllm_dsa import ops
from vllm_dsa.attn_result import LseBase
from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.timing import syncs_with_host
from vllm_dsa.ops import MlaBackend

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BORDERS = (0, 1, 63, 64, 65, 127, 2048, 4095, 8191, 8192)
LSE_ERROR = {False: 1e-4, True: 1e-2}


@pytest.fixture
def generator(seed):
    return torch.Generator(CUDA).manual_seed(seed)


def poisoned(q):
    workspace = ops.mla_decode_workspace(CUDA).fill_(NAN)
    out = torch.full((*q.shape[:2], 512), NAN, dtype=torch.bfloat16, device=CUDA)
    return {"out": out, "lse": torch.full(q.shape[:2], NAN, device=CUDA), "workspace": workspace}


def run(case, **options):
    return ops.mla_decode(
        *case.inputs,
        softmax_scale=SCALE,
        query_start_loc=case.query_start_loc,
        max_query_len=case.max_query_len,
        **options,
    )


def run_sparse(case, **options):
    return ops.sparse_mla_decode(
        *(case.q, case.cache, case.slots), softmax_scale=SCALE, topk_lens=case.topk_lens, **options
    )


def random_lens(seed, depths):
    """Around borders, ascending by one within a request as speculative decoding makes them."""
    rng = random.Random(seed)
    lens = []
    for depth in depths:
        last = max(depth, rng.choice([*BORDERS, rng.randrange(8193)]))
        lens += range(last - depth + 1, last + 1)
    return lens


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_dense(heads, next_n, fp8, seed, generator):
    depths = [next_n] * 6
    case = make_dense(generator, depths, random_lens(seed, depths), heads=heads, block_size=64, fp8=fp8)
    expected = naive(case.q, case.cache, case.slots())
    found = ops.mla_decode(*case.inputs, softmax_scale=SCALE, **poisoned(case.q))
    assert found.base is LseBase.E
    assert_close(found, expected, lse_error=LSE_ERROR[fp8])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_dense_of_ragged_depths(heads, block_size, fp8, seed, generator):
    depths = [1, 4, 0, 2, 3, 1]
    lens = [min(length, 1500) for length in random_lens(seed, depths)]
    case = make_dense(generator, depths, lens, heads=heads, block_size=block_size, fp8=fp8, orphans=3, page_gap=128)
    found = run(case, **poisoned(case.q))
    assert_close(found, naive(case.q, case.cache, case.slots()), lse_error=LSE_ERROR[fp8])


@pytest.mark.parametrize("requests", [1, 3, 40, 200])
def test_dense_of_any_batch(requests, seed, generator):
    rng = random.Random(seed)
    lens = [rng.randrange(0, 3000) for _ in range(requests)]
    case = make_dense(generator, [1] * requests, lens, heads=128, block_size=64)
    assert_close(run(case, **poisoned(case.q)), naive(case.q, case.cache, case.slots()))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [4, 64])
def test_sparse(heads, rows, fp8, seed, generator):
    rng = random.Random(seed)
    counts = [0, 1, 2047, 2048, *(rng.randrange(2049) for _ in range(rows - 4))]
    case = make_sparse(generator, counts, width=2048, heads=heads, block_size=64, fp8=fp8)
    found = run_sparse(case, **poisoned(case.q))
    assert_close(found, naive(case.q, case.cache, case.named()), lse_error=LSE_ERROR[fp8])


def test_topk_then_sparse_is_dense_where_all_is_chosen(generator):
    lens = [2048, 17, 1000, 1]
    case = make_dense(generator, [1] * 4, lens, heads=128, block_size=64)
    logits = torch.randn(4, 2048, generator=generator, device=CUDA)
    slots = ops.topk_indices(logits, case.context_lens, 2048, slots=ops.SlotMap(case.block_table, 64))
    found = ops.sparse_mla_decode(case.q, case.cache, slots, softmax_scale=SCALE, topk_lens=case.context_lens)
    assert_close(found, naive(case.q, case.cache, case.slots()))


def test_pages_beyond_two_gigabytes(generator):
    num_pages, block_size = 80_000, 64
    cache = torch.empty(num_pages, block_size, 576, dtype=torch.bfloat16, device=CUDA)
    cache[-4:] = torch.randn(4, block_size, 576, generator=generator, device=CUDA)
    table = torch.arange(num_pages - 4, num_pages, dtype=torch.int32, device=CUDA)[None]
    q = torch.randn(1, 16, 576, generator=generator, device=CUDA).bfloat16()
    lens = torch.tensor([250], dtype=torch.int32, device=CUDA)
    slots = (torch.arange(250, device=CUDA) + (num_pages - 4) * block_size).int()
    expected = naive(q, cache, [slots])
    assert_close(ops.mla_decode(q, cache, table, lens, softmax_scale=SCALE), expected)
    assert_close(ops.sparse_mla_decode(q, cache, slots[None], softmax_scale=SCALE), expected)


def test_a_captured_graph_follows_lengths_pages_starts_and_queries(generator):
    depths = ([1, 4, 2], [4, 0, 3], [0, 0, 0])
    lens = ([3000, *range(500, 504), 64, 65], [*range(100, 104), 7, 8, 9], [])
    cases = [
        make_dense(generator, *step, heads=16, block_size=64, orphans=8 - len(step[1]))
        for step in zip(depths, lens, strict=True)
    ]
    pages, width = (
        max(case_shape) for case_shape in zip(*((len(c.cache), c.block_table.shape[1]) for c in cases), strict=True)
    )
    q, context_lens = torch.zeros_like(cases[0].q), torch.zeros_like(cases[0].context_lens)
    cache = torch.zeros(pages, 64, 576, dtype=torch.bfloat16, device=CUDA)
    table, starts = (
        torch.zeros(3, width, dtype=torch.int32, device=CUDA),
        torch.zeros(4, dtype=torch.int32, device=CUDA),
    )
    results = poisoned(q)
    call = functools.partial(
        ops.mla_decode,
        *(q, cache, table, context_lens),
        softmax_scale=SCALE,
        query_start_loc=starts,
        max_query_len=4,
        **results,
    )
    ops.warmup_mla_decode(cache, 16, max_query_len=4, is_ragged=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = call()
    for case in (*cases, cases[0]):
        q.copy_(case.q)
        context_lens.copy_(case.context_lens)
        cache[: len(case.cache)] = case.cache
        table[:, : case.block_table.shape[1]] = case.block_table
        starts.copy_(case.query_start_loc)
        for tensor in results.values():
            tensor.fill_(NAN)
        graph.replay()
        assert_close(found, naive(case.q, case.cache, case.slots()))


def test_a_captured_sparse_graph_follows_its_slots(generator):
    cases = [make_sparse(generator, counts, width=256, heads=128, fp8=True) for counts in ([256, 3], [0, 200])]
    pages = max(len(case.cache) for case in cases)
    q, slots, lens = (torch.zeros_like(x) for x in (cases[0].q, cases[0].slots, cases[0].topk_lens))
    cache = torch.zeros(pages, *cases[0].cache.shape[1:], dtype=torch.uint8, device=CUDA)
    results = poisoned(q)
    ops.warmup_sparse_mla_decode(cache, 128, has_topk_lens=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = ops.sparse_mla_decode(q, cache, slots, softmax_scale=SCALE, topk_lens=lens, **results)
    for case in (*cases, cases[0]):
        q.copy_(case.q)
        slots.copy_(case.slots)
        lens.copy_(case.topk_lens)
        cache[: len(case.cache)] = case.cache
        for tensor in results.values():
            tensor.fill_(NAN)
        graph.replay()
        assert_close(found, naive(case.q, case.cache, case.named()), lse_error=1e-2)


@pytest.mark.parametrize(("requests", "launches"), [(2, 2), (132, 1)])
def test_a_call_is_two_launches_or_one_without_allocation_or_sync(requests, launches, generator):
    case = make_dense(generator, [1] * requests, [1000] * requests, heads=64, block_size=64)
    sparse = make_sparse(generator, [100] * requests, width=2048, heads=64, holes=False)
    results = poisoned(case.q)
    for call in (functools.partial(run, case, **results), functools.partial(run_sparse, sparse, **results)):
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert not syncs_with_host(call)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert count_launches(call) == (launches, 0)


def test_two_runs_give_the_same_bits(generator):
    case = make_dense(generator, [1] * 3, [8192, 5000, 100], heads=128, block_size=64)
    first, second = run(case), run(case)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


def test_the_twin_can_be_asked_for(generator):
    case = make_dense(generator, [1, 2], [70, 8, 9], heads=4, block_size=64)
    assert_close(run(case, backend=MlaBackend.REFERENCE), naive(case.q, case.cache, case.slots()))


def test_refuses_what_the_kernel_cannot_load_in_vectors(generator):
    case = make_dense(generator, [1], [70], heads=4, block_size=64)
    memory = torch.zeros(case.q.numel() + 1, dtype=torch.bfloat16, device=CUDA)
    with pytest.raises(ValueError, match=r"q starts at .*; allowed: multiples of 16"):
        ops.mla_decode(memory[1:].view_as(case.q), *case.inputs[1:], softmax_scale=SCALE)
    wide = torch.zeros(1, 4, 580, dtype=torch.bfloat16, device=CUDA)[..., :576]
    with pytest.raises(ValueError, match=r"q has strides .*; allowed: multiples of 16"):
        ops.mla_decode(wide, *case.inputs[1:], softmax_scale=SCALE)
