"""Our Hopper kernel against float64, itself, and everything that it must leave alone."""

import subprocess
import sys

import numpy as np
import pytest
import sanitizer
import torch

from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.ragged_case import RaggedCase, RaggedShape
from vllm_dsa.bench.timing import syncs_with_host
from vllm_dsa.kernels import sm90_paged_mqa_logits as sm90
from vllm_dsa.kernels.jit import KernelVariant
from vllm_dsa.kernels.sm90_paged_mqa_logits import launch_sm90_paged_mqa_logits

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NUM_SMS = 132
HEADS = (64, 32, 16)


def launch(case, out, **options):
    launch_sm90_paged_mqa_logits(
        case.q,
        case.cache,
        case.weights,
        case.context_lens,
        case.query_start_loc,
        case.block_table,
        out,
        **options,
    )
    return out


def logits(case, dtype=torch.float32, width=None, **options):
    width = case.shape.longest if width is None else width
    return launch(case, torch.full((len(case.lens), width), float("nan"), dtype=dtype, device=CUDA), **options)


def random_depths(rng):
    kind = rng.integers(5)
    batch = int(rng.choice([1, 2, 3, 7, 40]))
    if kind == 0:
        return (int(rng.integers(1, 9)),) * batch
    if kind == 1:
        return tuple(int(d) for d in np.resize([1, 8], batch))
    if kind == 2:
        return tuple(rng.integers(1, 5, batch).tolist())
    if kind == 3:
        return (*rng.integers(0, 9, batch).tolist(), 1)
    return (*rng.integers(0, 21, min(batch, 7)).tolist(), 2)


def random_shape(rng):
    depths = random_depths(rng)
    longest = int(rng.choice([64, 100, 700, 2500] if sum(depths) < 60 else [64, 100, 400]))
    return RaggedShape(
        depths,
        longest,
        heads=int(rng.choice(HEADS)),
        block_size=int(rng.choice([64, 32])),
        page_gap=int(rng.choice([0, 16, 112])),
        shares_pages=bool(rng.integers(2)),
    )


def fuzz(seed, cases):
    """Random cases into guarded, poisoned memory of any stride; raises on the first that is wrong."""
    rng = np.random.default_rng(seed)
    for number in range(cases):
        shape = random_shape(rng)
        case = RaggedCase(shape, int(rng.integers(2**31)), CUDA)
        rows, width = len(case.lens), int(shape.longest + rng.choice([-30, 0, 1, 5, 64]))
        dtype = torch.float32 if rng.integers(2) else torch.bfloat16
        fill_to = int(rng.choice([0, width, width // 2]))
        memory = torch.full((rows + 2, width + int(rng.choice([0, 3, 8]))), float("nan"), dtype=dtype, device=CUDA)
        num_ctas = int(rng.choice([NUM_SMS, NUM_SMS, 1, 2, 5, rng.integers(1, NUM_SMS + 1)]))
        launch(case, memory[1:-1, :width], fill_to=fill_to, num_ctas=num_ctas, early_kv=bool(rng.integers(2)))
        faults = case.faults(memory[1:-1, :width], fill_to)
        memory[1:-1, :width] = float("nan")
        if not memory.isnan().all():
            faults.append("written outside of out")
        assert not faults, f"case {number}, {shape}, width {width}, fill_to {fill_to}, {num_ctas} CTAs: {faults}"


@pytest.mark.parametrize("part", range(20))
def test_fuzz(part, seed):
    fuzz(seed, 105)


@pytest.mark.parametrize("part", range(4))
def test_fuzz_with_random_sleeps(part, seed, monkeypatch):
    """The order in which the warps arrive must not matter."""
    plain = sm90._variant

    def sleepy(*arguments):
        variant = plain(*arguments)
        return KernelVariant(variant.source, variant.symbol, (*variant.macros, ("JITTER", "1")))

    monkeypatch.setattr(sm90, "_variant", sleepy)
    fuzz(seed, 40)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("depth", range(1, 17))
def test_passes_of_many_tiles(depth, heads, seed):
    """One or two CTAs take whole requests: every number of tiles that a warpgroup may turn to by ones or by pairs."""
    case = RaggedCase(RaggedShape((depth,) * 24, 1300, heads=heads), seed, CUDA)
    whole = logits(case)
    assert case.faults(whole) == []
    for num_ctas in (1, 2):
        assert case.faults(logits(case, num_ctas=num_ctas)) == []


@pytest.mark.parametrize("batch", [385, 1024, 2049, 5000])
def test_large_batches(batch, seed):
    rng = np.random.default_rng(seed)
    shape = RaggedShape(tuple(rng.integers(0, 4, batch).tolist()), 100)
    case = RaggedCase(shape, seed, CUDA)
    assert case.faults(logits(case)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("depth", [2, 3, 4, 5, 6, 7, 8, 11])
def test_every_depth_has_the_bits_of_depth_one(depth, heads, dtype, seed):
    case = RaggedCase(RaggedShape((depth,) * 5, 1500, heads=heads), seed, CUDA)
    deep = logits(case, dtype)
    case.query_start_loc = torch.arange(5 * depth + 1, dtype=torch.int32, device=CUDA)
    case.block_table = case.block_table.repeat_interleave(depth, dim=0)
    single = logits(case, dtype)
    live = torch.arange(1500, device=CUDA) < case.context_lens.unsqueeze(1)
    assert live.any()
    assert torch.equal(deep[live], single[live])


def test_bits_depend_neither_on_the_grid_nor_on_the_batch(seed):
    case = RaggedCase(RaggedShape((3, 8, 1, 5, 0, 4, 2, 7), 2500), seed, CUDA)
    whole = logits(case, fill_to=2500)
    for num_ctas in (1, 2, 7, 50, 131):
        assert torch.equal(logits(case, fill_to=2500, num_ctas=num_ctas), whole)
    starts = case.query_start_loc.clone()
    table = case.block_table
    for request, (first, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        out = torch.full((end, 2500), float("nan"), device=CUDA)
        case.query_start_loc = starts[request : request + 2].contiguous()
        case.block_table = table[request : request + 1]
        launch(case, out, fill_to=2500)
        assert torch.equal(out[first:], whole[first:end])


def test_a_graph_replays_the_same_bits_and_follows_its_inputs(seed):
    rng = np.random.default_rng(seed)
    shapes = [RaggedShape(tuple(d), 2000) for d in ([4, 1, 8, 3], [1, 8, 3, 4], [5, 5, 5, 1])]
    cases = [RaggedCase(shape, int(rng.integers(2**31)), CUDA) for shape in shapes]
    width = max(case.block_table.shape[1] for case in cases)
    pages = max(len(case.cache) for case in cases)
    held = cases[0]
    memory = {
        "q": held.q.clone(),
        "weights": held.weights.clone(),
        "context_lens": held.context_lens.clone(),
        "query_start_loc": held.query_start_loc.clone(),
        "block_table": torch.zeros(4, width, dtype=torch.int32, device=CUDA),
        "cache": torch.zeros(pages, *held.cache.shape[1:], dtype=torch.uint8, device=CUDA),
    }

    def put(case):
        for name, tensor in memory.items():
            source = getattr(case, name)
            tensor[tuple(slice(size) for size in source.shape)] = source

    out = torch.empty(16, 2000, device=CUDA)
    put(held)
    launch_sm90_paged_mqa_logits(**memory, out=out, fill_to=2000)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_sm90_paged_mqa_logits(**memory, out=out, fill_to=2000)
    for case in cases:
        put(case)
        out.fill_(float("nan"))
        graph.replay()
        assert case.faults(out, fill_to=2000) == []
        first = out.clone()
        for _ in range(100):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first)


CAPTURE_FIRST = """
import sys
import torch
from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.ragged_case import RaggedCase, RaggedShape
from vllm_dsa.kernels.sm90_paged_mqa_logits import launch_sm90_paged_mqa_logits as launch
case = RaggedCase(RaggedShape((3, 1), 300), 0, torch.device("cuda"))
out = torch.full((4, 300), float("nan"), device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        launch(case.q, case.cache, case.weights, case.context_lens, case.query_start_loc, case.block_table, out)
except RuntimeError as error:
    print("refused:", error)
    sys.exit(0)
graph.replay()
assert case.faults(out) == []
print("worked")
"""


def test_a_first_call_inside_a_capture_works_or_says_why():
    done = subprocess.run([sys.executable, "-c", CAPTURE_FIRST], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("worked", "refused:"))


def test_early_kv_after_the_kernels_that_write_q_and_new_k(seed):
    """The predecessor writes the queries and each request's last keys; an early start must not read them too soon."""
    case = RaggedCase(RaggedShape((4,) * 16, 2000), seed, CUDA)
    expected = logits(case, fill_to=2000)
    q, cache = case.q.view(torch.uint8).clone(), case.cache.clone()
    old_cache = cache.clone()
    for request, length in enumerate(case.context_lens.view(16, 4).amax(1).tolist()):
        for token in range(max(0, length - 4), length):
            page = int(case.block_table[request, token // 64])
            old_cache.view(len(cache), -1)[page, token % 64 * 128 : token % 64 * 128 + 128] = 0x7F
    out = torch.empty_like(expected)

    other = RaggedCase(RaggedShape((4,) * 16, 2000), seed + 1, CUDA)

    def step():
        # By kernels: a copy would be a node that no launch may overlap.
        torch.bitwise_or(cache, 0, out=case.cache)
        torch.bitwise_or(q, 0, out=case.q.view(torch.uint8))
        launch(case, out, early_kv=True)
        # The next lets its successor start while it still writes the same logits.
        launch(other, out, fill_to=2000)
        launch(case, out, fill_to=2000, early_kv=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        case.q.view(torch.uint8).fill_(0x7F)
        case.cache.copy_(old_cache)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_a_call_is_one_launch_without_allocation_or_sync(seed):
    case = RaggedCase(RaggedShape((4, 2, 3), 500), seed, CUDA)
    out = logits(case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(lambda: launch(case, out))
    assert not syncs_with_host(lambda: launch(case, out, fill_to=500))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert count_launches(lambda: launch(case, out)) == (1, 0)
    assert count_launches(lambda: launch(case, out, fill_to=500)) == (1, 0)


def test_pages_beyond_2_gib(seed):
    case = RaggedCase(RaggedShape((4, 1), 2000), seed, CUDA)
    far = torch.zeros(300_000, 64, 1, 132, dtype=torch.uint8, device=CUDA)
    first = len(far) - len(case.cache)
    assert first * 8448 > 2**31
    far[first:] = case.cache
    case.cache = far
    case.block_table = torch.where(case.block_table < 1 << 20, case.block_table + first, case.block_table)
    assert case.faults(logits(case)) == []


def test_logits_beyond_2_31_elements(seed):
    batch, width = 3000, 131072
    case = RaggedCase(RaggedShape((6,) * batch, 70), seed, CUDA)
    out = torch.empty(6 * batch, width, device=CUDA)
    assert out.numel() > 2**31
    out[:, :128] = float("nan")
    launch(case, out)
    assert case.faults(out[:, :70]) == []


REDUCED = ("test_bits_depend_neither_on_the_grid_nor_on_the_batch", "test_large_batches[385]")


# Not initcheck: it would have to watch every kernel of torch's, and what must not be read is NaN here already.
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_compute_sanitizer(tool):
    sanitizer.assert_clean(tool, "sm90", __file__, REDUCED)
