"""The Hopper top-k against a stable float64 sort, on rows that made other kernels drop, repeat or invent indices."""

import numpy as np
import pytest
import sanitizer
import torch

from vllm_dsa import ops, reference
from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.timing import syncs_with_host
from vllm_dsa.kernels.topk import launch_topk

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
POISON = 0x7F7F7F7F
DTYPES = [torch.float32, torch.bfloat16]
CLUSTERS = (1, 2, 4, 8)
NAN, INF = float("nan"), float("inf")


def by_stable_sort(logits, lengths, k, starts=None):
    """The definition: descending, NaN last, ties to the lowest index, then ascending by index."""
    found = torch.full((len(logits), k), -1, dtype=torch.int32, device=logits.device)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if starts is None else int(starts[row])
        window = logits[row, start:].double()[: max(0, length)]
        ranked = torch.where(window == -INF, -1e300, window).nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
        chosen = ranked.sort(descending=True, stable=True).indices[:k].sort().values
        found[row, : len(chosen)] = chosen.int()
    return found


def chosen(logits, lengths, k, **options):
    out = torch.full((len(logits), k), POISON, dtype=torch.int32, device=CUDA)
    launch_topk(logits, lengths, k, out, **options)
    return out


def check(logits, lengths, k, **options):
    lengths = torch.as_tensor(lengths, dtype=torch.int32, device=CUDA)
    found = chosen(logits, lengths, k, **options)
    want = by_stable_sort(logits, lengths, k, options.get("starts"))
    wrong = (found != want).any(dim=1).nonzero().flatten().tolist()
    assert wrong == [], f"rows {wrong[:5]} of {len(logits)}, lengths {lengths[wrong[:5]].tolist()}, k {k}, {options}"
    return found


def plateau(n, rng, winners):
    row = torch.zeros(n, device=CUDA)
    row[rng.permutation(n)[:winners]] = torch.rand(min(winners, n), device=CUDA) + 1
    return row


def same_prefix(n, rng):
    """27 bits alike: a digit of eight tells nothing until the last."""
    return (torch.from_numpy(rng.integers(0, 32, n).astype(np.int32)).to(CUDA) + 0x41234560).view(torch.float32)


def sprinkled(n, rng):
    row = torch.randn(n, device=CUDA)
    for value in (NAN, INF, -INF, 0.0, -0.0):
        row[torch.from_numpy(rng.integers(0, n, n // 6)).to(CUDA)] = value
    return row


ROWS = {
    "random": lambda n, rng: torch.randn(n, device=CUDA),
    "all equal": lambda n, rng: torch.full((n,), -1.5, device=CUDA),
    "all nan": lambda n, rng: torch.full((n,), NAN, device=CUDA),
    "all -inf": lambda n, rng: torch.full((n,), -INF, device=CUDA),
    "relu": lambda n, rng: torch.randn(n, device=CUDA).clamp(min=0),
    "few above a plateau": lambda n, rng: plateau(n, rng, 100),
    "one bin": lambda n, rng: 1 + torch.rand(n, device=CUDA) * 2**-9,
    "same prefix": same_prefix,
    "signed zeros": lambda n, rng: torch.where(torch.rand(n, device=CUDA) < 0.5, 0.0, -0.0),
    "sprinkled": sprinkled,
    "rising": lambda n, rng: torch.arange(n, device=CUDA, dtype=torch.float32),
    "falling": lambda n, rng: -torch.arange(n, device=CUDA, dtype=torch.float32),
    "clustered": lambda n, rng: (
        torch.randn(n // 700 + 1, device=CUDA).repeat_interleave(700)[:n] + torch.randn(n, device=CUDA) * 1e-3
    ),
    "mostly nan": lambda n, rng: torch.where(torch.rand(n, device=CUDA) < 0.005, 1.0, NAN),
    "negative": lambda n, rng: -torch.rand(n, device=CUDA) - 1e-30,
}
LENGTHS = (1, 2047, 2048, 2049, 8191, 8192, 8193, 8320, 16384, 16385, 32768, 32769, 65536, 70001, 131072)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_break_others(kind, dtype, seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    logits = torch.full((len(LENGTHS), max(LENGTHS) + 5), INF, device=CUDA, dtype=dtype)
    for row, length in enumerate(LENGTHS):
        logits[row, :length] = ROWS[kind](length, rng).to(dtype)
    results = [
        check(logits, LENGTHS, 2048, cluster_size=size, threads=threads) for size in CLUSTERS for threads in (512, 1024)
    ]
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("k", [1, 31, 512, 1024, 2048])
def test_lengths_around_k(k, seed):
    torch.manual_seed(seed)
    lengths = [0, 1, k - 1, k, k + 1, 2 * k, 5000, 40000, -7, 10**9]
    check(torch.randn(len(lengths), 40001, device=CUDA).clamp(min=-1), lengths, k)


@pytest.mark.parametrize("part", range(8))
def test_fuzz(part, seed):
    """Any width, stride, alignment, window, k and cluster, into guarded memory."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        rows, width = int(rng.choice([1, 2, 5, 17])), int(rng.choice([1, 7, 2100, 9000, 33000, 70000]))
        width += int(rng.integers(0, 70))
        dtype = DTYPES[rng.integers(2)]
        memory = torch.full((rows + 1, width + int(rng.integers(0, 20))), NAN, device=CUDA, dtype=dtype)
        logits = memory.view(-1)[int(rng.integers(0, 5)) :]
        logits = logits.as_strided((rows, width), memory.stride(), logits.storage_offset())
        kind = str(rng.choice(list(ROWS)))
        logits.copy_(torch.stack([ROWS[kind](width, rng) for _ in range(rows)]))
        starts = torch.from_numpy(rng.integers(0, width + 1, rows).astype(np.int32)).to(CUDA)
        starts = starts if rng.integers(2) else None
        lengths = rng.integers(0, width + 2, rows).astype(np.int32)
        lengths = torch.from_numpy(np.where(rng.integers(0, 2, rows), lengths, width)).to(CUDA)
        k = int(rng.choice([2048, 2048, 512, rng.integers(1, 2049)]))
        room = torch.full((rows + 2, k + 3), POISON, dtype=torch.int32, device=CUDA)
        out = room[1:-1, :k]
        launch_topk(logits, lengths, k, out, starts=starts, cluster_size=int(rng.choice(CLUSTERS)))
        visible = lengths if starts is None else torch.minimum(lengths, width - starts)
        case = f"{kind}, {rows} x {width}, k {k}, lengths {lengths.tolist()}, starts {starts}"
        assert torch.equal(out, by_stable_sort(logits, visible, k, starts)), case
        out.fill_(POISON)
        assert (room == POISON).all(), case


def test_a_million_logits(seed):
    torch.manual_seed(seed)
    width = 1 << 20
    logits = torch.randn(6, width, device=CUDA)
    logits[1] = 0
    logits[2] = torch.arange(width, device=CUDA) // 3
    logits[3].clamp_(min=2.5)
    check(logits, [width, width, width, width, width - 1, 500_000], 2048)


@pytest.mark.parametrize("rows", [1, 3, 64, 256, 1024])
def test_a_row_depends_neither_on_its_batch_nor_on_the_launch(rows, seed):
    torch.manual_seed(seed)
    width = 40000 if rows > 64 else 131072
    logits = torch.randn(rows, width, device=CUDA).clamp(min=0.5)
    lengths = torch.randint(0, width + 1, (rows,), device=CUDA, dtype=torch.int32)
    together = check(logits, lengths, 2048)
    for row in torch.randperm(rows)[:8].tolist():
        assert torch.equal(chosen(logits[row : row + 1], lengths[row : row + 1], 2048)[0], together[row])


def test_values_and_slots(seed):
    torch.manual_seed(seed)
    rows, width, k = 9, 20000, 2048
    logits = torch.randn(rows, width, device=CUDA)
    lengths = torch.tensor([0, 5, 2048, 2049, 9000, 20000, 20000, 1, 8192], dtype=torch.int32, device=CUDA)
    table = torch.randint(0, 100_000, (4, width // 64 + 1), device=CUDA, dtype=torch.int32)
    request_of_row = torch.randint(0, 4, (rows,), device=CUDA, dtype=torch.int32)
    values = torch.full((rows, k), NAN, device=CUDA)
    slots = ops.SlotMap(table, 64, request_of_row)
    found = ops.topk_indices(logits, lengths, k, values=values, slots=slots)
    indices = by_stable_sort(logits, lengths, k)
    assert torch.equal(found, reference.slots_of_indices(indices, table, 64, request_of_row))
    assert torch.equal(values, reference.logits_of_indices(logits, indices))


def test_short_rows_are_chosen_without_their_logits():
    logits = torch.full((2, 3000), NAN, device=CUDA)
    lengths = torch.tensor([2048, 17], dtype=torch.int32, device=CUDA)
    found = ops.topk_indices(logits, lengths, 2048)
    assert torch.equal(found[0], torch.arange(2048, dtype=torch.int32, device=CUDA))
    assert torch.equal(found[1, :17], torch.arange(17, dtype=torch.int32, device=CUDA))
    assert (found[1, 17:] == -1).all()


def test_replays_are_the_same_bits_and_follow_their_inputs(seed):
    torch.manual_seed(seed)
    logits = torch.empty(12, 66000, device=CUDA)
    lengths = torch.empty(12, dtype=torch.int32, device=CUDA)
    out = torch.empty(12, 2048, dtype=torch.int32, device=CUDA)
    logits.normal_()
    lengths.fill_(3)
    ops.topk_indices(logits, lengths, 2048, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.topk_indices(logits, lengths, 2048, out=out)
    for low in (-9.0, 0.0, 2.0):
        logits.normal_().clamp_(min=low)
        lengths.random_(0, 66001)
        want = by_stable_sort(logits, lengths, 2048)
        for _ in range(34):
            out.fill_(POISON)
            graph.replay()
            assert torch.equal(out, want)


def test_a_call_is_one_launch_without_allocation_or_sync():
    logits, lengths = torch.randn(4, 40000, device=CUDA), torch.full((4,), 40000, dtype=torch.int32, device=CUDA)
    out = torch.empty(4, 2048, dtype=torch.int32, device=CUDA)

    def run():
        ops.topk_indices(logits, lengths, 2048, out=out)

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(run)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert count_launches(run) == (1, 0)


def test_what_the_kernel_does_not_take_is_the_twins(seed):
    torch.manual_seed(seed)
    logits = torch.randn(3, 5000, device=CUDA)
    lengths = torch.tensor([5000, 3000, 10], dtype=torch.int32, device=CUDA)
    for rows, k in ((logits.double(), 2048), (logits.half(), 2048), (logits, 3000)):
        assert torch.equal(ops.topk_indices(rows, lengths, k), by_stable_sort(rows, lengths, k))


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_compute_sanitizer(tool):
    sanitizer.assert_clean(tool, "topk", __file__, ("test_values_and_slots", "test_lengths_around_k[2048]"))
