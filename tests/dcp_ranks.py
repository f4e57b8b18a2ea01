"""What every rank of a DCP group checks against one rank that holds all tokens. Started by processes, not collected."""

import math
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from vllm_dsa import ops, reference
from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.bench.timing import capture, syncs_with_host
from vllm_dsa.context_parallel import merge as merge_module
from vllm_dsa.context_parallel import topk as topk_module
from vllm_dsa.context_parallel.layout import DcpLayout
from vllm_dsa.context_parallel.merge import merge_lse
from vllm_dsa.context_parallel.merge_buffers import MergeBuffers, MergeMethod
from vllm_dsa.context_parallel.topk import TopkBuffers, merge_topk

NAN = math.nan
POISON = 0x7F7F7F7F
CONTEXT = 40


@contextmanager
def group_of(backend, rank, size, store):
    """The process group of a child, which must not survive a failure: others would wait for it."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    device = {"device_id": torch.device("cuda", rank)} if backend == "nccl" else {}
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, **device)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Step:
    """Rows of a decode step over all tokens, the same on every rank."""

    scores: torch.Tensor  # (T, H, N) float64, -inf past a row's length
    values: torch.Tensor  # (N, V) float64
    logits: torch.Tensor  # (T, N) float32, of the indexer
    lengths: torch.Tensor  # (T,) int32

    @classmethod
    def draw(cls, lengths, heads, v_dim, generator):
        scores = torch.randn(len(lengths), heads, CONTEXT, generator=generator, dtype=torch.float64) * 6
        values = torch.randn(CONTEXT, v_dim, generator=generator, dtype=torch.float64)
        logits = torch.randn(len(lengths), CONTEXT, generator=generator).clamp(min=0)
        logits[:, ::7] = NAN
        lengths = torch.tensor(lengths, dtype=torch.int32)
        hidden = torch.arange(CONTEXT) >= lengths[:, None]
        return cls(scores.masked_fill(hidden[:, None], -math.inf), values, logits, lengths)

    def attention(self, visible):
        """Attention over the tokens of a (T, N) mask."""
        return attention_over(self.scores, self.values, visible)

    def shard(self, visible, dtype, base, device):
        """What a kernel returns for the visible tokens: rubbish where there are none, beside either infinity."""
        out, lse = self.attention(visible)
        is_empty = lse == -math.inf
        out = out.masked_fill(is_empty.unsqueeze(-1), NAN).to(dtype)
        lse = lse.masked_fill(is_empty, -math.inf if base is LseBase.E else math.inf)
        lse = (lse / math.log(2) if base is LseBase.TWO else lse).float()
        # Head-major where the base is natural: then both ways of sending an LSE are used.
        lse = lse.t().contiguous().t() if len(lse) % 2 else lse
        return DecodeAttnResult(out.to(device), lse.to(device), base)


def lengths_of(rows, size):
    return [0, 1, size - 1, CONTEXT, size + 1, CONTEXT - 3, 17][:rows]


def share(tensor, method, layout):
    """The heads of a (T, H, ...) tensor that a rank ends with."""
    return tensor if method is MergeMethod.ALL_REDUCE else tensor.chunk(layout.size, dim=1)[layout.rank]


def assert_merged(found, out, lse, method, layout, dtype):
    assert found.base is LseBase.E
    # A sum in bfloat16 rounds each part and each partial sum.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7 * (1 if method is MergeMethod.ALL_TO_ALL else layout.size)
    torch.testing.assert_close(found.out.double().cpu(), share(out, method, layout), rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(found.lse.double().cpu(), share(lse, method, layout), rtol=1e-5, atol=1e-5)


def check_merge_lse(layout, group, device, dtype, seed, steps=(4, 0, 3, 1)):
    """Every method, with and without buffers, over steps of several sizes; each rank states a base of its own."""
    generator = torch.Generator().manual_seed(seed)
    heads, v_dim = 3 * layout.size, 8
    base = list(LseBase)[layout.rank % 2]
    owner = layout.owner(torch.arange(CONTEXT))
    for method in MergeMethod:
        buffers = MergeBuffers.allocate(
            method, layout.size, max_tokens=4, num_heads=heads, v_dim=v_dim, dtype=dtype, device=device
        )
        for rows in steps:
            for tensor in (buffers.sent, buffers.received, buffers.scaled, buffers.out, buffers.lse):
                tensor.fill_(0x7F)
            step = Step.draw(lengths_of(rows, layout.size), heads, v_dim, generator)
            out, lse = step.attention(torch.ones(rows, CONTEXT, dtype=torch.bool))
            mine = step.shard((owner == layout.rank).expand(rows, -1), dtype, base, device)
            before = mine.out.clone(), mine.lse.clone()
            merged = merge_lse(mine, group, method=method, buffers=buffers)
            assert_merged(merged, out, lse, method, layout, dtype)
            if rows:
                assert merged.out.data_ptr() == buffers.out.data_ptr()
                assert (merged.out[0] == 0).all()  # a row of no tokens anywhere
            for is_now, was in zip((mine.out, mine.lse), before, strict=True):
                assert torch.equal(is_now.nan_to_num(7), was.nan_to_num(7))
        assert_merged(merge_lse(mine, group, method=method), out, lse, method, layout, dtype)


def check_all_heads(layout, group, device):
    """An all-reduce leaves any number of heads, and the same bits, on every rank."""
    step = Step.draw(lengths_of(4, layout.size), 5, 3, torch.Generator().manual_seed(1))
    mine = step.shard(
        (layout.owner(torch.arange(CONTEXT)) == layout.rank).expand(4, -1), torch.float32, LseBase.E, device
    )
    merged = merge_lse(mine, group, method=MergeMethod.ALL_REDUCE)
    out, lse = step.attention(torch.ones(4, CONTEXT, dtype=torch.bool))
    assert_merged(merged, out, lse, MergeMethod.ALL_REDUCE, layout, torch.float32)
    assert_same_everywhere(merged.out.view(torch.int32), group)
    assert_same_everywhere(merged.lse.view(torch.int32), group)


def assert_same_everywhere(tensor, group):
    all_ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, tensor.contiguous(), group=group)
    assert all(torch.equal(other, tensor) for other in all_ranks)


def local_topk(step, layout, k, out=None, values=None, device="cpu"):
    """This rank's candidates: its tokens' logits are all that it sees."""
    mine = layout.owner(torch.arange(CONTEXT)) == layout.rank
    logits, lengths = step.logits[:, mine].to(device), layout.local_lens(step.lengths).to(device)
    if values is None:
        values = torch.empty(len(lengths), k, device=device)
    return ops.topk_indices(logits, lengths, k, out=out, values=values), values


def check_topk_and_attention(layout, group, device, seed, steps=(7, 0, 2)):
    """From logits to attention: all choose what one rank would, attend to what they hold of it, and merge."""
    generator = torch.Generator().manual_seed(seed)
    heads, k = layout.size, 9
    buffers = TopkBuffers.allocate(layout, max_rows=7, k=k, device=device)
    for rows in steps:
        for tensor in (buffers.sent, buffers.received, buffers.ids, buffers.lengths, *buffers.merged):
            tensor.fill_(POISON)
        step = Step.draw(lengths_of(rows, layout.size), heads, 4, generator)
        want = reference.topk_indices(step.logits, step.lengths, k)
        indices, values = local_topk(step, layout, k, *buffers.candidates(rows), device=device)
        merged = merge_topk(indices, values, layout, group, buffers=buffers)
        assert torch.equal(merged.indices.cpu(), want)
        assert_same_everywhere(merged.indices, group)

        chosen = torch.zeros(rows, CONTEXT, dtype=torch.bool)
        mine = torch.zeros(rows, CONTEXT, dtype=torch.bool)
        for row in range(rows):
            chosen[row, want[row][want[row] >= 0].long()] = True
            kept = merged.local_indices[row, : merged.local_counts[row]].cpu()
            assert (kept.diff() > 0).all()
            assert (merged.local_indices[row, len(kept) :] == -1).all()
            mine[row, layout.global_pos(kept).long()] = True
        assert torch.equal(mine, chosen & (layout.owner(torch.arange(CONTEXT)) == layout.rank))
        shard = step.shard(mine, torch.float32, LseBase.E, device)
        out, lse = step.attention(chosen)
        assert_merged(merge_lse(shard, group), out, lse, MergeMethod.REDUCE_SCATTER, layout, torch.float32)
    copied = merge_topk(*local_topk(step, layout, k, device=device), layout, group)
    assert torch.equal(copied.indices.cpu(), want)


def check_refusals(layout, group, device):
    """Refused before anything is sent: the next collective still finds all ranks."""
    result = DecodeAttnResult(
        torch.ones(2, layout.size + 1, 4, device=device), torch.ones(2, layout.size + 1, device=device), LseBase.E
    )
    fitting = {"max_tokens": 2, "num_heads": layout.size + 1, "v_dim": 4, "dtype": torch.float32, "device": device}
    allocate = MergeBuffers.allocate
    refused = [
        (lambda: merge_lse(result.out, group), TypeError, "result is of type Tensor; allowed: DecodeAttnResult"),
        (lambda: merge_lse(result, group, method="ag_rs"), TypeError, "method is 'ag_rs'; allowed: MergeMethod."),
        (lambda: merge_lse(result, group), ValueError, f"num_heads is {layout.size + 1}; allowed: multiples"),
    ]
    changes = [
        ({"max_tokens": 1}, "result has 2 tokens; allowed: up to 1"),
        ({"num_heads": 1}, f"result's number of heads is {layout.size + 1}; allowed: 1"),
        ({"v_dim": 5}, "result's v_dim is 4; allowed: 5"),
        ({"dtype": torch.bfloat16}, "result's dtype is torch.float32; allowed: torch.bfloat16"),
        ({"device": "meta"}, f"result's device is {result.out.device}; allowed: meta"),
        ({"size": 1}, f"the group's size is {layout.size}; allowed: 1"),
        ({"method": MergeMethod.REDUCE_SCATTER, "num_heads": layout.size}, "method is MergeMethod.ALL_REDUCE; allowed"),
    ]
    for change, message in changes:
        buffers = allocate(**{"method": MergeMethod.ALL_REDUCE, "size": layout.size, **fitting, **change})
        call = lambda buffers=buffers: merge_lse(result, group, method=MergeMethod.ALL_REDUCE, buffers=buffers)  # noqa: E731
        refused.append((call, ValueError, message))
    other = replace(layout, rank=(layout.rank + 1) % layout.size)
    candidates = torch.zeros(1, 2, dtype=torch.int32, device=device), torch.zeros(1, 2, device=device)
    refused.append((lambda: merge_topk(*candidates, other, group), ValueError, f"layout is {other}; allowed: size"))
    for call, error, message in refused:
        with pytest.raises(error, match=re.escape(message)):
            call()


@contextmanager
def interpreted_kernels():
    """The kernels instead of their twins, on CPU tensors."""
    modules = (merge_module, topk_module)
    was = [module._runs_triton for module in modules]
    for module in modules:
        module._runs_triton = lambda device: True
    try:
        yield
    finally:
        for module, function in zip(modules, was, strict=True):
            module._runs_triton = function


def run_on_cpu(rank, size, store):
    """Everything by the twins, then by the interpreted kernels, then in groups that are a part of all processes."""
    with group_of("gloo", rank, size, store):
        check_refusals(DcpLayout(size, rank), None, "cpu")
        for dtype in (torch.float32, torch.bfloat16):
            check_merge_lse(DcpLayout(size, rank), None, "cpu", dtype, seed=size)
        check_all_heads(DcpLayout(size, rank), None, "cpu")
        for interleave in (1, 3):
            check_topk_and_attention(DcpLayout(size, rank, interleave), None, "cpu", seed=size)
        with interpreted_kernels():
            check_merge_lse(DcpLayout(size, rank), None, "cpu", torch.float32, seed=size + 1, steps=(2,))
            check_topk_and_attention(DcpLayout(size, rank, 2), None, "cpu", seed=size + 1, steps=(5,))
        # The last processes first: a rank within a group is not the process's.
        order = [range(size)[::-1][first::2] for first in range(2)]
        groups = [dist.new_group(sorted(ranks)) for ranks in order]
        group = groups[0] if rank in order[0] else groups[1]
        layout = DcpLayout(dist.get_world_size(group), dist.get_rank(group))
        check_merge_lse(layout, group, "cpu", torch.float32, seed=9, steps=(2,))
        check_topk_and_attention(layout, group, "cpu", seed=9, steps=(5,))
        stranger = groups[1] if rank in order[0] else groups[0]
        result = DecodeAttnResult(torch.ones(1, 2, 1), torch.ones(1, 2), LseBase.E)
        with pytest.raises(ValueError, match="group does not hold this process"):
            merge_lse(result, stranger)


def run_on_gpu(rank, size, store):
    """The same by NCCL, one process a GPU; then at real sizes, out of CUDA graphs."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with group_of("nccl", rank, size, store):
        check_refusals(DcpLayout(size, rank), None, device)
        for dtype in (torch.float32, torch.bfloat16):
            check_merge_lse(DcpLayout(size, rank), None, device, dtype, seed=size)
        check_all_heads(DcpLayout(size, rank), None, device)
        for interleave in (1, 3):
            layout = DcpLayout(size, rank, interleave)
            check_topk_and_attention(layout, None, device, seed=size)
            check_replays(layout, device, seed=size)
        # Graphs that hold collectives must be gone before the group is.
        torch.cuda.synchronize()


def check_replays(layout, device, seed, rows=8, k=2048, context=20_000, v_dim=512):
    """A captured choice and captured merges follow their inputs, without allocation or host sync."""
    generator = torch.Generator().manual_seed(seed)
    heads = 4 * layout.size
    is_mine = layout.owner(torch.arange(context, device=device)) == layout.rank
    logits = torch.zeros(rows, int(is_mine.sum()), device=device)
    lengths = torch.zeros(rows, dtype=torch.int32, device=device)
    buffers = TopkBuffers.allocate(layout, max_rows=rows, k=k, device=device)
    shard = DecodeAttnResult(
        torch.zeros(rows, heads, v_dim, dtype=torch.bfloat16, device=device),
        torch.zeros(rows, heads, device=device),
        list(LseBase)[layout.rank % 2],
    )
    sizes = {"max_tokens": rows, "num_heads": heads, "v_dim": v_dim, "dtype": torch.bfloat16, "device": device}
    memory = {method: MergeBuffers.allocate(method, layout.size, **sizes) for method in MergeMethod}

    def choose():
        indices, values = buffers.candidates(rows)
        ops.topk_indices(logits, lengths, k, out=indices, values=values)
        return merge_topk(indices, values, layout, buffers=buffers)

    def merge():
        return {method: merge_lse(shard, method=method, buffers=memory[method]) for method in MergeMethod}

    choice, merges = capture(choose), capture(merge)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(choose)
    assert not syncs_with_host(merge)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations

    for _ in range(3):
        all_logits = torch.randn(rows, context, generator=generator).clamp(min=0).to(device)
        all_lengths = torch.randint(0, context + 1, (rows,), generator=generator, dtype=torch.int32)
        all_lengths[:3] = torch.tensor([0, 1, context])
        all_lengths = all_lengths.to(device)
        logits.copy_(all_logits[:, is_mine])
        lengths.copy_(layout.local_lens(all_lengths))
        for tensor in buffers.merged:
            tensor.fill_(POISON)
        choice.replay()
        want = reference.topk_indices(all_logits, all_lengths, k)
        assert torch.equal(choice.result.indices, want)
        assert_same_everywhere(choice.result.indices, None)

        # A score and a value for each chosen token: attention over it by one rank, and over this rank's part of it.
        scores = torch.randn(rows, heads, k, generator=generator, dtype=torch.float64).to(device) * 4
        values = torch.randn(rows, k, v_dim, generator=generator, dtype=torch.float64).to(device)
        out, lse = attention_over(scores, values, want >= 0)
        part, part_lse = attention_over(scores, values, (want >= 0) & (layout.owner(want) == layout.rank))
        shard.out.copy_(part.masked_fill(part_lse.isinf().unsqueeze(-1), NAN))
        shard.lse.copy_(part_lse / (math.log(2) if shard.base is LseBase.TWO else 1))
        merges.replay()
        for method, merged in merges.result.items():
            assert_merged(merged, out.cpu(), lse.cpu(), method, layout, torch.bfloat16)


def attention_over(scores, values, visible):
    """(out, lse) of scores (T, H, K) and values ([T,] K, V) over a (T, K) mask, in float64; (0, -inf) without any."""
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp() @ values, lse
