"""``vllm-dsa cache``: what the kernel cache holds, and its removal."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dsa.cli.errors import fail, friendly_errors
from vllm_dsa.cli.replay_tables import human_bytes
from vllm_dsa.kernels.jit import clear_cache, prune_cache
from vllm_dsa.kernels.jit_cache import CacheEntry, CubinCache, cache_root
from vllm_dsa.kernels.variants import all_variants


@friendly_errors
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove every entry.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what this version of the package would not use.")
    ] = False,
) -> None:
    """Show where compiled CUDA kernels are kept, and which."""
    if clear and prune:
        fail("--clear and --prune exclude each other")
    if clear:
        typer.echo(f"removed {clear_cache()} entries from {cache_root()}")
    elif prune:
        typer.echo(f"removed {prune_cache(all_variants())} entries from {cache_root()}")
    else:
        _show(CubinCache(cache_root()))


def _show(cubins: CubinCache) -> None:
    entries = cubins.entries()
    console = Console()
    if entries:
        console.print(_table(entries))
    total = human_bytes(sum(entry.num_bytes for entry in entries))
    console.print(f"{cubins.root}: {len(entries)} entries, {total}", soft_wrap=True, highlight=False)


def _table(entries: list[CacheEntry]) -> Table:
    table = Table(title="kernel cache")
    table.add_column("kernel", overflow="fold")
    for column in ("arch", "compiler", "cubin"):
        table.add_column(column, no_wrap=True)
    for entry in entries:
        if entry.meta is None:
            table.add_row(entry.name, "damaged", "", "")
        else:
            # Brackets would read as markup.
            kernel = Text(entry.meta.kernel)
            table.add_row(kernel, entry.meta.arch, entry.meta.compiler, human_bytes(entry.num_bytes))
    return table
