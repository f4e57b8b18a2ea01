"""``vllm-dsa precompile``: every CUDA kernel, compiled into the cache."""

from typing import Annotated

import typer

from vllm_dsa.cli.errors import EXIT_CHECK_FAILED, friendly_errors
from vllm_dsa.cli.replay_tables import human_bytes
from vllm_dsa.kernels.jit import compile_cubin
from vllm_dsa.kernels.jit_cache import CubinCache, cache_root
from vllm_dsa.kernels.jit_source import DEFAULT_ARCH
from vllm_dsa.kernels.variants import all_variants


@friendly_errors
def precompile(
    arch: Annotated[str, typer.Option(help="Compile for this architecture, for example sm_90a.")] = DEFAULT_ARCH,
) -> None:
    """Compile every CUDA kernel into the cache. Needs no GPU.

    For images that run with VDSA_DISABLE_JIT=1 or with a read-only disk.
    """
    cache = CubinCache(cache_root())
    for variant in all_variants():
        compiled = compile_cubin(variant, arch)
        # A cache that cannot be written only costs other commands a compilation; here it is the point.
        if cache.load(compiled.entry_name) is None:
            typer.echo(f"error: {cache.root} cannot be written", err=True)
            raise typer.Exit(EXIT_CHECK_FAILED)
        typer.echo(f"{cache.root / compiled.entry_name}  {human_bytes(len(compiled.cubin))}  {variant}")
