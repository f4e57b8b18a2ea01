"""The decode build on a real GPU: budgets, warm-up, graphs that outlive their lengths."""

import dataclasses
import itertools

import pytest
import torch
import triton

from vllm_dsa import ops
from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.timing import syncs_with_host
from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import load_deep_gemm, resolve_capabilities
from vllm_dsa.indexer import DecodeBatch, DecodeForm, IndexerConfig, IndexerMetadataBuilder, decode_logits
from vllm_dsa.ops.row_map import rows_of_tokens, tokens_of_rows
from vllm_dsa.runner.graphs import DecodeGraphs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WIDTH = 40
CONFIG = IndexerConfig(
    next_n=4, max_num_seqs=64, block_table_width=WIDTH, max_num_tokens=512, topk=64, logits_backend="deep_gemm"
)
CONFIGS = {backend: dataclasses.replace(CONFIG, logits_backend=backend) for backend in ("deep_gemm", "sm90")}
BACKENDS = pytest.mark.parametrize("backend", CONFIGS)
MIXES = {
    "uniform 1": [1] * 64,
    "uniform 2": [2] * 64,
    "uniform 3": [3] * 64,
    "uniform 4": [4] * 64,
    "uniform 5": [5] * 64,
    "ragged": [1, 2, 3, 4] * 16,
    "empty requests": [4, 0, 4, 1] * 4,
    "one": [4],
    "none": [],
}


@pytest.fixture(scope="module")
def caps():
    return resolve_capabilities()


def make_batch(depths, generator, longest=WIDTH * 64):
    starts = torch.tensor([0, *itertools.accumulate(depths)], dtype=torch.int32)
    lens = torch.randint(1, longest + 1, (len(depths),), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 512, (len(depths), WIDTH), generator=generator, dtype=torch.int32)
    return DecodeBatch(starts.to(CUDA), starts, lens.to(CUDA), table.to(CUDA), max_seq_len=longest)


@BACKENDS
@pytest.mark.parametrize("dcp", [DcpLayout(), DcpLayout(4, 1, 64)])
@pytest.mark.parametrize("mix", MIXES)
def test_a_build_is_three_launches_no_allocation_no_sync(caps, generator, mix, dcp, backend):
    builder = IndexerMetadataBuilder(dataclasses.replace(CONFIGS[backend], dcp=dcp), caps, CUDA)
    batch = make_batch(MIXES[mix], generator)
    for _ in range(2):
        builder.build_decode(batch)
    launches, copies = count_launches(lambda: builder.build_decode(batch))
    # Our kernel needs no schedule, so its build is the expansion alone.
    assert 1 <= launches + copies <= (1 if backend == "sm90" else 3)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(lambda: builder.build_decode(batch))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


@BACKENDS
def test_builds_on_gpu_and_cpu_are_the_same(caps, generator, backend):
    gpu = IndexerMetadataBuilder(CONFIGS[backend], caps, CUDA)
    cpu = IndexerMetadataBuilder(CONFIGS[backend], caps, "cpu")
    for depths in MIXES.values():
        batch = make_batch(depths, generator)
        on_cpu = dataclasses.replace(
            batch,
            query_start_loc=batch.query_start_loc_cpu,
            seq_lens=batch.seq_lens.cpu(),
            block_table=batch.block_table.cpu(),
        )
        have, want = gpu.build_decode(batch), cpu.build_decode(on_cpu)
        for field in dataclasses.fields(want):
            ours, twins = getattr(have, field.name), getattr(want, field.name)
            same = torch.equal(ours.cpu(), twins) if isinstance(twins, torch.Tensor) else ours == twins
            assert same, field.name


@BACKENDS
def test_after_warmup_nothing_compiles(caps, generator, monkeypatch, backend):
    compiled = []
    # Another capacity than any other test's, so that this builder's kernels are its own.
    max_num_seqs = {"deep_gemm": 130, "sm90": 300}[backend]
    config = dataclasses.replace(CONFIGS[backend], max_num_seqs=max_num_seqs, max_num_tokens=8 * max_num_seqs)
    builder = IndexerMetadataBuilder(config, caps, CUDA)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **known: compiled.append(known["repr"]))
    builder.warmup()
    assert compiled, "the hook sees what a warm-up compiles"
    clean = {name: buffer.clone() for name, buffer in builder.buffers().items() if name != "schedule_metadata"}
    fresh = IndexerMetadataBuilder(config, caps, CUDA).buffers()
    assert all(torch.equal(buffer, fresh[name]) for name, buffer in clean.items())
    compiled.clear()
    for depths in [*MIXES.values(), [7] * 130, [8, 1], [6] * 3]:
        batch = make_batch(depths, generator)
        builder.build_decode(batch)
        # An engine's views start anywhere.
        shifted = torch.cat([batch.seq_lens[:1], batch.seq_lens])[1:]
        builder.build_decode(dataclasses.replace(batch, seq_lens=shifted))
    assert compiled == []


def test_a_changed_sm_count_is_an_error_at_the_next_build(caps, generator):
    if caps.provider is None:
        pytest.fail("needs a DeepGEMM build: see docs/deepgemm_builds.md")
    builder = IndexerMetadataBuilder(CONFIG, caps, CUDA)
    batch = make_batch([2, 2], generator)
    library = load_deep_gemm().module
    library.set_num_sms(caps.num_sms - 2)
    try:
        with pytest.raises(RuntimeError, match=f"schedules for {caps.num_sms - 2} SMs now"):
            builder.build_decode(batch)
    finally:
        library.set_num_sms(caps.num_sms)
    builder.build_decode(batch)


class Layer:
    """Logits and top-k of one layer, reading queries and cache from fixed addresses."""

    def __init__(self, caps, generator):
        self.caps = caps
        self.cache = ops.IndexKCacheLayout().allocate(512, CUDA)
        k = torch.randn(512 * 64, 128, generator=generator)
        ops.store_index_k(k.to(CUDA), self.cache, torch.arange(len(k), device=CUDA))
        self.q = torch.empty(512, 64, 128, dtype=torch.float8_e4m3fn, device=CUDA)
        self.weights = torch.empty(512, 64, device=CUDA)
        self.draw(generator)

    def draw(self, generator):
        q, weights = ops.fold_q(
            torch.randn(512, 64, 128, generator=generator).to(CUDA),
            torch.randn(512, 64, generator=generator).to(CUDA),
            scale_format=ops.ScaleFormat.FP32,
        )
        self.q.copy_(q)
        self.weights.copy_(weights)

    def launch(self, metadata):
        tokens = metadata.plan.num_tokens
        q, weights = rows_of_tokens(self.q[:tokens], self.weights[:tokens], metadata.row_to_token)
        logits = decode_logits(metadata, q, weights, self.cache, self.caps)
        lens = tokens_of_rows(metadata.context_lens.flatten(), metadata.token_to_row)
        ops.topk_indices(tokens_of_rows(logits, metadata.token_to_row), lens, CONFIG.topk, out=metadata.topk_indices)


@BACKENDS
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_a_graph_replays_right_at_other_lengths_pages_and_queries(caps, generator, depth, backend):
    layer = Layer(caps, generator)
    config = CONFIGS[backend]
    graphs = DecodeGraphs(IndexerMetadataBuilder(config, caps, CUDA), layer.launch, buckets=[4, 16, 64])
    eager = IndexerMetadataBuilder(config, caps, CUDA)
    for longest in (2500, 70, 2500, 2560, 5, 2100):
        for num_reqs in (64, 3, 13, 4):
            batch = make_batch([depth] * num_reqs, generator, longest)
            layer.draw(generator)
            replayed = graphs.run(batch).topk_indices[: num_reqs * depth].clone()
            metadata = eager.build_decode(batch)
            metadata.topk_indices.fill_(-7)
            layer.launch(metadata)
            assert torch.equal(replayed, metadata.topk_indices)
    if backend == "deep_gemm":
        # Three buckets by two widths, whatever the lengths.
        assert graphs.num_captured == 6


def test_a_ragged_step_runs_eagerly_and_right(caps, generator):
    layer = Layer(caps, generator)
    graphs = DecodeGraphs(IndexerMetadataBuilder(CONFIG, caps, CUDA), layer.launch, buckets=[64])
    metadata = graphs.run(make_batch([4, 1, 3, 2], generator))
    assert metadata.form is DecodeForm.GROUPED
    assert graphs.num_captured == 0
    assert metadata.topk_indices.min() >= -1


def test_where_rows_are_tokens_one_graph_serves_every_mix(caps, generator):
    flattening = dataclasses.replace(caps, native_next_n=frozenset({1}), paired_next_n=frozenset())
    layer = Layer(flattening, generator)
    graphs = DecodeGraphs(IndexerMetadataBuilder(CONFIG, flattening, CUDA), layer.launch, buckets=[8])
    eager = IndexerMetadataBuilder(CONFIG, flattening, CUDA)
    for depths in ([4, 4, 4], [1, 2, 3, 4], [4] * 8, [2] * 7):
        batch = make_batch(depths, generator)
        replayed = graphs.run(batch).topk_indices[: sum(depths)].clone()
        metadata = eager.build_decode(batch)
        layer.launch(metadata)
        assert torch.equal(replayed, metadata.topk_indices), depths
    assert graphs.num_captured == 1


def test_our_kernel_replays_right_for_every_mix(caps, generator):
    layer = Layer(caps, generator)
    graphs = DecodeGraphs(IndexerMetadataBuilder(CONFIGS["sm90"], caps, CUDA), layer.launch, buckets=[8, 64])
    eager = IndexerMetadataBuilder(CONFIGS["sm90"], caps, CUDA)
    for depths in ([4, 1, 3, 2], [1, 2, 3, 4], [4] * 8, [2] * 7, [1, 2, 3, 4] * 10, [8, 1, 1, 2]):
        for longest in (2500, 70):
            batch = make_batch(depths, generator, longest)
            layer.draw(generator)
            replayed = graphs.run(batch).topk_indices[: sum(depths)].clone()
            metadata = eager.build_decode(batch)
            assert metadata.form is DecodeForm.RAGGED
            metadata.topk_indices.fill_(-7)
            layer.launch(metadata)
            assert torch.equal(replayed, metadata.topk_indices), depths
    assert graphs.num_captured


def test_a_foreign_device_is_refused_before_any_launch(caps, generator):
    builder = IndexerMetadataBuilder(CONFIG, caps, CUDA)
    batch = make_batch([4, 4], generator)
    before = {name: buffer.clone() for name, buffer in builder.buffers().items()}
    with pytest.raises(ValueError, match="seq_lens must be on cuda:0, got cpu"):
        builder.build_decode(dataclasses.replace(batch, seq_lens=batch.seq_lens.cpu()))
    assert all(torch.equal(buffer, before[name]) for name, buffer in builder.buffers().items())
