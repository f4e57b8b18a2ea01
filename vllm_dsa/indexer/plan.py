"""The plan of a decode step: one expansion with one parameter, the group size."""

import enum
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    count_of_depth = Counter(depths)
    if count_of_depth and min(count_of_depth) < 0:
        bad = next(i for i, depth in enumerate(depths) if depth < 0)
        raise ValueError(f"depths must not be negative, got {depths[bad]} for request {bad}")
    num_reqs, num_tokens = len(depths), sum(depths)
    num_live = num_reqs - count_of_depth.pop(0, 0)
    if caps.supports_varlen:
        return StepPlan(DecodeForm.RAGGED, 1, num_reqs, num_tokens, num_groups=num_tokens, kv_reads=num_live)
    group_size, num_groups = _cheapest_group_size(count_of_depth, caps, costs or default_costs(caps))
    # A view of the engine's table needs its first rows to be exactly the kernel's rows.
    is_native = not count_of_depth or (list(count_of_depth) == [group_size] and 0 not in depths[:num_live])
    return StepPlan(
        form=DecodeForm.NATIVE if is_native else expanded_form(group_size),
        group_size=group_size,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_groups=num_groups,
        kv_reads=num_groups,
    )


def expanded_form(group_size: int) -> DecodeForm:
    """Return what a step in groups of `group_size` is called where the engine's table does not serve as it is."""
    return DecodeForm.FLATTENED if group_size == 1 else DecodeForm.GROUPED


def legal_group_sizes(max_depth: int, caps: PagedMQALogitsCapabilities) -> list[int]:
    """Return the group sizes that a step of at most `max_depth` rows per request may use, ascending."""
    candidates = range(1, max_depth + 1) if caps.native_next_n is None else sorted(caps.native_next_n)
    return [size for size in candidates if native_next_n_supported(size, caps)]


def _cheapest_group_size(
    count_of_depth: Mapping[int, int], caps: PagedMQALogitsCapabilities, costs: StepCosts
) -> tuple[int, int]:
    best: tuple[tuple[float, int, int], int] | None = None
    for size, cost in _group_costs(max(count_of_depth, default=1), caps, costs):
        num_groups = sum(count * -(-depth // size) for depth, count in count_of_depth.items())
        rank = (num_groups * cost, num_groups, num_groups * size)
        if best is None or rank < best[0]:
            best = (rank, size)
    if best is None:
        raise ValueError(f"caps.native_next_n must name a legal group size, got {caps.native_next_n}")
    return best[1], best[0][1]


@functools.lru_cache(maxsize=1024)
def _group_costs(max_depth: int, caps: PagedMQALogitsCapabilities, costs: StepCosts) -> tuple[tuple[int, float], ...]:
    return tuple((size, costs.group_cost(size)) for size in legal_group_sizes(max_depth, caps))
