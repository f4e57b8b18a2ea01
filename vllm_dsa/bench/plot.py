"""Benchmark results as a picture. Needs the ``plot`` extra."""

from collections.abc import Sequence
from pathlib import Path

from vllm_dsa.bench.build import BuildRow
from vllm_dsa.bench.indexer import IndexerRow
from vllm_dsa.bench.indexer_step import WHOLE
from vllm_dsa.bench.logits import LogitsRow

# Panel title -> line -> x label -> microseconds.
Panels = dict[str, dict[str, dict[str, float]]]
_COLUMNS = 3
PLANNED = "planned"


def logits_panels(rows: Sequence[LogitsRow]) -> Panels:
    """Return a panel for each context and batch, a line for each form over the cases."""
    panels: Panels = {}
    for row in rows:
        panel = f"paged logits, context {row.context}, batch {row.batch}"
        _put(panels, panel, row.variant, row.case, row.median_us)
        if row.chosen:
            _put(panels, panel, PLANNED, row.case, row.median_us)
    return panels


def build_panels(rows: Sequence[BuildRow]) -> Panels:
    """Return a panel for each context, a line for each kind of step over the batches."""
    panels: Panels = {}
    for row in rows:
        _put(panels, f"host time of a build, context {row.context}", row.case, str(row.batch), row.host_median_us)
    return panels


def indexer_panels(rows: Sequence[IndexerRow]) -> Panels:
    """Return a panel for each context and batch: the whole indexer, a line for each form over the cases."""
    panels: Panels = {}
    for row in rows:
        if row.stage == WHOLE:
            panel = f"whole indexer, context {row.context}, batch {row.batch}"
            _put(panels, panel, row.variant, row.case, row.median_us)
            if row.chosen:
                _put(panels, panel, PLANNED, row.case, row.median_us)
    return panels


def write_plot(panels: Panels, path: Path, caption: str) -> None:
    """Write the panels side by side; the format is that of the path's suffix.

    Parameters
    ----------
    panels : dict
        At least one.
    path : Path
        Where to write; overwritten.
    caption : str
        What was measured where.
    """
    # Without a display the default backend may try to open one.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    height = -(-len(panels) // _COLUMNS)
    figure, axes = pyplot.subplots(
        height, _COLUMNS, figsize=(6 * _COLUMNS, 4 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, points in lines.items():
            axis.plot(list(points), list(points.values()), "k--" if name == PLANNED else "o-", label=name)
        axis.set(title=title, ylabel="us", ylim=(0, None))
        axis.tick_params(axis="x", rotation=60)
        axis.legend()
    figure.suptitle(caption, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _put(panels: Panels, panel: str, line: str, label: str, value: float) -> None:
    panels.setdefault(panel, {}).setdefault(line, {})[label] = value
