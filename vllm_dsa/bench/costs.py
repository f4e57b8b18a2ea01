"""The planner's cost table from measured logits: ``vllm-dsa bench logits --costs``."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dsa.bench.forms import OURS, RAGGED
from vllm_dsa.bench.logits import LogitsRow
from vllm_dsa.bench.verdict import SHORTEST_US, cells
from vllm_dsa.indexer import StepCosts

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostFit:
    """A fitted table and what it costs in the cells that it was fitted to.

    Attributes
    ----------
    costs : StepCosts
    num_cells : int
        Cells used: those whose fastest form takes over 20 us.
    mean_loss, worst_loss : float
        How much longer the table's choice takes than the cell's best form, as shares.
    """

    costs: StepCosts
    num_cells: int
    mean_loss: float
    worst_loss: float

    def source_line(self) -> str:
        """Return the table as Python source."""
        return source_line(self.costs)


def source_line(costs: StepCosts) -> str:
    """Return a table as Python source."""
    values = ", ".join(str(cost) for cost in costs.costs)
    sizes = ", ".join(map(str, costs.group_sizes))
    comma = "," if len(costs.costs) == 1 else ""
    return f"StepCosts(group_sizes=({sizes}{comma}), costs=({values}{comma}))"


def ragged_costs(rows: Iterable[LogitsRow], costs: StepCosts) -> StepCosts | None:
    """Return what a request costs our kernel by its depth; ``None`` without rows of it.

    A cell's cost is that of the fastest other form by `costs`, times our time over its time: so the planner chooses
    between the two as the times would. The median over contexts and batches, of uniform steps of over 20 us.

    Parameters
    ----------
    rows : iterable of LogitsRow
        From ``bench logits``.
    costs : StepCosts
        Of the other forms.
    """
    found: dict[int, list[float]] = {}
    for cell in cells(rows):
        ours = next((row for row in cell.rows if row.variant == OURS), None)
        others = [row for row in cell.rows if row.variant not in (RAGGED, OURS)]
        if ours is None or not others or ours.case != f"n={ours.tokens // ours.batch}":
            continue
        best = min(others, key=lambda row: row.median_us)
        if min(best.median_us, ours.median_us) > SHORTEST_US:
            per_request = best.kv_reads / best.batch * costs.group_cost(best.group_size)
            found.setdefault(ours.tokens // ours.batch, []).append(per_request * ours.median_us / best.median_us)
    if not found:
        return None
    depths = tuple(sorted(found))
    return StepCosts(depths, tuple(round(float(np.median(found[depth])), 3) for depth in depths))


def fit_costs(rows: Iterable[LogitsRow]) -> CostFit:
    """Fit the cost of a pass by group size, so that the planner's choices lose the least.

    In a cell, the form of size c is cheaper than flattening exactly when cost(c) / cost(1) is below the cell's own
    ratio of times per pass. The fit starts from the median of those ratios and moves one size at a time to another
    cell's ratio while the mean loss over all cells falls.

    Parameters
    ----------
    rows : iterable of LogitsRow
        From ``bench logits``; RAGGED rows, our kernel's too, play no part.

    Raises
    ------
    ValueError
        If no cell over 20 us has all the group sizes, 1 among them.
    """
    sizes, times, groups = _tables(rows)
    ratios = (times / groups) / (times[:, :1] / groups[:, :1])
    # Rounded as it is printed, so that the loss that is reported is the printed table's.
    candidates = ratios.round(3)
    fitted = np.median(ratios, axis=0).round(3)
    best = _losses(fitted, times, groups).mean()
    improved = True
    while improved:
        improved = False
        for column in range(1, len(sizes)):
            start = fitted[column]
            for value in sorted(set(candidates[:, column].tolist()), key=lambda v: abs(v - start)):
                moved = fitted.copy()
                moved[column] = value
                loss = _losses(moved, times, groups).mean()
                if loss < best - 1e-12:
                    fitted, best, improved = moved, loss, True
    losses = _losses(fitted, times, groups)
    return CostFit(StepCosts(sizes, tuple(fitted.tolist())), len(times), float(losses.mean()), float(losses.max()))


def _tables(rows: Iterable[LogitsRow]) -> tuple[tuple[int, ...], FloatArray, FloatArray]:
    """Return the group sizes, and times and passes as (cells, sizes)."""
    grouped = [
        {row.group_size: row for row in cell.rows if row.variant not in (RAGGED, OURS)}
        for cell in cells(rows)
        if cell.best.median_us > SHORTEST_US
    ]
    sizes = tuple(sorted({size for by_size in grouped for size in by_size}))
    full = [by_size for by_size in grouped if len(by_size) == len(sizes)]
    if not full or sizes[0] != 1:
        raise ValueError(f"--costs needs cells of over {SHORTEST_US:g} us with every group size and 1, got {sizes}")
    times = np.array([[by_size[size].median_us for size in sizes] for by_size in full])
    groups = np.array([[float(by_size[size].kv_reads) for size in sizes] for by_size in full])
    return sizes, times, groups


def _losses(costs: FloatArray, times: FloatArray, groups: FloatArray) -> FloatArray:
    # Ties go to fewer passes, as in the planner.
    totals = groups * costs * (1 + 1e-9 * groups)
    chosen = totals.argmin(axis=1)
    losses: FloatArray = times[np.arange(len(times)), chosen] / times.min(axis=1) - 1
    return losses
