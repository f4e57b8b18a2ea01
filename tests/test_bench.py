"""The benchmark suite: cases, forms, pages, the 3% rule, the cost fit, tables and files."""

import csv
import dataclasses
import json
import math

import pytest
import torch

from vllm_dsa.bench.cases import BenchCase, bench_cases
from vllm_dsa.bench.ceilings import gb_per_s
from vllm_dsa.bench.costs import fit_costs, ragged_costs
from vllm_dsa.bench.forms import bench_planner, legal_forms
from vllm_dsa.bench.inputs import COPIES, PagePool
from vllm_dsa.bench.logits import LogitsRow, logits_rows
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.plot import logits_panels
from vllm_dsa.bench.results import BenchReport
from vllm_dsa.bench.tables import logits_tables
from vllm_dsa.bench.timing import Timing, summarize
from vllm_dsa.bench.verdict import cells, losing_cells
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import DecodeForm, StepCosts, plan_step
from vllm_dsa.ops import IndexKCacheLayout, LogitsBackend

CPU = torch.device("cpu")
SM90 = planned_capabilities("sm90")
THEIRS = StepCosts((1, 2, 4), (1.0, 1.2, 2.0))


def synthetic_rows(costs, case, us_per_pass=100.0):
    """Rows of a machine on which a pass of c rows takes exactly costs[c]."""
    forms = legal_forms(case.depths, SM90)
    timings = {}
    for form in forms:
        median = us_per_pass * form.plan.kv_reads * costs[form.plan.group_size]
        timings[form.variant] = Timing(median, median * 0.99, median * 1.01)
    return logits_rows(case, forms, timings, IndexKCacheLayout(), 64, 4000.0)


class TestCases:
    def test_the_default_grid(self):
        cases = list(bench_cases(BenchOptions()))
        uniform = [case for case in cases if case.name.startswith("n=")]
        assert len(uniform) == 8 * 3 * 4
        assert len({(case.name, case.context, case.batch) for case in cases}) == len(cases)
        assert {case.context for case in cases} == {4096, 32768, 131072}
        assert {case.batch for case in cases} == {1, 4, 16, 64}

    def test_mixes(self):
        cases = {case.name: case for case in bench_cases(BenchOptions(contexts=(4096,), batches=(6,), next_ns=(1,)))}
        assert cases["mix 1,2,3,4"].depths == (1, 2, 3, 4, 1, 2)
        assert cases["mix 3,3,3,1"].depths == (3, 3, 3, 1, 3, 3)
        assert cases["one long n=2"].seq_lens == (4096, 128, 128, 128, 128, 128)
        assert cases["one long n=3"].depths == (3,) * 6
        assert len(list(bench_cases(BenchOptions(batches=(1,), next_ns=(1,))))) == 3
        assert all(case.name == "n=2" for case in bench_cases(BenchOptions(next_ns=(2,), mixes=False)))

    def test_bounds_and_bytes(self):
        case = BenchCase("x", 65, depths=(2, 1), seq_lens=(65, 64))
        assert case.token_bounds() == [(0, 64), (0, 65), (1, 64)]
        layout = IndexKCacheLayout()
        assert case.kv_bytes(layout) == 3 * 64 * 132
        assert case.floor_bytes(layout, 8) == 3 * 64 * 132 + 3 * 8 * 132 + 4 * (64 + 65 + 64)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batches": ()}, "--batches must be distinct"),
            ({"contexts": (64, 64)}, "--contexts must be distinct"),
            ({"next_ns": (0,)}, "--next-n must be distinct"),
            ({"iters": 0}, "--iters must be at least 1"),
            ({"contexts": (3,)}, "--contexts must be at least 8"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            BenchOptions(**options)

    def test_the_command_names_every_option(self):
        command = BenchOptions(contexts=(64,), mixes=False).command("build", unused=("heads", "seed"))
        assert command == (
            "vllm-dsa bench build --contexts 64 --batches 1,4,16,64 --next-n 1,2,3,4,5,6,7,8 --no-mixes "
            "--block-size 64 --iters 40"
        )


class TestForms:
    @pytest.mark.parametrize("depths", [(1,), (2, 2), (3, 3), (4,) * 8, (5,), (3, 3, 3, 1)])
    def test_every_legal_form_once_and_the_planners_among_them(self, depths):
        forms = legal_forms(depths, SM90)
        assert [form.variant for form in forms] == ["flattened", "c=2", "c=4"]
        assert [form.plan for form in forms if form.chosen] == [plan_step(depths, SM90)]
        assert all(plan_step(depths, form.caps) == form.plan for form in forms)
        assert forms[2].caps.paired_next_n == {4}
        assert forms[1].caps.paired_next_n == frozenset()

    @pytest.mark.parametrize(("ours", "chosen"), [(0.1, "sm90"), (9.0, "c=4")])
    def test_our_kernel_is_a_form_of_its_own(self, ours, chosen):
        forms = legal_forms((3, 3), SM90, StepCosts((1, 2), (ours, 2 * ours)))
        assert [form.variant for form in forms] == ["flattened", "c=2", "c=4", "sm90"]
        assert [form.variant for form in forms if form.chosen] == [chosen]
        assert forms[-1].name == "sm90"
        assert [form.plan.backend for form in forms] == [LogitsBackend.DEEP_GEMM] * 3 + [LogitsBackend.SM90]

    def test_the_planner_of_a_benchmark_drops_what_the_heads_rule_out(self):
        assert bench_planner(SM90, 64, 64).ragged_costs is not None
        assert bench_planner(planned_capabilities("sm100"), 64, 64).ragged_costs is None
        few = dataclasses.replace(SM90, num_heads=frozenset({64}))
        assert bench_planner(few, 16, 64).caps.native_next_n == frozenset()

    def test_varlen_is_a_form_of_its_own(self):
        forms = legal_forms((2, 1), planned_capabilities("sm100"))
        assert [form.variant for form in forms] == ["flattened", "c=2", "ragged"]
        assert [form.plan.form for form in forms if form.chosen] == [DecodeForm.RAGGED]


def test_pages_belong_to_one_row_of_one_copy():
    cases = list(bench_cases(BenchOptions(contexts=(300,), batches=(4,), next_ns=(1,))))
    pool = PagePool(cases, IndexKCacheLayout(), seed=0, device=CPU)
    for case in cases:
        taken = [
            page
            for table in pool.tables(case)
            for row, count in zip(table.tolist(), case.pages(64), strict=True)
            for page in row[:count]
        ]
        assert len(set(taken)) == len(taken) == COPIES * sum(case.pages(64))
        assert max(taken) < len(pool.cache)


def test_summary_and_bandwidth():
    assert summarize([float(i) for i in range(101)]) == Timing(50.0, 10.0, 90.0)
    assert gb_per_s(4_000_000, 1000.0) == 4.0


class TestVerdict:
    def test_losing_cells_are_over_20_us_and_over_3_percent(self):
        rows = []
        for depth, us in ((3, 1.0), (4, 1.0), (5, 0.01)):
            rows += synthetic_rows(
                {1: 20.0, 2: 22.0, 4: 20.0 * 2.0}, BenchCase(f"n={depth}", 4096, (depth,), (4096,)), us
            )
        assert losing_cells(rows) == []
        slow = synthetic_rows({1: 20.0, 2: 19.0, 4: 40.0}, BenchCase("n=3", 4096, (3,), (4096,)), 1.0)
        (cell,) = losing_cells(slow)
        assert cell.chosen.variant == "c=4"
        assert cell.best.variant == "c=2"
        assert math.isclose(cell.loss, 40 / 38 - 1)
        assert losing_cells(synthetic_rows({1: 20.0, 2: 19.0, 4: 39.1}, cell_case(), 1.0)) == []
        assert losing_cells(synthetic_rows({1: 20.0, 2: 19.0, 4: 40.0}, cell_case(), 0.4)) == []

    def test_a_cell_whose_chosen_form_was_wrong(self):
        rows = [row for row in synthetic_rows({1: 20.0, 2: 19.0, 4: 40.0}, cell_case()) if not row.chosen]
        (cell,) = cells(rows)
        assert cell.chosen is None
        assert not cell.counts
        assert "WRONG" in logits_tables(rows)[0].rows[0]


def cell_case():
    return BenchCase("n=3", 4096, (3,), (4096,))


class TestCosts:
    @pytest.mark.parametrize("costs", [{1: 1.0, 2: 1.13, 4: 2.0}, {1: 1.0, 2: 1.9, 4: 2.5}])
    def test_exact_recovery(self, costs):
        rows = [row for case in bench_cases(BenchOptions()) for row in synthetic_rows(costs, case)]
        fit = fit_costs(rows)
        assert fit.costs.group_sizes == (1, 2, 4)
        assert fit.costs.costs == tuple(costs.values())
        assert fit.worst_loss == 0
        assert fit.source_line() == f"StepCosts(group_sizes=(1, 2, 4), costs=({', '.join(map(str, costs.values()))}))"

    def test_it_loses_no_more_than_the_median_ratios(self):
        # Two machines in one: no table is right for both, and n=3 decides between c=2 and c=4.
        rows = []
        for batch in (1, 4, 16):
            kind = {1: 1.0, 2: 1.2, 4: 2.6 if batch == 1 else 2.2}
            rows += synthetic_rows(kind, BenchCase("n=3", 4096, (3,) * batch, (4096,) * batch))
        fit = fit_costs(rows)
        assert fit.num_cells == 3
        assert fit.mean_loss == pytest.approx((2.6 / 2.4 - 1) / 3, abs=1e-3)

    def test_short_cells_do_not_count(self):
        rows = synthetic_rows({1: 1.0, 2: 1.1, 4: 2.0}, cell_case(), us_per_pass=1.0)
        with pytest.raises(ValueError, match="--costs needs cells of over 20 us"):
            fit_costs(rows)


class TestRaggedCosts:
    @staticmethod
    def rows(us_of_depth, batch=4):
        found = []
        for depth, us in us_of_depth.items():
            case = BenchCase(f"n={depth}", 4096, (depth,) * batch, (4096,) * batch)
            forms = legal_forms(case.depths, SM90, StepCosts((1, 2), (1.0, 1.0)))
            timings = {form.variant: Timing(50.0 * form.plan.kv_reads, 1.0, 99.0) for form in forms}
            timings["sm90"] = Timing(us, us, us)
            found += logits_rows(case, forms, timings, IndexKCacheLayout(), 64, 4000.0)
        return found

    def test_they_are_the_best_other_forms_costs_in_proportion_to_the_times(self):
        costs = ragged_costs(self.rows({1: 210.0, 3: 300.0, 8: 700.0}), THEIRS)
        assert costs == StepCosts((1, 3, 8), (1.05, 3.0, 7.0))

    def test_the_median_over_cells_and_none_without_ours(self):
        rows = self.rows({1: 200.0, 2: 220.0}) + self.rows({1: 50.0, 2: 60.0}, batch=1)
        assert ragged_costs(rows, THEIRS) == StepCosts((1, 2), (1.0, 1.38))
        assert ragged_costs([row for row in rows if row.variant != "sm90"], THEIRS) is None

    def test_short_cells_do_not_count(self):
        assert ragged_costs(self.rows({1: 19.0}, batch=1), THEIRS) is None


class TestResults:
    @pytest.fixture
    def report(self):
        report = BenchReport[LogitsRow]({"device": "none", "command": "vllm-dsa bench logits"}, errors=["n=9 is off"])
        for case in bench_cases(BenchOptions(contexts=(4096,), batches=(4,), next_ns=(1, 3))):
            report.rows += synthetic_rows({1: 1.0, 2: 1.13, 4: 2.0}, case)
        return report

    def test_json_round_trip(self, report, tmp_path):
        report.write_json(tmp_path / "x.json")
        values = json.loads((tmp_path / "x.json").read_text())
        assert [LogitsRow(**row) for row in values["rows"]] == report.rows
        assert values["environment"]["device"] == "none"
        assert values["errors"] == ["n=9 is off"]

    def test_csv_round_trip(self, report, tmp_path):
        report.write_csv(tmp_path / "x.csv")
        lines = (tmp_path / "x.csv").read_text().splitlines()
        assert lines[0] == "# device: none"
        assert lines[2] == "# error: n=9 is off"
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        assert [row["case"] for row in rows] == [row.case for row in report.rows]
        assert [float(row["median_us"]) for row in rows] == [row.median_us for row in report.rows]

    def test_tables_and_panels(self, report):
        (table,) = logits_tables(report.rows)
        assert table.columns[:5] == ("case", "batch", "flattened us", "c=2 us", "c=4 us")
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert [row[0] for row in table.rows][:2] == ["n=1", "n=3"]
        (lines,) = logits_panels(report.rows).values()
        assert set(lines) == {"flattened", "c=2", "c=4", "planned"}
