"""The kernels of the DCP merges on a real GPU: against their twins, in budget, captured and replayed."""

import math

import pytest
import torch
import torch.distributed as dist
import triton

from vllm_dsa import ops, reference
from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.timing import capture, syncs_with_host
from vllm_dsa.context_parallel import topk as dcp_topk
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.context_parallel.merge import merge_lse
from vllm_dsa.context_parallel.merge_buffers import MergeBuffers, MergeMethod
from vllm_dsa.context_parallel.topk import TopkBuffers, merge_topk
from vllm_dsa.kernels.merge_lse import launch_combine_shards, launch_pack_shard, launch_scale_shard
from vllm_dsa.kernels.merge_topk import launch_localize_indices, launch_order_candidates
from vllm_dsa.reference.merge_lse import merge_lse_reference, natural_lse, scale_shard
from vllm_dsa.reference.merge_topk import localize_indices, order_candidates

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
NAN, INF = math.nan, math.inf
POISON = 0x7F7F7F7F
# Half a unit in the last place, and what float32 weights lose.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def fill_shards(outs, lses):
    """Fresh shards of unequal weight; some are empty, the first row's all, with NaN for an output."""
    lses.normal_(std=4)
    draw = torch.rand_like(lses)
    lses.masked_fill_(draw < 0.2, -INF).masked_fill_(draw < 0.1, INF)
    lses[:, :1] = -INF
    outs.normal_()
    outs.masked_fill_(lses.isinf().unsqueeze(-1), NAN)


def make_shards(size, tokens, heads, v_dim, dtype):
    outs = torch.empty(size, tokens, heads, v_dim, dtype=dtype, device=CUDA)
    lses = torch.empty(size, tokens, heads, device=CUDA)
    fill_shards(outs, lses)
    return outs, lses


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, NAN, dtype=dtype, device=CUDA)


def assert_close(found, want, dtype=torch.float32):
    torch.testing.assert_close(found.double(), want, rtol=TOLERANCE[dtype], atol=1e-6)


def reference_merge(outs, lses):
    return merge_lse_reference([DecodeAttnResult(o, s, LseBase.E) for o, s in zip(outs, lses, strict=True)])


def assert_in_budget(run, launches):
    """So many launches, no copies, no allocation, no host sync, once warm."""
    for _ in range(2):
        run()
    assert count_launches(run) == (launches, 0)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(run)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "tokens", "heads", "v_dim"), [(2, 64, 128, 512), (3, 5, 63, 512), (8, 256, 16, 128)])
def test_decode_sizes_equal_the_twin(size, tokens, heads, v_dim, dtype, seed):
    torch.manual_seed(seed)
    outs, lses = make_shards(size, tokens, heads, v_dim, dtype)
    want, want_lse = reference_merge(outs, lses)
    out, lse = poisoned(tokens, heads, v_dim, dtype=dtype), poisoned(tokens, heads)
    launch_combine_shards(outs, lses, out, lse)
    assert_close(out, want, dtype)
    assert_close(lse, want_lse)
    assert (out[0] == 0).all()
    parts = size if heads % size == 0 else 1
    for shard in range(size):
        scaled, lse = poisoned(parts, tokens, heads // parts, v_dim, dtype=dtype), poisoned(tokens, heads // parts)
        launch_scale_shard(outs[shard], lses, shard, scaled, lse, part=shard % parts)
        found = scaled.transpose(0, 1).reshape(tokens, heads, v_dim)
        assert_close(found, scale_shard(outs[shard], lses, shard)[0], dtype)
        assert_close(lse, want_lse.chunk(parts, dim=1)[shard % parts])


def test_each_kernel_is_one_launch(seed):
    torch.manual_seed(seed)
    outs, lses = make_shards(4, 16, 32, 512, torch.bfloat16)
    buffers = MergeBuffers.allocate(
        MergeMethod.ALL_TO_ALL, 4, max_tokens=16, num_heads=32, v_dim=512, dtype=torch.bfloat16, device=CUDA
    )
    sent, received = buffers.messages(16)
    merged = buffers.merged(16)
    scaled, lse = torch.empty_like(outs[0]).view(4, 16, 8, 512), torch.empty(16, 8, device=CUDA)
    assert_in_budget(lambda: launch_scale_shard(outs[1], lses, 1, scaled, lse, part=1), 1)
    assert_in_budget(lambda: launch_pack_shard(outs[1], lses[1], sent.outs, sent.lses, to_natural=1.0), 1)
    assert_in_budget(lambda: launch_combine_shards(received.outs, received.lses, merged.out, merged.lse), 1)
    candidates = torch.full((4, 2, 16, 2048), -1, dtype=torch.int32, device=CUDA)
    topk = TopkBuffers.allocate(DcpLayout(4, 1), max_rows=16, k=2048, device=CUDA)
    ordered = (topk.values, topk.ids, topk.lengths)
    assert_in_budget(lambda: launch_order_candidates(candidates, *ordered, interleave=1), 1)
    topk.merged.indices.fill_(-1)
    assert_in_budget(lambda: launch_localize_indices(*topk.merged, dcp=(4, 1, 1)), 1)


def test_replays_follow_their_inputs(seed):
    torch.manual_seed(seed)
    size, tokens, heads, dtype = 5, 7, 20, torch.bfloat16
    outs, lses = make_shards(size, tokens, heads, 512, dtype)
    out, lse = poisoned(tokens, heads, 512, dtype=dtype), poisoned(tokens, heads)
    scaled, part_lse = poisoned(size, tokens, 4, 512, dtype=dtype), poisoned(tokens, 4)

    def run():
        launch_combine_shards(outs, lses, out, lse)
        launch_scale_shard(outs[3], lses, 3, scaled, part_lse, part=2)

    captured = capture(run)
    for _ in range(3):
        fill_shards(outs, lses)
        for tensor in (out, lse, scaled, part_lse):
            tensor.fill_(NAN)
        captured.replay()
        want, want_lse = reference_merge(outs, lses)
        assert_close(out, want, dtype)
        assert_close(lse, want_lse)
        want_scaled = scale_shard(outs[3], lses, 3)[0]
        assert_close(scaled.transpose(0, 1).reshape(tokens, heads, 512), want_scaled, dtype)
        assert_close(part_lse, want_lse[:, 8:12])


def test_no_batch_size_compiles_anew(monkeypatch):
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **known: compiled.append(known["repr"]))
    # A v_dim of no other test, so that the first batch is seen to compile.
    buffers = MergeBuffers.allocate(
        MergeMethod.ALL_TO_ALL, 3, max_tokens=33, num_heads=9, v_dim=80, dtype=torch.bfloat16, device=CUDA
    )
    for tokens in (5, 1, 2, 16, 17, 32, 33):
        sent, received = buffers.messages(tokens)
        merged = buffers.merged(tokens)
        out = torch.zeros(tokens, 9, 80, dtype=torch.bfloat16, device=CUDA)
        lse = torch.zeros(9, tokens, device=CUDA).t()
        lses, scaled = torch.zeros(3, tokens, 9, device=CUDA), torch.empty(3, tokens, 3, 80, device=CUDA).bfloat16()
        launch_pack_shard(out, lse, sent.outs, sent.lses, to_natural=1.0)
        received.lses.zero_()
        launch_combine_shards(received.outs, received.lses, merged.out, merged.lse)
        launch_scale_shard(out, lses, 1, scaled, torch.empty(tokens, 3, device=CUDA), part=1)
        if tokens == 5:
            assert len(compiled) == 3
    assert len(compiled) == 3, compiled


def draw_candidates(size, rows, k, layout, longest):
    """Logits with many ties and NaN, and (W, 2, rows, k) of what each rank would send of them."""
    logits = torch.randn(rows, longest, device=CUDA).clamp(min=0)
    logits[:, ::11] = NAN
    lengths = torch.randint(0, longest + 1, (rows,), device=CUDA, dtype=torch.int32)
    lengths[:2] = torch.tensor([longest, size - 1], dtype=torch.int32)
    tokens = torch.arange(longest, device=CUDA)
    shards = torch.empty(size, 2, rows, k, dtype=torch.int32, device=CUDA)
    for rank in range(size):
        mine = DcpLayout(size, rank, layout.interleave)
        local = logits[:, mine.owner(tokens) == rank].contiguous()
        ops.topk_indices(
            local, mine.local_lens(lengths), k, out=shards[rank, 0], values=shards[rank, 1].view(torch.float32)
        )
    return logits, lengths, shards


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 64), (8, 1)])
def test_the_merged_topk_is_one_ranks(size, interleave, seed):
    torch.manual_seed(seed)
    rows, k = 9, 2048
    layout = DcpLayout(size, size - 1, interleave)
    buffers = TopkBuffers.allocate(layout, max_rows=rows, k=k, device=CUDA)
    logits, lengths, shards = draw_candidates(size, rows, k, layout, 40_000)
    dcp_topk._choose(shards, buffers, buffers.merged)
    values, ids, counts = order_candidates(shards[:, 0], shards[:, 1].view(torch.float32), layout)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(buffers.ids[row, :count], ids[row, :count])
        assert torch.equal(buffers.values[row, :count].view(torch.int32), values[row, :count].view(torch.int32))
    assert torch.equal(buffers.lengths, counts)
    assert torch.equal(buffers.merged.indices, reference.topk_indices(logits, lengths, k))
    local, owned = localize_indices(buffers.merged.indices, layout)
    assert torch.equal(buffers.merged.local_indices, local)
    assert torch.equal(buffers.merged.local_counts, owned)


def test_the_merged_topk_is_three_launches_and_replays(seed):
    torch.manual_seed(seed)
    size, rows, k, layout = 4, 6, 2048, DcpLayout(4, 2)
    buffers = TopkBuffers.allocate(layout, max_rows=rows, k=k, device=CUDA)
    _, _, shards = draw_candidates(size, rows, k, layout, 30_000)
    assert_in_budget(lambda: dcp_topk._choose(shards, buffers, buffers.merged), 3)
    captured = capture(lambda: dcp_topk._choose(shards, buffers, buffers.merged))
    for longest in (30_000, 900, 9_000):
        logits, lengths, fresh = draw_candidates(size, rows, k, layout, longest)
        shards.copy_(fresh)
        for tensor in (buffers.ids, buffers.lengths, *buffers.merged):
            tensor.fill_(POISON)
        captured.replay()
        assert torch.equal(buffers.merged.indices, reference.topk_indices(logits, lengths, k))


@pytest.fixture
def group_of_one(tmp_path):
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=CUDA)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("base", LseBase)
@pytest.mark.parametrize("method", MergeMethod)
def test_a_merge_by_nccl_neither_allocates_nor_syncs_and_replays(group_of_one, method, base, seed):
    """With one rank: what is left of the outputs is what has tokens."""
    torch.manual_seed(seed)
    tokens, heads = 6, 16
    outs, lses = make_shards(1, tokens, heads, 512, torch.bfloat16)
    result = DecodeAttnResult(outs[0], lses[0], base)
    buffers = MergeBuffers.allocate(
        method, 1, max_tokens=8, num_heads=heads, v_dim=512, dtype=torch.bfloat16, device=CUDA
    )
    run = lambda: merge_lse(result, method=method, buffers=buffers)  # noqa: E731
    captured = capture(run)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(run)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    for _ in range(3):
        fill_shards(outs, lses)
        buffers.out.fill_(0x7F)
        captured.replay()
        merged = captured.result
        is_empty = lses[0].isinf()
        assert torch.equal(merged.out, outs[0].masked_fill(is_empty.unsqueeze(-1), 0))
        assert_close(merged.lse, natural_lse(result))


def test_a_merged_topk_by_nccl_replays(group_of_one, seed):
    torch.manual_seed(seed)
    logits, lengths = torch.randn(5, 9000, device=CUDA), torch.zeros(5, dtype=torch.int32, device=CUDA)
    buffers = TopkBuffers.allocate(DcpLayout(), max_rows=5, k=2048, device=CUDA)
    indices, values = buffers.candidates(5)

    def run():
        ops.topk_indices(logits, lengths, 2048, out=indices, values=values)
        return merge_topk(indices, values, DcpLayout(), buffers=buffers)

    captured = capture(run)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(run)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    for _ in range(3):
        logits.normal_().clamp_(min=0)
        lengths.random_(0, 9001)
        for tensor in buffers.merged:
            tensor.fill_(POISON)
        captured.replay()
        want = reference.topk_indices(logits, lengths, 2048)
        assert torch.equal(captured.result.indices, want)
        assert torch.equal(captured.result.local_indices, want)
        assert torch.equal(captured.result.local_counts, lengths.clamp(max=2048))
