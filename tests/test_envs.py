import re
from pathlib import Path

import pytest

from vllm_dsa import envs

REPO = Path(__file__).parents[1]


def test_defaults(monkeypatch):
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert {name: envs.get(name) for name in envs.VARIABLES} == {
        "VDSA_VALIDATE": False,
        "VDSA_MAX_LOGITS_MB": 512,
        "VDSA_LOGITS_BACKEND": "auto",
        "VDSA_TOPK_BACKEND": "auto",
        "VDSA_MLA_BACKEND": "auto",
        "VDSA_CACHE_DIR": None,
        "VDSA_DISABLE_JIT": False,
        "VDSA_REQUIRE_GPU": False,
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VDSA_VALIDATE", "1", True),
        ("VDSA_VALIDATE", "False", False),
        ("VDSA_MAX_LOGITS_MB", " 64 ", 64),
        ("VDSA_LOGITS_BACKEND", "sm90", "sm90"),
        ("VDSA_TOPK_BACKEND", "reference", "reference"),
        ("VDSA_TOPK_BACKEND", "deep_select", "deep_select"),
        ("VDSA_MLA_BACKEND", "flash_mla", "flash_mla"),
        ("VDSA_CACHE_DIR", "/var/cache/kernels", Path("/var/cache/kernels")),
        ("VDSA_CACHE_DIR", "~/kernels", Path.home() / "kernels"),
        ("VDSA_CACHE_DIR", "", None),
    ],
)
def test_parsing(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert envs.get(name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VDSA_VALIDATE", "yes please"),
        ("VDSA_MAX_LOGITS_MB", "0"),
        ("VDSA_MAX_LOGITS_MB", "-3"),
        ("VDSA_LOGITS_BACKEND", "sm100"),
        ("VDSA_TOPK_BACKEND", "deep_gemm"),
        ("VDSA_LOGITS_BACKEND", ""),
        ("VDSA_CACHE_DIR", "cache"),
    ],
)
def test_rubbish_is_refused_with_the_variable_named(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"environment variable {name}='{text}': allowed"):
        envs.get(name)


def test_unknown_names_are_a_programming_error():
    with pytest.raises(KeyError):
        envs.get("VDSA_NOPE")


def test_every_variable_is_documented_and_no_other():
    table = (REPO / "docs" / "environment.md").read_text()
    documented = set(re.findall(r"^\| `(VDSA_\w+)`", table, flags=re.MULTILINE))
    assert documented == set(envs.VARIABLES)
    for name, variable in envs.VARIABLES.items():
        assert re.search(rf"^\| `{name}` \| `{re.escape(variable.default)}` \|", table, flags=re.MULTILINE), name


def test_only_declared_variables_are_read():
    used = {
        name
        for path in [*REPO.glob("vllm_dsa/**/*.py"), *REPO.glob("tests/*.py")]
        if path.name != "test_envs.py"
        for name in re.findall(r"VDSA_[A-Z_]+[A-Z]", path.read_text())
    }
    assert used <= set(envs.VARIABLES)
