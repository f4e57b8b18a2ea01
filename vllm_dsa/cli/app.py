"""The Typer application: one file per command."""

from typing import Annotated

import typer

from vllm_dsa._version import __version__
from vllm_dsa.cli.bench import bench
from vllm_dsa.cli.cache import cache
from vllm_dsa.cli.info import info
from vllm_dsa.cli.inspect import inspect
from vllm_dsa.cli.plan import plan
from vllm_dsa.cli.precompile import precompile
from vllm_dsa.cli.replay import replay

app = typer.Typer(
    name="vllm-dsa",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="DeepSeek Sparse Attention decode: what this machine can run, what a step runs as, and traces replayed.",
)
app.command()(replay)
app.command()(plan)
app.command()(info)
app.command()(inspect)
app.command()(precompile)
app.command()(cache)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
