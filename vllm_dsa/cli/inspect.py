"""``vllm-dsa inspect``: registers, spills and instructions of the CUDA kernels."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_dsa.cli.errors import friendly_errors
from vllm_dsa.kernels.jit import compile_cubin
from vllm_dsa.kernels.jit_source import DEFAULT_ARCH, KernelVariant
from vllm_dsa.kernels.sass import KernelReport, disassemble, inspect_cubin
from vllm_dsa.kernels.variants import all_variants


@friendly_errors
def inspect(
    kernel: Annotated[str | None, typer.Argument(help="Only this source, for example sm90_paged_mqa_logits.")] = None,
    arch: Annotated[str, typer.Option(help="As compiled for this architecture.")] = DEFAULT_ARCH,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code instead.")] = False,
) -> None:
    """Show registers, spills and instruction counts of every variant of the CUDA kernels. Needs no GPU."""
    for source, variants in _variants_by_source(kernel).items():
        if sass:
            for variant in variants:
                typer.echo(f"{variant} {arch}")
                typer.echo(disassemble(compile_cubin(variant, arch).cubin, variant.symbol))
        else:
            Console().print(_table(source, variants, arch))


def _variants_by_source(kernel: str | None) -> dict[str, list[KernelVariant]]:
    by_source: dict[str, list[KernelVariant]] = {}
    for variant in all_variants():
        by_source.setdefault(variant.source, []).append(variant)
    if kernel is None:
        return by_source
    if kernel not in by_source:
        raise ValueError(f"KERNEL must be one of {', '.join(by_source)}, got {kernel!r}")
    return {kernel: by_source[kernel]}


def _table(source: str, variants: list[KernelVariant], arch: str) -> Table:
    table = Table("variant", title=f"{source}, {arch}")
    for column in ("registers", "stack B", "local B", "shared B", "instructions"):
        table.add_column(column, justify="right")
    for variant in variants:
        report = inspect_cubin(compile_cubin(variant, arch).cubin, variant.symbol)
        table.add_row(
            _label(variant),
            str(report.registers),
            str(report.stack_bytes),
            str(report.local_bytes),
            str(report.shared_bytes),
            _counts(report),
        )
    return table


def _label(variant: KernelVariant) -> str:
    symbol = [] if variant.symbol == variant.source else [variant.symbol]
    return "\n".join([*symbol, *(f"{name}={value}" for name, value in variant.macros)])


def _counts(report: KernelReport) -> str:
    lines = [f"{name} {count}" for name, count in report.opcode_counts.items() if count]
    return "\n".join([*lines, f"all {report.num_instructions}"])
