import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import (
    CudaGraphSupport,
    DecodeForm,
    IndexerConfig,
    StepCosts,
    StepPlanner,
    cudagraph_support,
    planner,
    startup_fields,
)
from vllm_dsa.ops import LogitsBackend

CPU = planned_capabilities("cpu")
SM90 = planned_capabilities("sm90")
SM90_MAIN = planned_capabilities("sm90", frozenset({1, 2}))
SM90_BARE = dataclasses.replace(SM90, provider=None)
SM100 = planned_capabilities("sm100")
DEPTHS = st.lists(st.integers(0, 9), max_size=40)
CONFIG = IndexerConfig(next_n=4, max_num_seqs=8, block_table_width=6)
# Our kernel at the price of a pass of two rows for any depth but one, for which it is dear.
DEAR_SINGLE_ROWS = StepCosts((1, 2, 8), (1.3, 1.3, 1.3))


def configured(**changes):
    return dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("backend", "caps", "depths", "form", "planned"),
    [
        ("auto", SM90, [4, 4], DecodeForm.RAGGED, LogitsBackend.SM90),
        ("auto", SM90, [1, 1], DecodeForm.NATIVE, LogitsBackend.DEEP_GEMM),
        ("auto", SM90_BARE, [1, 1], DecodeForm.RAGGED, LogitsBackend.SM90),
        ("auto", SM100, [4, 1], DecodeForm.RAGGED, LogitsBackend.DEEP_GEMM),
        ("auto", CPU, [4, 4], DecodeForm.GROUPED, LogitsBackend.REFERENCE),
        ("deep_gemm", SM90, [4, 4], DecodeForm.NATIVE, LogitsBackend.DEEP_GEMM),
        ("sm90", SM90, [1, 1], DecodeForm.RAGGED, LogitsBackend.SM90),
        ("reference", SM90, [3, 3], DecodeForm.GROUPED, LogitsBackend.REFERENCE),
        ("reference", CPU, [2, 2], DecodeForm.NATIVE, LogitsBackend.REFERENCE),
    ],
)
def test_who_computes(backend, caps, depths, form, planned):
    plan = StepPlanner.of(configured(logits_backend=backend), caps).plan(depths)
    assert (plan.form, plan.backend) == (form, planned)


@given(DEPTHS)
def test_without_deep_gemm_our_kernel_runs_every_step(depths):
    plan = StepPlanner.of(configured(logits_backend="sm90"), SM90).plan(depths)
    assert (plan.backend, plan.form) == (LogitsBackend.SM90, DecodeForm.RAGGED)
    assert (plan.num_rows, plan.num_table_rows) == (sum(depths), len(depths))


@pytest.mark.parametrize(
    ("backend", "next_n", "caps", "support"),
    [
        ("deep_gemm", 1, SM90, CudaGraphSupport.UNIFORM_BATCH),
        ("deep_gemm", 4, SM90, CudaGraphSupport.UNIFORM_BATCH),
        ("deep_gemm", 3, SM90, CudaGraphSupport.UNIFORM_BATCH),
        ("deep_gemm", 3, planned_capabilities("sm90", frozenset({1})), CudaGraphSupport.ALWAYS),
        ("auto", 3, SM100, CudaGraphSupport.ALWAYS),
        ("auto", 4, SM90, CudaGraphSupport.UNIFORM_BATCH),
        ("sm90", 4, SM90, CudaGraphSupport.ALWAYS),
        ("auto", 1, SM90, CudaGraphSupport.UNIFORM_BATCH),
        ("sm90", 1, SM90, CudaGraphSupport.ALWAYS),
        ("auto", 4, SM90_BARE, CudaGraphSupport.ALWAYS),
        ("auto", 4, CPU, CudaGraphSupport.UNIFORM_BATCH),
    ],
)
def test_cudagraph_support(backend, next_n, caps, support):
    assert cudagraph_support(configured(next_n=next_n, logits_backend=backend), caps) is support


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize(
    "caps", [planned_capabilities("sm90", frozenset({1})), SM100, SM90], ids=lambda caps: caps.arch
)
@given(depths=DEPTHS | st.lists(st.just(1), max_size=6))
def test_without_our_kernel_a_graph_for_every_mix_meets_one_layout(next_n, caps, depths):
    config = configured(next_n=next_n, logits_backend="deep_gemm")
    plan = StepPlanner.of(config, caps).plan
    if cudagraph_support(config, caps) is CudaGraphSupport.ALWAYS:
        assert plan(depths).form is plan([next_n]).form


def test_a_full_step_by_our_kernel_is_not_enough_where_a_shallower_one_is_grouped(monkeypatch):
    monkeypatch.setattr(planner, "SM90_KERNEL_COSTS", DEAR_SINGLE_ROWS)
    plan = StepPlanner.of(CONFIG, SM90).plan
    assert plan([4]).backend is LogitsBackend.SM90
    assert plan([2]).form is DecodeForm.NATIVE
    assert cudagraph_support(CONFIG, SM90) is CudaGraphSupport.UNIFORM_BATCH


@st.composite
def tables(draw):
    return StepCosts(tuple(range(1, 9)), tuple(draw(st.integers(80, 400)) / 100 for _ in range(8)))


@given(DEPTHS, tables(), st.sampled_from([SM90, SM90_MAIN]))
def test_a_graph_of_our_kernel_that_serves_every_mix_meets_no_group_of_rows(depths, costs, caps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "SM90_KERNEL_COSTS", costs)
        config = configured(next_n=9)
        step = StepPlanner.of(config, caps).plan
        is_always = cudagraph_support(config, caps) is CudaGraphSupport.ALWAYS
        if is_always and step([9]).backend is LogitsBackend.SM90:
            assert step(depths).group_size == 1


@pytest.mark.parametrize(
    ("changes", "caps", "expected"),
    [
        (
            {"next_n": 3, "logits_backend": "deep_gemm"},
            SM90,
            {"use_flattening": "True", "group_size": "4", "schedule_slots": "66", "logits_backend": "deep_gemm"},
        ),
        (
            {"logits_backend": "deep_gemm"},
            SM90_MAIN,
            {"use_flattening": "True", "group_size": "2", "native_next_n": "1,2", "schedule_slots": "132"},
        ),
        ({"next_n": 5}, SM100, {"use_flattening": "False", "supports_varlen": "True", "native_next_n": "any"}),
        (
            {"next_n": 1},
            CPU,
            {"arch": "cpu", "deep_gemm": "none", "num_sms": "1", "logits_backend": "reference", "forms": "1:native"},
        ),
        (
            {},
            SM90,
            {"logits_backend": "sm90", "forms": "1:native,2:native,3:ragged,4:ragged", "schedule_slots": "none"},
        ),
        ({"next_n": 2}, SM90_BARE, {"deep_gemm": "none", "logits_backend": "sm90", "forms": "1:ragged,2:ragged"}),
    ],
)
def test_startup_fields(changes, caps, expected):
    assert expected.items() <= startup_fields(configured(**changes), caps).items()
