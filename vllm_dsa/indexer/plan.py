"""The plan of a decode step: one expansion with one parameter, the group size."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, native_next_n_supported
from vllm_dsa.indexer.costs import StepCosts, default_costs


class DecodeForm(enum.Enum):
    """How a step's query rows reach the logits kernel."""

    NATIVE = "native"
    """Uniform depth that the kernel takes: queries and block table are views, KV is read once per request."""
    GROUPED = "grouped"
    """Each request becomes ``ceil(depth / group_size)`` groups; a group reads its KV once."""
    FLATTENED = "flattened"
    """Groups of one row: KV is read once per query row."""
    RAGGED = "ragged"
    """The kernel takes ragged depths itself: a row per token, KV is read once per request."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step runs as. Depends on the depths alone, so a graph captured for it outlives every change of lengths.

    Attributes
    ----------
    form : DecodeForm
    group_size : int
        Query rows per kernel row, the ``next_n`` that the kernel sees.
    num_reqs, num_tokens : int
        Requests of the step (zero-depth ones included) and their query rows.
    num_groups : int
        Rows of the kernel's ``context_lens`` and block table.
    kv_reads : int
        Passes over a request's KV, summed over the step. Flattening would make `num_tokens` of them.
    """

    form: DecodeForm
    group_size: int
    num_reqs: int
    num_tokens: int
    num_groups: int
    kv_reads: int

    @property
    def num_rows(self) -> int:
        """Query rows given to the kernel, dummy rows included."""
        return self.num_groups * self.group_size

    @property
    def num_dummy_rows(self) -> int:
        """Rows that stand for no token: zero weights, and the bound of the last real row of their group."""
        return self.num_rows - self.num_tokens

    @property
    def rows_are_tokens(self) -> bool:
        """Whether row ``i`` is token ``i``, so that queries need no gather."""
        return self.num_dummy_rows == 0


def plan_step(depths: Sequence[int], caps: PagedMQALogitsCapabilities, costs: StepCosts | None = None) -> StepPlan:
    """Choose the cheapest legal form of a decode step. Pure: no device, no state.

    Parameters
    ----------
    depths : sequence of int
        Query rows of each request, in batch order. 0 is a request that brings none (graph padding).
    caps : PagedMQALogitsCapabilities
        What the kernel takes.
    costs : StepCosts, optional
        By default the table of the capabilities' architecture.

    Returns
    -------
    StepPlan
        Least total cost; ties go to fewer KV reads, then to fewer rows. A kernel with varlen support always runs
        RAGGED, whose graphs then hold for every mix of depths.

    Raises
    ------
    ValueError
        If a depth is negative.
    """
    depth_array = np.asarray(depths, dtype=np.int64)
    if depth_array.size and depth_array.min() < 0:
        bad = int(np.argmin(depth_array))
        raise ValueError(f"depths must not be negative, got {int(depth_array[bad])} for request {bad}")
    num_reqs, num_tokens = depth_array.size, int(depth_array.sum())
    live = depth_array[depth_array > 0]
    if caps.supports_varlen:
        return StepPlan(DecodeForm.RAGGED, 1, num_reqs, num_tokens, num_groups=num_tokens, kv_reads=live.size)
    group_size, num_groups = _cheapest_group_size(live, caps, costs or default_costs(caps))
    return StepPlan(
        form=_form(depth_array, live.size, group_size),
        group_size=group_size,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_groups=num_groups,
        kv_reads=num_groups,
    )


def legal_group_sizes(max_depth: int, caps: PagedMQALogitsCapabilities) -> list[int]:
    """Return the group sizes that a step of at most `max_depth` rows per request may use, ascending."""
    candidates = range(1, max_depth + 1) if caps.native_next_n is None else sorted(caps.native_next_n)
    return [size for size in candidates if native_next_n_supported(size, caps)]


def _cheapest_group_size(live: np.ndarray, caps: PagedMQALogitsCapabilities, costs: StepCosts) -> tuple[int, int]:
    best: tuple[tuple[float, int, int], int] | None = None
    for size in legal_group_sizes(int(live.max(initial=1)), caps):
        num_groups = int((-(-live // size)).sum())
        rank = (num_groups * costs.group_cost(size), num_groups, num_groups * size)
        if best is None or rank < best[0]:
            best = (rank, size)
    if best is None:
        raise ValueError(f"caps.native_next_n must name a legal group size, got {caps.native_next_n}")
    return best[1], best[0][1]


def _form(depths: np.ndarray, num_live: int, group_size: int) -> DecodeForm:
    # A view of the engine's table needs its first rows to be exactly the kernel's rows.
    if (depths[:num_live] == group_size).all():
        return DecodeForm.NATIVE
    return DecodeForm.FLATTENED if group_size == 1 else DecodeForm.GROUPED
