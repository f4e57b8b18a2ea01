from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dsa.runner.acceptance import AcceptanceModel
from vllm_dsa.runner.block_pool import BlockPool
from vllm_dsa.runner.request import Request, RequestState
from vllm_dsa.runner.scheduled_step import ScheduledStep, StepOutcome
from vllm_dsa.runner.scheduler import Scheduler, SchedulerConfig
from vllm_dsa.runner.trace import TraceRequest, read_trace


def make(index: int, input_length: int, output_length: int, arrival_ms: float = 0, family: int = 0) -> Request:
    """Build a request; those of one family share the whole prefix that both have, other families nothing."""
    hash_ids = tuple(family * 1000 + block for block in range(-(-input_length // 512)))
    return Request(TraceRequest(index, arrival_ms, input_length, output_length, hash_ids))


def make_scheduler(num_blocks: int = 100, rate: float = 0.7, seed: int = 0, **limits: int) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 4096, **limits}
    config = SchedulerConfig(**{"num_speculative_tokens": 3, **limits})
    return Scheduler(config, BlockPool(num_blocks), AcceptanceModel(rate, seed))


class Cache:
    """The content of every slot of the cache, written as an engine would."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.slots = np.zeros(pool.num_blocks * pool.block_size, dtype=np.uint64)

    def slots_of(self, block_ids: list[int], start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop)
        pages = np.asarray(block_ids)[positions // self.pool.block_size]
        return pages * self.pool.block_size + positions % self.pool.block_size

    def check(self, request: Request) -> None:
        held = self.slots[self.slots_of(request.block_ids, 0, request.num_computed)]
        assert np.array_equal(held, request.content_keys(0, request.num_computed))


def check_step(scheduler: Scheduler, step: ScheduledStep) -> None:
    config, pool = scheduler.config, scheduler.pool
    assert step.num_tokens <= config.max_num_batched_tokens
    assert scheduler.num_running <= config.max_num_seqs
    rows = [(decode.request, decode.start, decode.seq_len) for decode in step.decodes]
    rows += [(prefill.request, prefill.start, prefill.stop) for prefill in step.prefills]
    assert step.num_tokens == sum(stop - start for _, start, stop in rows)
    assert len(rows) == scheduler.num_running, "a running request got no token"
    assert [request.index for request, _, _ in rows] == sorted(request.index for request, _, _ in rows)
    written: set[int] = set()
    for request, start, stop in rows:
        assert start == request.num_computed < stop <= config.max_model_len
        assert stop <= len(request.block_ids) * pool.block_size
        pages = request.block_ids[start // pool.block_size : -(-stop // pool.block_size)]
        assert all(pool.ref_count(page) == 1 for page in pages), "a page is written that another request reads"
        assert not written & set(pages)
        written |= set(pages)
    for decode in step.decodes:
        assert 1 <= decode.depth <= 1 + config.num_speculative_tokens
        assert decode.start == decode.request.num_tokens - 1
        assert decode.depth <= decode.request.num_remaining
    for request in step.preempted:
        assert request.state is RequestState.WAITING
        assert (request.num_computed, request.num_published_blocks, request.block_ids) == (0, 0, [])


def run_step(scheduler: Scheduler, cache: Cache, step: ScheduledStep) -> list[StepOutcome]:
    before = [(list(decode.request.block_ids), decode.request.num_decode_steps) for decode in step.decodes]
    for prefill in step.prefills:
        slots = cache.slots_of(prefill.request.block_ids, prefill.start, prefill.stop)
        cache.slots[slots] = prefill.request.content_keys(prefill.start, prefill.stop)
    outcomes = scheduler.complete(step)
    for decode, outcome, (block_ids, step_of_request) in zip(step.decodes, outcomes, before, strict=False):
        request, start = decode.request, decode.start
        fed = request.content_keys(start, start + 1)
        drafts = request.draft_keys(start + 1, decode.seq_len, outcome.accepted, step_of_request)
        cache.slots[cache.slots_of(block_ids, start, decode.seq_len)] = np.concatenate([fed, drafts])
        assert outcome.num_new_tokens == outcome.accepted + 1 <= decode.depth
        if not outcome.finished:
            assert request.num_computed == start + 1 + outcome.accepted == request.num_tokens - 1
    for outcome in outcomes:
        if not outcome.finished:
            cache.check(outcome.request)
    return outcomes


def run(scheduler: Scheduler, requests: list[Request], step_ms: float = 25.0) -> tuple[list[object], dict[int, int]]:
    """Run to the end under all checks; return what every step was and the tokens emitted by each request."""
    for request in requests:
        scheduler.add(request)
    cache = Cache(scheduler.pool)
    emitted = dict.fromkeys((request.index for request in requests), 0)
    log: list[object] = []
    now_ms = 0.0
    # The oldest running request is never preempted and gets a token every step.
    max_steps = sum(request.num_prompt + request.target_output for request in requests)
    while scheduler.has_work:
        step = scheduler.schedule(now_ms)
        if step.num_tokens == 0:
            assert scheduler.num_running == 0
            assert scheduler.next_arrival_ms is not None
            assert scheduler.next_arrival_ms > now_ms
            now_ms = scheduler.next_arrival_ms
        else:
            now_ms += step_ms
        check_step(scheduler, step)
        decodes = [(decode.request.index, decode.start, decode.depth) for decode in step.decodes]
        prefills = [(prefill.request.index, prefill.start, prefill.stop) for prefill in step.prefills]
        log.append((decodes, prefills, [request.index for request in step.preempted]))
        for outcome in run_step(scheduler, cache, step):
            emitted[outcome.request.index] += outcome.num_new_tokens
            assert outcome.finished == (emitted[outcome.request.index] == outcome.request.target_output)
        assert len(log) <= 2 * max_steps
    assert scheduler.next_arrival_ms is None
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    return log, emitted


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, int, float, int]]:
    shape = st.tuples(st.integers(1, 1100), st.integers(1, 90), st.integers(0, 300), st.integers(0, 2))
    return sorted(draw(st.lists(shape, min_size=1, max_size=7)), key=lambda request: request[2])


def build(workload: list[tuple[int, int, float, int]]) -> list[Request]:
    return [make(index, *shape) for index, shape in enumerate(workload)]


SETTINGS = {
    "workload": workloads(),
    # 19 pages are what the largest request of a workload needs.
    "num_blocks": st.integers(19, 45),
    "max_num_batched_tokens": st.integers(6, 700),
    "num_speculative_tokens": st.integers(0, 4),
    "rate": st.sampled_from([0.0, 0.4, 0.7, 1.0]),
}


@settings(max_examples=100)
@given(**SETTINGS, max_num_seqs=st.integers(1, 6))
def test_every_workload_finishes_exactly(workload: list[tuple[int, int, float, int]], **limits: int) -> None:
    requests = build(workload)
    _, emitted = run(make_scheduler(**limits), requests)
    assert emitted == {request.index: request.target_output for request in requests}
    assert all(request.state is RequestState.FINISHED for request in requests)


@settings(max_examples=20)
@given(**SETTINGS)
def test_tokens_do_not_depend_on_the_batch_and_steps_repeat(
    workload: list[tuple[int, int, float, int]], **limits: int
) -> None:
    alone = run(make_scheduler(max_num_seqs=1, **limits), build(workload))
    together = run(make_scheduler(max_num_seqs=6, **limits), build(workload))
    again = run(make_scheduler(max_num_seqs=6, **limits), build(workload))
    assert together == again
    assert alone[1] == together[1]


def test_the_youngest_is_preempted_recomputed_and_finishes() -> None:
    requests = [make(0, 640, 200, family=0), make(1, 640, 200, family=1)]
    scheduler = make_scheduler(num_blocks=22, max_num_batched_tokens=2000)
    log, _ = run(scheduler, requests)
    assert [request.num_preemptions > 0 for request in requests] == [False, True]
    assert requests[1].num_cached_tokens == 0, "pages found again after a preemption are no prefix hit"
    assert any(preempted == [1] for _, _, preempted in log)
    recomputed = [chunk for _, prefills, _ in log for chunk in prefills if chunk[0] == 1]
    assert recomputed[-1][2] > 640, "outputs emitted before the preemption are prefilled again"


def test_the_preempted_wait_in_front_in_their_order() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for index in range(4):
        scheduler.add(make(index, 63, 60, family=index))
    scheduler.add(make(4, 1, 1))
    scheduler.complete(scheduler.schedule(0))
    step = scheduler.schedule(0)
    # The older two need a second page each.
    assert [request.index for request in step.preempted] == [3, 2]
    readmitted: list[int] = []
    scheduler.complete(step)
    while scheduler.has_work:
        step = scheduler.schedule(0)
        readmitted += [prefill.request.index for prefill in step.prefills]
        scheduler.complete(step)
    assert list(dict.fromkeys(readmitted)) == [2, 3, 4]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=22, max_num_batched_tokens=2000)
    scheduler.add(make(0, 640, 200, family=0))
    scheduler.add(make(1, 640, 200, family=1))
    scheduler.add(make(2, 1, 1, arrival_ms=1))
    step = scheduler.schedule(0)
    while not step.preempted:
        scheduler.complete(step)
        step = scheduler.schedule(0)
    scheduler.complete(step)
    assert scheduler.num_running == 1


def test_a_prompt_prefix_is_reused_only_once_it_is_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2000)
    requests = [make(0, 640, 4), make(1, 640, 4), make(2, 640, 4, arrival_ms=1)]
    for request in requests:
        scheduler.add(request)
    scheduler.complete(scheduler.schedule(0))
    step = scheduler.schedule(1)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 576]
    assert [(prefill.start, prefill.stop) for prefill in step.prefills] == [(576, 640)]
    assert requests[2].block_ids[:9] == requests[0].block_ids[:9]
    assert requests[2].num_published_blocks == 9


def test_a_finished_prompt_is_evicted_from_its_end() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=2000)
    run(scheduler, [make(0, 640, 1)])
    run(scheduler, [make(1, 192, 1, family=1)])
    again = make(2, 640, 1)
    scheduler.add(again)
    scheduler.schedule(0)
    assert again.num_cached_tokens == 7 * 64


def test_one_token_is_computed_even_when_the_whole_prompt_is_cached() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2000)
    run(scheduler, [make(0, 640, 1)])
    scheduler.add(make(1, 640, 1))
    scheduler.add(make(2, 641, 1))
    step = scheduler.schedule(0)
    assert [(prefill.start, prefill.stop) for prefill in step.prefills] == [(576, 640), (640, 641)]


def test_a_long_prompt_runs_in_chunks_beside_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=256, num_speculative_tokens=1, rate=1.0)
    first, second = make(0, 10, 50, family=0), make(1, 600, 2, family=1)
    scheduler.add(first)
    scheduler.complete(scheduler.schedule(0))
    scheduler.add(second)
    chunks = []
    while second.state is not RequestState.FINISHED:
        step = scheduler.schedule(0)
        chunks += [(prefill.start, prefill.stop, prefill.is_last) for prefill in step.prefills]
        outcomes = scheduler.complete(step)
        assert step.decodes[0].request is first
    assert chunks == [(0, 254, False), (254, 508, False), (508, 600, True)]
    assert outcomes[-1].finished


def test_drafts_stop_at_the_last_output_and_at_the_token_budget() -> None:
    scheduler = make_scheduler(rate=1.0, max_num_seqs=2, max_num_batched_tokens=4)
    for index in range(2):
        scheduler.add(make(index, 1, 6, family=index))
    scheduler.complete(scheduler.schedule(0))
    depths = []
    while scheduler.has_work:
        step = scheduler.schedule(0)
        depths.append([decode.depth for decode in step.decodes])
        scheduler.complete(step)
    # The older takes what the budget leaves after one row for the younger, then the younger goes alone.
    assert depths == [[3, 1], [2, 2], [2]]


def test_depths_and_outcomes_are_those_of_the_acceptance_model() -> None:
    scheduler = make_scheduler(rate=0.5, seed=11)
    request = make(7, 1, 400)
    scheduler.add(request)
    scheduler.complete(scheduler.schedule(0))
    for step_of_request in range(60):
        assert request.num_decode_steps == step_of_request
        step = scheduler.schedule(0)
        num_drafts = step.decodes[0].depth - 1
        assert num_drafts == scheduler.acceptance.draft_length(7, step_of_request, 3)
        accepted = scheduler.complete(step)[0].accepted
        assert accepted == scheduler.acceptance.draw(7, step_of_request, num_drafts)


def test_a_request_with_one_output_ends_with_its_prefill() -> None:
    scheduler = make_scheduler(num_blocks=1)
    scheduler.add(make(0, 64, 1))
    outcome = scheduler.complete(scheduler.schedule(0))[0]
    assert (outcome.accepted, outcome.num_new_tokens, outcome.finished) == (0, 1, True)
    assert not scheduler.has_work


def test_requests_wait_for_their_arrival_in_order() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(0, 10, 1, arrival_ms=50))
    scheduler.add(make(1, 10, 1, arrival_ms=20, family=1))
    assert scheduler.next_arrival_ms == 50
    empty = scheduler.schedule(49)
    assert (empty.num_tokens, scheduler.complete(empty)) == (0, [])
    assert len(scheduler.schedule(50).prefills) == 2


def test_a_request_that_can_never_run_is_rejected_with_its_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=300)
    with pytest.raises(ValueError, match=r"request 0: input_length 250 \+ output_length 51 = 301 .*max_model_len 300"):
        scheduler.add(make(0, 250, 51))
    with pytest.raises(ValueError, match=r"request 1: input_length 250 \+ output_length 8 need 5 pages .*the 4 pages"):
        scheduler.add(make(1, 250, 8))
    assert not scheduler.has_work
    run(scheduler, [make(2, 250, 7)])


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pool\.block_size must be 64 \(config\), got 32"):
        Scheduler(make_scheduler().config, BlockPool(4, 32), AcceptanceModel(0.5, 0))
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match=r"request\.block_size must be 64 \(config\), got 32"):
        scheduler.add(Request(TraceRequest(0, 0, 1, 1, (1,)), 32))
    request = make(0, 1, 1)
    scheduler.add(request)
    step = scheduler.schedule(0)
    with pytest.raises(ValueError, match="request 0 must be WAITING, got PREFILL"):
        scheduler.add(request)
    with pytest.raises(RuntimeError, match="must be completed"):
        scheduler.schedule(0)
    scheduler.complete(step)
    with pytest.raises(ValueError, match="step must be the one"):
        scheduler.complete(step)


@pytest.mark.parametrize(
    ("name", "value", "lowest"),
    [
        ("max_num_seqs", 0, 1),
        ("max_num_batched_tokens", 3, 4),
        ("num_speculative_tokens", -1, 0),
        ("max_model_len", 0, 1),
        ("block_size", 0, 1),
    ],
)
def test_a_limit_out_of_range_is_refused(name: str, value: int, lowest: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least {lowest}, got {value}"):
        make_scheduler(**{name: value})


@pytest.mark.trace
@pytest.mark.parametrize("num_blocks", [2048, 16384])
def test_the_mooncake_trace_runs_to_its_end(mooncake_trace: Path, num_blocks: int) -> None:
    requests = [Request(request) for request in read_trace(mooncake_trace, limit=30).requests]
    scheduler = make_scheduler(num_blocks, max_num_seqs=32, max_num_batched_tokens=8192, max_model_len=131072)
    _, emitted = run(scheduler, requests)
    assert emitted == {request.index: request.target_output for request in requests}
    assert any(request.num_cached_tokens for request in requests)
    assert any(request.num_preemptions for request in requests) == (num_blocks == 2048)
