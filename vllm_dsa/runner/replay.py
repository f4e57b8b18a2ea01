"""The main job: a request trace through scheduler, metadata builder and indexer, checked on the way."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dsa.config import DsaConfig
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer import IndexerConfig, IndexerMetadataBuilder, startup_fields
from vllm_dsa.ops import IndexKCacheLayout, store_index_k
from vllm_dsa.runner.acceptance import AcceptanceModel
from vllm_dsa.runner.block_pool import BlockPool
from vllm_dsa.runner.oracle import RowCheck
from vllm_dsa.runner.report import ReplayReport
from vllm_dsa.runner.request import Request, output_content_keys, rejected_draft_keys
from vllm_dsa.runner.scheduler import ScheduledDecode, ScheduledPrefill, ScheduledStep, Scheduler, SchedulerConfig
from vllm_dsa.runner.splitmix import Uint64Array
from vllm_dsa.runner.step_batch import BlockTable, decode_batch, prefill_batch
from vllm_dsa.runner.synthetic import SyntheticIndexer
from vllm_dsa.runner.trace import TraceRequest
from vllm_dsa.runner.traffic import flattened_kv_bytes, kv_bytes
from vllm_dsa.runner.verify import QueryRows, StepVerifier

# FP8 e4m3 NaN: a token that is read before it is written shows up in the logits.
_POISON_BYTE = 0x7F


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """What to replay with.

    Attributes
    ----------
    model : DsaConfig
        Shapes of the indexer.
    num_speculative_tokens : int
        Drafts per decode step at most.
    acceptance_rate : float
        Chance that a draft is right, in [0, 1].
    max_num_seqs, max_num_batched_tokens : int
        Limits of a step.
    num_blocks : int
        Pages of the index-K cache.
    block_size : int
        Tokens per page.
    step_ms : float
        What a step takes on the simulated clock of arrivals, positive.
    verify_every : int
        Run and check the indexer of every N-th step; 0 for never.
    verify_rows : int
        Rows checked per verified step, of the decodes and of the prefills each.
    seed : int
        Of contents, acceptance and the choice of rows.
    """

    model: DsaConfig
    num_speculative_tokens: int = 3
    acceptance_rate: float = 0.7
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    num_blocks: int = 16384
    block_size: int = 64
    step_ms: float = 25.0
    verify_every: int = 100
    verify_rows: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.step_ms <= 0:
            raise ValueError(f"step_ms must be positive, got {self.step_ms}")
        for name, lowest in (("num_blocks", 1), ("verify_every", 0), ("verify_rows", 1)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {getattr(self, name)}")


class Replay:
    """Replays requests step by step.

    Parameters
    ----------
    config : ReplayConfig
        What to replay with.
    caps : PagedMQALogitsCapabilities
        What the steps are planned for.
    device : torch.device
        Where the cache and the metadata live.

    Raises
    ------
    ValueError
        If a limit of `config` is out of range.
    NotImplementedError, DeepGemmUnavailableError
        If ``VDSA_LOGITS_BACKEND`` names a backend that cannot run.
    """

    def __init__(self, config: ReplayConfig, caps: PagedMQALogitsCapabilities, device: torch.device) -> None:
        model, max_model_len = config.model, config.model.max_position_embeddings
        self.config = config
        self.device = device
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_speculative_tokens=config.num_speculative_tokens,
                max_model_len=max_model_len,
                block_size=config.block_size,
            ),
            BlockPool(config.num_blocks, config.block_size),
            AcceptanceModel(config.acceptance_rate, config.seed),
        )
        indexer_config = IndexerConfig(
            next_n=1 + config.num_speculative_tokens,
            max_num_seqs=config.max_num_seqs,
            block_table_width=-(-(max_model_len + config.num_speculative_tokens) // config.block_size),
            block_size=config.block_size,
            topk=model.index_topk,
            num_heads=model.index_n_heads,
            head_dim=model.index_head_dim,
        )
        self.builder = IndexerMetadataBuilder(indexer_config, caps, device)
        self.table = BlockTable(config.max_num_seqs, indexer_config.block_table_width)
        self.layout = IndexKCacheLayout(config.block_size, model.index_head_dim)
        self.cache = self.layout.allocate(config.num_blocks, device, fill=_POISON_BYTE)
        self.indexer = SyntheticIndexer(model, config.seed, device)
        self.verifier = StepVerifier(self.indexer, self.cache, model.index_topk, caps, config.verify_rows, config.seed)
        self.report = ReplayReport(
            startup=startup_fields(indexer_config, caps), num_index_layers=model.num_index_layers
        )
        self.now_ms = 0.0

    def run(
        self, requests: Iterable[TraceRequest], on_step: Callable[[ReplayReport], None] | None = None
    ) -> ReplayReport:
        """Replay until every request has finished.

        A request that can never fit is left out and named in the report. `on_step` is called after every step.
        """
        started = time.perf_counter()
        for trace_request in requests:
            self._add(trace_request)
        while self.scheduler.has_work:
            self._advance()
            if on_step is not None:
                on_step(self.report)
        self.report.simulated_s = self.now_ms / 1000
        self.report.wall_s = time.perf_counter() - started
        return self.report

    def _add(self, trace_request: TraceRequest) -> None:
        try:
            self.scheduler.add(Request(trace_request, self.config.block_size))
        except ValueError as error:
            self.report.rejected.append(str(error))
        else:
            self.report.num_requests += 1

    def _advance(self) -> None:
        step = self.scheduler.schedule(self.now_ms)
        for request in step.preempted:
            self.table.remove(request)
            self.report.num_preemptions += 1
        if step.num_tokens == 0 and not step.preempted:
            self.now_ms = max(self.now_ms, self.scheduler.next_arrival_ms or 0.0)
        else:
            self._run_step(step)
            self.now_ms += self.config.step_ms
        self._complete(step)

    def _run_step(self, step: ScheduledStep) -> None:
        self.report.num_steps += 1
        for request in [s.request for s in step.decodes] + [s.request for s in step.prefills]:
            self.table.update(request)
        every = self.config.verify_every
        verify = every > 0 and self.report.num_steps % every == 0
        self.report.verified_steps += verify
        if step.prefills:
            self._run_prefills(step.prefills, verify)
        if step.decodes:
            self._run_decodes(step.decodes, verify)

    def _run_decodes(self, decodes: tuple[ScheduledDecode, ...], verify: bool) -> None:
        fed = self._fed_contents(decodes)
        self._store([(d.request, d.start, d.seq_len) for d in decodes], fed)
        batch = decode_batch(decodes, self.table, self.device)
        started = time.perf_counter()
        metadata = self.builder.build_decode(batch)
        self.report.build_us.append((time.perf_counter() - started) * 1e6)

        depths = np.array([decode.depth for decode in decodes])
        seq_lens = np.array([decode.seq_len for decode in decodes])
        self.report.count_decode(
            self.now_ms,
            metadata.plan,
            depths.tolist(),
            kv_bytes(metadata.plan, depths, seq_lens, self.layout),
            flattened_kv_bytes(depths, seq_lens, self.layout),
        )
        if verify:
            rows = [
                QueryRows(d.request.index, np.concatenate([d.request.content_keys(0, d.start), keys]), d.start)
                for d, keys in zip(decodes, fed, strict=True)
            ]
            for where, check in self.verifier.check_decode(metadata, rows):
                self._judge(where, check)

    def _run_prefills(self, prefills: tuple[ScheduledPrefill, ...], verify: bool) -> None:
        spans = [(prefill.request, prefill.start, prefill.stop) for prefill in prefills]
        self._store(spans, [request.content_keys(start, stop) for request, start, stop in spans])
        self.report.num_prefill_tokens += sum(stop - start for _, start, stop in spans)
        batch = prefill_batch(prefills, self.table, self.device)
        started = time.perf_counter()
        chunks = self.builder.build_prefill(batch)
        self.report.prefill_build_us.append((time.perf_counter() - started) * 1e6)
        if verify:
            rows = [QueryRows(request.index, request.content_keys(0, stop), start) for request, start, stop in spans]
            for where, check in self.verifier.check_prefill(chunks, rows):
                self._judge(where, check)

    def _fed_contents(self, decodes: tuple[ScheduledDecode, ...]) -> list[Uint64Array]:
        """Contents of each decode's rows: the last sampled token, the right drafts, the wrong ones."""
        depths = np.array([decode.depth for decode in decodes])
        accepted = [self._num_right_drafts(decode) for decode in decodes]
        ends = depths.cumsum()
        row = np.arange(ends[-1]) - np.repeat(ends - depths, depths)
        positions = (np.repeat([decode.start for decode in decodes], depths) + row).astype(np.uint64)
        requests = np.repeat([d.request.index for d in decodes], depths).astype(np.uint64)
        steps = np.repeat([d.request.num_decode_steps for d in decodes], depths).astype(np.uint64)
        keys = np.where(
            row <= np.repeat(accepted, depths),
            output_content_keys(requests, positions),
            rejected_draft_keys(requests, positions, steps),
        )
        return np.split(keys, ends[:-1])

    def _num_right_drafts(self, decode: ScheduledDecode) -> int:
        # The draw depends on request and step alone, so the scheduler will make the same one after the step.
        return self.scheduler.acceptance.draw(decode.request.index, decode.request.num_decode_steps, decode.depth - 1)

    def _store(self, spans: list[tuple[Request, int, int]], contents: list[Uint64Array]) -> None:
        slots = np.concatenate([self.table.slots(*span) for span in spans])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        store_index_k(
            self.indexer.index_k(np.concatenate(contents)),
            self.cache,
            torch.from_numpy(slots).to(self.device),
            positions=torch.from_numpy(positions).to(self.device),
            cos_sin=self.indexer.cos_sin,
            style=self.indexer.rope_style,
        )

    def _judge(self, where: str, check: RowCheck) -> None:
        self.report.verified_rows += 1
        self.report.worst_logits_error = max(self.report.worst_logits_error, check.logits_error)
        if not check.ok:
            self.report.mismatches += 1
            self.report.mismatch_notes.append(
                f"step {self.report.num_steps}, {where}: logits error {check.logits_error:.2e}, "
                f"{check.misplaced} indices misplaced"
            )

    def _complete(self, step: ScheduledStep) -> None:
        outcomes = self.scheduler.complete(step)
        self.report.num_drafts += sum(decode.depth - 1 for decode in step.decodes)
        for outcome in outcomes:
            self.report.num_output_tokens += outcome.num_new_tokens
            self.report.num_accepted += outcome.accepted
            if outcome.finished:
                self.report.num_finished += 1
                self.report.num_cached_tokens += outcome.request.num_cached_tokens
                self.table.remove(outcome.request)
