"""NVRTC through ``cuda.core``: from a source to a cubin, on any machine, with or without a GPU."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from vllm_dsa.kernels.jit_errors import JitUnavailableError, KernelCompileError
from vllm_dsa.kernels.jit_source import KernelSource, KernelVariant

_OPTIONS: dict[str, Any] = {
    "std": "c++20",
    # Otherwise a header in the working directory, which the key does not know, would be found.
    "no_source_include": True,
    "ptxas_options": ["-v"],
    # NVRTC takes the call operator of a generic lambda for a host function without it.
    "device_as_default_execution_space": True,
}
OPTION_TEXTS = tuple(f"{name}={value}" for name, value in _OPTIONS.items())

_REMEDY = (
    "pip install 'cuda-core>=1.2,<2' and NVRTC, which comes with the CUDA builds of torch "
    "(alone: pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14')"
)


@functools.cache
def compiler_version() -> str:
    """Return the compiler's name and version, as the cache key holds them.

    Raises
    ------
    JitUnavailableError
        If ``cuda.core`` or NVRTC is missing or does not load.
    """
    try:
        import cuda.core  # noqa: F401  (missing must show here, where the remedy is)
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    # Bindings whose library is absent or of another CUDA raise anything from ImportError to RuntimeError.
    except Exception as error:
        raise JitUnavailableError(f"NVRTC cannot be used ({type(error).__name__}: {error}): {_REMEDY}") from error
    return f"nvrtc {major}.{minor}"


def compile_source(variant: KernelVariant, source: KernelSource, arch: str) -> tuple[bytes, str]:
    """Return the cubin and the compiler's log, with the report of ptxas.

    Raises
    ------
    KernelCompileError
        If the compiler refuses the source, the macros or the architecture.
    """
    from cuda.core import Program, ProgramOptions

    # The compiler reads a copy of what the key was made of: it can reach no other header and no later edit.
    with tempfile.TemporaryDirectory(prefix="vllm_dsa-") as folder:
        _write_headers(Path(folder), source)
        options = ProgramOptions(
            name=f"{variant.source}.cu",
            arch=arch,
            include_path=[folder],
            define_macro=list(variant.macros) or None,  # it refuses an empty list
            **_OPTIONS,
        )
        log = _Log()
        try:
            code = Program(source.text, "c++", options).compile("cubin", logs=log).code
        # The class of NVRTC's errors is private to cuda.core.
        except Exception as error:
            text = _without_folder(str(error), folder)
            raise KernelCompileError(f"cannot compile {variant} for {arch}: {text}") from None
        return bytes(code), _without_folder(log.text, folder)


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def _write_headers(folder: Path, source: KernelSource) -> None:
    for name, text in source.headers:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _without_folder(log: str, folder: str) -> str:
    return log.replace(f"{folder}/", "").strip("\0 \n")
