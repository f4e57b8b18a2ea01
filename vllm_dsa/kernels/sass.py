"""What is inside a cubin: registers, local memory, and the instructions that decide how fast it can be."""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_dsa.kernels.jit_errors import JitUnavailableError

# Tensor cores, the copy engine, spills, barriers, shuffles.
OPCODE_CLASSES = ("QGMMA", "HGMMA", "UTMALDG", "LDL", "STL", "BAR", "SHFL")

_PARAMETER = re.compile(r"Ordinal : (0x[0-9a-f]+)\s+Offset\s+: 0x[0-9a-f]+\s+Size\s+: (0x[0-9a-f]+)")
_USAGE = re.compile(r"Function (?P<symbol>\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel of a cubin.

    Attributes
    ----------
    registers : int
        Per thread.
    stack_bytes, local_bytes : int
        Per thread; spilled registers lie there.
    shared_bytes : int
        Static, with the 1024 bytes that the driver takes of it on Hopper and later.
    opcode_counts : mapping of str to int
        Instructions of each of ``OPCODE_CLASSES``.
    num_instructions : int
        All of them, padding included.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    opcode_counts: Mapping[str, int]
    num_instructions: int

    @property
    def has_spills(self) -> bool:
        """Whether anything of a thread lies in local memory."""
        counts = self.opcode_counts
        return bool(self.stack_bytes or self.local_bytes or counts["LDL"] or counts["STL"])


def inspect_cubin(cubin: bytes, symbol: str) -> KernelReport:
    """Report on one kernel of a cubin. Needs no GPU.

    Raises
    ------
    JitUnavailableError
        If there is no ``cuobjdump``.
    ValueError
        If the bytes are no cubin, or it has no such kernel.
    """
    usages = {usage["symbol"]: usage for usage in _USAGE.finditer(_cuobjdump(cubin, "-res-usage"))}
    if symbol not in usages:
        raise ValueError(f"symbol must be one of {', '.join(usages) or 'none'}, got {symbol!r}")
    registers, stack_bytes, shared_bytes, local_bytes = map(int, usages[symbol].groups()[1:])
    opcodes = Counter(_INSTRUCTION.findall(disassemble(cubin, symbol)))
    return KernelReport(
        registers=registers,
        stack_bytes=stack_bytes,
        local_bytes=local_bytes,
        shared_bytes=shared_bytes,
        opcode_counts={name: opcodes[name] for name in OPCODE_CLASSES},
        num_instructions=opcodes.total(),
    )


def parameter_sizes(cubin: bytes) -> list[int]:
    """Return the bytes of each parameter of a cubin's one kernel, in order.

    Raises
    ------
    FileNotFoundError
        If there is no ``cuobjdump``.
    ValueError
        If it refuses the cubin.
    """
    sizes = {int(ordinal, 16): int(size, 16) for ordinal, size in _PARAMETER.findall(_cuobjdump(cubin, "-elf"))}
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def disassemble(cubin: bytes, symbol: str) -> str:
    """Return the SASS of one kernel of a cubin.

    Raises
    ------
    JitUnavailableError
        If there is no ``cuobjdump``.
    ValueError
        If the bytes are no cubin.
    """
    return _cuobjdump(cubin, "-sass", "-fun", symbol)


def _cuobjdump(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(prefix="vllm_dsa-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([_find_cuobjdump(), *options, file.name], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"cuobjdump refuses these {len(cubin)} bytes: {(result.stderr or result.stdout).strip()}")
    return result.stdout


@functools.cache
def _find_cuobjdump() -> str:
    """Prefer Triton's: it is there wherever this package is."""
    found = _in_triton() or shutil.which("cuobjdump") or _in_cuda_packages()
    if found is None:
        raise JitUnavailableError(
            "cuobjdump is neither in triton's wheel, nor on the PATH, nor in a CUDA package: "
            "pip install nvidia-cuda-cuobjdump"
        )
    return found


def _in_triton() -> str | None:
    # Looked up, not imported: importing Triton takes a second.
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.is_file() else None


def _in_cuda_packages() -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    path: str | None = find_nvidia_binary_utility("cuobjdump")
    return path
