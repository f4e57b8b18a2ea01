import sys

import pytest

from vllm_dsa.deep_gemm_wrapper import DeepGemmUnavailableError, builds, find_builds, has_deep_gemm, load_deep_gemm


@pytest.fixture(autouse=True)
def fresh_search(monkeypatch):
    builds._load_first_importable.cache_clear()
    before = set(sys.modules)
    yield
    builds._load_first_importable.cache_clear()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("deep_gemm", "vllm"):
            del sys.modules[name]


def write_module(root, name, text):
    path = root.joinpath(*name.split("."))
    path.mkdir(parents=True)
    for parent in [path, *path.parents]:
        if parent == root:
            break
        (parent / "__init__.py").touch()
    (path / "__init__.py").write_text(text)


def test_external_build_comes_before_the_vendored_one(tmp_path, monkeypatch):
    write_module(tmp_path, "deep_gemm", "__version__ = '9.1'\ndef get_num_sms(): return 7")
    write_module(tmp_path, "vllm.third_party.deep_gemm", "__version__ = '2.8.1'")
    monkeypatch.syspath_prepend(tmp_path)
    assert [build.provider for build in find_builds()] == ["deep_gemm", "vllm.third_party.deep_gemm"]
    loaded = load_deep_gemm()
    assert (loaded.build.provider, loaded.build.version) == ("deep_gemm", "9.1")
    assert loaded.function("get_num_sms")() == 7
    assert has_deep_gemm()


def test_finding_builds_imports_nothing(tmp_path, monkeypatch):
    write_module(tmp_path, "deep_gemm", "raise SystemError('imported')")
    write_module(tmp_path, "vllm.third_party.deep_gemm", "raise SystemError('imported')")
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(find_builds()) == 2


def test_a_build_that_cannot_be_imported_gives_way_to_the_next(tmp_path, monkeypatch):
    write_module(tmp_path, "deep_gemm", "raise ImportError('undefined symbol: _ZN3c10')")
    write_module(tmp_path, "vllm.third_party.deep_gemm", "__version__ = '2.8.1'")
    monkeypatch.syspath_prepend(tmp_path)
    build = load_deep_gemm().build
    assert (build.provider, build.version) == ("vllm.third_party.deep_gemm", "2.8.1")


def test_error_says_what_was_tried_and_how_to_get_one(tmp_path, monkeypatch):
    write_module(tmp_path, "deep_gemm", "raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_deep_gemm()
    with pytest.raises(DeepGemmUnavailableError) as caught:
        load_deep_gemm()
    message = str(caught.value)
    assert "OSError: libcudart.so.13" in message
    assert "vllm.third_party.deep_gemm: not installed" in message
    assert "pip install" in message


def test_missing_function_is_named(tmp_path, monkeypatch):
    write_module(tmp_path, "deep_gemm", "")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeepGemmUnavailableError, match="no function 'fp8_paged_mqa_logits'"):
        load_deep_gemm().function("fp8_paged_mqa_logits")
