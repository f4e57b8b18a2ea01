import dataclasses
import os
import subprocess
import sys

import pytest

from vllm_dsa.kernels import jit_source
from vllm_dsa.kernels.jit_errors import JitUnavailableError
from vllm_dsa.kernels.jit_source import KernelSource, KernelVariant, cache_key, csrc_dir, read_source

VARIANT = KernelVariant("scale", "scale", (("FACTOR", "3"), ("OFFSET", "1")))
SOURCE = KernelSource('#include "a.cuh"\n', (("a.cuh", "int a;\n"), ("b.cuh", "int b;\n")))
KEY = (VARIANT, SOURCE, "sm_90a", ("std=c++20", "lineinfo=True"), "nvrtc 13.0")


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cuh").write_text("#pragma once\n")
    (folder / "scale.cu").write_text('#include "scale.cuh"\n')
    monkeypatch.setattr(jit_source, "csrc_dir", lambda: folder)
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        (dataclasses.replace(VARIANT, source="other"), *KEY[1:]),
        (dataclasses.replace(VARIANT, symbol="other"), *KEY[1:]),
        (dataclasses.replace(VARIANT, macros=(("FACTOR", "4"), ("OFFSET", "1"))), *KEY[1:]),
        (dataclasses.replace(VARIANT, macros=(("FACTOR", "3"), ("BIAS", "1"))), *KEY[1:]),
        (dataclasses.replace(VARIANT, macros=VARIANT.macros[::-1]), *KEY[1:]),
        (dataclasses.replace(VARIANT, macros=VARIANT.macros[:1]), *KEY[1:]),
        (VARIANT, dataclasses.replace(SOURCE, text=SOURCE.text + " "), *KEY[2:]),
        (VARIANT, dataclasses.replace(SOURCE, headers=SOURCE.headers[:1]), *KEY[2:]),
        (VARIANT, dataclasses.replace(SOURCE, headers=(SOURCE.headers[0], ("b.cuh", "int c;\n"))), *KEY[2:]),
        (VARIANT, dataclasses.replace(SOURCE, headers=(SOURCE.headers[0], ("c.cuh", "int b;\n"))), *KEY[2:]),
        (*KEY[:2], "sm_90", *KEY[3:]),
        (*KEY[:3], KEY[3][::-1], KEY[4]),
        (*KEY[:3], ("std=c++20lineinfo=True",), KEY[4]),
        (*KEY[:4], "nvrtc 13.1"),
    ],
)
def test_every_field_counts(changed):
    assert cache_key(*changed) != cache_key(*KEY)


@pytest.mark.parametrize("constant", ["CACHE_SCHEMA", "__version__"])
def test_the_cache_and_the_package_version_count(monkeypatch, constant):
    before = cache_key(*KEY)
    monkeypatch.setattr(jit_source, constant, "other")
    assert cache_key(*KEY) != before


def test_no_two_fields_run_into_each_other():
    first = dataclasses.replace(VARIANT, macros=(("AB", "C"),))
    second = dataclasses.replace(VARIANT, macros=(("A", "BC"),))
    assert cache_key(first, *KEY[1:]) != cache_key(second, *KEY[1:])


def test_the_key_is_the_same_in_any_process_and_folder(csrc, tmp_path):
    program = f"""
import pathlib
from vllm_dsa.kernels import jit_source
jit_source.csrc_dir = lambda: pathlib.Path({str(csrc)!r})
variant = jit_source.KernelVariant("scale", "scale", (("FACTOR", "3"),))
print(jit_source.cache_key(variant, jit_source.read_source(variant), "sm_90a", ("a=1", "b=2"), "nvrtc 13.0"))
"""
    keys = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed}
        keys.add(subprocess.check_output([sys.executable, "-c", program], cwd=folder, env=environment, text=True))
    assert len(keys) == 1


def test_headers_are_found_recursively(csrc):
    (csrc / "parts").mkdir()
    (csrc / "parts" / "inner.cuh").write_text('#include <scale.cuh>\n  #  include "innermost.cuh"  // why\n')
    (csrc / "innermost.cuh").write_text("#include <stdint.h>\n")
    (csrc / "nested.cu").write_text('#include "parts/inner.cuh"\n// #include "not_there.cuh"\n')
    source = read_source(KernelVariant("nested", "nested"))
    assert [name for name, _ in source.headers] == ["innermost.cuh", "parts/inner.cuh", "scale.cuh"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('#include "missing.cuh"', "bad.cu: an included header must lie in .*got 'missing.cuh'"),
        ('#include "../outside.cuh"', "got '../outside.cuh'"),
        ('#include "/etc/passwd"', "got '/etc/passwd'"),
        ("#include HEADER", "must name its header as \"name\", got 'HEADER'"),
    ],
)
def test_an_include_that_the_key_could_not_follow_is_refused(csrc, line, message):
    (csrc.parent / "outside.cuh").write_text("")
    (csrc / "bad.cu").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=message):
        read_source(KernelVariant("bad", "bad"))


def test_an_unknown_source_is_refused(csrc):
    with pytest.raises(ValueError, match=r"source must be one of scale in .*, got 'nope'"):
        read_source(KernelVariant("nope", "nope"))


def test_sources_are_found_in_a_checkout_and_in_an_installed_package(monkeypatch, tmp_path):
    assert (csrc_dir() / "README.md").is_file()
    installed = tmp_path / "site-packages" / "vllm_dsa"
    monkeypatch.setattr(jit_source, "__file__", str(installed / "kernels" / "jit_source.py"))
    with pytest.raises(JitUnavailableError, match="reinstall vllm-dsa"):
        csrc_dir()
    (tmp_path / "site-packages" / "csrc").mkdir(parents=True)
    assert csrc_dir() == tmp_path / "site-packages" / "csrc"
    (installed / "csrc").mkdir(parents=True)
    assert csrc_dir() == installed / "csrc"


@pytest.mark.parametrize(
    ("symbol", "text"), [("scale", "scale[FACTOR=3, OFFSET=1]"), ("entry", "scale:entry[FACTOR=3, OFFSET=1]")]
)
def test_a_variant_as_text(symbol, text):
    assert str(dataclasses.replace(VARIANT, symbol=symbol)) == text
