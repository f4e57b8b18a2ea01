"""Steps of MLA decode attention full of poison, and what their attention is, written out."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from vllm_dsa.reference import KV_LORA_RANK, LATENT_DIM, pack_fp8_latent, read_latent

NAN = float("nan")
POISON_PAGE = 0x7FFFFFFF
SCALE = LATENT_DIM**-0.5


@dataclass(frozen=True)
class DenseCase:
    """What `mla_decode` takes. Tokens that no row of their request sees are NaN, and so are pages of no request."""

    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int

    @property
    def inputs(self):
        return self.q, self.cache, self.block_table, self.context_lens

    def slots(self):
        """The slots that each row sees."""
        block_size, rows = self.cache.shape[1], []
        for request, (first, stop) in enumerate(pairwise(self.query_start_loc.tolist())):
            for length in self.context_lens[first:stop].tolist():
                position = torch.arange(max(0, length), device=self.q.device)
                rows.append(self.block_table[request, position // block_size] * block_size + position % block_size)
        return rows + [self.block_table.new_zeros(0)] * (len(self.q) - len(rows))


@dataclass(frozen=True)
class SparseCase:
    """What `sparse_mla_decode` takes. Tokens that no row names are NaN."""

    q: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    topk_lens: torch.Tensor

    def named(self):
        """The slots that each row names."""
        heads = [row[: max(0, length)] for row, length in zip(self.slots, self.topk_lens.tolist(), strict=True)]
        return [row[row >= 0] for row in heads]


@dataclass(frozen=True)
class Naive:
    """Softmax over gathered tokens, written out: float64 results, and what no cancelling would have made of them."""

    out: torch.Tensor
    lse: torch.Tensor
    sizes: torch.Tensor


def naive(q, cache, slots_of_rows, softmax_scale=SCALE):
    outs, lses, sizes = [], [], []
    for row, slots in zip(q.double(), slots_of_rows, strict=True):
        latent = read_latent(cache, slots)
        exponentials = (row @ latent.T * softmax_scale).exp()
        total = exponentials.sum(dim=1)
        weights = exponentials / total.clamp(min=1e-300)[:, None]
        value = latent[:, :KV_LORA_RANK]
        outs.append(weights @ value)
        sizes.append(weights @ value.abs())
        lses.append(total.log())
    return Naive(torch.stack(outs), torch.stack(lses), torch.stack(sizes))


def make_dense(generator, depths, lens, *, heads=2, block_size=16, fp8=False, orphans=0, page_gap=0, q_scale=1.0):
    """Requests of so many rows, of so many tokens each; `orphans` rows of no request behind them."""
    device = generator.device
    starts = [0]
    for depth in depths:
        starts.append(starts[-1] + depth)
    assert len(lens) == starts[-1]
    longest = [max([0, *lens[first:stop]]) for first, stop in pairwise(starts)]
    counts = [-(-length // block_size) for length in longest]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=generator, device=device).int()
    table = torch.full((len(depths), max([0, *counts]) + 1), POISON_PAGE, dtype=torch.int32, device=device)
    is_used = torch.zeros(pages, block_size, dtype=torch.bool, device=device)
    taken = 0
    for request, (count, length) in enumerate(zip(counts, longest, strict=True)):
        mine = order[taken : taken + count]
        table[request, :count] = mine
        is_used[mine.long()] = (torch.arange(count * block_size, device=device) < length).view(count, block_size)
        taken += count
    tokens = starts[-1] + orphans
    q = torch.randn(tokens, heads, LATENT_DIM, generator=generator, device=device) * q_scale
    q[starts[-1] :] = NAN
    context_lens = torch.tensor([*lens, *[5] * orphans], dtype=torch.int32, device=device)
    return DenseCase(
        q=q.bfloat16(),
        cache=make_cache(generator, is_used, fp8=fp8, page_gap=page_gap),
        block_table=table,
        context_lens=context_lens,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        max_query_len=max([1, *depths]),
    )


def make_cache(generator, is_used, *, fp8, page_gap=0):
    """Random latents at the used slots; everything else, and the gaps between pages, is NaN."""
    latent = torch.randn(*is_used.shape, LATENT_DIM, generator=generator, device=is_used.device)
    latent *= 0.5 + torch.rand(*is_used.shape, 1, generator=generator, device=is_used.device)
    rows = pack_fp8_latent(latent) if fp8 else latent.bfloat16()
    # In float8_e4m3fn, float32 and bfloat16 all bits set is a NaN.
    rows = rows.view(torch.uint8).masked_fill(~is_used.unsqueeze(2), 0xFF)
    num_pages, block_size, row_bytes = rows.shape
    memory = torch.full((num_pages, block_size * row_bytes + page_gap), 0xFF, dtype=torch.uint8, device=rows.device)
    memory[:, : block_size * row_bytes] = rows.view(num_pages, -1)
    cache = memory.as_strided(rows.shape, (memory.stride(0), row_bytes, 1))
    return cache if fp8 else cache.view(torch.bfloat16)


def make_sparse(generator, counts, *, width, heads=2, block_size=16, fp8=False, holes=True):
    """Rows that name so many tokens, with -1 between and behind them, and garbage past their topk_lens."""
    device = generator.device
    pages = -(-sum(counts) // block_size) + 2
    order = torch.randperm(pages * block_size, generator=generator, device=device).int()
    is_used = torch.zeros(pages * block_size, dtype=torch.bool, device=device)
    slots = torch.full((len(counts), width), -1, dtype=torch.int32, device=device)
    lens = torch.full((len(counts),), width, dtype=torch.int32, device=device)
    taken = 0
    for row, count in enumerate(counts):
        end = min(width, count + 3) if holes else count
        columns = torch.randperm(end, generator=generator, device=device)[:count].sort().values
        slots[row, columns] = order[taken : taken + count]
        slots[row, end:] = POISON_PAGE
        lens[row] = end
        taken += count
    is_used[order[:taken].long()] = True
    q = torch.randn(len(counts), heads, LATENT_DIM, generator=generator, device=device)
    cache = make_cache(generator, is_used.view(pages, block_size), fp8=fp8)
    return SparseCase(q.bfloat16(), cache, slots, lens)


def assert_close(found, expected, *, lse_error=1e-4):
    """bfloat16 weights and output: each rounds by 2 ** -9, or 2 ** -8 where the interpreter cuts bits off."""
    assert found.out.dtype == torch.bfloat16
    out, want = found.out.double(), expected.out
    assert not out.isnan().any()
    error = (out - want).abs()
    bound = 2.0**-7 * (want.abs() + expected.sizes)
    assert (error <= bound).all(), f"worst {(error / bound.clamp(min=1e-30)).max().item():.2f} of its bound"
    assert torch.equal(found.lse.isinf(), expected.lse.isinf())
    assert not found.lse.isnan().any()
    is_seen = ~expected.lse.isinf()
    assert ((found.lse - expected.lse).abs()[is_seen] <= lse_error).all()
    assert (found.lse[~is_seen] == -float("inf")).all()
    assert (out[~is_seen] == 0).all()
