"""What every decode kernel of a rank reads about a step: one object, at addresses that a captured graph may keep."""

import enum
from dataclasses import dataclass

import torch

from vllm_dsa import envs
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.context_parallel.page_tables import ReqToToken, check_page_source
from vllm_dsa.kernels.dcp_metadata import DcpBuffers, launch_dcp_metadata
from vllm_dsa.ops._checks import INTEGER_DTYPES, check_enum, check_int, check_tensor
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference.dcp_metadata import dcp_metadata


class DecodeMode(enum.Enum):
    """What a step's lengths count, and how many query rows a request has.

    Attributes
    ----------
    DECODE : DecodeMode
        One row, counted.
    TARGET_VERIFY : DecodeMode
        ``next_n`` rows of drafts behind a prefix; the lengths count the prefix alone.
    DRAFT_EXTEND : DecodeMode
        ``next_n`` rows, counted. So is a verify step of vLLM, whose lengths count the drafts.
    """

    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


@dataclass(frozen=True, slots=True)
class DcpDecodeMetadata:
    """Lengths and pages of a step, over all ranks and on this one; for every backend, eager, captured or replayed.

    Make it with :meth:`allocate`. Every buffer is contiguous int32, its address never changes, and each
    :meth:`refresh` writes all of it: past the step lengths are 0 and pages are 0. Slice them to the step, or to a
    graph's bucket. With a layout of size 1 both lengths are the same numbers.

    Attributes
    ----------
    layout : DcpLayout
        This rank's share.
    block_size : int
        Tokens per page on this rank.
    next_n : int
        Query rows per request of a speculative step.
    max_seq_len : int
        Longest length that :meth:`refresh` may be given.
    max_seq_len_k : int
        Host bound on `seq_lens_k` in every mode, at least 1; what a captured graph is planned for. For one eager step,
        ``layout.local_max_len(longest)`` is tighter.
    global_seq_lens_k : torch.Tensor
        ``(max_reqs,)`` tokens of each request over all ranks, the step's own included. What SGLang calls
        ``causal_seqs``, for a kernel that finds each row's bound itself.
    seq_lens_k : torch.Tensor
        ``(max_reqs,)`` those of them that this rank holds.
    row_lens_k : torch.Tensor
        ``(max_reqs * next_n,)`` tokens on this rank that each query row sees; see :meth:`row_lens_of`.
    block_table : torch.Tensor
        ``(max_reqs, width)`` this rank's pages, 0 past ``ceil(seq_lens_k / block_size)``.
    """

    layout: DcpLayout
    block_size: int
    next_n: int
    max_seq_len: int
    max_seq_len_k: int
    global_seq_lens_k: torch.Tensor
    seq_lens_k: torch.Tensor
    row_lens_k: torch.Tensor
    block_table: torch.Tensor
    _validates: bool

    @classmethod
    def allocate(
        cls,
        layout: DcpLayout,
        *,
        max_reqs: int,
        max_seq_len: int,
        block_size: int,
        next_n: int = 1,
        block_table_width: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "DcpDecodeMetadata":
        """Allocate for the largest step; nothing grows later.

        Parameters
        ----------
        layout : DcpLayout
            This rank's share.
        max_reqs : int
            Requests per step, padding included.
        max_seq_len : int
            Longest length that :meth:`refresh` will be given. Drafts that it does not count get room of their own.
        block_size : int
            Tokens per page on this rank; the interleave divides it.
        next_n : int
            ``1 + num_speculative_tokens``, what SGLang calls ``num_draft_tokens``.
        block_table_width : int, optional
            Pages per request, where a kernel wants them padded or the engine's block table is wider than needed. The
            least, and the default, is the same on every rank: ``ceil((max_seq_len + next_n) / (block_size * size))``.
        device : torch.device or str
            Where the buffers live.

        Raises
        ------
        TypeError, ValueError
            If a size is no int or out of range, or the interleave does not divide `block_size`.
        """
        sizes = {"max_reqs": max_reqs, "max_seq_len": max_seq_len, "block_size": block_size, "next_n": next_n}
        for name, value in sizes.items():
            check_int(name, value, at_least=1)
        layout.check_block_size(block_size)
        longest = max_seq_len + next_n
        least = -(-longest // (block_size * layout.size))
        width = least if block_table_width is None else block_table_width
        check_int("block_table_width", width, at_least=least)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            layout=layout,
            block_size=block_size,
            next_n=next_n,
            max_seq_len=max_seq_len,
            max_seq_len_k=layout.local_max_len(longest),
            global_seq_lens_k=zeros(max_reqs),
            seq_lens_k=zeros(max_reqs),
            row_lens_k=zeros(max_reqs * next_n),
            block_table=zeros(max_reqs, width),
            _validates=envs.get("VDSA_VALIDATE"),
        )

    def refresh(self, mode: DecodeMode, seq_lens: torch.Tensor, pages: ReqToToken | torch.Tensor) -> None:
        """Write a step into the buffers: eager, before a replay, or captured itself.

        Parameters
        ----------
        mode : DecodeMode
            What `seq_lens` counts.
        seq_lens : torch.Tensor
            ``(R,)`` int32 or int64 global lengths, at most `max_seq_len`, on the buffers' device; never written. 0 (or
            less) marks a padding request: its lengths are 0 in every mode.
        pages : ReqToToken or torch.Tensor
            Same device: each position's virtual slot, or a ``(R, C)`` int32 or int64 block table, last stride 1, whose
            columns stand for ``block_size * layout.size`` tokens and name the same page on every rank, as in vLLM.
            Pages less than 0 are taken for 0. Only columns of live pages are read, those that exist: what the drafts
            need past the end of the engine's table is page 0.

        Raises
        ------
        TypeError, ValueError
            If `mode` is none, or a tensor has another dtype, shape, stride or device, or does not reach `max_seq_len`,
            or has more columns or requests than the buffers. No buffer is written then. Values on the device are not
            checked unless ``VDSA_VALIDATE=1`` was set at :meth:`allocate`.
        RuntimeError
            If the buffers are on another CUDA device than the current one.

        Notes
        -----
        On a GPU one launch, no allocation and no host sync after the first call with these dtypes, which compiles.
        It remembers nothing, so eager, captured and replayed refreshes may follow each other in any order; a captured
        one reads the same `seq_lens` and `pages` again. Elsewhere the torch twin runs,
        :func:`vllm_dsa.reference.dcp_metadata.dcp_metadata`. Source: SGLang 0.5.23's trtllm_mla and its DCP layout,
        vLLM 0.33's slot mapping.
        """
        table, req_pool_indices = self._check(mode, seq_lens, pages)
        buffers = DcpBuffers(self.global_seq_lens_k, self.seq_lens_k, self.row_lens_k, self.block_table)
        num_draft_tokens = self.next_n if mode is DecodeMode.TARGET_VERIFY else 0
        rows_per_req = self._rows_per_req(mode)
        if seq_lens.is_cuda:
            launch_dcp_metadata(
                seq_lens,
                table,
                req_pool_indices,
                buffers,
                num_draft_tokens=num_draft_tokens,
                rows_per_req=rows_per_req,
                block_size=self.block_size,
                dcp=(self.layout.size, self.layout.rank, self.layout.interleave),
            )
            return
        step = dcp_metadata(
            seq_lens,
            table,
            req_pool_indices,
            num_draft_tokens=num_draft_tokens,
            rows_per_req=rows_per_req,
            block_size=self.block_size,
            dcp=self.layout,
            max_reqs=len(self.seq_lens_k),
            max_rows_per_req=self.next_n,
            width=self.block_table.shape[1],
        )
        for buffer, values in zip(buffers, step, strict=True):
            buffer.copy_(values)

    def row_lens_of(self, mode: DecodeMode, num_reqs: int) -> torch.Tensor:
        """Return the rows' lengths of the first `num_reqs` requests, ``(num_reqs, rows)`` and contiguous.

        For a kernel that takes a length per query row; rows of a request do not differ by one each under DCP. The view
        holds until a refresh in a mode with other rows. `num_reqs` may be a graph's bucket.
        """
        rows = self._rows_per_req(mode)
        return self.row_lens_k[: num_reqs * rows].view(num_reqs, rows)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return every buffer by name; their addresses never change."""
        names = ("global_seq_lens_k", "seq_lens_k", "row_lens_k", "block_table")
        return {name: getattr(self, name) for name in names}

    def _rows_per_req(self, mode: DecodeMode) -> int:
        return 1 if mode is DecodeMode.DECODE else self.next_n

    def _check(
        self, mode: DecodeMode, seq_lens: torch.Tensor, pages: ReqToToken | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_enum("mode", mode, DecodeMode)
        device, max_reqs = self.seq_lens_k.device, len(self.seq_lens_k)
        check_tensor("seq_lens", seq_lens, dtypes=INTEGER_DTYPES, shape=(None,), device=device)
        num_reqs = len(seq_lens)
        if num_reqs > max_reqs:
            raise ValueError(f"seq_lens has {num_reqs} requests; allowed: at most max_reqs, {max_reqs}")
        if seq_lens.data_ptr() in (self.global_seq_lens_k.data_ptr(), self.seq_lens_k.data_ptr()) and num_reqs:
            raise ValueError("seq_lens is a buffer of this object; allowed: the engine's own lengths, never written")
        checked = check_page_source(
            pages,
            num_reqs=num_reqs,
            layout=self.layout,
            block_size=self.block_size,
            max_seq_len=self.max_seq_len,
            max_width=self.block_table.shape[1],
            device=device,
        )
        if seq_lens.is_cuda:
            check_current_device(device)
        if self._validates and num_reqs and not 0 <= int(seq_lens.min()) <= int(seq_lens.max()) <= self.max_seq_len:
            raise ValueError(f"seq_lens is {seq_lens.tolist()}; allowed: 0 to max_seq_len, {self.max_seq_len}")
        return checked
