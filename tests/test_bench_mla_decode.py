"""The MLA benchmark on CPU tensors: options, checking before timing, and what a row says."""

import importlib.util
import sys
from pathlib import Path

import fake_mla_libraries
import pytest
import torch

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.bench import mla_decode as bench
from vllm_dsa.bench.ceilings import Ceilings
from vllm_dsa.bench.gpu import GpuRig
from vllm_dsa.bench.mla_decode import MlaOptions, bench_mla_decode, mla_tables
from vllm_dsa.bench.mla_inputs import MlaInputs
from vllm_dsa.bench.timing import Timing
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.ops import MlaBackend

CPU = torch.device("cpu")
SMALL = MlaOptions(heads=(2,), batches=(2,), next_ns=(1, 2), contexts=(70,), topk=16)


class FakeGraph:
    def __init__(self, function):
        self.function, self.result = function, function()

    def replay(self):
        again = self.function()
        if isinstance(again, DecodeAttnResult) and again is not self.result:
            self.result.out.copy_(again.out)
            self.result.lse.copy_(again.lse)


@pytest.fixture
def fake_gpu(mocker):
    rig = GpuRig(CPU, planned_capabilities("sm90"), mocker.Mock(), Ceilings(4000.0, 4100.0, 3.0))
    mocker.patch.object(bench, "_set_up", return_value=rig)
    mocker.patch.object(bench, "capture", FakeGraph)
    mocker.patch.object(bench, "syncs_with_host", return_value=False)
    mocker.patch.object(
        bench,
        "measure_interleaved",
        lambda runs, flush, iters: {name: Timing(10.0 + i, 9.0, 12.0) for i, name in enumerate(runs)},
    )


def test_every_shape_is_checked_and_timed(fake_gpu):
    labels = []
    report = bench_mla_decode(SMALL, labels.append)
    assert report.errors == []
    assert len(report.rows) == len(labels) == 2 * 2 * 2
    assert [row.flash_mla_us for row in report.rows] == [None] * 8
    dense, sparse = report.rows[0], report.rows[-1]
    assert (dense.mode, dense.dtype, dense.latent_bytes) == ("dense", "bf16", 2 * 70 * 1152)
    assert (sparse.mode, sparse.dtype, sparse.latent_bytes) == ("sparse", "fp8", 4 * 16 * 656)
    assert dense.gb_per_s == pytest.approx(2 * 70 * 1152 / 10.0 / 1e3)
    assert dense.share == pytest.approx(dense.gb_per_s / 4100)
    assert dense.tflops == pytest.approx(2 * 2 * 70 * 2 * 1088 / 10.0 / 1e6)
    assert dense.torch_us == 11.0
    assert report.environment["command"] == SMALL.command
    tables = mla_tables(report.rows)
    assert [len(table.rows) for table in tables] == [2] * 4
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


@pytest.mark.parametrize(("topk", "next_n"), [(None, 1), (None, 3), (16, 2)])
def test_the_torch_baseline_computes_the_same(topk, next_n):
    inputs = MlaInputs(2, 2, next_n, 70, topk=topk, is_fp8=False, block_size=16, seed=3, device=CPU)
    expected = inputs.run(MlaBackend.REFERENCE)
    found = inputs.torch_baseline().reshape(expected.out.shape)
    torch.testing.assert_close(found.float(), expected.out.float(), rtol=0.05, atol=0.03)


def test_a_library_that_is_there_is_timed_and_checked(fake_gpu, mocker):
    mocker.patch.dict(sys.modules, flash_mla=fake_mla_libraries.FlashMla("2026"))
    mocker.patch("vllm_dsa.ops.mla_decode.resolve_mla_backend", lambda backend, _: backend or MlaBackend.REFERENCE)
    options = MlaOptions(modes=("sparse",), dtypes=("fp8",), heads=(2,), batches=(1,), next_ns=(1,), contexts=(70,))
    report = bench_mla_decode(options, str)
    assert report.errors == []
    assert report.rows[0].flash_mla_us == 12.0


@pytest.mark.parametrize("fault", ["out", "lse", "nan", "unwritten"])
def test_a_wrong_result_has_no_number(fake_gpu, mocker, fault):
    right = MlaInputs.run

    def run(self, backend, buffers=None):
        found = right(self, MlaBackend.REFERENCE)
        if backend is MlaBackend.REFERENCE:
            return found
        if backend is not None:
            raise ImportError
        if fault == "unwritten":
            return DecodeAttnResult(buffers["out"], buffers["lse"], LseBase.E)
        factor = torch.nan if fault == "nan" else 1.05
        out = found.out * (1.0 if fault == "lse" else factor)
        return DecodeAttnResult(out, found.lse + 0.1 * (fault == "lse"), found.base)

    mocker.patch.object(MlaInputs, "run", run)
    report = bench_mla_decode(SMALL, str)
    assert report.rows == []
    assert len(report.errors) == 8
    assert "out is off by" in report.errors[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modes": ("both",)}, r"--modes must be some of dense, sparse, got \['both'\]"),
        ({"dtypes": ()}, "--dtypes must be some of bf16, fp8"),
        ({"next_ns": (0,)}, "--next-n must be whole numbers of at least 1"),
        ({"block_size": 0}, "--block-size must be at least 1, got 0"),
        ({"contexts": (3,), "next_ns": (4,)}, "--contexts must be at least 4"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        MlaOptions(**change)


def test_without_a_gpu_it_says_so(mocker):
    mocker.patch.object(bench, "is_cuda", return_value=False)
    with pytest.raises(NotImplementedError, match="torch sees no CUDA device"):
        bench_mla_decode(MlaOptions(), str)


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[1] / "benchmarks" / "bench_mla_decode.py"
    spec = importlib.util.spec_from_file_location("bench_mla_decode", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestScript:
    def test_the_printed_command_measures_the_same(self, script):
        options = MlaOptions(modes=("sparse",), heads=(16,), next_ns=(1, 2, 4), topk=512, seed=7)
        assert script.parse(options.command.split()[2:]) == (options, None)
        assert script.parse([]) == (MlaOptions(), None)

    def test_tables_and_a_report(self, script, fake_gpu, tmp_path, capsys):
        arguments = [*SMALL.command.split()[2:], "--json", str(tmp_path / "x.json")]
        assert script.main(arguments) == 0
        printed = capsys.readouterr().out
        assert f"reproduce: {SMALL.command}" in printed
        assert "MLA decode, sparse, fp8 cache" in printed
        assert (tmp_path / "x.json").exists()

    def test_a_wrong_result_is_exit_code_1(self, script, fake_gpu, mocker, capsys):
        mocker.patch.object(bench, "_fault", return_value="off")
        assert script.main(SMALL.command.split()[2:]) == 1
        assert "WRONG: dense bf16, 2 heads, batch 2, n=1, context 70: off" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu():
    options = MlaOptions(heads=(16, 128), batches=(2,), next_ns=(1, 2), contexts=(4096,), iters=3)
    report = bench_mla_decode(options, str)
    assert report.errors == []
    assert len(report.rows) == 16
