"""The metadata builder: from an engine's batch to what the indexer kernels of every layer read."""

import logging

import torch

from vllm_dsa import envs
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.batch import DecodeBatch, IndexerDecodeMetadata, PrefillBatch, PrefillChunk
from vllm_dsa.indexer.buffers import StepBuffers
from vllm_dsa.indexer.checks import check_decode_batch, check_decode_values, check_prefill_batch
from vllm_dsa.indexer.config import IndexerConfig, startup_fields
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, plan_step
from vllm_dsa.indexer.prefill import build_prefill_chunks
from vllm_dsa.ops.schedule import paged_mqa_schedule
from vllm_dsa.reference.expand_decode import expand_decode

logger = logging.getLogger("vllm_dsa")


class IndexerMetadataBuilder:
    """Builds the indexer's metadata, once per engine step, into buffers of fixed addresses.

    Logs one INFO record of ``key=value`` fields, the startup line, when made.

    Parameters
    ----------
    config : IndexerConfig
        Sizes and limits of the server.
    caps : PagedMQALogitsCapabilities
        What the logits kernel takes, usually from ``resolve_capabilities()``.
    device : torch.device or str
        Where the buffers live.

    Raises
    ------
    ValueError
        If the kernel does not take the configured page size.
    """

    def __init__(
        self, config: IndexerConfig, caps: PagedMQALogitsCapabilities, device: torch.device | str = "cpu"
    ) -> None:
        if config.block_size not in caps.block_sizes:
            raise ValueError(
                f"block_size must be one of {sorted(caps.block_sizes)} for deep_gemm {caps.provider} on {caps.arch}, "
                f"got {config.block_size}"
            )
        self.config = config
        self.caps = caps
        self.device = torch.device(device)
        self._buffers = StepBuffers.allocate(config, caps, self.device)
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
            checked unless ``VDSA_VALIDATE=1``.
        """
        check_decode_batch(batch, self.config, self.device)
        plan = plan_step(batch.query_start_loc_cpu.diff().tolist(), self.caps)
        if envs.get("VDSA_VALIDATE"):
            check_decode_values(batch)
        native = plan.form is DecodeForm.NATIVE
        expanded = expand_decode(
            batch.query_start_loc,
            batch.seq_lens,
            # The kernel reads the engine's own rows in NATIVE: no column to copy.
            batch.block_table[:, :0] if native else batch.block_table,
            group_size=plan.group_size,
            num_groups=plan.num_groups,
            num_tokens=plan.num_tokens,
            block_size=self.config.block_size,
            dcp=self.config.dcp,
            compress_ratio=self.config.compress_ratio,
        )
        self._buffers.store(expanded, plan)
        return self._metadata(plan, batch)

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
            ``(num_reqs, width)`` int32. In NATIVE it must be the table that the metadata was built with.

        Raises
        ------
        NotImplementedError
            Under DCP: the draft's rows belong to other ranks.
        TypeError, ValueError
            If the metadata is not one row per request, or a tensor does not match it.
        """
        self._check_draft_update(metadata, seq_lens, block_table)
        lens = seq_lens.clamp(min=0) // self.config.compress_ratio
        metadata.context_lens.copy_(lens[:, None])
        if metadata.form is not DecodeForm.NATIVE:
            metadata.block_table[:, : block_table.shape[1]].copy_(block_table)
        self._schedule(metadata.plan, metadata.context_lens, metadata.indices)

    def _metadata(self, plan: StepPlan, batch: DecodeBatch) -> IndexerDecodeMetadata:
        buffers = self._buffers
        native = plan.form is DecodeForm.NATIVE
        context_lens = buffers.context_lens[: plan.num_rows].view(plan.num_groups, plan.group_size)
        indices = buffers.indices[: plan.num_groups] if plan.form is DecodeForm.RAGGED else None
        max_local = self.config.dcp.local_lens(batch.max_seq_len) // self.config.compress_ratio
        return IndexerDecodeMetadata(
            plan=plan,
            context_lens=context_lens,
            block_table=batch.block_table[: plan.num_groups] if native else buffers.block_table[: plan.num_groups],
            schedule_metadata=self._schedule(plan, context_lens, indices),
            row_to_token=None if plan.rows_are_tokens else buffers.row_to_token[: plan.num_rows],
            token_to_row=None if plan.rows_are_tokens else buffers.token_to_row[: plan.num_tokens],
            decode_lens=buffers.decode_lens[: plan.num_reqs],
            indices=indices,
            topk_indices=buffers.topk_indices[: plan.num_tokens],
            max_context_len=max(max_local, 1),
        )

    def _schedule(self, plan: StepPlan, context_lens: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        return paged_mqa_schedule(
            context_lens,
            self.config.block_size,
            self.caps,
            indices=indices,
            out=self._buffers.schedule_metadata,
        )

    def _check_draft_update(
        self, metadata: IndexerDecodeMetadata, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        if self.config.dcp.size > 1:
            raise NotImplementedError("draft metadata cannot be updated in place under DCP: build each step")
        plan = metadata.plan
        if plan.group_size != 1 or plan.num_tokens != plan.num_reqs:
            raise ValueError(
                "metadata must have one row per request for a draft update, got "
                f"{plan.num_tokens} rows for {plan.num_reqs} requests in groups of {plan.group_size}"
            )
        if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
            raise TypeError(f"seq_lens and block_table must be int32, got {seq_lens.dtype} and {block_table.dtype}")
        if seq_lens.shape != (plan.num_reqs,):
            raise ValueError(f"seq_lens must have shape ({plan.num_reqs},), got {tuple(seq_lens.shape)}")
        if block_table.dim() != 2 or block_table.shape[0] != plan.num_reqs:
            raise ValueError(f"block_table must have {plan.num_reqs} rows, got {tuple(block_table.shape)}")
        if metadata.form is not DecodeForm.NATIVE and block_table.shape[1] > metadata.block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} columns, the buffer has {metadata.block_table.shape[1]}"
            )
        if metadata.form is DecodeForm.NATIVE and block_table.data_ptr() != metadata.block_table.data_ptr():
            raise ValueError("block_table must be the tensor that the NATIVE metadata was built with")
