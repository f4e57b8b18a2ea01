"""Every way in which a step can legally run, each forced by narrowing the capabilities."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer import DecodeForm, StepPlan, plan_step
from vllm_dsa.indexer.plan import legal_group_sizes
from vllm_dsa.runner.report import form_label

# One pass for each query row: what vLLM does for depths that are not native.
FLATTENED = "flattened"
RAGGED = "ragged"


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
        """``flattened``, ``native c=2``, ``grouped c=4`` or ``ragged``."""
        return form_label(self.plan)

    @property
    def variant(self) -> str:
        """``flattened``, ``c=2``, ``c=4``, ... or ``ragged``: the same word over all depths.

        One pass for each query row is flattened also where its depth, 1, is native.
        """
        if self.plan.form is DecodeForm.RAGGED:
            return RAGGED
        return FLATTENED if self.plan.group_size == 1 else f"c={self.plan.group_size}"


def legal_forms(depths: Sequence[int], caps: PagedMQALogitsCapabilities) -> list[Form]:
    """Return the legal forms of a step by ascending group size, RAGGED last; exactly one is chosen.

    Parameters
    ----------
    depths : sequence of int
        Query rows of each request.
    caps : PagedMQALogitsCapabilities
        What the kernel takes.
    """
    choice = plan_step(depths, caps)
    narrowed = [_only(size, caps) for size in legal_group_sizes(max(depths), caps)]
    if caps.supports_varlen:
        narrowed.append(caps)
    forms = []
    for one in narrowed:
        plan = plan_step(depths, one)
        forms.append(Form(one, plan, chosen=plan == choice))
    return forms


def _only(group_size: int, caps: PagedMQALogitsCapabilities) -> PagedMQALogitsCapabilities:
    size = frozenset({group_size})
    return dataclasses.replace(caps, native_next_n=size, paired_next_n=caps.paired_next_n & size, supports_varlen=False)
