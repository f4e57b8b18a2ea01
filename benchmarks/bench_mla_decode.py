"""Our MLA decode attention beside torch, FlashMLA and FlashInfer, over the shapes of docs/kernels/mla_decode.md."""

import argparse
import dataclasses
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_dsa.bench.mla_decode import MlaOptions, bench_mla_decode, mla_tables


def parse(arguments: list[str]) -> tuple[MlaOptions, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(MlaOptions):
        flag = "--next-n" if field.name == "next_ns" else f"--{field.name.replace('_', '-')}"
        default = field.default
        if isinstance(default, tuple):
            kind, default = type(default[0]), ",".join(map(str, default))
            convert = lambda text, kind=kind: tuple(kind(part) for part in text.split(","))  # noqa: E731
        else:
            convert = int
        parser.add_argument(flag, dest=field.name, type=convert, default=default, help=f"default: {default}")
    parser.add_argument("--json", type=Path, help="write the report there")
    values = vars(parser.parse_args(arguments))
    json = values.pop("json")
    try:
        return MlaOptions(**values), json
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str]) -> int:
    options, json = parse(arguments)
    console = Console(width=160)
    report = bench_mla_decode(options, lambda label: console.log(label, highlight=False))
    for key, value in report.environment.items():
        console.print(f"{key}: {value}", highlight=False, markup=False, soft_wrap=True)
    for table in mla_tables(report.rows):
        printed = Table(*table.columns, title=table.title, title_justify="left")
        for row in table.rows:
            printed.add_row(*row)
        console.print(printed)
    console.print(f"reproduce: {options.command}", highlight=False, markup=False, soft_wrap=True)
    for error in report.errors:
        console.print(f"WRONG: {error}", highlight=False, markup=False, soft_wrap=True)
    if json is not None:
        report.write_json(json)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
