"""Every way in which a step can legally run, each forced by narrowing the capabilities."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer import DecodeForm, IndexerConfig, StepCosts, StepPlan, plan_step
from vllm_dsa.indexer.plan import legal_group_sizes
from vllm_dsa.indexer.planner import StepPlanner, without_groups
from vllm_dsa.ops import LogitsBackend
from vllm_dsa.runner.report import form_label

# One pass for each query row: what vLLM does for depths that are not native.
FLATTENED = "flattened"
RAGGED = "ragged"
# Our own Hopper kernel, which takes any depths.
OURS = "sm90"


@dataclass(frozen=True, slots=True)
class Form:
    """One legal form of a step.

    Attributes
    ----------
    caps : PagedMQALogitsCapabilities
        Under which the planner has no other choice.
    plan : StepPlan
        Its plan.
    chosen : bool
        Whether the planner takes it when it has the choice.
    """

    caps: PagedMQALogitsCapabilities
    plan: StepPlan
    chosen: bool

    @property
    def name(self) -> str:
        """``flattened``, ``native c=2``, ``grouped c=4``, ``ragged`` or ``sm90``."""
        return OURS if self.plan.backend is LogitsBackend.SM90 else form_label(self.plan)

    @property
    def variant(self) -> str:
        """``flattened``, ``c=2``, ``c=4``, ..., ``ragged`` or ``sm90``: the same word over all depths.

        One pass for each query row is flattened also where its depth, 1, is native.
        """
        if self.plan.backend is LogitsBackend.SM90:
            return OURS
        if self.plan.form is DecodeForm.RAGGED:
            return RAGGED
        return FLATTENED if self.plan.group_size == 1 else f"c={self.plan.group_size}"


def bench_planner(caps: PagedMQALogitsCapabilities, heads: int, block_size: int) -> StepPlanner:
    """Return the planner of a server with these heads and pages that may use whatever runs."""
    config = IndexerConfig(
        next_n=1, max_num_seqs=1, block_table_width=1, block_size=block_size, num_heads=heads, logits_backend="auto"
    )
    return StepPlanner.of(config, caps)


def legal_forms(
    depths: Sequence[int], caps: PagedMQALogitsCapabilities, ragged_costs: StepCosts | None = None
) -> list[Form]:
    """Return the legal forms of a step by ascending group size, RAGGED and our kernel last; exactly one is chosen.

    Parameters
    ----------
    depths : sequence of int
        Query rows of each request.
    caps : PagedMQALogitsCapabilities
        What DeepGEMM takes.
    ragged_costs : StepCosts, optional
        Of our kernel, where it may run; see ``StepPlanner``.
    """
    choice = plan_step(depths, caps, ragged_costs=ragged_costs)
    narrowed = [_only(size, caps) for size in legal_group_sizes(max(depths), caps)]
    if caps.supports_varlen:
        narrowed.append(caps)
    plans = [(one, plan_step(depths, one)) for one in narrowed]
    if ragged_costs is not None:
        nothing = without_groups(caps)
        plans.append((nothing, plan_step(depths, nothing, ragged_costs=ragged_costs)))
    return [Form(one, plan, chosen=plan == choice) for one, plan in plans]


def _only(group_size: int, caps: PagedMQALogitsCapabilities) -> PagedMQALogitsCapabilities:
    size = frozenset({group_size})
    return dataclasses.replace(caps, native_next_n=size, paired_next_n=caps.paired_next_n & size, supports_varlen=False)
