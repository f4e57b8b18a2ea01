import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_dsa import ops
from vllm_dsa.ops import topk as topk_op
from vllm_dsa.reference import topk as topk_twin

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF, NAN = math.inf, math.nan
POISON = 0x7F7F7F7F
SPECIAL = [0.0, -0.0, 1.0, 1.0 + 2**-7, -1.0, 2.0, NAN, -NAN, INF, -INF, 1e-7, -65504.0]


def brute_force(logits, lengths, k, starts=None):
    """Python's sort with an explicit key: not-a-number last, then value down, then index up."""
    rows = []
    for row, (values, length) in enumerate(zip(logits.tolist(), lengths.tolist(), strict=True)):
        start = 0 if starts is None else int(starts[row])
        window = values[start : max(start, min(start + length, len(values)))]
        order = sorted(
            range(len(window)), key=lambda i: (math.isnan(window[i]), -window[i] if window[i] == window[i] else 0, i)
        )
        chosen = sorted(order[:k])
        rows.append(chosen + [-1] * (k - len(chosen)))
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), k)


def check(logits, lengths, k, starts=None):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    before = logits.clone()
    out = torch.full((logits.shape[0], k), POISON, dtype=torch.int32)
    found = ops.topk_indices(logits, lengths, k, starts=starts, out=out)
    assert found is out
    assert torch.equal(found, brute_force(logits, lengths, k, starts))
    assert torch.equal(found, ops.topk_indices(logits, lengths, k, starts=starts))
    assert torch.equal(logits.nan_to_num(nan=1.5), before.nan_to_num(nan=1.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 64, 300])
def test_random_rows_of_every_length_around_k(dtype, k, generator):
    lengths = [0, 1, k - 1, k, k + 1, 299, 300, 400, -3]
    check(torch.randn(len(lengths), 300, generator=generator).to(dtype), lengths, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_equal_rows_take_the_lowest_indices(dtype):
    logits = torch.tensor([0.0, -1.5, INF, -INF, NAN])[:, None].expand(5, 200).to(dtype).contiguous()
    check(logits, [200, 200, 200, 200, 200], 64)
    found = ops.topk_indices(logits, torch.full((5,), 200, dtype=torch.int32), 64)
    assert torch.equal(found, torch.arange(64, dtype=torch.int32).expand(5, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plateau_of_relu_zeros(dtype, generator):
    logits = torch.randn(6, 500, generator=generator).clamp(min=0).to(dtype)
    check(logits, [500, 499, 300, 257, 256, 255], 256)


@pytest.mark.parametrize("dtype", DTYPES)
def test_winners_above_a_plateau_keep_their_places(dtype, generator):
    logits = torch.zeros(3, 4000, dtype=dtype)
    winners = torch.randperm(4000, generator=generator)[:100].sort().values
    logits[:, winners] = torch.rand(100, generator=generator).add(1).to(dtype)
    check(logits, [4000, 4000, 2100], 2048)
    found = ops.topk_indices(logits[:1], torch.tensor([4000], dtype=torch.int32), 2048)
    assert torch.isin(winners.int(), found[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_are_equal(dtype):
    check(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0, 1.0]], dtype=dtype), [6], 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan(dtype):
    row = [NAN, -INF, 3.0, INF, -NAN, -INF, 0.0, -65504.0]
    logits = torch.tensor([row] * 8, dtype=dtype)
    for k in range(1, 9):
        check(logits, list(range(1, 9)), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_are_relative_to_their_start_and_clamped(dtype, generator):
    logits = torch.randn(7, 120, generator=generator).clamp(min=0).to(dtype)
    logits[:, :10] = 100.0
    check(logits, [50, 110, 111, 5, 0, 1, 10**9], 16, starts=[10, 10, 10, 117, 30, 119, 120])


def test_what_lies_outside_the_window_has_no_effect(generator):
    logits = torch.randn(1, 300, generator=generator)
    lengths, starts = (torch.tensor([n], dtype=torch.int32) for n in (100, 50))
    expected = ops.topk_indices(logits, lengths, 32, starts=starts)
    for poison in (NAN, INF, -INF):
        poisoned = torch.full((1, 300), poison)
        poisoned[:, 50:150] = logits[:, 50:150]
        assert torch.equal(ops.topk_indices(poisoned, lengths, 32, starts=starts), expected)


def test_a_row_does_not_depend_on_its_batch(generator):
    logits = torch.randn(40, 3000, generator=generator).clamp(min=0)
    lengths = torch.randint(0, 3001, (40,), generator=generator, dtype=torch.int32)
    together = ops.topk_indices(logits, lengths, 2048)
    for row in range(40):
        assert torch.equal(ops.topk_indices(logits[row : row + 1], lengths[row : row + 1], 2048)[0], together[row])


def test_more_rows_than_one_group_and_a_wide_row(generator):
    logits = torch.randn(5, 1 << 21, generator=generator, dtype=torch.float32)
    lengths = torch.tensor([1 << 21, 2049, 0, 2048, 1 << 20], dtype=torch.int32)
    found = ops.topk_indices(logits, lengths, 2048)
    for row in (0, 1, 2, 3, 4):
        length = int(lengths[row])
        best = logits[row, :length].topk(min(2048, length)).indices.sort().values.int()
        assert torch.equal(found[row, : len(best)], best)
        assert (found[row, len(best) :] == -1).all()


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, NAN, INF, -INF, 1e-45]), min_size=9, max_size=9),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_equals_brute_force(rows, data):
    count = len(rows)
    lengths = data.draw(st.lists(st.integers(-1, 12), min_size=count, max_size=count))
    starts = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    k = data.draw(st.integers(1, 12))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    check(torch.tensor(rows, dtype=dtype), lengths, k, starts)


def by_stable_sort(window, k):
    """A stable descending float64 sort with NaN last, the first k of it in ascending order."""
    order = window.double().nan_to_num(nan=-math.inf, posinf=INF, neginf=-1e308).sort(descending=True, stable=True)
    return order.indices[:k].sort().values


@given(
    rows=st.lists(st.lists(st.sampled_from(SPECIAL), min_size=13, max_size=13), min_size=1, max_size=7), data=st.data()
)
def test_equals_a_stable_float64_sort_in_any_groups_of_rows(rows, data):
    def ints(low, high):
        drawn = data.draw(st.lists(st.integers(low, high), min_size=len(rows), max_size=len(rows)))
        return torch.tensor(drawn, dtype=torch.int32)

    logits = torch.tensor(rows, dtype=torch.float64).to(data.draw(st.sampled_from(DTYPES)))
    lengths, starts, request_of_row = ints(-2, 20), ints(0, 13), ints(0, 2)
    k, block_size = data.draw(st.integers(1, 16)), data.draw(st.sampled_from([1, 4, 5]))
    table = torch.randint(0, 1000, (3, 13), dtype=torch.int32)
    values = torch.full((len(rows), k), NAN)
    with mock.patch.object(topk_twin, "_GROUP_ELEMENTS_CPU", data.draw(st.sampled_from([1, 30, 1 << 18]))):
        found = ops.topk_indices(logits, lengths, k, starts=starts, values=values)
        slots = ops.topk_indices(
            logits, lengths, k, starts=starts, slots=ops.SlotMap(table, block_size, request_of_row)
        )
    for row in range(len(rows)):
        window = logits[row, starts[row] :][: max(0, int(lengths[row]))]
        want = by_stable_sort(window, k)
        count = len(want)
        assert found[row].tolist() == want.tolist() + [-1] * (k - count)
        assert torch.equal(values[row, :count].nan_to_num(nan=7.0), window[want].float().nan_to_num(nan=7.0))
        assert (values[row, count:] == -INF).all()
        of_request = table[request_of_row[row]]
        assert slots[row, :count].tolist() == (of_request[want // block_size] * block_size + want % block_size).tolist()
        assert (slots[row, count:] == -1).all()


class OnOneDevice(TorchDispatchMode):
    """Fails on an operation that mixes devices; on meta tensors, which have no values, reading one fails by itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given_to = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        assert all(value.is_meta for value in given_to), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_is_read_on_the_host(dtype):
    """So the twin can be captured in a CUDA graph, and what it launches depends on shapes alone."""

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def run():
        return ops.topk_indices(
            empty(9, 1 << 20, dtype=dtype),
            empty(9),
            2048,
            starts=empty(9),
            values=empty(9, 2048, dtype=torch.float32),
            slots=ops.SlotMap(empty(3, 99), 64, empty(9)),
        )

    with OnOneDevice():
        assert run().shape == (9, 2048)


def test_out_may_be_a_slice_of_a_larger_buffer(generator):
    buffer = torch.full((4, 32), POISON, dtype=torch.int32)
    logits = torch.randn(2, 50, generator=generator)
    lengths = torch.tensor([50, 3], dtype=torch.int32)
    ops.topk_indices(logits, lengths, 8, out=buffer[1:3, :8])
    assert torch.equal(buffer[1:3, :8], brute_force(logits, lengths, 8))
    assert (buffer[[0, 3]] == POISON).all()
    assert (buffer[:, 8:] == POISON).all()


def test_logits_may_be_a_slice_of_a_larger_buffer(generator):
    wide = torch.randn(3, 64, generator=generator)
    check(wide[:, :50], [50, 49, 3], 8)


def test_no_rows_and_no_columns():
    none = torch.empty(0, dtype=torch.int32)
    assert ops.topk_indices(torch.empty(0, 9), none, 4).shape == (0, 4)
    check(torch.empty(2, 0), [0, 5], 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 9, dtype=torch.int32)}, TypeError, "logits has dtype torch.int32"),
        ({"logits": torch.zeros(9)}, ValueError, "logits has shape"),
        ({"logits": torch.zeros(9, 2).T}, ValueError, "logits has strides"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, TypeError, "lengths has dtype torch.int64"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, "lengths has shape"),
        ({"k": 0}, ValueError, "k is 0; allowed: at least 1"),
        ({"k": 4.0}, TypeError, "k is 4.0"),
        ({"starts": torch.zeros(1, dtype=torch.int32)}, ValueError, "starts has shape"),
        ({"out": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, r"out has shape \(2, 5\); allowed: \(2, 4\)"),
        ({"out": torch.zeros(2, 4)}, TypeError, "out has dtype torch.float32"),
    ],
)
def test_refuses_and_leaves_out_alone(change, error, message):
    out = torch.full((2, 4), POISON, dtype=torch.int32)
    good = {"logits": torch.zeros(2, 9), "lengths": torch.ones(2, dtype=torch.int32), "k": 4, "out": out}
    with pytest.raises(error, match=message):
        ops.topk_indices(**(good | change))
    assert (out == POISON).all()


def test_validate_finds_starts_out_of_range(monkeypatch):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    starts = torch.tensor([9, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"starts\[1\] is 10; allowed: 0 to 9"):
        ops.topk_indices(torch.zeros(2, 9), torch.ones(2, dtype=torch.int32), 4, starts=starts)


class TestValuesAndSlots:
    def test_values_are_the_chosen_logits(self, generator):
        logits = torch.randn(4, 50, generator=generator)
        lengths = torch.tensor([50, 3, 0, 9], dtype=torch.int32)
        starts = torch.tensor([0, 5, 7, 41], dtype=torch.int32)
        values = torch.full((4, 8), NAN)
        found = ops.topk_indices(logits, lengths, 8, starts=starts, values=values)
        for row in range(4):
            for index, value in zip(found[row].tolist(), values[row].tolist(), strict=True):
                expected = -INF if index < 0 else float(logits[row, starts[row] + index])
                assert value == expected

    @pytest.mark.parametrize("has_map", [False, True])
    def test_slots_are_where_the_tokens_lie(self, has_map, generator):
        logits = torch.randn(3, 40, generator=generator)
        lengths = torch.tensor([40, 3, 0], dtype=torch.int32)
        request_of_row = torch.tensor([2, 0, 1], dtype=torch.int32) if has_map else None
        table = torch.randint(0, 1000, (3, 5), generator=generator, dtype=torch.int32)
        found = ops.topk_indices(logits, lengths, 8)
        slots = ops.topk_indices(logits, lengths, 8, slots=ops.SlotMap(table, 8, request_of_row))
        for row in range(3):
            request = int(request_of_row[row]) if has_map else row
            for index, slot in zip(found[row].tolist(), slots[row].tolist(), strict=True):
                assert slot == (-1 if index < 0 else int(table[request, index // 8]) * 8 + index % 8)

    def test_no_columns(self):
        lengths, values = torch.tensor([3, 3], dtype=torch.int32), torch.zeros(2, 4)
        table = torch.empty(2, 0, dtype=torch.int32)
        found = ops.topk_indices(torch.empty(2, 0), lengths, 4, values=values, slots=ops.SlotMap(table, 8))
        assert (found == -1).all()
        assert (values == -INF).all()

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"values": torch.zeros(2, 4, dtype=torch.float64)}, TypeError, "values has dtype"),
            ({"values": torch.zeros(2, 5)}, ValueError, "values has shape"),
            (
                {"slots": ops.SlotMap(torch.zeros(3, 5, dtype=torch.int32), 8)},
                ValueError,
                "slots.block_table has shape",
            ),
            ({"slots": ops.SlotMap(torch.zeros(2, 5, dtype=torch.int32), 0)}, ValueError, "slots.block_size is 0"),
        ],
    )
    def test_refuses_and_leaves_out_alone(self, change, error, message):
        out = torch.full((2, 4), POISON, dtype=torch.int32)
        good = {"logits": torch.zeros(2, 9), "lengths": torch.ones(2, dtype=torch.int32), "k": 4, "out": out}
        with pytest.raises(error, match=message):
            ops.topk_indices(**(good | change))
        assert (out == POISON).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "stride", "offset", "has_starts", "expected"),
    [
        (1 << 20, 1 << 20, 0, False, True),
        (1 << 20, (1 << 20) + 4, 8, False, True),
        (1 << 20, (1 << 20) + 2, 0, False, False),
        (1 << 20, 1 << 20, 2, False, False),
        (1 << 20, 1 << 20, 0, True, False),
        ((1 << 20) - 3, (1 << 20) + 1, 1, True, True),
        ((1 << 20) + 1, (1 << 20) + 4, 0, False, False),
        (0, 4, 0, False, False),
    ],
)
def test_which_rows_the_kernel_takes(width, stride, offset, has_starts, expected, dtype, mocker):
    """Its groups hold a row of 2**20 only where none of the first is lost to what lies before."""
    mocker.patch("vllm_dsa.ops.topk.is_hopper", return_value=True)
    memory = torch.empty(2 * stride + offset + 16, dtype=dtype)
    first = -(memory.data_ptr() // memory.element_size()) % 4
    logits = memory.as_strided((2, width), (stride, 1), first + offset)
    mocker.patch.object(torch.Tensor, "is_cuda", True)
    lengths = torch.zeros(2, dtype=torch.int32)
    assert topk_op._takes(logits, lengths, lengths if has_starts else None, 2048) is expected


class TestWarmup:
    @pytest.mark.parametrize(
        ("k", "device", "choice", "is_hopper", "loads"),
        [
            (2048, "cuda", "auto", True, 1),
            (2048, "cuda", "sm90", True, 1),
            (2049, "cuda", "auto", True, 0),
            (2048, "cuda", "reference", True, 0),
            (2048, "cuda", "auto", False, 0),
            (2048, "cpu", "auto", True, 0),
        ],
    )
    def test_loads_what_may_be_launched(self, k, device, choice, is_hopper, loads, monkeypatch, mocker):
        monkeypatch.setenv("VDSA_TOPK_BACKEND", choice)
        mocker.patch("vllm_dsa.ops.topk.is_hopper", return_value=is_hopper)
        load = mocker.patch("vllm_dsa.ops.topk.load_topk")
        ops.warmup_topk(k, torch.device(device))
        assert load.call_args_list == [mocker.call(torch.float32)] * loads


class TestBackends:
    ROWS = torch.tensor([[3.0, 1.0, 2.0]])
    LENGTHS = torch.tensor([3], dtype=torch.int32)

    @pytest.fixture
    def launch(self, mocker):
        return mocker.patch("vllm_dsa.ops.topk.launch_topk")

    @pytest.mark.parametrize(
        ("choice", "takes", "launches"),
        [("auto", True, 1), ("auto", False, 0), ("sm90", True, 1), ("reference", True, 0)],
    )
    def test_who_chooses(self, choice, takes, launches, launch, monkeypatch, mocker):
        monkeypatch.setenv("VDSA_TOPK_BACKEND", choice)
        mocker.patch("vllm_dsa.ops.topk._takes", return_value=takes)
        found = ops.topk_indices(self.ROWS, self.LENGTHS, 2)
        assert launch.call_count == launches
        if not launches:
            assert found.tolist() == [[0, 2]]

    def test_a_kernel_that_cannot_is_an_error_before_anything_is_written(self, launch, monkeypatch):
        monkeypatch.setenv("VDSA_TOPK_BACKEND", "sm90")
        out = torch.full((1, 2), POISON, dtype=torch.int32)
        with pytest.raises(
            NotImplementedError, match=r"does not take k 2 of torch.float32 logits of shape \(1, 3\) on cpu"
        ):
            ops.topk_indices(self.ROWS, self.LENGTHS, 2, out=out)
        launch.assert_not_called()
        assert (out == POISON).all()
