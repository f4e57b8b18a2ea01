import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_dsa.deep_gemm_wrapper import native_next_n_supported, planned_capabilities
from vllm_dsa.indexer import SM90_KERNEL_COSTS, DecodeForm, StepCosts, StepPlan, plan_step
from vllm_dsa.indexer.costs import SM90_COSTS
from vllm_dsa.ops import LogitsBackend

SM90 = planned_capabilities("sm90")
SM90_MAIN = planned_capabilities("sm90", frozenset({1, 2}))
SM90_ODD = dataclasses.replace(SM90, num_sms=131)
ANY_DEPTH = dataclasses.replace(planned_capabilities("sm100"), supports_varlen=False)
ALL_CAPS = [
    SM90,
    SM90_MAIN,
    SM90_ODD,
    ANY_DEPTH,
    planned_capabilities("sm100"),
    planned_capabilities("cpu"),
    planned_capabilities("sm90", frozenset({1})),
    planned_capabilities("sm90", frozenset({4})),
]
# Nothing of DeepGEMM's.
NO_DEEP_GEMM = dataclasses.replace(SM90, native_next_n=frozenset(), paired_next_n=frozenset())
DEPTHS = st.lists(st.integers(0, 9), max_size=40)


@pytest.mark.parametrize(
    ("depths", "caps", "form", "group_size", "num_groups", "kv_reads"),
    [
        ([1] * 5, SM90, DecodeForm.NATIVE, 1, 5, 5),
        ([2] * 5, SM90, DecodeForm.NATIVE, 2, 5, 5),
        ([4] * 5, SM90, DecodeForm.NATIVE, 4, 5, 5),
        ([3] * 5, SM90, DecodeForm.GROUPED, 4, 5, 5),
        ([5] * 2, SM90, DecodeForm.GROUPED, 2, 6, 6),
        ([6] * 2, SM90, DecodeForm.GROUPED, 2, 6, 6),
        ([7] * 2, SM90, DecodeForm.GROUPED, 4, 4, 4),
        ([8] * 2, SM90, DecodeForm.GROUPED, 4, 4, 4),
        ([3, 3, 3, 1], SM90, DecodeForm.GROUPED, 2, 7, 7),
        ([4] * 31 + [2], SM90, DecodeForm.GROUPED, 4, 32, 32),
        ([4] * 5, SM90_MAIN, DecodeForm.GROUPED, 2, 10, 10),
        ([4] * 5, SM90_ODD, DecodeForm.GROUPED, 2, 10, 10),
        ([3] * 5, planned_capabilities("sm90", frozenset({1})), DecodeForm.FLATTENED, 1, 15, 15),
        ([3] * 5, ANY_DEPTH, DecodeForm.NATIVE, 3, 5, 5),
        ([3, 1], planned_capabilities("sm100"), DecodeForm.RAGGED, 1, 4, 2),
        ([4, 4, 0, 0], SM90, DecodeForm.NATIVE, 4, 2, 2),
        ([4, 0, 4], SM90, DecodeForm.GROUPED, 4, 2, 2),
        ([1, 0, 1], SM90, DecodeForm.FLATTENED, 1, 2, 2),
        ([], SM90, DecodeForm.NATIVE, 1, 0, 0),
        ([0, 0], SM90, DecodeForm.NATIVE, 1, 0, 0),
    ],
)
def test_known_steps(depths, caps, form, group_size, num_groups, kv_reads):
    plan = plan_step(depths, caps)
    assert (plan.form, plan.group_size, plan.num_groups, plan.kv_reads) == (form, group_size, num_groups, kv_reads)
    assert (plan.num_reqs, plan.num_tokens) == (len(depths), sum(depths))


@given(DEPTHS, st.sampled_from(ALL_CAPS))
def test_a_plan_is_legal_and_the_cheapest(depths, caps):
    plan = plan_step(depths, caps)
    if plan.form is DecodeForm.RAGGED:
        assert caps.supports_varlen
        assert plan.num_rows == sum(depths)
        return
    if sum(depths):
        assert native_next_n_supported(plan.group_size, caps)
    assert plan.num_groups == sum(-(-depth // plan.group_size) for depth in depths)
    costs = SM90_COSTS if caps.arch_family == 9 else StepCosts((1, 2), (1.0, 1.1))
    for size in range(1, 10):
        if native_next_n_supported(size, caps):
            groups = sum(-(-depth // size) for depth in depths)
            assert plan.num_groups * costs.group_cost(plan.group_size) <= groups * costs.group_cost(size) + 1e-9
    assert plan.num_dummy_rows == plan.num_rows - sum(depths)
    assert plan.num_dummy_rows >= 0


@given(DEPTHS, st.sampled_from(ALL_CAPS))
def test_native_means_a_view(depths, caps):
    plan = plan_step(depths, caps)
    if plan.form is DecodeForm.NATIVE:
        assert all(depth == plan.group_size for depth in depths[: plan.num_groups])
        assert not any(depths[plan.num_groups :])
        assert plan.rows_are_tokens


def test_a_costs_argument_changes_the_choice():
    dear_rows = StepCosts((1, 2, 4), (1.0, 2.5, 6.0))
    assert plan_step([4, 4], SM90, dear_rows).form is DecodeForm.FLATTENED
    free_rows = StepCosts((1, 2, 4), (1.0, 1.0, 1.0))
    assert plan_step([3, 1], SM90, free_rows).group_size == 4


def test_costs_are_linear_between_and_past_the_points():
    costs = StepCosts((1, 2, 4), (1.0, 2.0, 6.0))
    assert [costs.group_cost(size) for size in (1, 2, 3, 4, 5, 6)] == [1.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_negative_depth_is_refused():
    with pytest.raises(ValueError, match="depths must not be negative, got -1 for request 2"):
        plan_step([1, 2, -1], SM90)


PLANNERS = {
    "deep_gemm": lambda depths: plan_step(depths, SM90),
    "one row alone": lambda depths: plan_step(depths, planned_capabilities("sm90", frozenset({1}))),
    "varlen": lambda depths: plan_step(depths, planned_capabilities("sm100")),
    "ours": lambda depths: plan_step(depths, SM90, ragged_costs=SM90_KERNEL_COSTS),
}


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@given(depths=st.lists(st.integers(0, 9), max_size=8) | st.lists(st.just(1), max_size=8))
def test_one_row_per_request_is_seen_whatever_the_form(planner, depths):
    assert planner(depths).is_one_row_per_request == all(depth == 1 for depth in depths)


class TestOurKernel:
    @pytest.mark.parametrize(
        ("depths", "kv_reads"),
        [
            ([3] * 5, 5),
            ([3, 3, 3, 1], 4),
            ([4, 0, 4], 2),
            ([8, 8], 2),
            ([9, 1], 3),
            ([16, 17], 5),
            ([], 0),
            ([0, 0], 0),
        ],
    )
    def test_known_steps(self, depths, kv_reads):
        plan = plan_step(depths, SM90, ragged_costs=SM90_KERNEL_COSTS)
        assert plan == StepPlan(
            DecodeForm.RAGGED,
            group_size=1,
            num_reqs=len(depths),
            num_tokens=sum(depths),
            num_groups=sum(depths),
            kv_reads=kv_reads,
            max_depth=max(depths, default=0),
            backend=LogitsBackend.SM90,
        )
        assert plan.rows_are_tokens
        assert plan.reads_engine_table
        assert plan.num_table_rows == len(depths)

    @pytest.mark.parametrize(
        ("depths", "form"),
        [([1] * 5, DecodeForm.NATIVE), ([2] * 5, DecodeForm.NATIVE), ([1] * 200 + [2], DecodeForm.FLATTENED)],
    )
    def test_deep_gemm_where_it_is_cheaper(self, depths, form):
        plan = plan_step(depths, SM90, ragged_costs=SM90_KERNEL_COSTS)
        assert (plan.form, plan.backend) == (form, LogitsBackend.DEEP_GEMM)

    def test_a_tie_is_ours_whatever_the_order_of_the_depths(self):
        same = StepCosts(tuple(range(1, 9)), tuple(SM90_COSTS.group_cost(2) * -(-depth // 2) for depth in range(1, 9)))
        only_twos = planned_capabilities("sm90", frozenset({2}))
        for depths in ([1, 2, 3] * 7, [3, 2, 1] * 7, [2] * 9, [5, 5, 1]):
            assert plan_step(depths, only_twos, ragged_costs=same).backend is LogitsBackend.SM90

    @given(DEPTHS, st.sampled_from([SM90, SM90_MAIN, SM90_ODD]), st.lists(st.integers(90, 400), min_size=8, max_size=8))
    def test_the_cheapest_whatever_the_costs(self, depths, caps, hundredths):
        costs = StepCosts(tuple(range(1, 9)), tuple(cost / 100 for cost in hundredths))
        theirs = plan_step(depths, caps)
        plan = plan_step(depths, caps, ragged_costs=costs)
        ours = sum(depth // 8 * costs.costs[7] + (costs.costs[depth % 8 - 1] if depth % 8 else 0) for depth in depths)
        least = theirs.num_groups * SM90_COSTS.group_cost(theirs.group_size)
        if plan.backend is LogitsBackend.SM90:
            assert ours <= least + 1e-6
        else:
            assert plan == theirs
            assert least <= ours + 1e-6

    @given(DEPTHS)
    def test_the_only_one_allowed(self, depths):
        dear = StepCosts((1, 8), (100.0, 900.0))
        assert plan_step(depths, NO_DEEP_GEMM, ragged_costs=dear).backend is LogitsBackend.SM90

    @given(DEPTHS, st.sampled_from(ALL_CAPS))
    def test_never_unless_its_costs_are_given(self, depths, caps):
        backend = LogitsBackend.REFERENCE if caps.provider is None else LogitsBackend.DEEP_GEMM
        assert plan_step(depths, caps).backend is backend


def test_a_set_without_a_legal_size_is_refused():
    only_four = dataclasses.replace(planned_capabilities("sm90", frozenset({4})), num_sms=131)
    with pytest.raises(ValueError, match="legal group size"):
        plan_step([4], only_four)
