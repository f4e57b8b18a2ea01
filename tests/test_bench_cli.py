"""``vllm-dsa bench``, its GPU paths driven on the CPU by a stand-in clock and graph, and small runs on a real GPU."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from vllm_dsa import ops
from vllm_dsa.bench import logits as logits_bench
from vllm_dsa.bench.ceilings import Ceilings
from vllm_dsa.bench.gpu import GpuRig
from vllm_dsa.bench.indexer import IndexerRow
from vllm_dsa.bench.inputs import COPIES
from vllm_dsa.bench.options import BenchOptions
from vllm_dsa.bench.timing import Timing
from vllm_dsa.cli.app import app
from vllm_dsa.deep_gemm_wrapper import planned_capabilities

CPU = torch.device("cpu")
SM90 = planned_capabilities("sm90")
TINY = ["--contexts", "300", "--batches", "1,4", "--next-n", "1,3", "--heads", "16", "--iters", "2"]


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["bench", *map(str, arguments)])


class FakeGraph:
    """Replays into the tensors of its first result, as a CUDA graph does."""

    def __init__(self, function):
        self.function = function
        self.result = function()

    def replay(self):
        again = self.function()
        for old, new in zip(tensors(self.result), tensors(again), strict=True):
            old.copy_(new)


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result or ())


@pytest.fixture
def fake_gpu(mocker):
    """An SM90 plan on CPU tensors; the n-th run of a turn takes n times 50 us."""

    def clock(runs, flush, iters):
        for copies in runs.values():
            assert len(copies) == COPIES
            for one in copies:
                one()
        return {key: Timing(50.0 * (i + 1), 49.0, 51.0) for i, key in enumerate(runs)}

    rig = GpuRig(CPU, SM90, mocker.Mock(), Ceilings(4000.0, 4100.0, 3.0))
    mocker.patch("vllm_dsa.bench.gpu.set_up_gpu", return_value=rig)
    for module in ("logits", "indexer"):
        mocker.patch(f"vllm_dsa.bench.{module}.capture", FakeGraph)
        mocker.patch(f"vllm_dsa.bench.{module}.measure_interleaved", clock)
    mocker.patch("vllm_dsa.bench.indexer.syncs_with_host", side_effect=lambda call: "topk" in str(call))


class TestLogits:
    def test_every_form_is_checked_and_timed(self, run, fake_gpu, tmp_path):
        paths = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "png")}
        outputs = ["--json", paths["json"], "--csv", paths["csv"], "--plot", paths["png"]]
        result = run("logits", *TINY, *outputs, "--costs")
        assert result.exit_code == 0, result.output
        values = json.loads(paths["json"].read_text())
        assert len(values["rows"]) == 4 * (2 + 2 + 4)
        assert values["errors"] == []
        assert values["environment"]["measured copy GB/s"] == "4100"
        assert paths["csv"].exists()
        assert paths["png"].read_bytes().startswith(b"\x89PNG")
        command = values["environment"]["command"]
        assert result.output.count(f"reproduce: {command}") == 2
        assert f"reproduce: {command} --costs" in result.output
        assert "StepCosts(group_sizes=(1, 2, 4)" in result.output
        assert "our kernel: StepCosts(group_sizes=(1, 3)" in result.output

    def test_a_wrong_form_has_no_number_and_exit_code_1(self, run, fake_gpu, mocker):
        def off_when_paired(q, *arguments, **keywords):
            logits = ops.paged_mqa_logits(q, *arguments, **keywords)
            return logits * 1.01 if q.shape[1] == 4 else logits

        mocker.patch("vllm_dsa.indexer.logits.paged_mqa_logits", off_when_paired)
        result = run("logits", *TINY, "--no-mixes")
        assert result.exit_code == 1
        assert "WRONG: n=3, context 300, batch 4, grouped c=4: logits are off by 1.0e-02" in result.output
        report = logits_bench.bench_logits(BenchOptions((300,), (1,), (3,), False, 16), lambda case: None)
        assert [row.variant for row in report.rows] == ["flattened", "c=2", "sm90"]

    def test_nan_is_wrong(self, run, fake_gpu, mocker, tmp_path):
        mocker.patch(
            "vllm_dsa.indexer.logits.paged_mqa_logits", side_effect=lambda q, *_, **__: torch.full((4, 300), math.nan)
        )
        report = logits_bench.bench_logits(BenchOptions((300,), (1,), (4,), False, 16), lambda case: None)
        assert [row.variant for row in report.rows] == ["sm90"]
        assert len(report.errors) == 3
        outputs = ["--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png", "--costs"]
        one = ["--contexts", "300", "--batches", "1", "--next-n", "4", "--no-mixes", "--heads", "16"]
        assert run("logits", *one, *outputs).exit_code == 1


class TestIndexer:
    def test_stages_of_every_form(self, run, fake_gpu, tmp_path):
        result = run(
            "indexer", *TINY, "--json", tmp_path / "x.json", "--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png"
        )
        assert result.exit_code == 0, result.output
        rows = [IndexerRow(**row) for row in json.loads((tmp_path / "x.json").read_text())["rows"]]
        assert len(rows) == 4 * (2 + 2 + 4) * 5
        assert {row.mode for row in rows if row.stage == "topk"} == {"eager"}
        assert {row.mode for row in rows if row.stage == "logits"} == {"graph"}
        assert "reproduce: vllm-dsa bench indexer --contexts 300" in result.output

    def test_a_wrong_selection_is_exit_code_1(self, run, fake_gpu, mocker):
        mocker.patch("vllm_dsa.bench.indexer_step.topk_indices")
        result = run("indexer", *TINY, "--no-mixes")
        assert result.exit_code == 1
        assert "300 indices misplaced" in result.output


class TestTopk:
    SMALL = ("--rows", "1,3", "--lengths", "40,90", "--k", "16")

    @pytest.fixture(autouse=True)
    def stand_ins(self, mocker):
        rig = GpuRig(CPU, SM90, mocker.Mock(), Ceilings(4000.0, 4100.0, 3.0))
        mocker.patch("vllm_dsa.bench.topk.set_up_gpu", return_value=rig)
        mocker.patch("vllm_dsa.bench.topk.capture", FakeGraph)
        clock = {
            "ours": Timing(10.0, 9.0, 11.0),
            "torch.topk": Timing(50.0, 0, 0),
        }
        mocker.patch("vllm_dsa.bench.topk.measure_interleaved", return_value=clock)

    def test_every_shape(self, run, tmp_path):
        result = run("topk", *self.SMALL, "--json", tmp_path / "x.json", "--csv", tmp_path / "x.csv")
        assert result.exit_code == 0, result.output
        report = json.loads((tmp_path / "x.json").read_text())
        assert [(row["rows"], row["length"]) for row in report["rows"]] == [(1, 40), (1, 90), (3, 40), (3, 90)]
        assert {row["speedup"] for row in report["rows"]} == {5.0}
        assert report["rows"][-1]["floor_us"] == pytest.approx(4 * 3 * 90 / 4100e3)
        assert "reproduce: vllm-dsa bench topk --rows 1,3 --lengths 40,90 --k 16 --iters 40 --seed 0" in result.output

    def test_a_wrong_index_has_no_number_and_exit_code_1(self, run, mocker):
        mocker.patch("vllm_dsa.bench.topk.topk_indices", side_effect=lambda logits, lengths, k, out, **_: out.fill_(3))
        result = run("topk", *self.SMALL)
        assert result.exit_code == 1
        assert "WRONG: 1 rows of 40: not the indices of the twin" in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--lengths", "40,8", "--k", "16"), "--lengths must be at least k, 16"),
            (("--rows", "0"), "--rows must be whole numbers of at least 1"),
            (("--iters", "0"), "--iters must be at least 1, got 0"),
        ],
    )
    def test_bad_options(self, run, arguments, message):
        result = run("topk", *arguments)
        assert result.exit_code == 2
        assert message in result.output


class TestBuild:
    def test_on_the_cpu(self, run, tmp_path, mocker):
        mocker.patch("vllm_dsa.bench.build.is_cuda", return_value=False)
        mocker.patch("vllm_dsa.bench.build.resolve_capabilities", return_value=planned_capabilities("cpu"))
        small = ["--contexts", "256", "--batches", "1,4", "--next-n", "1,3", "--iters", "3"]
        result = run("build", *small, "--json", tmp_path / "x.json", "--plot", tmp_path / "x.png")
        assert result.exit_code == 0, result.output
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert [row["case"] for row in rows[:4]] == ["n=1", "n=3", "n=1", "n=3"]
        assert all(row["host_p99_us"] >= row["host_median_us"] > 0 for row in rows)
        assert all(row["launches"] is row["gpu_us"] is None for row in rows)
        assert result.output.rstrip().endswith("--next-n 1,3 --mixes --block-size 64 --iters 3")


class TestBadInput:
    @pytest.mark.parametrize("which", ["logits", "indexer"])
    def test_without_cuda(self, run, which, mocker):
        mocker.patch("vllm_dsa.bench.gpu.is_cuda", return_value=False)
        result = run(which)
        assert result.exit_code == 2
        assert result.stderr == (
            f"error: bench {which} times a GPU, and torch sees no CUDA device (bench build runs anywhere)\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["logits", "--contexts", "4k"], "--contexts must be whole numbers separated by commas, got '4k'"),
            (["build", "--batches", "0"], "--batches must be distinct whole numbers of at least 1, got [0]"),
            (["build", "--block-size", "48"], "block_size"),
            (["build", "--csv", "/no/such/folder/x.csv"], "--csv: no such folder: /no/such/folder"),
        ],
    )
    def test_one_line_and_exit_code_2(self, run, arguments, message):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.gpu
class TestOnTheGpu:
    def test_logits(self, run, tmp_path):
        small = ["--contexts", "4096", "--batches", "2", "--next-n", "3", "--no-mixes", "--iters", "5"]
        result = run("logits", *small, "--json", tmp_path / "x.json")
        assert result.exit_code == 0, result.output
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert rows[0]["variant"] == "flattened"
        assert sum(row["chosen"] for row in rows) == 1
        assert all(row["median_us"] > 1 for row in rows)

    def test_indexer(self, run):
        small = ["--contexts", "4096", "--batches", "2", "--next-n", "3", "--no-mixes", "--iters", "3"]
        result = run("indexer", *small)
        assert result.exit_code == 0, result.output

    def test_build(self, run, tmp_path):
        small = ["--contexts", "4096", "--batches", "2", "--next-n", "3", "--no-mixes", "--iters", "5"]
        result = run("build", *small, "--json", tmp_path / "x.json")
        assert result.exit_code == 0, result.output
        (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert row["launches"] > 0
        assert row["gpu_us"] > 0

    def test_topk(self, run):
        assert run("topk", "--rows", "3", "--lengths", "5000,70000", "--iters", "3").exit_code == 0
