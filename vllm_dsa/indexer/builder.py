"""The metadata builder: from an engine's batch to what the indexer kernels of every layer read."""

import functools
import logging

import torch

from vllm_dsa import envs
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, check_num_sms
from vllm_dsa.indexer.batch import DecodeBatch, IndexerDecodeMetadata, PrefillBatch, PrefillChunk
from vllm_dsa.indexer.buffers import StepBuffers, runs_triton
from vllm_dsa.indexer.checks import check_decode_batch, check_decode_values, check_prefill_batch
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.plan import StepPlan
from vllm_dsa.indexer.planner import StepPlanner, schedule_slots, startup_fields
from vllm_dsa.indexer.prefill import build_prefill_chunks
from vllm_dsa.indexer.views import StepViews, logits_width, make_views
from vllm_dsa.indexer.warmup import warmup_logits, warmup_plans
from vllm_dsa.kernels.schedule import launch_schedule
from vllm_dsa.ops import warmup_topk
from vllm_dsa.ops.schedule import paged_mqa_schedule, uses_sm100_rule
from vllm_dsa.platform import check_current_device

logger = logging.getLogger("vllm_dsa")


class IndexerMetadataBuilder:
    """Builds the indexer's metadata, once per engine step, into buffers of fixed addresses.

    Logs one INFO record of ``key=value`` fields, the startup line, when made.

    Parameters
    ----------
    config : IndexerConfig
        Sizes and limits of the server.
    caps : PagedMQALogitsCapabilities
        What DeepGEMM takes, usually from ``resolve_capabilities()``.
    device : torch.device or str
        Where the buffers live.

    Raises
    ------
    NotImplementedError, DeepGemmUnavailableError, ValueError
        If the configured backend cannot run, or no kernel takes the configured page size; see
        :func:`vllm_dsa.ops.resolve_logits_backends`.
    """

    def __init__(
        self, config: IndexerConfig, caps: PagedMQALogitsCapabilities, device: torch.device | str = "cpu"
    ) -> None:
        self._planner = StepPlanner.of(config, caps)
        self.config = config
        self.caps = caps
        # With its index, so that a tensor of another GPU is seen to be foreign.
        self.device = torch.empty(0, device=device).device
        self._buffers = StepBuffers.allocate(config, caps, self.device)
        self._validates: bool = envs.get("VDSA_VALIDATE")
        # Depths and plans repeat, and planning or cutting eight views costs more host time than a launch.
        self._plan = functools.lru_cache(maxsize=1024)(self._planner.plan)
        self._views = functools.lru_cache(maxsize=1024)(self._make_views)
        fields = startup_fields(config, caps)
        logger.info("indexer decode: %s", " ".join(f"{key}={value}" for key, value in fields.items()))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return every persistent buffer by name; their addresses never change."""
        return self._buffers.tensors()

    def build_decode(self, batch: DecodeBatch) -> IndexerDecodeMetadata:
        """Plan a decode step and fill its metadata.

        Parameters
        ----------
        batch : DecodeBatch
            Ragged, deeper or shallower than the configured next_n, with padding requests, or empty.

        Returns
        -------
        IndexerDecodeMetadata
            Views that hold until the next build.

        Raises
        ------
        TypeError, ValueError
            If a tensor has another dtype, shape or device than documented, a depth is negative, the batch exceeds the
            configured sizes, or its table is too narrow. No buffer is written then. Values on the device are not
            checked unless ``VDSA_VALIDATE=1`` was set when the builder was made.
        RuntimeError
            If the library's SM count was changed after the capabilities were resolved, or the builder's device is not
            the current one.

        Notes
        -----
        On a GPU two launches (one where the plan is for our Hopper kernel, which needs no schedule), no allocation and
        no host sync. Not meant to be captured: the plan is host work. The metadata's addresses depend on the plan
        alone, so what reads it may be.
        """
        self._check_gpu()
        depths = check_decode_batch(batch, self.config, self.device)
        plan = self._plan(depths)
        if self._validates:
            check_decode_values(batch)
        self._buffers.expand(batch, plan, self.config)
        return self._metadata(plan, batch)

    def warmup(self) -> None:
        """Compile everything that a decode step of this configuration can launch, before the first one does.

        Notes
        -----
        Seconds on a GPU with an empty compiler cache, and it waits for the device. Leaves the buffers as new. Logits
        are float32, for the top-k too: a bfloat16 `out` of our Hopper kernel is another variant, which its first launch
        compiles.
        """
        for plan in warmup_plans(self.config, self._planner):
            batch = self._empty_request(plan.num_tokens)
            self._buffers.expand(batch, plan, self.config)
            warmup_logits(self._metadata(plan, batch), self.config, self.caps)
        self._buffers.expand(self._empty_request(0), self._planner.plan([]), self.config)
        warmup_topk(self.config.topk, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def build_prefill(self, batch: PrefillBatch) -> list[PrefillChunk]:
        """Cut a prefill batch into chunks whose logits fit ``config.max_logits_bytes``.

        Raises
        ------
        TypeError, ValueError
            If a tensor has another dtype, shape or device than documented, or a request has more rows than tokens.
        """
        check_prefill_batch(batch, self.config, self.device)
        return build_prefill_chunks(batch, self.config)

    def update_draft_decode_metadata(
        self, metadata: IndexerDecodeMetadata, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        """Move one-row-per-request metadata on to the next draft step, in place.

        Between draft steps only lengths (and pages) change: the engine need not plan again. The caller's
        ``max_context_len`` must already bound the new lengths (not checked).

        Parameters
        ----------
        metadata : IndexerDecodeMetadata
            From this builder's last :meth:`build_decode`, every request one row deep.
        seq_lens : torch.Tensor
            ``(num_reqs,)`` int32 new global lengths.
        block_table : torch.Tensor
            ``(num_reqs, width)`` int32. Where the plan reads the engine's own table, it must be the one that the
            metadata was built with.

        Raises
        ------
        NotImplementedError
            Under DCP: the draft's rows belong to other ranks.
        TypeError, ValueError
            If the metadata is not one row per request, or a tensor does not match it.
        RuntimeError
            As :meth:`build_decode`.
        """
        self._check_gpu()
        self._check_draft_update(metadata, seq_lens, block_table)
        lens = metadata.context_lens[:, 0]
        torch.clamp(seq_lens, min=0, out=lens)
        if self.config.compress_ratio > 1:
            lens.floor_divide_(self.config.compress_ratio)
        if not metadata.plan.reads_engine_table:
            metadata.block_table[:, : block_table.shape[1]].copy_(block_table)
        self._schedule(metadata.context_lens, metadata.indices, metadata.schedule_metadata)

    def _check_gpu(self) -> None:
        if self.device.type == "cuda":
            check_current_device(self.device)
            check_num_sms(self._planner.caps)

    def _empty_request(self, depth: int) -> DecodeBatch:
        starts = torch.tensor([0, depth], dtype=torch.int32)
        lens = torch.zeros(1, dtype=torch.int32, device=self.device)
        return DecodeBatch(starts.to(self.device), starts, lens, lens.view(1, 1), max_seq_len=0)

    def _metadata(self, plan: StepPlan, batch: DecodeBatch) -> IndexerDecodeMetadata:
        views = self._views(plan)
        self._schedule(views.context_lens, views.indices, views.schedule_metadata)
        max_local = self.config.dcp.local_lens(batch.max_seq_len) // self.config.compress_ratio
        return IndexerDecodeMetadata(
            plan=plan,
            context_lens=views.context_lens,
            block_table=batch.block_table[: plan.num_table_rows] if views.block_table is None else views.block_table,
            schedule_metadata=views.schedule_metadata,
            row_to_token=views.row_to_token,
            token_to_row=views.token_to_row,
            decode_lens=views.decode_lens,
            indices=views.indices,
            query_start_loc=views.query_start_loc,
            topk_indices=views.topk_indices,
            max_context_len=logits_width(max_local, self.config.block_table_width * self.config.block_size),
        )

    def _make_views(self, plan: StepPlan) -> StepViews:
        return make_views(self._buffers, plan, schedule_slots(plan, self.caps))

    def _schedule(self, context_lens: torch.Tensor, indices: torch.Tensor | None, out: torch.Tensor | None) -> None:
        if out is None:
            return
        if runs_triton(self.device):
            # The shapes are the plan's: nothing that the public operator would check.
            launch_schedule(context_lens, out, indices=indices, sm100_rule=uses_sm100_rule(self.caps))
        else:
            paged_mqa_schedule(context_lens, self.config.block_size, self.caps, indices=indices, out=out)

    def _check_draft_update(
        self, metadata: IndexerDecodeMetadata, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        if self.config.dcp.size > 1:
            raise NotImplementedError("draft metadata cannot be updated in place under DCP: build each step")
        plan = metadata.plan
        if plan.group_size != 1 or not plan.is_one_row_per_request:
            raise ValueError(
                "metadata must have one row per request for a draft update, got "
                f"{plan.num_tokens} rows for {plan.num_reqs} requests, {plan.form.value} in groups of {plan.group_size}"
            )
        if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
            raise TypeError(f"seq_lens and block_table must be int32, got {seq_lens.dtype} and {block_table.dtype}")
        if seq_lens.shape != (plan.num_reqs,):
            raise ValueError(f"seq_lens must have shape ({plan.num_reqs},), got {tuple(seq_lens.shape)}")
        if block_table.dim() != 2 or block_table.shape[0] != plan.num_reqs:
            raise ValueError(f"block_table must have {plan.num_reqs} rows, got {tuple(block_table.shape)}")
        if plan.reads_engine_table:
            if block_table.data_ptr() != metadata.block_table.data_ptr():
                raise ValueError(f"block_table must be the tensor that the {plan.form.name} metadata was built with")
        elif block_table.shape[1] > metadata.block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} columns, the buffer has {metadata.block_table.shape[1]}"
            )
