"""What a configured server's steps are planned with, and what follows from it before the first one."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vllm_dsa.deep_gemm_wrapper import (
    PagedMQALogitsCapabilities,
    native_next_n_supported,
    paged_mqa_logits_schedule_slots,
)
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.costs import SM90_KERNEL_COSTS, StepCosts, default_costs
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, legal_group_sizes, plan_step, ragged_cost
from vllm_dsa.ops import LogitsBackend, resolve_logits_backends


class CudaGraphSupport(enum.Enum):
    """For which steps a captured decode graph may be replayed (vLLM's names)."""

    UNIFORM_BATCH = "uniform_batch"
    """Steps in which every request brings the captured number of rows."""
    ALWAYS = "always"
    """Any mix of depths with the captured number of tokens, in at most the captured number of requests."""


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Plans the steps of a server; see :func:`~vllm_dsa.indexer.plan_step`.

    Attributes
    ----------
    caps : PagedMQALogitsCapabilities
        Of DeepGEMM, narrowed to what may be planned: no provider where the torch twin computes, no `native_next_n`
        where only our kernel may.
    ragged_costs : StepCosts or None
        Of our Hopper kernel, where it may be planned.
    flattens_all : bool
        Whether a full step is FLATTENED. A graph of it reads the expanded table, so no step may leave that out: single
        rows alone, which could run NATIVE on the engine's table, are then expanded too.
    """

    caps: PagedMQALogitsCapabilities
    ragged_costs: StepCosts | None
    flattens_all: bool = False

    @classmethod
    def of(cls, config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> Self:
        """Return the planner that `config` allows with these capabilities.

        Raises
        ------
        NotImplementedError, DeepGemmUnavailableError, ValueError
            As :func:`plannable_backends`.
        """
        backends = plannable_backends(config, caps)
        if LogitsBackend.DEEP_GEMM not in backends:
            caps = dataclasses.replace(caps, provider=None, version=None)
        if backends == {LogitsBackend.SM90}:
            caps = without_groups(caps)
        ragged_costs = SM90_KERNEL_COSTS if LogitsBackend.SM90 in backends else None
        full_step = plan_step([config.next_n], caps, ragged_costs=ragged_costs)
        return cls(caps, ragged_costs, flattens_all=full_step.form is DecodeForm.FLATTENED)

    def plan(self, depths: Sequence[int]) -> StepPlan:
        """Plan a step."""
        plan = plan_step(depths, self.caps, ragged_costs=self.ragged_costs)
        if self.flattens_all and plan.form is DecodeForm.NATIVE:
            return dataclasses.replace(plan, form=DecodeForm.FLATTENED)
        return plan


def without_groups(caps: PagedMQALogitsCapabilities) -> PagedMQALogitsCapabilities:
    """Return capabilities under which no form but our Hopper kernel's can be planned."""
    return dataclasses.replace(caps, native_next_n=frozenset(), paired_next_n=frozenset(), supports_varlen=False)


def plannable_backends(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> frozenset[LogitsBackend]:
    """Return who may compute the decode logits of a server.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError, ValueError
        As :func:`vllm_dsa.ops.resolve_logits_backends`.
    """
    return resolve_logits_backends(
        config.logits_backend,
        caps,
        block_size=config.block_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
    )


def cudagraph_support(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> CudaGraphSupport:
    """Say which decode steps a graph that was captured for full steps serves.

    RAGGED and FLATTENED have one kernel row per token whatever the depths, so a graph serves any mix of them; the rows
    of NATIVE and GROUPED depend on the depths, so a graph serves uniform steps.

    A graph of our Hopper kernel reads row lengths, ``query_start_loc`` and the engine's table, which every build with
    one row per token leaves alike, whoever that step was planned for. It therefore serves any mix if no mix can be
    planned in groups of two rows or more: if at every depth up to ``next_n`` the kernel costs no more than these do,
    because the cost of a step is a sum over its requests.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError, ValueError
        As :func:`plannable_backends`.
    """
    planner = StepPlanner.of(config, caps)
    plan = planner.plan([config.next_n])
    if planner.ragged_costs is None:
        is_always = plan.form in (DecodeForm.RAGGED, DecodeForm.FLATTENED)
    else:
        is_always = plan.backend is LogitsBackend.SM90 and _never_groups(
            config.next_n, planner.caps, planner.ragged_costs
        )
    return CudaGraphSupport.ALWAYS if is_always else CudaGraphSupport.UNIFORM_BATCH


def _never_groups(max_depth: int, caps: PagedMQALogitsCapabilities, ragged_costs: StepCosts) -> bool:
    costs = default_costs(caps)
    return all(
        ragged_cost(depth, ragged_costs) <= -(-depth // size) * costs.group_cost(size)
        for size in legal_group_sizes(max_depth, caps)
        if size > 1
        for depth in range(1, max_depth + 1)
    )


def startup_fields(config: IndexerConfig, caps: PagedMQALogitsCapabilities) -> dict[str, str]:
    """Return the fields of the startup line, in their order.

    ``use_flattening`` means what vLLM means by it: the configured next_n is not native. This package then takes its own
    kernel, which ``logits_backend`` shows, or groups where it can, which ``group_size`` shows. These two and
    ``schedule_slots`` (none where the kernel needs no schedule) are those of a full step; ``forms`` are those of
    uniform steps of each depth up to next_n.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError, ValueError
        As :func:`plannable_backends`.
    """
    planner = StepPlanner.of(config, caps)
    plan = planner.plan([config.next_n])
    forms = (f"{depth}:{planner.plan([depth]).form.value}" for depth in range(1, config.next_n + 1))
    return {
        "use_flattening": str(not native_next_n_supported(config.next_n, caps)),
        "supports_varlen": str(caps.supports_varlen),
        "next_n": str(config.next_n),
        "arch": caps.arch,
        "deep_gemm": ":".join(part for part in (caps.provider or "none", caps.version) if part),
        "native_next_n": caps.native_text,
        "logits_backend": plan.backend.value,
        "forms": ",".join(forms),
        "group_size": str(plan.group_size),
        "schedule_slots": str(schedule_slots(plan, caps) or "none"),
        "num_sms": str(caps.num_sms),
    }


def schedule_slots(plan: StepPlan, caps: PagedMQALogitsCapabilities) -> int | None:
    """Return the slots of a plan's schedule; None where the kernel makes its own."""
    if plan.backend is LogitsBackend.SM90:
        return None
    return paged_mqa_logits_schedule_slots(caps.num_sms, plan.group_size, caps)
