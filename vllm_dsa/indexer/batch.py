"""What an engine hands to the builder each step, and what it gets back."""

from dataclasses import dataclass

import torch

from vllm_dsa.indexer.plan import DecodeForm, StepPlan


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The decode part of one engine step.

    Attributes
    ----------
    query_start_loc : torch.Tensor
        ``(num_reqs + 1,)`` int32 on the builder's device, first query row of each request, starting at 0.
    query_start_loc_cpu : torch.Tensor
        The same numbers on the CPU; the plan is made from these.
    seq_lens : torch.Tensor
        ``(num_reqs,)`` int32 on the device: global lengths, this step's rows included. 0 marks a padding request.
    block_table : torch.Tensor
        ``(num_reqs, width)`` int32 on the device, last stride 1: page ids on this rank.
    max_seq_len : int
        Host bound on `seq_lens`: sizes the logits, and is checked against the table's width.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        """Requests of the step, padding included."""
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class IndexerDecodeMetadata:
    """Everything that the decode indexer of every layer needs in one step.

    All tensors are int32 views of the builder's buffers (or of the engine's own table) and hold until the next build.
    ``G`` groups of ``c = group_size`` rows, ``T`` tokens, ``R`` requests.

    Attributes
    ----------
    plan : StepPlan
        Form, backend, group size and counts.
    context_lens : torch.Tensor
        ``(G, c)`` contiguous: cached states that each row sees.
    block_table : torch.Tensor
        ``(G, width)``: the engine's own rows in NATIVE, the expanded table elsewhere. For our Hopper kernel ``(R,
        width)``, the engine's own rows.
    schedule_metadata : torch.Tensor or None
        ``(slots + 1, 2)`` for a launch of exactly these lengths; ``None`` for our Hopper kernel, which needs none.
    row_to_token : torch.Tensor or None
        ``(G * c,)`` token of each row, -1 for a dummy row; ``None`` where row ``i`` is token ``i``.
    token_to_row : torch.Tensor or None
        ``(T,)`` the other way; ``None`` likewise.
    decode_lens : torch.Tensor
        ``(R,)`` query rows of each request.
    indices : torch.Tensor or None
        ``(G,)`` request of each row, in RAGGED by DeepGEMM only.
    query_start_loc : torch.Tensor or None
        ``(R + 1,)`` first token of each request, then the number of tokens; for our Hopper kernel only. The buffer goes
        on with that number, so that a graph captured for more requests sees empty ones.
    topk_indices : torch.Tensor
        ``(T, topk)`` where the step's selected indices go, one row per token.
    max_context_len : int
        Host bound on `context_lens`: columns of the logits, one of few widths (:func:`~vllm_dsa.indexer.logits_width`).
    """

    plan: StepPlan
    context_lens: torch.Tensor
    block_table: torch.Tensor
    schedule_metadata: torch.Tensor | None
    row_to_token: torch.Tensor | None
    token_to_row: torch.Tensor | None
    decode_lens: torch.Tensor
    indices: torch.Tensor | None
    query_start_loc: torch.Tensor | None
    topk_indices: torch.Tensor
    max_context_len: int

    @property
    def form(self) -> DecodeForm:
        """The plan's form."""
        return self.plan.form


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The prefill part of one engine step.

    Attributes
    ----------
    query_start_loc_cpu : torch.Tensor
        ``(num_reqs + 1,)`` int32 CPU, first query row of each request, starting at 0.
    seq_lens_cpu : torch.Tensor
        ``(num_reqs,)`` int32 CPU: exact global lengths, this step's rows included.
    block_table : torch.Tensor
        ``(num_reqs, width)`` int32 on the builder's device.
    """

    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Query rows whose logits fit the memory limit, over the gathered keys of their requests.

    Attributes
    ----------
    token_start, token_stop : int
        The chunk's rows, counted from the first prefill row.
    req_start, req_stop : int
        Its requests, counted from the first prefill request.
    cu_seq_lens : torch.Tensor
        ``(requests + 1,)`` int32: where each request's keys start in the gathered buffer.
    total_seq_lens : int
        Keys to gather.
    row_starts, row_ends : torch.Tensor
        ``(rows,)`` int32: keys that each row sees, as positions in the gathered buffer.
    block_table : torch.Tensor
        ``(requests, width)`` view of the batch's table.
    skip_kv_gather : bool
        The chunk goes on with the request of the one before it, whose keys are already gathered.
    """

    token_start: int
    token_stop: int
    req_start: int
    req_stop: int
    cu_seq_lens: torch.Tensor
    total_seq_lens: int
    row_starts: torch.Tensor
    row_ends: torch.Tensor
    block_table: torch.Tensor
    skip_kv_gather: bool

    @property
    def logits_bytes(self) -> int:
        """Size of the chunk's float32 logits."""
        return 4 * (self.token_stop - self.token_start) * self.total_seq_lens
