"""Every ``VDSA_*`` environment variable: its default, its parser and its help.

Values are read at each access, never at import. The prefix is not ``VLLM_``: vLLM warns on names it does not know.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGITS_BACKENDS = ("auto", "deep_gemm", "sm90", "reference")
TOPK_BACKENDS = ("auto", "sm90", "reference", "flashinfer", "deep_select")
MLA_BACKENDS = ("auto", "triton", "flash_mla", "flashinfer", "reference")


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: its default as text, the parser of that text, and a line of help."""

    default: str
    parse: Callable[[str], Any]
    help: str


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true"):
        return True
    if lowered in ("0", "false", ""):
        return False
    raise ValueError("allowed: 0, 1, true, false")


def _parse_positive_int(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise ValueError("allowed: a whole number of at least 1")
    return int(text)


def _parse_folder(text: str) -> Path | None:
    if text in ("", "auto"):
        return None
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError("allowed: an absolute path, auto")
    return path


def _parser_of_choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"allowed: {', '.join(choices)}")
        return text

    return parse


VARIABLES: dict[str, EnvVar] = {
    "VDSA_VALIDATE": EnvVar(
        default="0",
        parse=_parse_bool,
        help="Check values on the device too (one host sync a build): lengths, depths, slots, page ids.",
    ),
    "VDSA_MAX_LOGITS_MB": EnvVar(
        default="512",
        parse=_parse_positive_int,
        help="Largest float32 logits matrix of one prefill chunk, in MiB.",
    ),
    "VDSA_LOGITS_BACKEND": EnvVar(
        default="auto",
        parse=_parser_of_choice(LOGITS_BACKENDS),
        help="Who may compute decode logits: auto (the cheapest that is there), deep_gemm, sm90, reference.",
    ),
    "VDSA_TOPK_BACKEND": EnvVar(
        default="auto",
        parse=_parser_of_choice(TOPK_BACKENDS),
        help="Who chooses the top-k: auto (the Hopper kernel where it can, else torch), sm90, reference (torch), or a "
        "library that must be installed: flashinfer, deep_select (their own ties and NaN).",
    ),
    "VDSA_MLA_BACKEND": EnvVar(
        default="auto",
        parse=_parser_of_choice(MLA_BACKENDS),
        help="Who computes MLA decode attention: auto (our kernel on CUDA, else torch), triton, reference (torch), or "
        "a library that must be installed: flash_mla, flashinfer.",
    ),
    "VDSA_CACHE_DIR": EnvVar(
        default="auto",
        parse=_parse_folder,
        help="Folder of the compiled CUDA kernels; auto: $XDG_CACHE_HOME/vllm_dsa, else ~/.cache/vllm_dsa.",
    ),
    "VDSA_DISABLE_JIT": EnvVar(
        default="0",
        parse=_parse_bool,
        help="Never compile a CUDA kernel: one that the cache lacks is an error.",
    ),
    "VDSA_REQUIRE_GPU": EnvVar(
        default="0",
        parse=_parse_bool,
        help="Tests only: a GPU test that finds no GPU fails instead of skipping.",
    ),
}


def get(name: str) -> Any:
    """Return the parsed value of a ``VDSA_*`` variable.

    Raises
    ------
    KeyError
        If `name` is not declared in this module.
    ValueError
        If the environment holds text that the variable's parser refuses.
    """
    variable = VARIABLES[name]
    text = os.environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={text!r}: {error}") from None
