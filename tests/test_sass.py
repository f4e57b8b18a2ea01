import pytest

from vllm_dsa.kernels import jit, jit_source, sass
from vllm_dsa.kernels.jit import KernelVariant, compile_cubin
from vllm_dsa.kernels.jit_errors import JitUnavailableError
from vllm_dsa.kernels.jit_store import CubinStore
from vllm_dsa.kernels.sass import disassemble, inspect_cubin

# `reverse` needs a barrier and shared memory; `spill` keeps an array that registers cannot index.
TEXT = """
extern "C" __global__ void reverse(int* x) {
  __shared__ int s[256];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = __shfl_xor_sync(~0u, s[255 - threadIdx.x], 1);
}
extern "C" __global__ void spill(int* x, int n) {
  int local[64];
  for (int i = 0; i < 64; i++) local[i] = x[i];
  for (int i = 0; i < n; i++) local[x[i] & 63] += i;
  x[n] = local[n & 63];
}
"""


@pytest.fixture
def cubin(tmp_path, monkeypatch):
    (tmp_path / "two.cu").write_text(TEXT)
    monkeypatch.setattr(jit_source, "csrc_dir", lambda: tmp_path)
    monkeypatch.setenv("VDSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_store", CubinStore())
    return compile_cubin(KernelVariant("two", "reverse")).cubin


def test_a_kernel_without_spills(cubin):
    report = inspect_cubin(cubin, "reverse")
    assert not report.has_spills
    assert report.opcode_counts == dict.fromkeys(sass.OPCODE_CLASSES, 0) | {"BAR": 1, "SHFL": 1}
    assert report.shared_bytes == 1024 + 1024
    assert 0 < report.registers < 32
    assert report.num_instructions > 10


def test_a_kernel_with_spills(cubin):
    report = inspect_cubin(cubin, "spill")
    assert report.has_spills
    assert report.stack_bytes == 256
    assert report.opcode_counts["LDL"]
    assert report.opcode_counts["STL"]


def test_disassembly_is_of_one_kernel(cubin):
    text = disassemble(cubin, "reverse")
    assert "Function : reverse" in text
    assert "Function : spill" not in text


def test_predicated_and_braced_instructions_are_counted():
    lines = """
        /*0010*/              @!P0 LDL.64 R2, [R1] ;       /* 0x0000000001027983 */
                                                           /* 0x000fe20000100a00 */
        /*0020*/             @UP1 UTMALDG.3D [UR8], [UR4] ;
        /*1000*/              { LDL R4, [R1+0x8] ;
    """
    assert sass._INSTRUCTION.findall(lines) == ["LDL", "UTMALDG", "LDL"]


def test_an_unknown_symbol(cubin):
    with pytest.raises(ValueError, match=r"symbol must be one of .*reverse.*, got 'nope'"):
        inspect_cubin(cubin, "nope")


def test_bytes_that_are_no_cubin():
    with pytest.raises(ValueError, match="cuobjdump refuses these 7 bytes: "):
        inspect_cubin(b"rubbish", "reverse")


class TestTool:
    @pytest.fixture(autouse=True)
    def fresh(self):
        sass._find_cuobjdump.cache_clear()
        yield
        sass._find_cuobjdump.cache_clear()

    def test_order(self, mocker):
        assert sass._find_cuobjdump().endswith("triton/backends/nvidia/bin/cuobjdump")
        sass._find_cuobjdump.cache_clear()
        mocker.patch("vllm_dsa.kernels.sass._in_triton", return_value=None)
        mocker.patch("shutil.which", return_value="/on/the/path")
        assert sass._find_cuobjdump() == "/on/the/path"

    def test_none_anywhere(self, mocker):
        mocker.patch("importlib.util.find_spec", return_value=None)
        mocker.patch("shutil.which", return_value=None)
        mocker.patch("cuda.pathfinder.find_nvidia_binary_utility", return_value=None)
        with pytest.raises(JitUnavailableError, match="pip install nvidia-cuda-cuobjdump"):
            disassemble(b"", "reverse")
