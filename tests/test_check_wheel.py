import importlib.util
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "check_wheel.py"


@pytest.fixture
def check_wheel():
    spec = importlib.util.spec_from_file_location("check_wheel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(tmp_path, names, name="vllm_dsa-0.1.0-py3-none-any.whl"):
    wheel = tmp_path / name
    with zipfile.ZipFile(wheel, "w") as archive:
        for entry in names:
            archive.writestr(entry, "x")
    return wheel


def test_a_good_wheel(check_wheel, tmp_path):
    assert check_wheel.faults(build(tmp_path, check_wheel.required())) == []


def test_faults_are_named(check_wheel, tmp_path):
    names = [*check_wheel.required()[1:], "tests/test_x.py", "vllm_dsa/k.cubin"]
    problems = check_wheel.faults(build(tmp_path, names, "vllm_dsa-0.1.0-cp311-cp311-linux_x86_64.whl"))
    assert len(problems) == 4
    assert any("vllm_dsa/__init__.py is missing" in problem for problem in problems)


def test_device_code_must_be_in_it(check_wheel, tmp_path):
    problems = check_wheel.faults(build(tmp_path, check_wheel.REQUIRED))
    assert any("vllm_dsa/csrc/sm90_paged_mqa_logits.cu is missing" in problem for problem in problems)
