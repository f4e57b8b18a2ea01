"""Logits of whole decode steps on a real GPU: builder, fold, cache and the loaded DeepGEMM together."""

import itertools

import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.deep_gemm_wrapper import fp8_mqa_logits
from vllm_dsa.indexer import DecodeBatch, IndexerConfig, IndexerMetadataBuilder, decode_logits
from vllm_dsa.ops import LogitsBackend
from vllm_dsa.ops.row_map import tokens_of_rows
from vllm_dsa.runner.oracle import LOGITS_TOLERANCE

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BORDERS = [1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 700, 1023]
DEPTHS = {
    **{f"{batch}x{next_n}": [next_n] * batch for batch, next_n in [(4, 1), (2, 2), (2, 4), (3, 3), (3, 5), (2, 8)]},
    **{f"{next_n} at every border": [next_n] * len(BORDERS) for next_n in (1, 2, 4, 6, 7)},
    "ragged 1..8": [1, 2, 3, 4, 5, 6, 7, 8, 1, 8],
    "ragged with padding": [3, 0, 1, 4, 0, 2],
}


def page_pool(block_size, pages, strided):
    """Pages of a layer's own, or every other page of a pool that two layers share."""
    layout = ops.IndexKCacheLayout(block_size)
    pool = layout.allocate(2 * pages if strided else pages, CUDA, fill=0x7F)
    return pool[::2] if strided else pool


class Step:
    """One decode step with random contents, its metadata and its two expectations."""

    def __init__(self, depths, caps, generator, heads, block_size, shared, strided, backend="deep_gemm"):
        lengths = [BORDERS[i % len(BORDERS)] if depth else 0 for i, depth in enumerate(depths)]
        width = -(-max(BORDERS) // block_size)
        num_reqs, num_tokens = len(depths), sum(depths)
        self.k = torch.randn(num_reqs * width * block_size, 128, generator=generator).to(CUDA)
        self.cache = page_pool(block_size, num_reqs * width, strided)
        ops.store_index_k(self.k, self.cache, torch.arange(len(self.k), device=CUDA))
        table = torch.randperm(num_reqs * width, generator=generator).int().view(num_reqs, width)
        if shared:
            table[:, : width // 2] = table[0, : width // 2]
        self.q = torch.randn(num_tokens, heads, 128, generator=generator).to(CUDA)
        self.weights = torch.randn(num_tokens, heads, generator=generator).to(CUDA)
        starts = torch.tensor([0, *itertools.accumulate(depths)], dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        self.batch = DecodeBatch(starts.to(CUDA), starts, lens.to(CUDA), table.to(CUDA), max(lengths))
        config = IndexerConfig(
            next_n=4,
            max_num_seqs=num_reqs,
            block_table_width=width,
            max_num_tokens=num_tokens,
            block_size=block_size,
            num_heads=heads,
            logits_backend=backend,
        )
        self.caps = caps
        self.metadata = IndexerMetadataBuilder(config, caps, CUDA).build_decode(self.batch)
        per_token = [max(n - d + j + 1, 0) for n, d in zip(lengths, depths, strict=True) for j in range(d)]
        self.lens = torch.tensor(per_token, dtype=torch.int32, device=CUDA)
        self.table = table.to(CUDA).repeat_interleave(torch.tensor(depths, device=CUDA), dim=0)

    def logits(self):
        metadata = self.metadata
        q, weights = ops.fold_q(
            self.q, self.weights, scale_format=ops.ScaleFormat.FP32, row_to_token=metadata.row_to_token
        )
        rows = decode_logits(metadata, q, weights, self.cache, self.caps)
        return tokens_of_rows(rows, metadata.token_to_row)

    def dequantised(self):
        q, weights = reference.fold_q(self.q, self.weights, scale_format=ops.ScaleFormat.FP32)
        return reference.paged_mqa_logits(
            q.unsqueeze(1),
            self.cache,
            weights,
            self.lens.unsqueeze(1),
            self.table,
            max_context_len=self.metadata.max_context_len,
            compute_dtype=torch.float64,
        )

    def true_row(self, token):
        block_size = self.cache.shape[1]
        at = torch.arange(int(self.lens[token]), device=CUDA)
        slots = self.table[token].long()[at // block_size] * block_size + at % block_size
        scores = (self.q[token].double() @ self.k[slots].double().T).relu()
        heads, head_dim = self.q.shape[1:]
        return (self.weights[token].double() @ scores) * heads**-0.5 * head_dim**-0.5


def relative(have, want):
    return float((have.double() - want).norm() / want.norm().clamp(min=1e-30))


def cosine_difference(have, want):
    have = have.double()
    return float(1 - 2 * (have * want).sum() / (have.square() + want.square()).sum())


@pytest.mark.parametrize("backend", ["deep_gemm", "sm90"])
@pytest.mark.parametrize("layout", ["plain", "shared pages", "strided pool"])
@pytest.mark.parametrize(("heads", "block_size"), [(64, 64), (32, 64), (64, 32), (32, 32)])
@pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS)
def test_every_depth_equals_the_dequantised_reference(caps, generator, depths, heads, block_size, layout, backend):
    if backend == "deep_gemm" and block_size not in caps.block_sizes:
        pytest.skip(f"{caps.version} has no pages of {block_size}")
    shared, strided = layout == "shared pages", layout == "strided pool"
    step = Step(depths, caps, generator, heads, block_size, shared, strided, backend)
    tolerance = LOGITS_TOLERANCE[LogitsBackend(backend)]
    logits, dequantised = step.logits(), step.dequantised()
    seen = []
    for token, length in enumerate(step.lens.tolist()):
        have, want = logits[token, :length], dequantised[token, :length]
        # Of one or two tokens the norm itself can be near zero.
        assert length < 16 or relative(have, want) < tolerance, token
        seen.append(have)
    assert relative(torch.cat(seen), dequantised[dequantised.isfinite()]) < tolerance


@pytest.mark.parametrize("backend", ["deep_gemm", "sm90"])
@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize(
    "depths", [*([n] * 60 for n in range(1, 9)), [1, 2, 3, 4, 5, 6, 7, 8] * 7], ids=lambda d: f"{len(d)} of {d[-1]}"
)
def test_what_quantisation_costs(caps, generator, depths, heads, backend):
    """Rounding q and k to FP8 costs 7e-4 on average; a query's share of it is its own, so it takes many to say so."""
    step = Step(depths, caps, generator, heads, 64, shared=False, strided=False, backend=backend)
    logits = step.logits()
    seen = torch.cat([logits[token, :length] for token, length in enumerate(step.lens.tolist())])
    true = torch.cat([step.true_row(token) for token in range(len(step.lens))])
    assert cosine_difference(seen, true) < 1e-3


@pytest.mark.parametrize("heads", [64, 32])
def test_prefill_logits_start_at_the_rows_start(caps, generator, heads):
    k = torch.randn(1000, 128, generator=generator).to(CUDA)
    values, scale = reference.quantize_fp8(k, scale_format=ops.ScaleFormat.FP32, amax_floor=1e-4)
    q, weights = ops.fold_q(
        torch.randn(40, heads, 128, generator=generator).to(CUDA),
        torch.randn(40, heads, generator=generator).to(CUDA),
        scale_format=ops.ScaleFormat.FP32,
    )
    starts = torch.tensor([0, 300, 301, 640] * 10, dtype=torch.int32, device=CUDA)
    ends = starts + torch.randint(1, 361, (40,), generator=generator, dtype=torch.int32).to(CUDA)
    got = fp8_mqa_logits(q, values, scale, weights, starts, ends, 360, caps=caps)
    want = reference.mqa_logits(q, values, scale, weights, starts, ends, compute_dtype=torch.float64)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        tolerance = LOGITS_TOLERANCE[LogitsBackend.DEEP_GEMM] if end - start >= 16 else 1e-2
        assert relative(got[row, : end - start], want[row, start:end]) < tolerance
