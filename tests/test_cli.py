import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_dsa import __version__, envs
from vllm_dsa.cli.app import app
from vllm_dsa.cli.replay_tables import human_bytes
from vllm_dsa.kernels.jit_source import KernelVariant
from vllm_dsa.kernels.jit_store import CubinStore
from vllm_dsa.ops import LogitsBackend

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def small_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(GOOD | {"timestamp": 30 * i, "hash_ids": [1, 10 + i]}) for i in range(8)]
    path.write_text("\n".join(lines) + "\n")
    return path


class TestReplay:
    def test_tables(self, run, small_trace):
        result = run("replay", small_trace, "--arch", "sm90", "--verify-every", "5")
        assert result.exit_code == 0, result.output
        for text in ("use_flattening=False", "logits_backend=sm90", "ragged", "mismatches: 0 of", "8 of 8 finished"):
            assert text in result.output

    def test_json(self, run, small_trace):
        result = run("replay", small_trace, "--arch", "sm90", "--num-speculative-tokens", "2", "--json")
        report = json.loads(result.stdout)
        assert result.exit_code == 0
        assert report["startup"]["use_flattening"] == "True"
        assert report["startup"]["logits_backend"] == "sm90"
        assert report["verification"]["mismatches"] == 0
        assert report["tokens"]["output"] == 72
        assert {"median", "p99", "count"} == set(report["build_us"]["decode"])

    def test_deep_gemm_alone(self, run, small_trace, monkeypatch):
        monkeypatch.setenv("VDSA_LOGITS_BACKEND", "deep_gemm")
        result = run("replay", small_trace, "--arch", "sm90", "--verify-every", "5")
        assert result.exit_code == 0, result.output
        for text in ("logits_backend=deep_gemm", "native c=4", "mismatches: 0 of"):
            assert text in result.output
        result = run("replay", small_trace, "--arch", "cpu")
        assert result.exit_code == 2
        assert "the deep_gemm logits backend needs a DeepGEMM build" in result.stderr

    def test_limit_model_and_plot(self, run, small_trace, tmp_path):
        png = tmp_path / "out.png"
        result = run("replay", small_trace, "--limit", "2", "--model", "glm-5", "--plot", png)
        assert result.exit_code == 0, result.output
        assert "2 of 2 finished" in result.output
        assert png.read_bytes().startswith(b"\x89PNG")

    def test_skipped_lines_are_reported_with_their_numbers(self, run, small_trace):
        with small_trace.open("a") as file:
            file.write('{"timestamp": 0}\nnot json\n')
        result = run("replay", small_trace, "--arch", "sm90")
        assert result.exit_code == 0
        assert "skipped: line 9:" in result.output
        assert "skipped: line 10:" in result.output

    def test_strict_stops_at_a_malformed_line(self, run, small_trace):
        with small_trace.open("a") as file:
            file.write("not json\n")
        result = run("replay", small_trace, "--strict")
        assert result.exit_code == 2
        assert "line 9" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_a_mismatch_is_exit_code_1(self, run, small_trace, mocker):
        mocker.patch.dict("vllm_dsa.runner.oracle.LOGITS_TOLERANCE", {LogitsBackend.REFERENCE: -1.0})
        result = run("replay", small_trace, "--verify-every", "3")
        assert result.exit_code == 1
        assert "MISMATCH: step 3" in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["/no/such/trace.jsonl"], "no such file: /no/such/trace.jsonl"),
            (["--model", "deepseek-v9"], "neither a preset"),
            (["--arch", "sm80"], "arch must be one of"),
            (["--step-ms", "0"], "step_ms must be positive"),
            (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "max_num_batched_tokens"),
            (["--plot", "/no/such/folder/out.png"], "no such folder"),
            (["--acceptance-rate", "2"], "--acceptance-rate"),
            (["--num-speculative-tokens", "-1"], "--num-speculative-tokens"),
            (["--limit", "0"], "--limit"),
        ],
    )
    def test_bad_input_is_exit_code_2_and_no_traceback(self, run, arguments, message):
        result = run("replay", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr

    def test_a_model_folder_with_a_bad_config(self, run, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        result = run("replay", "--model", tmp_path)
        assert result.exit_code == 2
        assert "model_type must be one of deepseek_v32, glm_moe_dsa, got 'llama'" in result.stderr

    def test_a_folder_or_binary_file_as_trace(self, run, tmp_path):
        assert run("replay", tmp_path).exit_code == 2
        binary = tmp_path / "x.bin"
        binary.write_bytes(b"\xff\xfe\x00")
        result = run("replay", binary, "--arch", "cpu")
        assert result.exit_code == 0
        assert "skipped: line 1" in result.output

    def test_interrupted(self, run, small_trace, mocker):
        mocker.patch("vllm_dsa.cli.replay.Replay.run", side_effect=KeyboardInterrupt)
        assert run("replay", small_trace).exit_code == 130


class TestPlan:
    def test_table(self, run):
        result = run("plan", "--depths", "3,3,3,1", "--arch", "sm90")
        assert result.exit_code == 0
        for text in ("ragged by sm90", "4 (flattened 10)", "none on 132 SMs", "ragged *", "7.99", "6.03"):
            assert text in result.output

    def test_table_of_deep_gemm_alone(self, run, monkeypatch):
        monkeypatch.setenv("VDSA_LOGITS_BACKEND", "deep_gemm")
        result = run("plan", "--depths", "3,3,3,1", "--arch", "sm90")
        assert result.exit_code == 0
        for text in ("grouped by deep_gemm", "7 (flattened 10)", "132 on 132 SMs", "2 *"):
            assert text in result.output
        assert "ragged" not in result.output

    def test_another_build(self, run, monkeypatch):
        monkeypatch.setenv("VDSA_LOGITS_BACKEND", "deep_gemm")
        result = run("plan", "--depths", "4,4", "--arch", "sm90", "--native", "1,2", "--json")
        values = json.loads(result.stdout)
        assert (values["form"], values["group_size"], values["num_groups"]) == ("grouped", 2, 4)
        assert values["schedule_slots"] == 132

    def test_our_kernel_needs_no_schedule(self, run):
        values = json.loads(run("plan", "--depths", "4,4", "--arch", "sm90", "--json").stdout)
        assert (values["form"], values["backend"], values["schedule_slots"]) == ("ragged", "sm90", None)

    def test_native_4_halves_the_slots(self, run, monkeypatch):
        monkeypatch.setenv("VDSA_LOGITS_BACKEND", "deep_gemm")
        values = json.loads(run("plan", "--depths", "4,4", "--arch", "sm90", "--json").stdout)
        assert (values["form"], values["schedule_slots"], values["num_sms"]) == ("native", 66, 132)

    def test_this_machine_and_blackwell(self, run):
        assert run("plan", "--depths", "2").exit_code == 0
        assert "ragged" in run("plan", "--depths", "2,1", "--arch", "sm100").output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--depths", "3,x"], "--depths must be whole numbers separated by commas, got '3,x'"),
            (["--depths", "3,-1"], "depths must not be negative, got -1 for request 1"),
            (["--depths", "3", "--native", "1,0"], "native_next_n must name"),
            (["--depths", "3", "--arch", "sm70"], "arch must be one of"),
        ],
    )
    def test_bad_input(self, run, arguments, message):
        result = run("plan", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr


class TestInfo:
    def test_tables_and_json(self, run):
        assert "DeepGEMM" in run("info", "--help").output
        result = run("info", "--json")
        assert result.exit_code == 0
        sections = json.loads(result.stdout)
        assert sections["versions"]["vllm-dsa"] == __version__
        assert set(sections["environment"]) == set(envs.VARIABLES)
        assert "native_next_n" in sections["capabilities in use"]
        assert sections["logits backends"]["planned for"]
        assert "capabilities in use" in run("info").output

    def test_it_prints_even_when_every_probe_fails(self, run, mocker):
        for name in ("_versions", "_gpus", "_builds", "resolve_capabilities", "_environment"):
            mocker.patch(f"vllm_dsa.cli.info.{name}", side_effect=OSError("broken"))
        result = run("info", "--json")
        assert result.exit_code == 0
        assert all(section == {"error": "OSError: broken"} for section in json.loads(result.stdout).values())

    def test_every_build_found_is_listed(self, run, mocker):
        from vllm_dsa.deep_gemm_wrapper import DeepGemmBuild, DeepGemmUnavailableError

        builds = [
            DeepGemmBuild("deep_gemm", "sgl-deep-gemm", "0.2.5", "/a"),
            DeepGemmBuild("vllm.third_party.deep_gemm", "vllm", "0.33.0", "/b"),
        ]
        mocker.patch("vllm_dsa.cli.info.find_builds", return_value=builds)
        mocker.patch("vllm_dsa.cli.info.load_deep_gemm", side_effect=DeepGemmUnavailableError("no such symbol"))
        found = json.loads(run("info", "--json").stdout)["deep_gemm builds"]
        assert [build["version"] for build in found] == ["0.2.5", "0.33.0"]
        assert "no such symbol" in found[0]["loaded"]


class TestKernels:
    @pytest.fixture(autouse=True)
    def variants(self, tmp_path, monkeypatch, mocker):
        (tmp_path / "add.cu").write_text('extern "C" __global__ void add(int* x) { x[threadIdx.x] += ADDEND; }\n')
        monkeypatch.setattr("vllm_dsa.kernels.jit_source.csrc_dir", lambda: tmp_path)
        monkeypatch.setattr("vllm_dsa.kernels.jit._store", CubinStore())
        monkeypatch.setenv("VDSA_CACHE_DIR", str(tmp_path / "cache"))
        variants = tuple(KernelVariant("add", "add", (("ADDEND", str(i)),)) for i in (1, 2))
        for command in ("inspect", "precompile", "cache"):
            mocker.patch(f"vllm_dsa.cli.{command}.all_variants", return_value=variants)
        return variants

    def test_precompile_then_run_without_the_compiler(self, run, tmp_path, monkeypatch):
        result = run("precompile")
        assert result.exit_code == 0, result.output
        assert [line.rpartition("  ")[2] for line in result.output.splitlines()] == ["add[ADDEND=1]", "add[ADDEND=2]"]
        assert all(Path(line.split()[0], "kernel.cubin").is_file() for line in result.output.splitlines())
        monkeypatch.setenv("VDSA_DISABLE_JIT", "1")
        assert run("inspect").exit_code == 0
        result = run("inspect", "--arch", "sm_100a")
        assert result.exit_code == 2
        assert "run `vllm-dsa precompile --arch sm_100a`" in result.stderr

    def test_precompile_into_a_cache_that_cannot_be_written(self, run, tmp_path):
        (tmp_path / "cache").write_text("a file")
        result = run("precompile")
        assert result.exit_code != 0
        assert str(tmp_path / "cache") in result.stderr

    def test_inspect(self, run):
        result = run("inspect", "add")
        assert result.exit_code == 0, result.output
        for text in ("add, sm_90a", "ADDEND=1", "ADDEND=2", "registers", "all "):
            assert text in result.output

    def test_inspect_prints_the_machine_code(self, run):
        result = run("inspect", "--sass")
        assert result.output.count("Function : add") == 2
        assert "EXIT" in result.output

    def test_cache(self, run, tmp_path):
        root = tmp_path / "cache"
        assert run("cache").output == f"{root}: 0 entries, 0 B\n"
        run("precompile")
        assert f"{root}: 2 entries, " in run("cache").output
        assert "add[ADDEND=1]" in run("cache").output
        next(root.glob("*/meta.json")).write_text("")
        assert "damaged" in run("cache").output
        assert run("cache", "--prune").output == f"removed 0 entries from {root}\n"
        (tmp_path / "add.cu").write_text("// rewritten\n")
        assert run("cache", "--prune").output == f"removed 2 entries from {root}\n"
        run("precompile")
        assert run("cache", "--clear").output == f"removed 2 entries from {root}\n"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["inspect", "nope"], "KERNEL must be one of add, got 'nope'"),
            (["inspect", "--arch", "sm90"], "arch must be of the form sm_90a, got 'sm90'"),
            (["precompile", "--arch", "sm_17"], "cannot compile add[ADDEND=1] for sm_17"),
            (["cache", "--clear", "--prune"], "--clear and --prune exclude each other"),
        ],
    )
    def test_bad_input(self, run, arguments, message):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr


def test_version(run):
    assert run("--version").output.strip() == __version__


def test_without_the_cli_extra_the_message_says_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['typer'] = None\n"
        "from vllm_dsa.cli import main\n"
        "main()"
    )  # fmt: skip
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "vllm-dsa: typer is not installed: pip install 'vllm-dsa[cli]'\n"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (2.5e13, "25 TB")])
def test_human_bytes(count, text):
    assert human_bytes(count) == text
