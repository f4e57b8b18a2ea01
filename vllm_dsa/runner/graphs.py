"""CUDA graphs of a decode step: the metadata is built outside, what reads it is captured once and replayed."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from vllm_dsa.indexer import (
    CudaGraphSupport,
    DecodeBatch,
    IndexerConfig,
    IndexerDecodeMetadata,
    IndexerMetadataBuilder,
    cudagraph_support,
)
from vllm_dsa.indexer.checks import check_table_width


class PaddedDecodeInputs:
    """A batch copied to fixed addresses and filled up to a bucket with padding requests.

    Parameters
    ----------
    config : IndexerConfig
        Sizes.
    device : torch.device or str
        Where the copies live.
    """

    def __init__(self, config: IndexerConfig, device: torch.device | str) -> None:
        self._config = config
        self._query_start_loc = torch.zeros(config.max_num_seqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(config.max_num_seqs, config.block_table_width, dtype=torch.int32, device=device)

    def load(self, batch: DecodeBatch, padding_depths: Sequence[int]) -> DecodeBatch:
        """Copy a batch in and return it with padding requests behind it.

        Padding requests have seq_len 0, so that every row of theirs sees nothing.

        Parameters
        ----------
        batch : DecodeBatch
        padding_depths : sequence of int
            Rows of each padding request.

        Raises
        ------
        ValueError
            If the batch's table is wider than the copy, or too narrow for its ``max_seq_len``.
        """
        check_table_width(batch.block_table, batch.max_seq_len, self._config)
        live, width = batch.num_reqs, batch.block_table.shape[1]
        num_reqs = live + len(padding_depths)
        padding = torch.tensor(padding_depths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        starts = torch.cat([batch.query_start_loc_cpu, batch.query_start_loc_cpu[-1] + padding])
        self._query_start_loc[: num_reqs + 1].copy_(starts)
        self._seq_lens[:live].copy_(batch.seq_lens)
        self._seq_lens[live:num_reqs].zero_()
        self._block_table[:live, :width].copy_(batch.block_table)
        self._block_table[live:num_reqs].zero_()
        return DecodeBatch(
            query_start_loc=self._query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=starts,
            seq_lens=self._seq_lens[:num_reqs],
            block_table=self._block_table[:num_reqs],
            max_seq_len=batch.max_seq_len,
        )


class DecodeGraphs:
    """Runs decode steps, each through the graph of its bucket where one can serve it.

    Parameters
    ----------
    builder : IndexerMetadataBuilder
        On a CUDA device.
    launch : callable
        Launches what a step does with its metadata: logits and top-k of every layer. It must read its other inputs
        (queries, weights, cache) from fixed addresses and neither sync nor depend on values of the metadata; rows of
        padding requests are handed to it too, with length 0.
    buckets : sequence of int
        Requests per captured step. A step runs in the smallest bucket that holds it.

    Raises
    ------
    ValueError
        If the builder is not on a GPU, or a bucket is out of range.

    Notes
    -----
    A graph is captured at the first step of its plan and logits width and holds for every later step of these, whatever
    its lengths and pages. A step that no graph can serve runs eagerly: more requests than the largest bucket holds, or
    ragged depths where :func:`vllm_dsa.indexer.cudagraph_support` says ``UNIFORM_BATCH``.
    """

    def __init__(
        self,
        builder: IndexerMetadataBuilder,
        launch: Callable[[IndexerDecodeMetadata], None],
        buckets: Sequence[int],
    ) -> None:
        if builder.device.type != "cuda":
            raise ValueError(f"builder must be on a CUDA device, got {builder.device}")
        if not buckets or min(buckets) < 1 or max(buckets) > builder.config.max_num_seqs:
            raise ValueError(f"buckets must be within 1 and {builder.config.max_num_seqs}, got {list(buckets)}")
        self._builder = builder
        self._launch = launch
        self._buckets = sorted(buckets)
        self._inputs = PaddedDecodeInputs(builder.config, builder.device)
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._support = cudagraph_support(builder.config, builder.caps)

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def run(self, batch: DecodeBatch) -> IndexerDecodeMetadata:
        """Build a step's metadata and launch it; returns the metadata, padding included.

        Raises
        ------
        TypeError, ValueError
            As :meth:`IndexerMetadataBuilder.build_decode`.
        """
        padding_depths = self._padding_depths(batch.query_start_loc_cpu.diff().tolist())
        if padding_depths is None:
            metadata = self._builder.build_decode(batch)
            self._launch(metadata)
            return metadata
        metadata = self._builder.build_decode(self._inputs.load(batch, padding_depths))
        plan = metadata.plan
        # All of the plan but its passes and its depths, which no launch depends on.
        key = (dataclasses.replace(plan, kv_reads=0, max_depth=0), metadata.max_context_len)
        if key not in self._graphs:
            self._graphs[key] = self._capture(metadata)
        self._graphs[key].replay()
        return metadata

    def _padding_depths(self, depths: list[int]) -> list[int] | None:
        """Return the depths of the requests that fill the batch's bucket up; None if no graph can serve it."""
        config = self._builder.config
        bucket = next((size for size in self._buckets if size >= len(depths)), None)
        if bucket is None or not depths:
            return None
        if self._support is CudaGraphSupport.UNIFORM_BATCH:
            return [depths[0]] * (bucket - len(depths)) if len(set(depths)) == 1 else None
        # One row per token: what counts is the number of tokens, so one padding request brings all that lack.
        missing = bucket * config.next_n - sum(depths)
        if missing == 0:
            return [0] * (bucket - len(depths))
        return [missing] + [0] * (bucket - len(depths) - 1) if missing > 0 and bucket > len(depths) else None

    def _capture(self, metadata: IndexerDecodeMetadata) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        # The first launch may compile, which a capture cannot.
        with torch.cuda.stream(stream):
            self._launch(metadata)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._launch(metadata)
        return graph
