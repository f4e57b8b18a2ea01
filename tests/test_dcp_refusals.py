import itertools

import pytest
import torch

from vllm_dsa.context_parallel import DcpLayout, check_dcp_decode, check_dcp_fused_write

LENS = torch.ones(1, dtype=torch.int32)
DCP = DcpLayout(3, 1)


def refusal(layout, q_len, return_lse, causal_seqs, row_lens, takes_causal_seqs):
    try:
        check_dcp_decode(
            layout,
            q_len=q_len,
            return_lse=return_lse,
            causal_seqs=causal_seqs,
            row_lens=row_lens,
            takes_causal_seqs=takes_causal_seqs,
        )
    except NotImplementedError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("q_len", "causal_seqs", "return_lse", "message"),
    [
        (1, None, True, None),
        (2, None, True, "q_len is 2 under DCP of size 3: each query row ends at another token"),
        (4, LENS, True, "causal_seqs is given under DCP of size 3"),
        (1, LENS, True, "causal_seqs is given under DCP of size 3"),
        (1, None, False, "return_lse is False under DCP of size 3: without the LSE"),
        (2, None, False, "q_len is 2"),
    ],
)
def test_a_kernel_with_one_length_per_request(q_len, causal_seqs, return_lse, message):
    found = refusal(DCP, q_len, return_lse, causal_seqs, None, False)
    assert found is None if message is None else found.startswith(message)


@pytest.mark.parametrize(("q_len", "causal_seqs"), list(itertools.product((1, 2, 4), (None, LENS))))
def test_rows_with_lengths_of_their_own_pass(q_len, causal_seqs):
    takes = causal_seqs is not None
    assert refusal(DCP, q_len, True, causal_seqs, LENS, takes) is None
    assert "return_lse is False" in refusal(DCP, q_len, False, causal_seqs, LENS, takes)


def test_a_kernel_that_finds_each_rows_bound_needs_the_global_lengths():
    assert refusal(DCP, 4, True, LENS, None, True) is None
    assert "q_len is 4" in refusal(DCP, 4, True, None, None, True)


def test_one_rank_is_refused_nothing():
    for case in itertools.product((1, 4), (False, True), (None, LENS), (None, LENS), (False, True)):
        assert refusal(DcpLayout(), *case) is None


def test_a_fused_write_that_knows_no_owner_is_refused():
    check_dcp_fused_write(DcpLayout(), "set_mla_kv_concat_q", takes_dcp=False)
    check_dcp_fused_write(DCP, "set_mla_kv_concat_q_fp8", takes_dcp=True)
    with pytest.raises(NotImplementedError, match=r"set_mla_kv_concat_q writes .* rank 1 of 3"):
        check_dcp_fused_write(DCP, "set_mla_kv_concat_q", takes_dcp=False)
