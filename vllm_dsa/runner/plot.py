"""The replay as a picture: depths, forms and bytes over the trace's clock. Needs the ``plot`` extra."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_dsa.runner.report import ReplayReport

_BINS = 80


def plot_report(report: ReplayReport, path: Path) -> None:
    """Write a PNG of three panels, each binned over the simulated time.

    Parameters
    ----------
    report : ReplayReport
        With its samples.
    path : Path
        Where to write; overwritten.
    """
    # Without a display the default backend may try to open one.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    seconds = np.array([sample.now_ms / 1000 for sample in report.samples])
    edges = np.linspace(0, max(report.simulated_s, 1e-3), _BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    steps = np.maximum(_binned(seconds, np.ones_like(seconds), edges), 1)
    figure, (depths, forms, traffic) = pyplot.subplots(3, 1, figsize=(11, 9), sharex=True, layout="constrained")

    counts = {f"depth {depth}": _depth_counts(report, depth) for depth in sorted(report.depths)}
    _stack(depths, middles, {name: _binned(seconds, count, edges) / steps for name, count in counts.items()})
    depths.set(ylabel="decodes per step", title="decodes by query rows")
    shares = {label: _binned(seconds, _is_form(report, label), edges) / steps for label in sorted(report.forms)}
    _stack(forms, middles, shares)
    forms.set(ylabel="share of steps", title="form of the decode steps")

    scale = report.num_index_layers / 1e9
    for name, values in (
        ("flattened would read", [sample.flattened_kv_bytes * scale for sample in report.samples]),
        ("read", [sample.kv_bytes * scale for sample in report.samples]),
    ):
        traffic.step(middles, _binned(seconds, np.array(values), edges), where="mid", label=name)
    traffic.set(ylabel="GB", xlabel="trace time (s)", title=f"index-K bytes, {report.num_index_layers} layers")
    traffic.legend(loc="upper left")
    figure.suptitle(" ".join(f"{key}={value}" for key, value in report.startup.items()), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _stack(axes: object, middles: npt.NDArray[np.float64], series: dict[str, npt.NDArray[np.float64]]) -> None:
    if series:
        axes.stackplot(middles, list(series.values()), labels=list(series), step="mid")  # type: ignore[attr-defined]
        axes.legend(loc="upper left")  # type: ignore[attr-defined]


def _depth_counts(report: ReplayReport, depth: int) -> npt.NDArray[np.float64]:
    return np.array([sample.depths.count(depth) for sample in report.samples], dtype=float)


def _is_form(report: ReplayReport, label: str) -> npt.NDArray[np.float64]:
    return np.array([sample.form == label for sample in report.samples], dtype=float)


def _binned(
    seconds: npt.NDArray[np.float64], values: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    return np.histogram(seconds, edges, weights=values)[0]
