"""The builder's buffers: allocated once, at addresses that a captured graph may keep."""

from dataclasses import dataclass, fields

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.indexer.config import IndexerConfig
from vllm_dsa.indexer.plan import DecodeForm, StepPlan, legal_group_sizes
from vllm_dsa.reference.expand_decode import ExpandedDecode

# An idle SM of some DeepGEMM builds reads one length past the batch before it finds that it has no work.
LENS_SLACK = 64
DUMMY_ROW = -1


@dataclass(slots=True)
class StepBuffers:
    """One tensor per role, int32, sized for the largest step; every build rewrites each from end to end.

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
    schedule_metadata: torch.Tensor
    topk_indices: torch.Tensor
    _live_table_rows: int = 0

    @classmethod
    def allocate(cls, config: IndexerConfig, caps: PagedMQALogitsCapabilities, device: torch.device) -> "StepBuffers":
        """Allocate for the largest step of `config` in any legal form."""
        tokens, requests = config.max_num_tokens, config.max_num_seqs
        widest_group = max(legal_group_sizes(tokens, caps)) if caps.native_next_n is not None else 1
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
            schedule_metadata=zeros(caps.num_sms + 1, 2),
            topk_indices=zeros(tokens, config.topk).fill_(-1),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every buffer by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.name.startswith("_")}

    def store(self, expanded: ExpandedDecode, plan: StepPlan) -> None:
        """Write a step and clear what an earlier, larger step left behind it."""
        _store(self.context_lens, expanded.context_lens.flatten(), 0)
        _store(self.row_to_token, expanded.row_to_token, DUMMY_ROW)
        _store(self.token_to_row, expanded.token_to_row, 0)
        _store(self.decode_lens, expanded.decode_lens, 0)
        self._store_indices(expanded.request_of_group)
        native = plan.form is DecodeForm.NATIVE
        self._store_table(expanded.block_table[:0] if native else expanded.block_table)

    def _store_indices(self, request_of_group: torch.Tensor) -> None:
        unused = _distinct_requests(len(self.indices), len(self.decode_lens), self.indices.device)
        unused[: len(request_of_group)] = request_of_group
        self.indices.copy_(unused)

    def _store_table(self, table: torch.Tensor) -> None:
        # The table is the one large buffer: past the step only the rows that the last step used are cleared.
        rows, width = table.shape
        self.block_table[:rows, :width].copy_(table)
        self.block_table[:rows, width:].zero_()
        self.block_table[rows : self._live_table_rows].zero_()
        self._live_table_rows = rows


def _store(buffer: torch.Tensor, values: torch.Tensor, fill: int) -> None:
    buffer[: len(values)].copy_(values)
    buffer[len(values) :].fill_(fill)


def _distinct_requests(count: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)
