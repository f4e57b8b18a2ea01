import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.ops import IndexKCacheLayout, RopeStyle, ScaleFormat
from vllm_dsa.reference import dequantize_fp8, make_cos_sin

H, D = 32, 128
POISON = 0x7F


def relative_error(found, expected):
    visible = expected != float("-inf")
    assert torch.equal(found != float("-inf"), visible)
    found, expected = found[visible].double(), expected[visible].double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def cosine_difference(found, expected):
    visible = expected != float("-inf")
    found, expected = found[visible].double(), expected[visible].double()
    return (1 - 2 * (found * expected).sum() / (found.square() + expected.square()).sum()).item()


def dense_logits(q, k, weights, lengths, width):
    """Float64 logits of one request: q (n, H, D), k (L, D), weights (n, H), lengths per row."""
    scores = torch.einsum("nhd,td->nht", q.double(), k.double()).clamp(min=0)
    logits = torch.full((q.shape[0], width), float("-inf"), dtype=torch.float64)
    for row, length in enumerate(lengths):
        logits[row, :length] = torch.einsum("ht,h->t", scores[row], weights[row].double())[:length]
    return logits


class Scene:
    """A batch whose K lies in shuffled pages of layer 1 of an interleaved pool of two."""

    def __init__(self, context_lens, generator, *, block_size=64, num_heads=H, scale_format=ScaleFormat.FP32):
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32)
        num_reqs, next_n = self.context_lens.shape
        longest = [max(lens) for lens in context_lens]
        pages = [-(-length // block_size) for length in longest]
        layout = IndexKCacheLayout(block_size)
        num_blocks = sum(pages) + 3
        pool = torch.full((num_blocks, 2, layout.page_bytes), POISON, dtype=torch.uint8)
        self.cache = pool[:, 1].unflatten(1, (block_size, 1, layout.token_bytes))
        order = torch.randperm(num_blocks - 1, generator=generator).int() + 1
        # Dead columns name no page at all: reading one would fail.
        self.block_table = torch.full((num_reqs, max(pages, default=0) + 2), 2**31 - 1, dtype=torch.int32)
        self.q_exact = torch.randn(num_reqs, next_n, num_heads, D, generator=generator)
        self.w_exact = torch.randn(num_reqs * next_n, num_heads, generator=generator)
        q, self.weights = ops.fold_q(self.q_exact.flatten(0, 1), self.w_exact, scale_format=scale_format)
        self.q = q.view(self.q_exact.shape)
        self.k_exact, self.k = [], []
        for request, length in enumerate(longest):
            mine, order = order[: pages[request]], order[pages[request] :]
            self.block_table[request, : pages[request]] = mine
            k = torch.randn(length, D, generator=generator)
            token = torch.arange(length)
            slots = mine[token // block_size].long() * block_size + token % block_size
            ops.store_index_k(k, self.cache, slots, scale_format=scale_format)
            self.k_exact.append(k)
            values, scale = reference.quantize_fp8(k, scale_format=scale_format, amax_floor=1e-4)
            self.k.append(dequantize_fp8(values, scale, torch.float64))

    def run(self, max_context_len, **kwargs):
        return ops.paged_mqa_logits(
            self.q,
            self.cache,
            self.weights,
            self.context_lens,
            self.block_table,
            max_context_len=max_context_len,
            **kwargs,
        )

    def expected(self, width, *, exact=False):
        rows = []
        next_n = self.context_lens.shape[1]
        for request, lengths in enumerate(self.context_lens.tolist()):
            of_request = slice(request * next_n, (request + 1) * next_n)
            if exact:
                scale = D**-0.5 * self.q.shape[2] ** -0.5
                q, k, w = self.q_exact[request], self.k_exact[request], self.w_exact[of_request] * scale
            else:
                q, k, w = self.q[request].double(), self.k[request], self.weights[of_request]
            rows.append(dense_logits(q, k, w, [min(length, width) for length in lengths], width))
        return torch.cat(rows)


SHAPES = {
    "one_token": [[1]],
    "page_edges": [[63], [64], [65], [128]],
    "next_n_2": [[100, 101], [64, 65]],
    "next_n_4": [[301, 302, 303, 304], [1, 2, 3, 4]],
    "with_zeros": [[0, 0], [77, 78], [0, 0]],
    "any_order_in_a_request": [[70, 3, 0], [5, 200, 199]],
    "two_chunks": [[4096, 4097, 4200]],
}


@pytest.mark.parametrize("context_lens", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_equals_the_dense_reference(context_lens, block_size, scale_format, generator):
    scene = Scene(context_lens, generator, block_size=block_size, scale_format=scale_format)
    width = max(map(max, context_lens)) + 7
    out = torch.full((scene.weights.shape[0], width), float("nan"))
    found = scene.run(width, out=out)
    assert found is out
    assert relative_error(found, scene.expected(width)) < 5e-6


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
@pytest.mark.parametrize("num_heads", [32, 64])
def test_is_close_to_the_logits_without_quantisation(scale_format, num_heads, generator):
    # Rounding q and k to 3 bits of mantissa gives 7e-4 for normal data; the mean needs thousands of logits.
    context_lens = [[2000, 2001, 2002], [1500, 1501, 1502]]
    scene = Scene(context_lens, generator, num_heads=num_heads, scale_format=scale_format)
    assert cosine_difference(scene.run(2002), scene.expected(2002, exact=True)) < 1e-3


@pytest.mark.parametrize("num_heads", [1, 32, 64])
def test_float64_is_exact_for_any_number_of_heads(num_heads, generator):
    scene = Scene([[129, 130]], generator, num_heads=num_heads)
    arguments = (scene.q, scene.cache, scene.weights, scene.context_lens, scene.block_table)
    found = reference.paged_mqa_logits(*arguments, max_context_len=130, compute_dtype=torch.float64)
    assert found.dtype == torch.float64
    assert relative_error(found, scene.expected(130)) < 1e-14


def test_negative_weights_give_negative_logits(generator):
    scene = Scene([[90]], generator)
    scene.weights = -scene.weights.abs()
    found = scene.run(90)
    assert (found < 0).any()
    assert relative_error(found, scene.expected(90)) < 5e-6


def test_rows_of_a_request_are_what_each_would_be_alone(generator):
    scene = Scene([[301, 302, 303], [10, 11, 12]], generator)
    together = scene.run(320).view(2, 3, 320)
    for row in range(3):
        alone = ops.paged_mqa_logits(
            scene.q[:, row : row + 1],
            scene.cache,
            scene.weights.view(2, 3, H)[:, row].contiguous(),
            scene.context_lens[:, row : row + 1].contiguous(),
            scene.block_table,
            max_context_len=320,
        )
        assert relative_error(alone, together[:, row]) < 1e-6


def test_a_row_longer_than_the_result_is_cut(generator):
    scene = Scene([[100, 200], [50, 51]], generator)
    assert relative_error(scene.run(120), scene.expected(120)) < 5e-6


def test_poison_past_the_length_in_the_last_page_never_shows(generator):
    scene = Scene([[65, 66]], generator)
    values, scales = IndexKCacheLayout().views(scene.cache)
    page = int(scene.block_table[0, 1])
    values[page, 2:] = float("nan")
    scales[page, 2:] = float("nan")
    found = scene.run(128)
    assert not found.isnan().any()
    assert relative_error(found, scene.expected(128)) < 5e-6


def test_two_runs_are_bitwise_equal_and_out_may_be_a_slice(generator):
    scene = Scene([[300, 301]], generator)
    buffer = torch.full((4, 512), float("nan"))
    scene.run(301, out=buffer[1:3, :301])
    assert torch.equal(buffer[1:3, :301], scene.run(301))
    assert buffer[[0, 3]].isnan().all()
    assert buffer[:, 301:].isnan().all()


def test_hadamard_on_both_sides_leaves_the_logits_close(generator):
    q = torch.randn(2, H, D, generator=generator)
    k = torch.randn(64, D, generator=generator)
    weights = torch.randn(2, H, generator=generator)
    logits = []
    for hadamard in (False, True):
        rope = {"cos_sin": make_cos_sin(64, 64), "style": RopeStyle.INTERLEAVED}
        cache = IndexKCacheLayout().allocate(1, "cpu", fill=POISON)
        position = torch.arange(64)
        ops.store_index_k(k, cache, position, positions=position, hadamard=hadamard, **rope)
        folded = ops.fold_q(
            q,
            weights,
            positions=torch.tensor([62, 63]),
            scale_format=ScaleFormat.UE8M0,
            hadamard=hadamard,
            **rope,
        )
        lens = torch.tensor([[63, 64]], dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        logits.append(ops.paged_mqa_logits(folded[0].unsqueeze(0), cache, folded[1], lens, table, max_context_len=64))
    assert cosine_difference(*logits) < 4e-3


@pytest.mark.parametrize(("num_reqs", "width"), [(0, 64), (2, 0)])
def test_empty(num_reqs, width):
    found = ops.paged_mqa_logits(
        torch.zeros(num_reqs, 2, H, D).to(torch.float8_e4m3fn),
        IndexKCacheLayout().allocate(1, "cpu"),
        torch.zeros(num_reqs * 2, H),
        torch.zeros(num_reqs, 2, dtype=torch.int32),
        torch.zeros(num_reqs, 1, dtype=torch.int32),
        max_context_len=width,
    )
    assert found.shape == (num_reqs * 2, width)
    assert found.dtype == torch.float32


def test_a_block_table_without_columns_serves_empty_requests(generator):
    scene = Scene([[0], [0]], generator)
    scene.block_table = scene.block_table[:, :0]
    assert (scene.run(16) == float("-inf")).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 2, H, D)}, TypeError, "q has dtype torch.float32; allowed: torch.float8_e4m3fn"),
        ({"cache": IndexKCacheLayout(head_dim=64).allocate(1, "cpu")}, ValueError, "head_dim of 64"),
        ({"weights": torch.zeros(2, H)}, ValueError, r"weights has shape \(2, 32\); allowed: \(4, 32\)"),
        ({"weights": torch.zeros(4, H).bfloat16()}, TypeError, "weights has dtype torch.bfloat16"),
        ({"context_lens": torch.zeros(2, dtype=torch.int32)}, ValueError, "context_lens has shape"),
        ({"context_lens": torch.zeros(2, 2)}, TypeError, "context_lens has dtype"),
        ({"block_table": torch.zeros(2, 8, dtype=torch.int64)}, TypeError, "block_table has dtype"),
        ({"block_table": torch.zeros(8, 2, dtype=torch.int32).T}, ValueError, "block_table has strides"),
        ({"max_context_len": -1}, ValueError, "max_context_len is -1; allowed: at least 0"),
        ({"max_context_len": True}, TypeError, "max_context_len is True"),
        ({"out": torch.zeros(4, 79)}, ValueError, r"out has shape \(4, 79\); allowed: \(4, 80\)"),
        ({"out": torch.zeros(4, 80).double()}, TypeError, "out has dtype torch.float64"),
        ({"out": torch.zeros(4, 80, device="meta")}, ValueError, "out is on meta; allowed: cpu"),
    ],
)
def test_refuses_and_leaves_out_alone(change, error, message, generator):
    scene = Scene([[70, 71], [5, 6]], generator)
    out = torch.full((4, 80), 7.0)
    good = {
        "q": scene.q,
        "cache": scene.cache,
        "weights": scene.weights,
        "context_lens": scene.context_lens,
        "block_table": scene.block_table,
        "max_context_len": 80,
        "out": out,
    }
    with pytest.raises(error, match=message):
        ops.paged_mqa_logits(**(good | change))
    assert (out == 7.0).all()


def test_validate_finds_lengths_and_pages_out_of_range(monkeypatch, generator):
    monkeypatch.setenv("VDSA_VALIDATE", "1")
    scene = Scene([[70, 71], [5, 6]], generator)
    out = torch.full((4, 80), 7.0)
    scene.run(80)
    with pytest.raises(ValueError, match=r"context_lens\[0, 1\] is 71; allowed: 0 to 70"):
        scene.run(70, out=out[:, :70])
    scene.block_table[1, 0] = scene.cache.shape[0]
    with pytest.raises(ValueError, match=rf"block_table\[1, 0\] is {scene.cache.shape[0]}"):
        scene.run(80, out=out)
    scene.block_table = scene.block_table[:, :1]
    with pytest.raises(ValueError, match=r"context_lens\[0, 0\] is 70; allowed: 0 to 64"):
        scene.run(80, out=out)
    scene.context_lens[0, 0] = -1
    with pytest.raises(ValueError, match=r"context_lens\[0, 0\] is -1"):
        scene.run(80, out=out)
    assert (out == 7.0).all()
