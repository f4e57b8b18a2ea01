"""The builder's buffers: allocated once, at addresses that a captured graph may keep."""

from dataclasses import dataclass, field, fields

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.batch import DecodeBatch
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.plan import StepPlan, legal_group_sizes
from vllm_dsa.kernels.expand_decode import ExpandBuffers, ExpandSizes, launch_expand_decode
from vllm_dsa.reference.expand_decode import ExpandedDecode, expand_decode

# An idle SM of some DeepGEMM builds reads one length past the batch before it finds that it has no work.
LENS_SLACK = 64
DUMMY_ROW = -1


@dataclass(slots=True)
class StepBuffers:
    """One tensor per role, int32, sized for the largest step; past a step's own part each is as if never used.

    Attributes
    ----------
    context_lens : torch.Tensor
        ``(rows + slack,)``; rows past the step have length 0.
    block_table : torch.Tensor
        ``(groups, width)``; unused rows are 0.
    row_to_token : torch.Tensor
        ``(rows,)``; -1 for dummy and unused rows.
    token_to_row : torch.Tensor
        ``(tokens,)``; 0 for unused tokens.
    decode_lens : torch.Tensor
        ``(requests,)``; 0 for unused requests.
    indices : torch.Tensor
        ``(groups,)``; unused rows hold distinct requests past the last, so that no two of them pair.
    query_start_loc : torch.Tensor
        ``(requests + 1,)``; the step's number of tokens past its own part.
    schedule_metadata : torch.Tensor
        ``(num_sms + 1, 2)``; a step uses a prefix.
    topk_indices : torch.Tensor
        ``(tokens, topk)``; written by the consumer.
    """

    context_lens: torch.Tensor
    block_table: torch.Tensor
    row_to_token: torch.Tensor
    token_to_row: torch.Tensor
    decode_lens: torch.Tensor
    indices: torch.Tensor
    query_start_loc: torch.Tensor
    schedule_metadata: torch.Tensor
    topk_indices: torch.Tensor
    _used: ExpandSizes = field(default_factory=ExpandSizes)

    @classmethod
    def allocate(cls, config: IndexerConfig, caps: PagedMQALogitsCapabilities, device: torch.device) -> "StepBuffers":
        """Allocate for the largest step of `config` in any legal form."""
        tokens, requests = config.max_num_tokens, config.max_num_seqs
        widest_group = max(legal_group_sizes(tokens, caps), default=1) if caps.native_next_n is not None else 1
        rows = tokens + requests * (widest_group - 1)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            context_lens=zeros(rows + LENS_SLACK),
            block_table=zeros(tokens, config.block_table_width),
            row_to_token=zeros(rows).fill_(DUMMY_ROW),
            token_to_row=zeros(tokens),
            decode_lens=zeros(requests),
            indices=_distinct_requests(tokens, requests, device),
            query_start_loc=zeros(requests + 1),
            schedule_metadata=zeros(caps.num_sms + 1, 2),
            topk_indices=zeros(tokens, config.topk).fill_(-1),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every buffer by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}

    def expand(self, batch: DecodeBatch, plan: StepPlan, config: IndexerConfig) -> None:
        """Write a step and clear what an earlier, larger step left behind it; one launch on a GPU.

        Parameters
        ----------
        batch : DecodeBatch
            Checked, on the buffers' device.
        plan : StepPlan
            Of the batch's depths.
        config : IndexerConfig
            What the buffers were allocated for.
        """
        step = ExpandSizes(
            rows=plan.num_rows,
            tokens=plan.num_tokens,
            reqs=plan.num_reqs,
            groups=plan.num_groups,
            table_rows=0 if plan.reads_engine_table else plan.num_groups,
        )
        if runs_triton(self.context_lens.device):
            self._expand_on_gpu(batch, plan, config, step)
        else:
            self._expand_by_twin(batch, plan, config, step)
        self._used = step

    def _expand_on_gpu(self, batch: DecodeBatch, plan: StepPlan, config: IndexerConfig, step: ExpandSizes) -> None:
        launch_expand_decode(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            ExpandBuffers(
                context_lens=self.context_lens,
                block_table=self.block_table,
                row_to_token=self.row_to_token,
                token_to_row=self.token_to_row,
                decode_lens=self.decode_lens,
                indices=self.indices,
                query_start_loc=self.query_start_loc,
            ),
            group_size=plan.group_size,
            step=step,
            previous=self._used,
            block_size=config.block_size,
            dcp=(config.dcp.size, config.dcp.rank, config.dcp.interleave),
            compress_ratio=config.compress_ratio,
        )

    def _expand_by_twin(self, batch: DecodeBatch, plan: StepPlan, config: IndexerConfig, step: ExpandSizes) -> None:
        expanded = expand_decode(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table[:, : batch.block_table.shape[1] if step.table_rows else 0],
            group_size=plan.group_size,
            num_groups=plan.num_groups,
            num_tokens=plan.num_tokens,
            block_size=config.block_size,
            dcp=config.dcp,
            compress_ratio=config.compress_ratio,
        )
        _store(self.context_lens, expanded.context_lens.flatten(), 0)
        _store(self.row_to_token, expanded.row_to_token, DUMMY_ROW)
        _store(self.token_to_row, expanded.token_to_row, 0)
        _store(self.decode_lens, expanded.decode_lens, 0)
        _store(self.query_start_loc, batch.query_start_loc[:-1].clamp(max=plan.num_tokens), plan.num_tokens)
        self.indices.copy_(_distinct_requests(len(self.indices), len(self.decode_lens), self.indices.device))
        self.indices[: plan.num_groups] = expanded.request_of_group
        self._store_table(expanded, step)

    def _store_table(self, expanded: ExpandedDecode, step: ExpandSizes) -> None:
        # The table is the one large buffer: past the step only the rows that the last step used are cleared.
        width = expanded.block_table.shape[1]
        self.block_table[: step.table_rows, :width].copy_(expanded.block_table[: step.table_rows])
        self.block_table[: step.table_rows, width:].zero_()
        self.block_table[step.table_rows : self._used.table_rows].zero_()


def runs_triton(device: torch.device) -> bool:
    """Whether builds on a device run the Triton kernels; the torch twins do elsewhere."""
    return device.type == "cuda"


def _store(buffer: torch.Tensor, values: torch.Tensor, fill: int) -> None:
    buffer[: len(values)].copy_(values)
    buffer[len(values) :].fill_(fill)


def _distinct_requests(count: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)
