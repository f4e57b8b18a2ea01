"""The wrapper of a decode kernel under DCP: refuses, answers the autotuner, and hands on everything else."""

import pytest
import torch
from forwarding import assert_forwards_everything

from vllm_dsa.attn_result import LseBase
from vllm_dsa.context_parallel import DcpDecodeKernel, DcpLayout, autotune_dummy, multi_ctas_kv_counter_heads

LENS = torch.ones(3, dtype=torch.int32)
ONE_ROW, TWO_ROWS = torch.zeros(3, 4, 8), torch.zeros(3, 2, 4, 8)


def wrapper(kernel, size=1, **options):
    return DcpDecodeKernel(kernel, DcpLayout(size, size - 1), v_head_dim=16, lse_base=LseBase.TWO, **options)


def untouched(*args, **keywords):
    raise AssertionError("the kernel ran")


@pytest.mark.parametrize("return_lse", [True, False])
def test_one_rank_forwards_everything(return_lse):
    assert_forwards_everything(wrapper, TWO_ROWS, return_lse=return_lse)
    assert_forwards_everything(lambda kernel: wrapper(kernel, is_autotuning=lambda: True), ONE_ROW)


def test_ranks_forward_everything_that_is_not_refused():
    assert_forwards_everything(lambda kernel: wrapper(kernel, 4), ONE_ROW, return_lse=True, causal_seqs=None)
    assert_forwards_everything(
        lambda kernel: wrapper(kernel, 4), TWO_ROWS, return_lse=True, row_lens=LENS, causal_seqs=None
    )
    assert_forwards_everything(
        lambda kernel: wrapper(kernel, 4, takes_causal_seqs=True), TWO_ROWS, return_lse=True, causal_seqs=LENS
    )


@pytest.mark.parametrize("dropped", ["return_lse", "causal_seqs", "multi_ctas_kv_counter_buffer"])
def test_a_wrapper_that_drops_a_keyword_is_found(dropped):
    def wrap(kernel):
        return lambda *args, **sent: kernel(*args, **{name: sent[name] for name in sent if name != dropped})

    with pytest.raises(AssertionError, match=f"dropped {{'{dropped}'}}"):
        assert_forwards_everything(wrap, ONE_ROW)


def test_a_wrapper_that_changes_a_keyword_is_found():
    with pytest.raises(AssertionError, match="changed"):
        assert_forwards_everything(
            lambda kernel: lambda *args, **sent: kernel(*args, **{**sent, "return_lse": True}),
            ONE_ROW,
            return_lse=False,
        )


@pytest.mark.parametrize(
    ("query", "keywords", "message"),
    [
        (TWO_ROWS, {"return_lse": True}, "q_len is 2"),
        (ONE_ROW, {"return_lse": True, "causal_seqs": LENS}, "causal_seqs"),
        (ONE_ROW, {"return_lse": False}, "return_lse"),
        (ONE_ROW, {}, "return_lse"),
    ],
)
def test_ranks_refuse_before_the_kernel_runs(query, keywords, message):
    with pytest.raises(NotImplementedError, match=message):
        wrapper(untouched, 4)(query, **keywords)


def test_an_unknown_form_of_query_is_refused():
    with pytest.raises(ValueError, match=r"query has shape \(3, 4\)"):
        wrapper(untouched, 4)(torch.zeros(3, 4), return_lse=True)


@pytest.mark.parametrize(("query", "rows"), [(ONE_ROW, 3), (TWO_ROWS, 6)])
def test_the_autotuner_gets_zeros_and_the_kernel_is_not_touched(query, rows):
    dummy = wrapper(untouched, 4, is_autotuning=lambda: True)(query, return_lse=False)
    assert (dummy.out.shape, dummy.out.dtype) == ((rows, 4, 16), torch.bfloat16)
    assert (dummy.lse.shape, dummy.lse.dtype, dummy.base) == ((rows, 4), torch.float32, LseBase.TWO)
    assert not dummy.out.any()
    assert not dummy.lse.any()


def test_a_dummy_of_an_fp8_query_is_no_fp8():
    dummy = autotune_dummy(ONE_ROW.to(torch.float8_e4m3fn), 512, LseBase.E, torch.float16)
    assert (dummy.out.shape, dummy.out.dtype, dummy.base) == ((3, 4, 512), torch.float16, LseBase.E)


def test_counters_are_for_the_heads_of_all_ranks():
    assert multi_ctas_kv_counter_heads(16, DcpLayout()) == 16
    assert multi_ctas_kv_counter_heads(16, DcpLayout(5, 2)) == 80
