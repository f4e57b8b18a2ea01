"""``vllm-dsa info``: the machine, the libraries and the DeepGEMM builds as this package sees them."""

import json
import os
import platform as python_platform
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_dsa import envs
from vllm_dsa._version import __version__
from vllm_dsa.deep_gemm_wrapper import (
    DeepGemmBuild,
    PagedMQALogitsCapabilities,
    find_builds,
    load_deep_gemm,
    resolve_capabilities,
    static_capabilities,
)
from vllm_dsa.indexer import IndexerConfig, plannable_backends
from vllm_dsa.platform import current_device

_LIBRARIES = ("torch", "triton", "numpy", "cuda-core", "transformers", "vllm", "sglang")


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, GPUs, every DeepGEMM build found with its capabilities, and the environment variables."""
    sections = collect_info()
    if as_json:
        typer.echo(json.dumps(sections, indent=2))
        return
    console = Console()
    for title, section in sections.items():
        rows = section if isinstance(section, list) else [section]
        for row in rows:
            console.print(_table(title, row))


def collect_info() -> dict[str, Any]:
    """Return every section; a probe that fails leaves its error in its place, so this always returns."""
    probes: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "gpus": _gpus,
        "deep_gemm builds": _builds,
        "capabilities in use": lambda: _capabilities_json(resolve_capabilities()),
        "logits backends": _logits_backends,
        "environment": _environment,
    }
    return {name: _guarded(probe) for name, probe in probes.items()}


def _guarded(probe: Callable[[], Any]) -> Any:
    # A report on a broken machine is exactly when this command is run: nothing may stop it.
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str]:
    import torch

    versions = {"vllm-dsa": __version__, "python": python_platform.python_version()}
    versions |= {name: _installed_version(name) for name in _LIBRARIES}
    versions["torch loaded"] = torch.__version__
    versions["cuda of torch"] = str(torch.version.cuda)
    return versions


def _installed_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[dict[str, Any]] | dict[str, str]:
    import torch

    from vllm_dsa.platform import is_cuda

    if not is_cuda():
        return {"none": "torch sees no CUDA device"}
    return [
        {"index": i, "name": d.name, "arch": d.arch, "num_sms": d.num_sms}
        for i, d in ((i, current_device(i)) for i in range(torch.cuda.device_count()))
    ]


def _builds() -> list[dict[str, Any]] | dict[str, str]:
    builds = find_builds()
    if not builds:
        return {"none": "neither deep_gemm nor vllm.third_party.deep_gemm is installed"}
    loaded = _guarded(lambda: load_deep_gemm().build.provider)
    return [_build_json(build, loaded) for build in builds]


def _build_json(build: DeepGemmBuild, loaded: str | dict[str, str]) -> dict[str, Any]:
    return {
        "module": build.provider,
        "distribution": build.distribution,
        "version": build.version,
        "path": build.path,
        "loaded": loaded["error"] if isinstance(loaded, dict) else str(loaded == build.provider),
        **_capabilities_json(static_capabilities(current_device(), build)),
    }


def _capabilities_json(caps: PagedMQALogitsCapabilities) -> dict[str, Any]:
    return {
        "provider": caps.provider,
        "arch": caps.arch,
        "num_sms": caps.num_sms,
        "native_next_n": "any" if caps.native_next_n is None else sorted(caps.native_next_n),
        "paired_next_n": sorted(caps.paired_next_n),
        "block_sizes": sorted(caps.block_sizes),
        "num_heads": sorted(caps.num_heads),
        "prefill_signature": caps.prefill_signature.value if caps.prefill_signature else None,
        "supports_varlen": caps.supports_varlen,
    }


def _logits_backends() -> dict[str, list[str]]:
    """Who may compute decode logits of 64 heads of 128 dims over pages of 64 tokens."""
    config = IndexerConfig(next_n=1, max_num_seqs=1, block_table_width=1)
    backends = plannable_backends(config, resolve_capabilities())
    return {"planned for": sorted(backend.value for backend in backends)}


def _environment() -> dict[str, str]:
    return {
        name: f"{os.environ[name]} (set)" if name in os.environ else f"{variable.default} (default)"
        for name, variable in envs.VARIABLES.items()
    }


def _table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for key, value in values.items():
        table.add_row(key, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    return table
