import pytest
import torch

from vllm_dsa.ops import LogitsBackend
from vllm_dsa.runner import oracle

EXPECTED = torch.tensor([5.0, 1.0, 4.0, 1.0, 3.0, -2.0], dtype=torch.float64)
ROW = torch.cat([EXPECTED.float(), torch.full((2,), float("-inf"))])


def indices(*values):
    return torch.tensor(values, dtype=torch.int32)


def check_row(logits, selected, expected, topk, backend=LogitsBackend.REFERENCE):
    return oracle.check_row(logits, selected, expected, topk, backend)


def test_the_right_row_is_ok():
    assert check_row(ROW, indices(0, 2, 4), EXPECTED, 3).ok
    assert check_row(ROW, indices(0, 1, 2, 3, 4, 5, -1, -1), EXPECTED, 8).ok


@pytest.mark.parametrize("tied", [1, 3])
def test_a_tie_at_the_threshold_is_the_kernels_business(tied):
    assert check_row(ROW, indices(*sorted((0, 2, 4, tied))), EXPECTED, 4).ok


@pytest.mark.parametrize(
    "selected",
    [
        (0, 2, 5),  # a clear loser in, a clear winner out
        (0, 2, -1),  # a hole
        (0, 2, 2),  # twice the same
        (0, 2, 6),  # past the length
        (2, 0, 4),  # out of order
    ],
)
def test_a_wrong_selection_is_counted(selected):
    check = check_row(ROW, indices(*selected), EXPECTED, 3)
    assert check.misplaced > 0
    assert not check.ok


@pytest.mark.parametrize("row", [ROW * 1.0001, ROW.clone().index_fill_(0, torch.tensor([1]), float("nan")), ROW[:5]])
def test_wrong_logits_are_noticed(row):
    assert not check_row(row, indices(0, 2, 4), EXPECTED, 3).ok


@pytest.mark.parametrize("backend", [LogitsBackend.DEEP_GEMM, LogitsBackend.SM90])
def test_fp8_tensor_cores_may_err_more_and_only_that_much(backend):
    assert check_row(ROW * 1.0003, indices(0, 2, 4), EXPECTED, 3, backend).ok
    assert not check_row(ROW * 1.001, indices(0, 2, 4), EXPECTED, 3, backend).ok
    assert check_row(ROW, indices(0, 2, 5), EXPECTED, 3, backend).misplaced > 0
