"""The torch twin as other GPUs' top-k: exact there too, without a host sync, and the same after any replay."""

import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.bench.timing import capture, syncs_with_host

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
POISON = 0x7F7F7F7F
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BLOCK_SIZE = 64


@pytest.fixture(autouse=True)
def _twin_alone(monkeypatch):
    monkeypatch.setenv("VDSA_TOPK_BACKEND", "reference")


class Case:
    """Buffers of fixed shapes, whose values `draw` makes anew."""

    def __init__(self, rows, width, k, dtype):
        self.k = k
        self.logits = torch.zeros(rows, width, device=CUDA, dtype=dtype)
        self.lengths, self.starts, self.request_of_row = torch.zeros(3, rows, device=CUDA, dtype=torch.int32)
        self.table = torch.zeros(4, width // BLOCK_SIZE + 1, device=CUDA, dtype=torch.int32)
        self.out = torch.zeros(rows, k, device=CUDA, dtype=torch.int32)
        self.values = torch.zeros(rows, k, device=CUDA)
        self.draw(0.0)

    def draw(self, low):
        """Draw new values; logits below `low` become a plateau, and some are NaN, infinite or a signed zero."""
        rows, width = self.logits.shape
        self.logits.normal_().clamp_(min=low)
        for value in (NAN, INF, -INF, 0.0, -0.0):
            self.logits[:, torch.randint(0, width, (width // 50 + 1,), device=CUDA)] = value
        self.lengths.random_(-2, width + 9)
        self.lengths[: rows // 2] = width
        self.starts.random_(0, width + 1)
        self.starts[: rows // 3 + 1] = 0
        # The last row is short, and its logits were never written.
        self.lengths[-1] = min(self.k, width) // 2
        self.logits[-1] = NAN
        self.request_of_row.random_(0, 4)
        self.table.random_(0, 100_000)

    def run(self, slots):
        slot_map = ops.SlotMap(self.table, BLOCK_SIZE, self.request_of_row) if slots else None
        return ops.topk_indices(
            self.logits, self.lengths, self.k, starts=self.starts, out=self.out, values=self.values, slots=slot_map
        )

    def check(self, slots):
        """Compare `out` and `values` with a stable float64 sort of each row."""
        for row, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            window = self.logits[row, start:][: max(0, length)]
            ranked = window.double().nan_to_num(nan=-INF, posinf=INF, neginf=-1e308)
            want = ranked.sort(descending=True, stable=True).indices[: self.k].sort().values
            count = len(want)
            assert torch.equal(self.values[row, :count].nan_to_num(nan=7.0), window[want].float().nan_to_num(nan=7.0))
            assert (self.values[row, count:] == -INF).all()
            if slots:
                want = self.table[self.request_of_row[row]][want // BLOCK_SIZE] * BLOCK_SIZE + want % BLOCK_SIZE
            assert torch.equal(self.out[row, :count], want.int()), f"row {row}, start {start}, length {length}"
            assert (self.out[row, count:] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "k"),
    [
        (1, 1, 4),
        (5, 1000, 64),
        (9, 40_000, 2048),
        (3, 200_000, 2048),  # few wide rows, for which torch.topk has another way
        (40, 131_072, 2048),  # two groups of rows
        (2, 1 << 20, 5000),  # more than any kernel of ours takes
    ],
)
def test_a_captured_call_follows_its_inputs(rows, width, k, dtype, seed):
    torch.manual_seed(seed)
    case = Case(rows, width, k, dtype)
    graphs = {}
    for slots in (False, True):
        case.run(slots)
        torch.cuda.synchronize()
        assert not syncs_with_host(lambda slots=slots: case.run(slots))
        graphs[slots] = capture(lambda slots=slots: case.run(slots))
    for low in (-9.0, 0.0, 2.0):
        case.draw(low)
        for slots, graph in graphs.items():
            case.out.fill_(POISON)
            case.values.fill_(NAN)
            graph.replay()
            case.check(slots)


def test_the_result_of_a_capture_may_be_the_graphs_own(seed):
    """Without `out` the indices lie in the graph's pool; the work arrays there must not reach into them."""
    torch.manual_seed(seed)
    case = Case(40, 131_072, 2048, torch.float32)
    graph = capture(lambda: reference.topk_indices(case.logits, case.lengths, case.k, starts=case.starts))
    for low in (-9.0, 1.0):
        case.draw(low)
        graph.result.fill_(POISON)
        graph.replay()
        assert torch.equal(graph.result, case.run(slots=False))
        case.check(slots=False)


def test_the_hopper_kernel_gives_the_same(seed, monkeypatch):
    torch.manual_seed(seed)
    case = Case(24, 66_000, 2048, torch.float32)
    twins = case.run(slots=True).clone()
    monkeypatch.setenv("VDSA_TOPK_BACKEND", "auto")
    case.out.fill_(POISON)
    assert torch.equal(case.run(slots=True), twins)


def test_another_gpu_than_hopper_is_served_unasked(seed, monkeypatch, mocker):
    torch.manual_seed(seed)
    monkeypatch.setenv("VDSA_TOPK_BACKEND", "auto")
    mocker.patch("vllm_dsa.ops.topk.is_hopper", return_value=False)
    launch = mocker.patch("vllm_dsa.ops.topk.launch_topk")
    case = Case(6, 9000, 2048, torch.float32)
    graph = capture(lambda: case.run(slots=False))
    case.draw(0.5)
    graph.replay()
    case.check(slots=False)
    launch.assert_not_called()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_take_the_memory_of_a_group(dtype):
    rows, width = 256, 131_072
    logits = torch.zeros(rows, width, device=CUDA, dtype=dtype)
    lengths = torch.full((rows,), width, device=CUDA, dtype=torch.int32)
    out = torch.empty(rows, 2048, device=CUDA, dtype=torch.int32)
    ops.topk_indices(logits, lengths, 2048, out=out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.topk_indices(logits, lengths, 2048, out=out)
    assert torch.cuda.max_memory_allocated() - before < 40 * (1 << 22)
