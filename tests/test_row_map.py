import pytest
import torch

from vllm_dsa.ops.row_map import rows_of_tokens, tokens_of_rows


def test_rows_go_there_and_back(generator):
    q = torch.randn(3, 2, 8, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(3, 2, generator=generator)
    row_to_token = torch.tensor([0, 1, -1, 2], dtype=torch.int32)
    row_q, row_weights = rows_of_tokens(q, weights, row_to_token)
    assert not row_weights[2].any()
    token_to_row = torch.tensor([0, 1, 3], dtype=torch.int32)
    assert torch.equal(tokens_of_rows(row_q.float(), token_to_row), q.float())
    assert torch.equal(tokens_of_rows(row_weights, token_to_row), weights)


def test_identity_copies_nothing():
    q, weights = torch.zeros(2, 1, 4), torch.zeros(2, 1)
    assert rows_of_tokens(q, weights, None) == (q, weights)
    assert tokens_of_rows(q, None) is q


def test_mismatched_heads():
    with pytest.raises(ValueError, match="weights"):
        rows_of_tokens(torch.zeros(2, 1, 4), torch.zeros(2, 3), None)
