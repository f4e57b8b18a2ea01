"""Whether the planner's choice is as good as the best legal form. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_dsa.bench.logits import LogitsRow

# Below this a launch's fixed costs and the clock decide, not the form.
SHORTEST_US = 20.0
SLACK = 0.03


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of one case, one for each form that was timed."""

    rows: tuple[LogitsRow, ...]

    @property
    def label(self) -> str:
        """The case, its context and its batch."""
        first = self.rows[0]
        return f"{first.case}, context {first.context}, batch {first.batch}"

    @property
    def best(self) -> LogitsRow:
        """The fastest form."""
        return min(self.rows, key=lambda row: row.median_us)

    @property
    def chosen(self) -> LogitsRow | None:
        """The planner's form; ``None`` if its answer was wrong."""
        return next((row for row in self.rows if row.chosen), None)

    @property
    def counts(self) -> bool:
        """Whether the planner's form takes long enough to be judged."""
        return self.chosen is not None and self.chosen.median_us > SHORTEST_US

    @property
    def loss(self) -> float:
        """How much longer the chosen form takes than the best, as a share; NaN without a chosen form."""
        return math.nan if self.chosen is None else self.chosen.median_us / self.best.median_us - 1


def cells(rows: Iterable[LogitsRow]) -> list[Cell]:
    """Group rows by case, in order of appearance."""
    grouped: dict[tuple[str, int, int], list[LogitsRow]] = {}
    for row in rows:
        grouped.setdefault((row.case, row.context, row.batch), []).append(row)
    return [Cell(tuple(group)) for group in grouped.values()]


def losing_cells(rows: Iterable[LogitsRow]) -> list[Cell]:
    """Return the cells of over 20 us whose chosen form is more than 3% slower than the best, worst first."""
    losing = [cell for cell in cells(rows) if cell.counts and cell.loss > SLACK]
    return sorted(losing, key=lambda cell: -cell.loss)
