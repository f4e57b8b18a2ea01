"""What a cubin is made of: a variant, its source and headers, and the digest over everything that decides its bytes."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_dsa._version import __version__
from vllm_dsa.kernels.jit_errors import JitUnavailableError

DEFAULT_ARCH = "sm_90a"
# Of the entries' layout and of the key; raise it when either changes.
CACHE_SCHEMA = "1"

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(?P<operand>.*?)[ \t\r]*$", re.MULTILINE)
_HEADER_NAME = re.compile(r'"(?P<quoted>[^"]+)"|<(?P<angled>[^>]+)>')


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One cubin.

    Attributes
    ----------
    source : str
        Stem of ``csrc/{source}.cu``.
    symbol : str
        The ``extern "C"`` entry.
    macros : tuple of (str, str)
        Names and values that the compiler predefines, in order.
    """

    source: str
    symbol: str
    macros: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """``source[NAME=value, ...]``, with ``:symbol`` where it is another name."""
        kernel = self.source if self.symbol == self.source else f"{self.source}:{self.symbol}"
        macros = ", ".join(f"{name}={value}" for name, value in self.macros)
        return f"{kernel}[{macros}]"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A source and every project header that it reaches.

    Attributes
    ----------
    text : str
        The ``.cu`` file.
    headers : tuple of (str, str)
        Name relative to ``csrc`` and text of each header, sorted by name.
    """

    text: str
    headers: tuple[tuple[str, str], ...]


def csrc_dir() -> Path:
    """Return the folder of the CUDA sources: inside the package when installed, beside it in a checkout.

    Raises
    ------
    JitUnavailableError
        If neither is there.
    """
    package = Path(__file__).parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if candidate.is_dir():
            return candidate
    raise JitUnavailableError(
        f"the CUDA sources are neither in {package / 'csrc'} nor in {package.parent / 'csrc'}: reinstall vllm-dsa"
    )


def read_source(variant: KernelVariant) -> KernelSource:
    """Read a variant's source and, recursively, the project headers that it includes.

    Every ``#include`` counts, also one that a condition skips. A name is relative to ``csrc``. A name in angle brackets
    that is not there is the compiler's own, and the compiler's version stands for it.

    Raises
    ------
    ValueError
        If there is no such source, if a quoted header is not in ``csrc``, or if an include names its header by a macro.
    """
    root = csrc_dir()
    path = root / f"{variant.source}.cu"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in root.glob("*.cu")))
        raise ValueError(f"source must be one of {known or 'none'} in {root}, got {variant.source!r}")
    text = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    pending = _included_headers(root, path.name, text)
    while pending:
        name = pending.pop()
        if name not in headers:
            headers[name] = (root / name).read_text(encoding="utf-8")
            pending += _included_headers(root, name, headers[name])
    return KernelSource(text, tuple(sorted(headers.items())))


def cache_key(variant: KernelVariant, source: KernelSource, arch: str, options: Iterable[str], compiler: str) -> str:
    """Return the digest of everything that decides the cubin, and of nothing that differs between machines.

    Parameters
    ----------
    variant : KernelVariant
        Its macros count in their order.
    source : KernelSource
        From :func:`read_source`.
    arch : str
        For example ``sm_90a``.
    options : iterable of str
        The compiler's options in their order, without paths.
    compiler : str
        Name and version.
    """
    fields = [
        ("schema", CACHE_SCHEMA),
        ("package", __version__),
        ("compiler", compiler),
        ("arch", arch),
        *(("option", option) for option in options),
        ("source", variant.source),
        ("symbol", variant.symbol),
        *((part, text) for macro in variant.macros for part, text in zip(("macro", "value"), macro, strict=True)),
        ("text", source.text),
        *((part, text) for header in source.headers for part, text in zip(("header", "text"), header, strict=True)),
    ]
    digest = hashlib.sha256()
    for tag, value in fields:
        for part in (tag.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _included_headers(root: Path, includer: str, text: str) -> list[str]:
    headers = []
    for include in _INCLUDE.finditer(text):
        match = _HEADER_NAME.match(include["operand"])
        if match is None:
            raise ValueError(f'{includer}: an include must name its header as "name", got {include["operand"]!r}')
        name = match["quoted"] or match["angled"]
        if _is_project_header(root, name):
            headers.append(name)
        elif match["quoted"]:
            raise ValueError(f"{includer}: an included header must lie in {root}, got {name!r}")
    return headers


def _is_project_header(root: Path, name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and (root / path).is_file()
