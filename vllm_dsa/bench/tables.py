"""The printed tables of each benchmark, as text cells. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dsa.bench.build import BuildRow
from vllm_dsa.bench.indexer import IndexerRow
from vllm_dsa.bench.indexer_step import STAGES
from vllm_dsa.bench.logits import LogitsRow
from vllm_dsa.bench.topk import TopkRow
from vllm_dsa.bench.verdict import SLACK, Cell, cells


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table; `rows` have as many cells as `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def logits_tables(rows: Sequence[LogitsRow]) -> list[TextTable]:
    """Return a table for each context: every legal form's median, then the chosen form's particulars."""
    return [_logits_table(context, [row for row in rows if row.context == context]) for context in _contexts(rows)]


def build_tables(rows: Sequence[BuildRow]) -> list[TextTable]:
    """Return one table of all builds."""
    columns = ("case", "context", "batch", "form", "tokens", "host us", "host p99", "GPU us", "launches", "copies")
    body = tuple(
        (
            row.case,
            str(row.context),
            str(row.batch),
            row.form,
            str(row.tokens),
            f"{row.host_median_us:.0f}",
            f"{row.host_p99_us:.0f}",
            "-" if row.gpu_us is None else f"{row.gpu_us:.1f}",
            "-" if row.launches is None else str(row.launches),
            "-" if row.copies is None else str(row.copies),
        )
        for row in rows
    )
    return [TextTable("build_decode of one step", columns, body)]


def indexer_tables(rows: Sequence[IndexerRow]) -> list[TextTable]:
    """Return a table for each context: the stages of every form, in us; ``e`` marks an eager one."""
    return [_indexer_table(context, [row for row in rows if row.context == context]) for context in _contexts(rows)]


def topk_tables(rows: Sequence[TopkRow]) -> list[TextTable]:
    """Return one table of all shapes."""
    columns = ("rows", "length", "us", "p10-p90", "torch.topk us", "x torch", "floor us")
    body = tuple(
        (
            str(row.rows),
            str(row.length),
            f"{row.median_us:.1f}",
            f"{row.p10_us:.1f}-{row.p90_us:.1f}",
            f"{row.torch_us:.1f}",
            f"{row.speedup:.1f}",
            f"{row.floor_us:.1f}",
        )
        for row in rows
    )
    return [TextTable("top-k", columns, body)]


def _contexts(rows: Sequence[LogitsRow] | Sequence[IndexerRow]) -> list[int]:
    return list(dict.fromkeys(row.context for row in rows))


def _logits_table(context: int, rows: list[LogitsRow]) -> TextTable:
    names = list(dict.fromkeys(row.variant for row in sorted(rows, key=lambda row: row.group_size)))
    columns = (
        *("case", "batch"),
        *(f"{name} us" for name in names),
        *("plan", "us", "p10-p90", "KV MB", "GB/s", "% of bw", "x flattened", "over best"),
    )
    body = tuple(_logits_cells(cell, names) for cell in cells(rows))
    return TextTable(f"paged logits, context {context}", columns, body)


def _logits_cells(cell: Cell, names: list[str]) -> tuple[str, ...]:
    medians = {row.variant: f"{row.median_us:.1f}" for row in cell.rows}
    first, chosen = cell.rows[0], cell.chosen
    head = (first.case, str(first.batch), *(medians.get(name, "WRONG") for name in names))
    if chosen is None:
        return (*head, *("WRONG",) * 8)
    return (
        *head,
        chosen.form,
        f"{chosen.median_us:.1f}",
        f"{chosen.p10_us:.1f}-{chosen.p90_us:.1f}",
        f"{chosen.kv_bytes / 1e6:.1f}",
        f"{chosen.floor_gb_per_s:.0f}",
        f"{chosen.bandwidth_share:.0%}",
        _speedup(chosen.speedup),
        f"{cell.loss:+.1%}" + (" !" if cell.counts and cell.loss > SLACK else ""),
    )


def _indexer_table(context: int, rows: list[IndexerRow]) -> TextTable:
    grouped: dict[tuple[str, int, str], list[IndexerRow]] = {}
    for row in rows:
        grouped.setdefault((row.case, row.batch, row.form), []).append(row)
    columns = ("case", "batch", "form", *(f"{stage} us" for stage in STAGES), "p10-p90", "x flattened")
    body = tuple(_indexer_cells({row.stage: row for row in group}) for group in grouped.values())
    return TextTable(f"decode indexer of one layer, context {context} (* planned, e eager)", columns, body)


def _indexer_cells(by_stage: dict[str, IndexerRow]) -> tuple[str, ...]:
    whole = by_stage[STAGES[-1]]
    times = (f"{row.median_us:.1f}{' e' if row.mode == 'eager' else ''}" for row in map(by_stage.__getitem__, STAGES))
    return (
        whole.case,
        str(whole.batch),
        whole.form + (" *" if whole.chosen else ""),
        *times,
        f"{whole.p10_us:.1f}-{whole.p90_us:.1f}",
        _speedup(whole.speedup),
    )


def _speedup(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
