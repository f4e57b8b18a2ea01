import logging
import sys
import threading
import time

import pytest

from vllm_dsa.kernels import jit, jit_compile, jit_source
from vllm_dsa.kernels.jit import KernelVariant, clear_cache, compile_cubin, load_kernel, prune_cache
from vllm_dsa.kernels.jit_cache import CubinCache
from vllm_dsa.kernels.jit_errors import JitDisabledError, JitUnavailableError, KernelCompileError, KernelLoadError
from vllm_dsa.kernels.jit_once import OncePerKey
from vllm_dsa.kernels.jit_store import CubinStore
from vllm_dsa.platform import CPU, DeviceInfo

TEXT = """
#include "scale.cuh"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] = scaled(x[threadIdx.x]); }
"""
HEADER = """
#pragma once
__device__ float scaled(float x) { return x * FACTOR; }
"""
VARIANT = KernelVariant("scale", "scale", (("FACTOR", "3"),))


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cu").write_text(TEXT)
    (folder / "scale.cuh").write_text(HEADER)
    monkeypatch.setattr(jit_source, "csrc_dir", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, csrc):
    monkeypatch.setenv("VDSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_store", CubinStore())
    return CubinCache(tmp_path / "cache")


@pytest.fixture
def compilations(mocker):
    return mocker.spy(jit, "compile_source")


class TestCompile:
    def test_a_cubin_and_the_report_of_ptxas(self, cache):
        compiled = compile_cubin(VARIANT)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert "Used " in compiled.log
        assert "0 bytes spill stores" in compiled.log
        assert [entry.name for entry in cache.entries()] == [compiled.entry_name]
        assert cache.entries()[0].meta.kernel == "scale[FACTOR=3]"

    def test_the_second_call_reads_the_cache(self, compilations):
        assert compile_cubin(VARIANT) == compile_cubin(VARIANT)
        assert compilations.call_count == 1

    def test_a_header_edit_compiles_again(self, csrc):
        before = compile_cubin(VARIANT)
        (csrc / "scale.cuh").write_text(HEADER.replace("x * FACTOR", "x + FACTOR"))
        after = compile_cubin(VARIANT)
        assert before.key != after.key
        assert before.cubin != after.cubin

    def test_macros_and_architectures_are_cubins_of_their_own(self, cache):
        compiled = [
            compile_cubin(VARIANT),
            compile_cubin(KernelVariant("scale", "scale", (("FACTOR", "5"),))),
            compile_cubin(VARIANT, "sm_100a"),
        ]
        assert len({one.cubin for one in compiled}) == 3
        assert len(cache.entries()) == 3

    def test_a_truncated_cubin_is_compiled_again(self, cache, compilations):
        first = compile_cubin(VARIANT)
        path = cache.root / first.entry_name / "kernel.cubin"
        path.write_bytes(path.read_bytes()[:100])
        assert compile_cubin(VARIANT).cubin == first.cubin
        assert compilations.call_count == 2
        assert len(list((cache.root / "quarantine").iterdir())) == 1

    def test_a_refused_source_names_itself_and_shows_the_log(self, csrc):
        (csrc / "scale.cuh").write_text("__device__ float scaled(float x) { return y; }\n")
        with pytest.raises(KernelCompileError) as caught:
            compile_cubin(VARIANT)
        assert str(caught.value).startswith("cannot compile scale[FACTOR=3] for sm_90a: ")
        assert '\nscale.cuh(1): error: identifier "y" is undefined' in str(caught.value)

    def test_no_header_but_those_of_the_key_is_found(self, csrc, tmp_path, monkeypatch):
        (tmp_path / "stray.cuh").write_text("")
        (csrc / "scale.cu").write_text("#include <stray.cuh>\n" + TEXT)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(KernelCompileError, match=r'cannot open source file "stray\.cuh"'):
            compile_cubin(VARIANT)

    @pytest.mark.parametrize("arch", ["sm90", "compute_90a", "sm_90x", ""])
    def test_an_arch_of_another_form(self, arch):
        with pytest.raises(ValueError, match=f"arch must be of the form sm_90a, got '{arch}'"):
            compile_cubin(VARIANT, arch)

    def test_an_arch_that_the_compiler_does_not_know(self):
        with pytest.raises(KernelCompileError, match=r"for sm_17: [\s\S]*gpu-architecture"):
            compile_cubin(VARIANT, "sm_17")

    def test_without_the_compiler_the_message_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        jit_compile.compiler_version.cache_clear()
        with pytest.raises(JitUnavailableError, match=r"pip install 'cuda-core>=1\.2,<2' and NVRTC"):
            compile_cubin(VARIANT)


class TestCacheUse:
    def test_jit_disabled(self, monkeypatch):
        monkeypatch.setenv("VDSA_DISABLE_JIT", "1")
        with pytest.raises(JitDisabledError, match="run `vllm-dsa precompile --arch sm_90a`"):
            compile_cubin(VARIANT)
        monkeypatch.setenv("VDSA_DISABLE_JIT", "0")
        compiled = compile_cubin(VARIANT)
        monkeypatch.setenv("VDSA_DISABLE_JIT", "1")
        assert compile_cubin(VARIANT) == compiled

    @pytest.mark.parametrize("reason", ["read-only", "open to all", "link", "no folder"])
    def test_a_cache_that_cannot_be_used_costs_one_warning(
        self, cache, reason, caplog, mocker, compilations, tmp_path, monkeypatch
    ):
        if reason == "read-only":
            # These tests may run as root, whom no mode stops; and the compiler's own folder is elsewhere.
            tempfile = mocker.patch("vllm_dsa.kernels.jit_cache.tempfile")
            tempfile.mkdtemp.side_effect = OSError(30, "Read-only file system")
        elif reason == "open to all":
            cache.root.mkdir()
            cache.root.chmod(0o777)
        elif reason == "link":
            name = compile_cubin(VARIANT).entry_name
            compilations.reset_mock()
            (cache.root / name).rename(tmp_path / "elsewhere")
            (cache.root / name).symlink_to(tmp_path / "elsewhere")
        else:
            cache.root.write_text("a file")
        with caplog.at_level(logging.WARNING, "vllm_dsa"):
            compiled = compile_cubin(VARIANT)
            assert compile_cubin(VARIANT) == compiled
            compile_cubin(KernelVariant("scale", "scale", (("FACTOR", "5"),)))
        assert compilations.call_count == 2
        assert len(caplog.records) == 1
        assert "this process keeps its kernels in memory" in caplog.text

    def test_clear(self, cache):
        compile_cubin(VARIANT)
        assert clear_cache() == 1
        assert cache.entries() == []

    def test_prune_keeps_the_current_variants_of_every_architecture(self, cache, csrc):
        other = KernelVariant("scale", "scale", (("FACTOR", "5"),))
        compile_cubin(other)
        (csrc / "scale.cu").write_text(TEXT + "// edited\n")
        kept = {compile_cubin(VARIANT).entry_name, compile_cubin(VARIANT, "sm_100a").entry_name}
        compile_cubin(other)
        assert prune_cache([VARIANT]) == 2
        assert {entry.name for entry in cache.entries()} == kept


class TestLoad:
    def test_without_a_gpu(self, mocker):
        mocker.patch("torch.cuda.current_device", side_effect=AssertionError("Torch not compiled with CUDA enabled"))
        with pytest.raises(KernelLoadError, match="loading a kernel needs a CUDA device: Torch not compiled"):
            load_kernel(VARIANT)

    @pytest.mark.parametrize(("family", "minor", "arch"), [(8, 0, "sm_80"), (9, 0, "sm_90a"), (10, 3, "sm_103a")])
    def test_the_arch_is_the_devices_own(self, family, minor, arch):
        assert jit._native_arch(DeviceInfo(family, minor, 132, "planned")) == arch

    def test_the_cpu_has_none(self):
        with pytest.raises(KernelLoadError, match="the current one is cpu"):
            jit._native_arch(CPU)

    def test_once_per_variant_device_and_shared_memory(self, mocker):
        mocker.patch("vllm_dsa.kernels.jit._loaded", OncePerKey())
        load = mocker.patch("vllm_dsa.kernels.jit._load")
        ordinal = mocker.patch("torch.cuda.current_device", return_value=0)
        first = load_kernel(VARIANT, dynamic_shared_bytes=65536)
        assert load_kernel(VARIANT, dynamic_shared_bytes=65536) is first
        load_kernel(VARIANT)
        ordinal.return_value = 1
        load_kernel(VARIANT)
        assert [call.args for call in load.call_args_list] == [(VARIANT, 0, 65536), (VARIANT, 0, 0), (VARIANT, 1, 0)]

    @pytest.fixture
    def driver(self, mocker):
        """A device that accepts everything, of which no kernel comes to run."""
        mocker.patch("vllm_dsa.kernels.jit.current_device", return_value=DeviceInfo(9, 0, 132, "H200"))
        mocker.patch("cuda.core.Device")
        mocker.patch("cuda.core.ObjectCode")
        driver = mocker.patch("cuda.bindings.driver")
        driver.cuDeviceGet.return_value = (0, "device")
        driver.cuKernelSetAttribute.return_value = (0,)
        driver.cuKernelGetFunction.return_value = (0, "function")
        driver.cuDriverGetVersion.return_value = (0, 13010)
        return driver

    @pytest.mark.parametrize(("shared_bytes", "calls"), [(48 * 1024, 0), (48 * 1024 + 1, 1)])
    def test_large_shared_memory_is_asked_for(self, driver, shared_bytes, calls):
        assert jit._load(VARIANT, 0, shared_bytes).function == "function"
        assert driver.cuKernelSetAttribute.call_count == calls

    def test_a_refusal_names_the_arch_and_the_driver(self, driver, mocker):
        mocker.patch("cuda.core.ObjectCode.from_cubin", side_effect=RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU"))
        with pytest.raises(KernelLoadError, match=r"H200 \(driver for CUDA 13\.1\) .* sm_90a .*NO_BINARY_FOR_GPU"):
            jit._load(VARIANT, 0, 0)


class TestOncePerKey:
    def test_threads_build_once_and_side_by_side(self):
        values, builds, both = OncePerKey(), [], threading.Barrier(2, timeout=10)

        def build(key):
            builds.append(key)
            both.wait()  # two keys must be in the making at once
            time.sleep(0.01)
            return key

        threads = [threading.Thread(target=values.get, args=(key, lambda key=key: build(key))) for key in "aabb"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(builds) == ["a", "b"]

    def test_a_failed_build_is_tried_again(self):
        values = OncePerKey()
        with pytest.raises(ZeroDivisionError):
            values.get("key", lambda: 1 // 0)
        assert values.get("key", lambda: 7) == 7
