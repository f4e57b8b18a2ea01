"""The plan of a decode step: one expansion with one parameter, the group size."""

import enum
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, native_next_n_supported
from vllm_dsa.indexer.costs import SM90_ROWS_PER_PASS, StepCosts, default_costs
from vllm_dsa.ops import LogitsBackend

# Sums of equal costs may differ in their last bits.
_TIE = 1 + 1e-9


class DecodeForm(enum.Enum):
    """How a step's query rows reach the logits kernel."""

    NATIVE = "native"
    """Uniform depth that the kernel takes: queries and block table are views, KV is read once per request."""
    GROUPED = "grouped"
    """Each request becomes ``ceil(depth / group_size)`` groups; a group reads its KV once."""
    FLATTENED = "flattened"
    """Groups of one row: KV is read once per query row."""
    RAGGED = "ragged"
    """The kernel takes ragged depths itself: a row per token, KV is read once per request (per eight rows of one by our
    Hopper kernel)."""


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
        Rows of the kernel's ``context_lens``.
    kv_reads : int
        Passes over a request's KV, summed over the step. Flattening would make `num_tokens` of them.
    max_depth : int
        Most query rows that a request brings.
    backend : LogitsBackend
        Whose kernel the step is laid out for. On a device that it does not run on the torch twin stands in.
    """

    form: DecodeForm
    group_size: int
    num_reqs: int
    num_tokens: int
    num_groups: int
    kv_reads: int
    max_depth: int
    backend: LogitsBackend = LogitsBackend.DEEP_GEMM

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

    @property
    def is_one_row_per_request(self) -> bool:
        """Whether every request brings exactly one row: as many rows as requests, and none brings two."""
        return self.num_tokens == self.num_reqs and self.max_depth <= 1

    @property
    def reads_engine_table(self) -> bool:
        """Whether the kernel reads the engine's own block table, so that none is expanded."""
        return self.form is DecodeForm.NATIVE or self.backend is LogitsBackend.SM90

    @property
    def num_table_rows(self) -> int:
        """Rows of the kernel's block table: one per request for our Hopper kernel, one per group for every other."""
        return self.num_reqs if self.backend is LogitsBackend.SM90 else self.num_groups


def plan_step(
    depths: Sequence[int],
    caps: PagedMQALogitsCapabilities,
    costs: StepCosts | None = None,
    ragged_costs: StepCosts | None = None,
) -> StepPlan:
    """Choose the cheapest legal form of a decode step. Pure: no device, no state.

    Parameters
    ----------
    depths : sequence of int
        Query rows of each request, in batch order. 0 is a request that brings none (graph padding).
    caps : PagedMQALogitsCapabilities
        What DeepGEMM takes. Without a provider the same forms are planned for the torch twin; an empty `native_next_n`
        allows none of them.
    costs : StepCosts, optional
        By default the table of the capabilities' architecture.
    ragged_costs : StepCosts, optional
        What a request costs our Hopper kernel, by its depth, in the unit of `costs`; one deeper than
        ``SM90_ROWS_PER_PASS`` costs the sum of its passes. None: the kernel may not be planned.

    Returns
    -------
    StepPlan
        Least total cost; ties go to our kernel (fewest launches), then to fewer KV reads, then to fewer rows. A
        DeepGEMM with varlen support always runs RAGGED, whose graphs then hold for every mix of depths.

    Raises
    ------
    ValueError
        If a depth is negative, or nothing may be planned.
    """
    count_of_depth = Counter(depths)
    if count_of_depth and min(count_of_depth) < 0:
        bad = next(i for i, depth in enumerate(depths) if depth < 0)
        raise ValueError(f"depths must not be negative, got {depths[bad]} for request {bad}")
    num_reqs, num_tokens, max_depth = len(depths), sum(depths), max(depths, default=0)
    num_live = num_reqs - count_of_depth.pop(0, 0)
    backend = LogitsBackend.REFERENCE if caps.provider is None else LogitsBackend.DEEP_GEMM
    if caps.supports_varlen:
        return _ragged_plan(num_reqs, num_tokens, num_live, max_depth, backend)
    best = _cheapest_groups(count_of_depth, caps, costs or default_costs(caps))
    if ragged_costs is not None and (
        best is None or _ragged_total(count_of_depth, ragged_costs) <= best.total_cost * _TIE
    ):
        passes = sum(count * -(-depth // SM90_ROWS_PER_PASS) for depth, count in count_of_depth.items())
        return _ragged_plan(num_reqs, num_tokens, passes, max_depth, LogitsBackend.SM90)
    if best is None:
        raise ValueError(f"caps.native_next_n must name a legal group size, got {caps.native_next_n}")
    # A view of the engine's table needs its first rows to be exactly the kernel's rows.
    is_native = not count_of_depth or (list(count_of_depth) == [best.group_size] and 0 not in depths[:num_live])
    return StepPlan(
        form=DecodeForm.NATIVE if is_native else expanded_form(best.group_size),
        group_size=best.group_size,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_groups=best.num_groups,
        kv_reads=best.num_groups,
        max_depth=max_depth,
        backend=backend,
    )


def expanded_form(group_size: int) -> DecodeForm:
    """Return what a step in groups of `group_size` is called where the engine's table does not serve as it is."""
    return DecodeForm.FLATTENED if group_size == 1 else DecodeForm.GROUPED


def legal_group_sizes(max_depth: int, caps: PagedMQALogitsCapabilities) -> list[int]:
    """Return the group sizes that a step of at most `max_depth` rows per request may use, ascending."""
    candidates = range(1, max_depth + 1) if caps.native_next_n is None else sorted(caps.native_next_n)
    return [size for size in candidates if native_next_n_supported(size, caps)]


def _ragged_plan(num_reqs: int, num_tokens: int, kv_reads: int, max_depth: int, backend: LogitsBackend) -> StepPlan:
    return StepPlan(
        form=DecodeForm.RAGGED,
        group_size=1,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_groups=num_tokens,
        kv_reads=kv_reads,
        max_depth=max_depth,
        backend=backend,
    )


class _Groups(NamedTuple):
    """A step cut into groups, ordered by what it costs."""

    total_cost: float
    num_groups: int
    num_rows: int
    group_size: int


def _cheapest_groups(
    count_of_depth: Mapping[int, int], caps: PagedMQALogitsCapabilities, costs: StepCosts
) -> _Groups | None:
    choices = []
    for size, cost in _group_costs(max(count_of_depth, default=1), caps, costs):
        num_groups = sum(count * -(-depth // size) for depth, count in count_of_depth.items())
        choices.append(_Groups(num_groups * cost, num_groups, num_groups * size, size))
    return min(choices, default=None)


@functools.lru_cache(maxsize=1024)
def _group_costs(max_depth: int, caps: PagedMQALogitsCapabilities, costs: StepCosts) -> tuple[tuple[int, float], ...]:
    return tuple((size, costs.group_cost(size)) for size in legal_group_sizes(max_depth, caps))


def _ragged_total(count_of_depth: Mapping[int, int], costs: StepCosts) -> float:
    return math.fsum(count * ragged_cost(depth, costs) for depth, count in count_of_depth.items())


@functools.lru_cache(maxsize=1024)
def ragged_cost(depth: int, costs: StepCosts) -> float:
    """Return what one request of `depth` rows, at least 1, costs our Hopper kernel: the sum of its passes."""
    full, rest = divmod(depth, SM90_ROWS_PER_PASS)
    return full * costs.group_cost(SM90_ROWS_PER_PASS) + (costs.group_cost(rest) if rest else 0.0)
