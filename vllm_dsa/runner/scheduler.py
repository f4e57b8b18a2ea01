"""Continuous batching with speculative decode: which tokens of which requests run in a step.

Requests are served in the order in which they were added. The running requests are always older than the waiting
ones, and of the running ones only the youngest can still be in prefill, because a prefill that does not end in its
step has used up the token budget. So the oldest request is never the victim of a preemption, gets at least one
token every step, and the loop cannot livelock.
"""

from collections import deque
from dataclasses import dataclass, field

from vllm_dsa.runner.acceptance import AcceptanceModel
from vllm_dsa.runner.block_pool import BlockPool
from vllm_dsa.runner.request import Request, RequestState
from vllm_dsa.runner.scheduled_step import ScheduledDecode, ScheduledPrefill, ScheduledStep, StepOutcome

__all__ = [
    "ScheduledDecode",
    "ScheduledPrefill",
    "ScheduledStep",
    "Scheduler",
    "SchedulerConfig",
    "StepOutcome",
]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes
    ----------
    max_num_seqs : int
        Requests that run at once, at least 1.
    max_num_batched_tokens : int
        Tokens of a step; at least ``max_num_seqs``, so that every running request gets a token each step.
    num_speculative_tokens : int
        Largest number of drafts of a decode, at least 0.
    max_model_len : int
        Largest prompt plus output of a request, at least 1.
    block_size : int
        Tokens of a cache page; that of the pool and of the requests.

    Raises
    ------
    ValueError
        When a limit is out of range.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    max_model_len: int
    block_size: int = 64

    def __post_init__(self) -> None:
        for name, lowest in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", self.max_num_seqs),
            ("num_speculative_tokens", 0),
            ("max_model_len", 1),
            ("block_size", 1),
        ):
            value = getattr(self, name)
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")


@dataclass(slots=True)
class _OpenStep:
    budget: int
    decodes: list[ScheduledDecode] = field(default_factory=list)
    prefills: list[ScheduledPrefill] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """First come, first served continuous batching over a paged cache.

    Each :meth:`schedule` is followed by the :meth:`complete` of its step. Pages that held only rejected drafts
    stay with their request, which needs them next.

    Parameters
    ----------
    config : SchedulerConfig
        Limits of a step.
    pool : BlockPool
        The pages; used by this scheduler alone.
    acceptance : AcceptanceModel
        Drafts proposed and accepted.

    Raises
    ------
    ValueError
        When the page size of ``pool`` is not that of ``config``.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, acceptance: AcceptanceModel) -> None:
        if pool.block_size != config.block_size:
            raise ValueError(f"pool.block_size must be {config.block_size} (config), got {pool.block_size}")
        self.config = config
        self.pool = pool
        self.acceptance = acceptance
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_flight: ScheduledStep | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def next_arrival_ms(self) -> float | None:
        """Arrival of the request that is admitted next, maybe past; ``None`` when none waits."""
        return self._waiting[0].trace.arrival_ms if self._waiting else None

    def add(self, request: Request) -> None:
        """Queue a request behind those added before, which it never overtakes, whatever their arrival.

        Raises
        ------
        ValueError
            When the request is not new, its page size is not that of the scheduler, or it can never run: prompt
            plus output exceed ``max_model_len``, or need more pages than the pool has.
        """
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.index} must be WAITING, got {request.state.name}")
        if request.block_size != self.config.block_size:
            raise ValueError(f"request.block_size must be {self.config.block_size} (config), got {request.block_size}")
        length = request.num_prompt + request.target_output
        described = f"request {request.index}: input_length {request.num_prompt} + output_length"
        if length > self.config.max_model_len:
            raise ValueError(
                f"{described} {request.target_output} = {length} tokens, allowed: max_model_len "
                f"{self.config.max_model_len}"
            )
        # The last output token is never fed.
        num_pages = self._pages_for(length - 1)
        if num_pages > self.pool.num_blocks:
            raise ValueError(
                f"{described} {request.target_output} need {num_pages} pages of {self.config.block_size} tokens, "
                f"allowed: the {self.pool.num_blocks} pages of the pool"
            )
        self._waiting.append(request)

    def schedule(self, now_ms: float) -> ScheduledStep:
        """Choose the next step and allocate its pages.

        Decodes come first, oldest first, then the running prefill, then admissions of requests that have
        arrived. When the pool is exhausted the youngest running request is preempted (it waits in front and is
        recomputed), and nothing is admitted in that step.

        Parameters
        ----------
        now_ms : float
            Time on the clock of the arrivals.

        Returns
        -------
        ScheduledStep
            Empty (0 tokens) only when nothing runs and the next request has not arrived.

        Raises
        ------
        RuntimeError
            When the step before was not completed.
        """
        if self._in_flight is not None:
            raise RuntimeError("the step before must be completed before the next schedule()")
        open_step = _OpenStep(budget=self.config.max_num_batched_tokens)
        self._schedule_running(open_step)
        if not open_step.preempted:
            self._admit_arrived(open_step, now_ms)
        self._in_flight = ScheduledStep(
            decodes=tuple(open_step.decodes),
            prefills=tuple(open_step.prefills),
            preempted=tuple(open_step.preempted),
            num_tokens=self.config.max_num_batched_tokens - open_step.budget,
        )
        return self._in_flight

    def complete(self, step: ScheduledStep) -> list[StepOutcome]:
        """Advance the requests of a step that ran.

        Of a decode, the K of the token fed and of the accepted drafts is valid afterwards; that of the token
        sampled at the end is not. Prompt pages that a chunk filled become reusable. A request that emitted its
        last token gives its pages back.

        Parameters
        ----------
        step : ScheduledStep
            The step that :meth:`schedule` returned last.

        Returns
        -------
        list of StepOutcome
            Those of the decodes, then those of the prefills, in the order of the step.

        Raises
        ------
        ValueError
            When ``step`` is not the one in flight.
        """
        if step is not self._in_flight:
            raise ValueError("step must be the one that schedule() returned last, and not completed yet")
        self._in_flight = None
        outcomes = [self._complete_decode(decode) for decode in step.decodes]
        outcomes += [self._complete_prefill(prefill) for prefill in step.prefills]
        if any(outcome.finished for outcome in outcomes):
            self._running = [request for request in self._running if request.state is not RequestState.FINISHED]
        return outcomes

    def _schedule_running(self, open_step: _OpenStep) -> None:
        num_seen = 0
        while num_seen < len(self._running):
            request = self._running[num_seen]
            num_seen += 1
            # One token is set aside for each younger request.
            budget = open_step.budget - (len(self._running) - num_seen)
            if request.state is RequestState.DECODE:
                self._schedule_decode(request, budget, open_step)
            else:
                self._schedule_chunk(request, budget, open_step)

    def _schedule_decode(self, request: Request, budget: int, open_step: _OpenStep) -> None:
        # The last remaining token is sampled, not drafted. This bounds seq_len by max_model_len too: add()
        # took only requests that end within it.
        max_drafts = min(self.config.num_speculative_tokens, request.num_remaining - 1, budget - 1)
        depth = 1 + self.acceptance.draft_length(request.index, request.num_decode_steps, max_drafts)
        start = request.num_tokens - 1
        if self._grow(request, start + depth, open_step):
            open_step.decodes.append(ScheduledDecode(request, depth, start))
            open_step.budget -= depth

    def _schedule_chunk(self, request: Request, budget: int, open_step: _OpenStep) -> None:
        start = request.num_computed
        stop = min(request.num_tokens, start + budget)
        if self._grow(request, stop, open_step):
            open_step.prefills.append(ScheduledPrefill(request, start, stop, stop == request.num_tokens))
            open_step.budget -= stop - start

    def _grow(self, request: Request, num_positions: int, open_step: _OpenStep) -> bool:
        num_missing = self._pages_for(num_positions) - len(request.block_ids)
        if num_missing <= 0:
            return True
        while (pages := self.pool.allocate(num_missing)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            open_step.preempted.append(victim)
            if victim is request:
                return False
        request.block_ids += pages
        return True

    def _preempt(self, request: Request) -> None:
        self._release_pages(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit_arrived(self, open_step: _OpenStep, now_ms: float) -> None:
        while (
            self._waiting
            and self._waiting[0].trace.arrival_ms <= now_ms
            and len(self._running) < self.config.max_num_seqs
            and open_step.budget > 0
            and self._take_pages(self._waiting[0], open_step.budget)
        ):
            request = self._waiting.popleft()
            request.state = RequestState.PREFILL
            self._running.append(request)
            self._schedule_chunk(request, open_step.budget, open_step)

    def _take_pages(self, request: Request, budget: int) -> bool:
        # At least one token is computed, or there would be nothing to sample from.
        num_matchable = (request.num_tokens - 1) // self.config.block_size
        matched = self.pool.match_prefix(request.prefix_page_keys()[:num_matchable])
        num_cached = len(matched) * self.config.block_size
        stop = min(request.num_tokens, num_cached + budget)
        fresh = self.pool.allocate(self._pages_for(stop) - len(matched))
        if fresh is None:
            self.pool.release(reversed(matched))
            return False
        request.block_ids = matched + fresh
        request.num_published_blocks = len(matched)
        request.num_computed = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        return True

    def _complete_decode(self, decode: ScheduledDecode) -> StepOutcome:
        request = decode.request
        accepted = self.acceptance.draw(request.index, request.num_decode_steps, decode.depth - 1)
        request.num_decode_steps += 1
        request.num_computed = decode.start + 1 + accepted
        return self._emit(request, accepted, accepted + 1)

    def _complete_prefill(self, prefill: ScheduledPrefill) -> StepOutcome:
        request = prefill.request
        request.num_computed = prefill.stop
        self._publish_prompt_pages(request)
        if not prefill.is_last:
            return StepOutcome(request, accepted=0, num_new_tokens=0, finished=False)
        request.state = RequestState.DECODE
        return self._emit(request, accepted=0, num_new_tokens=1)

    def _publish_prompt_pages(self, request: Request) -> None:
        keys = request.prefix_page_keys()
        num_full = min(len(keys), request.num_computed // self.config.block_size)
        for page in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_ids[page], keys[page])
        request.num_published_blocks = num_full

    def _emit(self, request: Request, accepted: int, num_new_tokens: int) -> StepOutcome:
        request.num_output += num_new_tokens
        finished = request.num_remaining == 0
        if finished:
            self._release_pages(request)
            request.state = RequestState.FINISHED
        return StepOutcome(request, accepted, num_new_tokens, finished)

    def _release_pages(self, request: Request) -> None:
        # Last page first: a prefix without its first page cannot be matched at all.
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_published_blocks = 0

    def _pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.config.block_size)
