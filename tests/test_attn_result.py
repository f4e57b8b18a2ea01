import dataclasses

import pytest
import torch

from vllm_dsa.attn_result import DecodeAttnResult, LseBase


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_are_kept_as_they_are(dtype):
    out = torch.zeros(3, 8, 20, dtype=dtype)[:, 2:7, :16]
    lse = torch.zeros(5, 3).t()
    result = DecodeAttnResult(out, lse, LseBase.TWO)
    assert result.out is out
    assert result.lse is lse
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.base = LseBase.E


def test_there_may_be_no_tokens():
    DecodeAttnResult(torch.zeros(0, 4, 8), torch.zeros(0, 4), LseBase.E)


def test_the_base_has_no_default():
    with pytest.raises(TypeError, match="base"):
        DecodeAttnResult(torch.zeros(1, 4, 8), torch.zeros(1, 4))


OUT, LSE = torch.zeros(2, 4, 8), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("out", "lse", "base", "error", "message"),
    [
        (None, LSE, LseBase.E, TypeError, "out is of type NoneType; allowed: torch.Tensor"),
        (OUT.double(), LSE, LseBase.E, TypeError, "out has dtype torch.float64; allowed: torch.float32"),
        (OUT, LSE.bfloat16(), LseBase.E, TypeError, "lse has dtype torch.bfloat16; allowed: torch.float32"),
        (OUT, LSE, "e", TypeError, "base is 'e'; allowed: LseBase.E, LseBase.TWO"),
        (OUT[0], LSE, LseBase.E, ValueError, "out has shape (4, 8); allowed"),
        (OUT[:, :0], LSE[:, :0], LseBase.E, ValueError, "out has shape (2, 0, 8); allowed"),
        (OUT[..., ::2], LSE, LseBase.E, ValueError, "out has strides (32, 8, 2); allowed: a last stride of 1"),
        (OUT, LSE.t(), LseBase.E, ValueError, "lse has shape (4, 2); allowed: (2, 4)"),
        (OUT, LSE.to("meta"), LseBase.E, ValueError, "lse is on meta; allowed: cpu"),
    ],
)
def test_what_does_not_fit_is_refused(out, lse, base, error, message):
    with pytest.raises(error) as caught:
        DecodeAttnResult(out, lse, base)
    assert message in str(caught.value)
