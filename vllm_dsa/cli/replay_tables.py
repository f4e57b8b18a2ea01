"""The replay report for people."""

from rich.console import Console
from rich.table import Table

from vllm_dsa.runner.report import ReplayReport, quantiles

_MAX_NOTES = 5


def print_report(report: ReplayReport, console: Console) -> None:
    """Print the startup line, the forms, the totals and the verdict."""
    startup = " ".join(f"{key}={value}" for key, value in report.startup.items())
    console.print(f"indexer decode: {startup}", soft_wrap=True)
    console.print(_forms_table(report))
    console.print(_totals_table(report))
    _print_notes("skipped", report.skipped_lines, console)
    _print_notes("rejected", report.rejected, console)
    _print_notes("MISMATCH", report.mismatch_notes, console)
    console.print(
        f"mismatches: {report.mismatches} of {report.verified_rows} rows checked against float64 "
        f"in {report.verified_steps} steps (worst logits error {report.worst_logits_error:.1e})",
        soft_wrap=True,
    )


def _forms_table(report: ReplayReport) -> Table:
    layers = report.num_index_layers
    table = Table(title=f"decode steps by form (bytes over {layers} index layers)")
    for column in ("form", "steps", "rows", "dummy", "KV reads", "KV bytes", "flattened", "saved"):
        table.add_column(column, no_wrap=True, justify="left" if column == "form" else "right")
    for label, totals in sorted(report.forms.items()):
        flattened = totals.flattened_kv_bytes
        saved = 1 - totals.kv_bytes / flattened if flattened else 0.0
        table.add_row(
            label,
            str(totals.steps),
            str(totals.rows),
            str(totals.dummy_rows),
            str(totals.kv_reads),
            human_bytes(totals.kv_bytes * layers),
            human_bytes(flattened * layers),
            f"{saved:.0%}",
        )
    return table


def _totals_table(report: ReplayReport) -> Table:
    rate = report.num_accepted / report.num_drafts if report.num_drafts else 0.0
    depths = ", ".join(f"{depth}: {report.depths[depth]}" for depth in sorted(report.depths))
    table = Table(title="totals", show_header=False)
    for label, value in (
        ("requests", f"{report.num_finished} of {report.num_requests} finished, {report.num_preemptions} preemptions"),
        ("steps", f"{report.num_steps} in {report.simulated_s:.1f} s of the trace's clock"),
        ("prefill tokens", f"{report.num_prefill_tokens} computed, {report.num_cached_tokens} found in the cache"),
        ("output tokens", f"{report.num_output_tokens}, {rate:.0%} of {report.num_drafts} drafts accepted"),
        ("decodes by depth", depths or "none"),
        ("decode build", _timing(report.build_us)),
        ("prefill build", _timing(report.prefill_build_us)),
        ("wall time", f"{report.wall_s:.1f} s"),
    ):
        table.add_row(label, value)
    return table


def _timing(values: list[float]) -> str:
    summary = quantiles(values)
    return "none" if summary is None else f"median {summary['median']:.0f} us, p99 {summary['p99']:.0f} us"


def _print_notes(label: str, notes: list[str], console: Console) -> None:
    for note in notes[:_MAX_NOTES]:
        console.print(f"{label}: {note}", highlight=False, markup=False, soft_wrap=True)
    if len(notes) > _MAX_NOTES:
        console.print(f"{label}: and {len(notes) - _MAX_NOTES} more")


def human_bytes(count: float) -> str:
    """Return a byte count with a decimal unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
