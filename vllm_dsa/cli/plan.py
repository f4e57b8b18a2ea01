"""``vllm-dsa plan``: what a step of given depths runs as."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_dsa.cli.errors import friendly_errors
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, planned_capabilities, resolve_capabilities
from vllm_dsa.indexer import IndexerConfig, StepPlan, StepPlanner, default_costs, schedule_slots
from vllm_dsa.indexer.plan import DecodeForm, legal_group_sizes, ragged_cost


@friendly_errors
def plan(
    depths: Annotated[str, typer.Option(help="Query rows of each request, for example 3,3,3,1.")],
    arch: Annotated[
        str | None, typer.Option(help="Plan for this machine: sm90, sm100 or cpu. Default: the one here.")
    ] = None,
    native: Annotated[str | None, typer.Option(help="Another build's native next_n, for example 1,2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the form, backend, groups, KV reads and schedule slots of one decode step.

    Plans for pages of 64 tokens, 64 heads of 128 dims and VDSA_LOGITS_BACKEND.
    """
    caps = _capabilities(arch, native)
    depth_list = parse_whole_numbers("--depths", depths)
    planner = StepPlanner.of(IndexerConfig(next_n=1, max_num_seqs=1, block_table_width=1), caps)
    step = planner.plan(depth_list)
    if as_json:
        typer.echo(json.dumps(_plan_json(step, caps), indent=2))
        return
    console = Console()
    console.print(_plan_table(step, caps))
    if not caps.supports_varlen and step.num_tokens:
        console.print(_choices_table(depth_list, step, planner))


def parse_whole_numbers(name: str, text: str) -> list[int]:
    """Read ``3,3,1``; raises ``ValueError`` that names the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be whole numbers separated by commas, got {text!r}") from None


def _capabilities(arch: str | None, native: str | None) -> PagedMQALogitsCapabilities:
    native_set = None if native is None else frozenset(parse_whole_numbers("--native", native))
    if arch is None and native_set is None:
        return resolve_capabilities()
    return planned_capabilities(arch or resolve_capabilities().arch, native_set)


def _plan_json(step: StepPlan, caps: PagedMQALogitsCapabilities) -> dict[str, Any]:
    return {
        "arch": caps.arch,
        "native_next_n": None if caps.native_next_n is None else sorted(caps.native_next_n),
        "form": step.form.value,
        "backend": step.backend.value,
        "group_size": step.group_size,
        "num_groups": step.num_groups,
        "num_rows": step.num_rows,
        "num_dummy_rows": step.num_dummy_rows,
        "num_tokens": step.num_tokens,
        "kv_reads": step.kv_reads,
        "schedule_slots": schedule_slots(step, caps),
        "num_sms": caps.num_sms,
    }


def _plan_table(step: StepPlan, caps: PagedMQALogitsCapabilities) -> Table:
    values = _plan_json(step, caps)
    native = "any" if caps.native_next_n is None else ", ".join(map(str, sorted(caps.native_next_n)))
    table = Table(title="decode step", show_header=False)
    for label, value in (
        ("arch", f"{caps.arch}, native next_n {native}"),
        ("form", f"{values['form']} by {values['backend']}"),
        ("group size", values["group_size"]),
        ("groups", values["num_groups"]),
        ("rows", f"{values['num_rows']} ({values['num_dummy_rows']} dummy) for {values['num_tokens']} tokens"),
        ("KV reads", f"{values['kv_reads']} (flattened {values['num_tokens']})"),
        ("schedule slots", f"{values['schedule_slots'] or 'none'} on {caps.num_sms} SMs"),
    ):
        table.add_row(label, str(value))
    return table


def _choices_table(depths: list[int], chosen: StepPlan, planner: StepPlanner) -> Table:
    costs = default_costs(planner.caps)
    is_ragged = chosen.form is DecodeForm.RAGGED
    table = Table("group size", "groups", "rows", "relative cost", title="legal forms")
    for size in legal_group_sizes(max(depths), planner.caps):
        groups = sum(-(-depth // size) for depth in depths)
        mark = " *" if size == chosen.group_size and not is_ragged else ""
        table.add_row(f"{size}{mark}", str(groups), str(groups * size), f"{groups * costs.group_cost(size):.2f}")
    if planner.ragged_costs is not None:
        rows = str(sum(depths))
        total = sum(ragged_cost(depth, planner.ragged_costs) for depth in depths)
        table.add_row(f"ragged{' *' if is_ragged else ''}", rows, rows, f"{total:.2f}")
    return table
