"""The adapters to other libraries, against fakes that have their signatures, checks and liberties."""

import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.ops import topk as topk_op
from vllm_dsa.ops import topk_backend

LIBRARIES = ("flashinfer", "deep_select")
POISON = 0x7F7F7F7F
NAN_MARK = 0x3F3F3F3F
NAN = math.nan


def ordered_bits(logits):
    """FlashInfer's keys: 0.0 above -0.0, NaN above inf."""
    bits = logits.float().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


class FakeFlashInfer:
    """``flashinfer``: its checks, its ties, any order."""

    def __init__(self):
        self.calls = []

    def top_k_ragged_transform(
        self, input, offsets, lengths, k, deterministic=False, tie_break=0, dsa_graph_safe=False, row_starts=None
    ):
        self.calls.append(inspect.currentframe().f_locals.copy())
        num_rows, width = input.shape
        per_row = [offsets, lengths] + ([] if row_starts is None else [row_starts])
        assert input.is_contiguous()
        assert all(each.shape == (num_rows,) and each.is_contiguous() and each.dtype == torch.int32 for each in per_row)
        starts = torch.zeros_like(lengths) if row_starts is None else row_starts
        assert (lengths >= 0).all()
        assert (starts + lengths <= width).all()
        out = torch.full((num_rows, k), -1, dtype=torch.int32)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            keys = ordered_bits(input[row, start : start + length])
            if length > k:
                assert tie_break == 1
                best = keys.sort(descending=True, stable=True).indices[:k]
                best = best[torch.randperm(k)]
            else:
                best = torch.arange(length)
            out[row, : len(best)] = best.int() + offsets[row]
        return out


class FakeDeepSelect:
    """``deep_select``: its checks, ties to the highest index, any order, and no choice from a row with a NaN."""

    STRIDE_BYTES = 64

    def __init__(self):
        self.calls = []

    def get_stride_requirement(self):
        return self.STRIDE_BYTES, 32

    def topk(
        self,
        input,
        topk,
        sorted=False,
        begin=None,
        end=None,
        indices_type=torch.int64,
        sorted_index=False,
        hint=None,
        output_idx=None,
        output_idx_offset=None,
        idx_oob_fill_value=2147483647,
        value_oob_fill_value=-math.inf,
        return_value=True,
        abort_when_nan_found=True,
    ):
        self.calls.append(inspect.currentframe().f_locals.copy())
        num_rows, width = input.shape
        assert input.stride(0) * input.element_size() % self.STRIDE_BYTES == 0
        assert input.stride(1) == 1
        assert (end.dtype, end.shape, end.is_contiguous()) == (torch.int32, (num_rows,), True)
        assert (end >= 0).all()
        assert (end <= width).all()
        assert not abort_when_nan_found
        aligned = -(-topk // 8) * 8
        out = torch.full((num_rows, aligned), idx_oob_fill_value, dtype=indices_type)[:, :topk]
        for row, length in enumerate(end.tolist()):
            window = input[row, :length].float()
            if length > topk and window.isnan().any():
                out[row] = torch.randint(-3, width + 3, (topk,))
                out[row, 0] = NAN_MARK
                continue
            best = length - 1 - window.flip(0).sort(descending=True, stable=True).indices[:topk]
            if length <= topk:
                best = torch.arange(length)
            out[row, : len(best)] = best[torch.randperm(len(best))].to(indices_type)
        return (None if not return_value else input), out


@pytest.fixture
def fakes(mocker, monkeypatch):
    """Both libraries as if installed, and CPU tensors that pass for CUDA ones."""
    made = {"flashinfer": FakeFlashInfer(), "deep_select": FakeDeepSelect()}
    for name, fake in made.items():
        monkeypatch.setitem(sys.modules, name, fake)
    mocker.patch.object(torch.Tensor, "is_cuda", True)
    mocker.patch("vllm_dsa.ops.topk.check_current_device")
    topk_backend._load.cache_clear()
    yield made
    topk_backend._load.cache_clear()


def chosen(library, logits, lengths, k, **options):
    lengths = torch.as_tensor(lengths, dtype=torch.int32)
    out = torch.full((len(logits), k), POISON, dtype=torch.int32)
    topk_backend.topk_by_library(library, logits, lengths, k, out, **options)
    return out


def distinct(rows, width, generator, dtype=torch.float32):
    """Rows without a tie in any dtype."""
    steps = torch.stack([torch.randperm(width, generator=generator) for _ in range(rows)])
    return (steps - width // 2).to(dtype)


@pytest.mark.usefixtures("fakes")
class TestBoth:
    @pytest.mark.parametrize("library", LIBRARIES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("k", [1, 7, 64])
    def test_distinct_logits_give_the_twins_indices(self, library, dtype, k, generator):
        lengths = [0, 1, k - 1, k, k + 1, 2 * k + 3, 200, 10**9, -7]
        logits = distinct(len(lengths), 200, generator, dtype)
        want = reference.topk_indices(logits, torch.tensor(lengths, dtype=torch.int32), k)
        assert torch.equal(chosen(library, logits, lengths, k), want)

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_short_rows_are_whole_whatever_their_logits(self, library):
        logits = torch.full((3, 50), NAN)
        whole = torch.arange(16, dtype=torch.int32)
        found = chosen(library, logits, [16, 3, 0], 16)
        for row, length in enumerate((16, 3, 0)):
            assert torch.equal(found[row], whole.where(whole < length, -1))

    @pytest.mark.parametrize("library", LIBRARIES)
    @pytest.mark.parametrize("width", [0, 9, 10])
    def test_rows_that_are_never_longer_than_k_need_no_library(self, library, width, fakes):
        found = chosen(library, torch.zeros(2, width), [3, 99], 10)
        whole = torch.arange(10, dtype=torch.int32)
        assert torch.equal(found, torch.stack([whole.where(whole < min(n, width), -1) for n in (3, 99)]))
        assert fakes[library].calls == []

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_values_and_slots(self, library, generator, monkeypatch):
        logits, lengths = distinct(4, 96, generator), torch.tensor([96, 40, 5, 0], dtype=torch.int32)
        slots = ops.SlotMap(torch.randint(0, 99, (2, 12), dtype=torch.int32), 8, torch.tensor([1, 0, 0, 1]).int())
        results = []
        for choice in ("reference", library):
            monkeypatch.setenv("VDSA_TOPK_BACKEND", choice)
            values = torch.full((4, 16), NAN)
            results.append((ops.topk_indices(logits, lengths, 16, values=values, slots=slots), values))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_any_row_stride_and_out_in_a_larger_buffer(self, library, generator):
        logits = distinct(3, 80, generator)[:, :77]
        room = torch.full((5, 20), POISON, dtype=torch.int32)
        lengths = torch.tensor([77, 30, 4], dtype=torch.int32)
        topk_backend.topk_by_library(library, logits, lengths, 16, room[1:4, :16])
        assert torch.equal(room[1:4, :16], reference.topk_indices(logits, lengths, 16))
        room[1:4, :16] = POISON
        assert (room == POISON).all()

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_logits_that_fit_are_not_copied(self, library, fakes):
        logits = torch.rand(3, 64)
        chosen(library, logits, [64] * 3, 8)
        assert fakes[library].calls[0]["input"].data_ptr() == logits.data_ptr()

    @pytest.mark.parametrize("choice", ["auto", "reference"])
    def test_neither_is_chosen_unasked(self, choice, fakes, monkeypatch):
        monkeypatch.setenv("VDSA_TOPK_BACKEND", choice)
        ops.topk_indices(torch.rand(2, 64).half(), torch.tensor([64, 64], dtype=torch.int32), 8)
        assert all(fake.calls == [] for fake in fakes.values())


@pytest.mark.usefixtures("fakes")
class TestFlashInfer:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_ties_go_to_the_lowest_index(self, dtype, generator):
        logits = torch.randn(6, 300, generator=generator).to(dtype).clamp(min=0.5)
        lengths = torch.tensor([300, 299, 65, 64, 63, 0], dtype=torch.int32)
        want = reference.topk_indices(logits, lengths, 64)
        assert torch.equal(chosen("flashinfer", logits, lengths, 64), want)

    def test_windows_are_relative_to_their_start(self, generator):
        logits = torch.randn(6, 300, generator=generator).clamp(min=0)
        starts = torch.tensor([0, 9, 250, 300, 100, 17], dtype=torch.int32)
        lengths = torch.tensor([300, 200, 10**9, 5, -1, 33], dtype=torch.int32)
        want = reference.topk_indices(logits, lengths, 32, starts=starts)
        assert torch.equal(chosen("flashinfer", logits, lengths, 32, starts=starts), want)
        spread = torch.stack([starts, starts], dim=1)[:, 0]
        assert torch.equal(chosen("flashinfer", logits, lengths, 32, starts=spread), want)

    def test_asks_for_ties_and_for_what_a_graph_may_hold(self, fakes):
        chosen("flashinfer", torch.rand(2, 64), [64, 9], 8)
        call = fakes["flashinfer"].calls[0]
        assert (call["tie_break"], call["dsa_graph_safe"], call["row_starts"]) == (1, True, None)

    def test_its_nan_and_signed_zeros_are_as_documented(self):
        logits = torch.tensor([[-0.0, 0.0, NAN, -1.0]])
        assert chosen("flashinfer", logits, [4], 2).tolist() == [[1, 2]]
        assert reference.topk_indices(logits, torch.tensor([4]).int(), 2).tolist() == [[0, 1]]


@pytest.mark.usefixtures("fakes")
class TestDeepSelect:
    def test_of_ties_any_are_chosen_but_as_many(self, generator):
        logits = torch.randn(4, 300, generator=generator).clamp(min=0.5)
        found = chosen("deep_select", logits, [300] * 4, 200)
        twins = reference.topk_indices(logits, torch.full((4,), 300, dtype=torch.int32), 200)
        assert not torch.equal(found, twins)
        assert (found.diff(dim=1) > 0).all()
        values = [logits.gather(1, indices.long()).sort(dim=1).values for indices in (found, twins)]
        assert torch.equal(*values)

    def test_a_row_with_a_nan_is_empty_and_its_neighbours_are_not(self, generator):
        logits = distinct(3, 64, generator)
        logits[1, 50] = NAN
        lengths = torch.tensor([64, 64, 64], dtype=torch.int32)
        found = chosen("deep_select", logits, lengths, 16)
        assert (found[1] == -1).all()
        assert torch.equal(found[[0, 2]], reference.topk_indices(logits, lengths, 16)[[0, 2]])

    def test_asks_for_indices_alone(self, fakes):
        chosen("deep_select", torch.rand(2, 64), [64, 9], 8)
        call = fakes["deep_select"].calls[0]
        assert (call["indices_type"], call["return_value"], call["begin"]) == (torch.int32, False, None)


@pytest.mark.parametrize(
    ("library", "change", "message"),
    [
        ("flashinfer", {"k": 2049}, "k 2049 of torch.float32 .* k up to 2048"),
        ("deep_select", {"k": 4097}, "k 4097 of torch.float32 .* k up to 4096"),
        ("flashinfer", {"logits": torch.zeros(2, 9).double()}, "torch.float64 logits"),
        ("deep_select", {"logits": torch.zeros(2, 9).half()}, "torch.float16 logits"),
        ("deep_select", {"logits": torch.zeros(1, 1).expand(2, 1 << 23)}, "8388608.* up to 8388607"),
        ("deep_select", {"starts": torch.zeros(2, dtype=torch.int32)}, "with starts; allowed: .* without starts"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_refuses_and_leaves_out_alone(library, change, message):
    arguments = {"logits": torch.zeros(2, 9), "lengths": torch.ones(2, dtype=torch.int32), "k": 4} | change
    out = torch.full((2, arguments["k"]), POISON, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"VDSA_TOPK_BACKEND={library}, but it does not take .*{message}"):
        topk_backend.topk_by_library(library, **arguments, out=out)
    assert (out == POISON).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_cpu_is_refused(library, monkeypatch):
    monkeypatch.setenv("VDSA_TOPK_BACKEND", library)
    with pytest.raises(NotImplementedError, match="on cpu without starts; allowed: on CUDA"):
        ops.topk_indices(torch.zeros(2, 9), torch.ones(2, dtype=torch.int32), 4)


@pytest.mark.parametrize(
    ("library", "module", "message"),
    [
        ("flashinfer", None, r"needs flashinfer.top_k_ragged_transform: .*; install flashinfer-python 0.6.10 or later"),
        ("flashinfer", SimpleNamespace(), "no attribute 'top_k_ragged_transform'"),
        (
            "flashinfer",
            SimpleNamespace(top_k_ragged_transform=lambda input, offsets, lengths, k: None),
            "unexpected keyword argument 'tie_break'; install flashinfer-python 0.6.10",
        ),
        ("deep_select", None, r"needs deep_select.get_stride_requirement: .*; install DeepSelect .*github.com"),
        ("deep_select", SimpleNamespace(get_stride_requirement=lambda: (64, 32)), "no attribute 'topk'"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_a_library_that_is_missing_or_old_is_an_error_before_anything_is_written(library, module, message, monkeypatch):
    # A None in sys.modules makes an import fail, installed or not.
    monkeypatch.setitem(sys.modules, library, module)
    monkeypatch.setenv("VDSA_TOPK_BACKEND", library)
    out = torch.full((2, 4), POISON, dtype=torch.int32)
    with pytest.raises(ImportError, match=message):
        ops.topk_indices(torch.zeros(2, 9), torch.full((2,), 9, dtype=torch.int32), 4, out=out)
    assert (out == POISON).all()


class TestWarmup:
    @pytest.mark.parametrize(
        ("choice", "device", "chooses"),
        [("flashinfer", "cuda", 1), ("deep_select", "cuda", 1), ("flashinfer", "cpu", 0), ("reference", "cuda", 0)],
    )
    def test_of_a_library_is_one_choice_on_the_gpu(self, choice, device, chooses, monkeypatch, mocker):
        monkeypatch.setenv("VDSA_TOPK_BACKEND", choice)
        once = mocker.patch("vllm_dsa.ops.topk._choose_once")
        ops.warmup_topk(16, torch.device(device))
        assert once.call_args_list == [mocker.call(16, torch.device(device))] * chooses

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_the_choice_reaches_the_library(self, library, fakes, monkeypatch):
        monkeypatch.setenv("VDSA_TOPK_BACKEND", library)
        topk_op._choose_once(16, torch.device("cpu"))
        assert len(fakes[library].calls) == 1
