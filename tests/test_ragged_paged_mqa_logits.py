import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_dsa import ops, reference
from vllm_dsa.ops import IndexKCacheLayout, LogitsBackend, ragged_paged_mqa_logits_backend

H, D = 16, 128
POISON = 0x7F
MINUS_INFINITY = float("-inf")


class Scene:
    """Requests of any depths whose K lies in shuffled pages; every other page is poisoned."""

    def __init__(self, lens_of_requests, generator, *, block_size=64, num_heads=H, head_dim=D):
        self.lens_of_requests = lens_of_requests
        depths = torch.tensor([len(lens) for lens in lens_of_requests], dtype=torch.int32)
        self.query_start_loc = torch.cat([depths.new_zeros(1), depths.cumsum(0, dtype=torch.int32)])
        self.context_lens = torch.tensor([n for lens in lens_of_requests for n in lens], dtype=torch.int32)
        pages = [-(-max([*lens, 0]) // block_size) for lens in lens_of_requests]
        layout = IndexKCacheLayout(block_size, head_dim)
        self.cache = layout.allocate(sum(pages) + 2, "cpu", fill=POISON)
        order = torch.randperm(sum(pages) + 1, generator=generator).int() + 1
        # Dead columns name no page at all: reading one would fail.
        self.block_table = torch.full((len(pages), max(pages, default=0) + 1), 2**31 - 1, dtype=torch.int32)
        self.k = []
        for request, count in enumerate(pages):
            mine, order = order[:count], order[count:]
            self.block_table[request, :count] = mine
            length = max([*lens_of_requests[request], 0])
            token = torch.arange(length)
            slots = mine[token // block_size].long() * block_size + token % block_size
            k = torch.randn(length, head_dim, generator=generator)
            ops.store_index_k(k, self.cache, slots)
            values, scale = reference.quantize_fp8(k, scale_format=ops.ScaleFormat.FP32, amax_floor=1e-4)
            self.k.append(reference.dequantize_fp8(values, scale, torch.float64))
        tokens = len(self.context_lens)
        self.q = torch.randn(tokens, num_heads, head_dim, generator=generator).to(torch.float8_e4m3fn)
        self.weights = torch.randn(tokens, num_heads, generator=generator)

    def arguments(self):
        return (self.q, self.cache, self.weights, self.context_lens, self.query_start_loc, self.block_table)

    def run(self, width, **kwargs):
        return ops.ragged_paged_mqa_logits(*self.arguments(), max_context_len=width, **kwargs)

    def expected(self, width):
        """Float64 logits by the definition, without pages."""
        logits = torch.full((len(self.context_lens), width), MINUS_INFINITY, dtype=torch.float64)
        rows = ((request, length) for request, lens in enumerate(self.lens_of_requests) for length in lens)
        for row, (request, length) in enumerate(rows):
            visible = min(max(length, 0), width)
            scores = (self.q[row].double() @ self.k[request][:visible].T).relu()
            logits[row, :visible] = self.weights[row].double() @ scores
        return logits


def assert_close(found, expected):
    visible = expected != MINUS_INFINITY
    assert torch.equal(found != MINUS_INFINITY, visible)
    error = (found[visible].double() - expected[visible]).norm()
    assert error <= 5e-6 * expected[visible].norm().clamp(min=1e-30)


MIXES = {
    "one row": [[1]],
    "page edges": [[63], [64, 65], [128]],
    "depths 1 to 9": [[100 + i for i in range(depth)] for depth in range(1, 10)],
    "requests without rows": [[], [5], [], [], [70, 71], []],
    "lengths 0": [[0, 0], [77, 78], [0]],
    "any order in a request": [[70, 3, 0], [5, 200, 199]],
    "two chunks": [[4096, 4097, 4200], [1]],
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("block_size", [32, 64])
def test_equals_the_definition_and_overwrites_out(mix, block_size, generator):
    scene = Scene(mix, generator, block_size=block_size)
    width = max(n for lens in mix for n in lens) + 70
    out = torch.full((len(scene.context_lens), width), float("nan"))
    assert scene.run(width, out=out) is out
    assert_close(out, scene.expected(width))


@given(
    st.lists(st.lists(st.integers(-3, 150), max_size=10), max_size=5),
    st.integers(0, 180),
    st.integers(0, 2**31),
    st.data(),
)
def test_any_ragged_step_equals_the_definition(mix, width, seed, data):
    scene = Scene(mix, torch.Generator().manual_seed(seed), num_heads=2, head_dim=8, block_size=32)
    fill_to = data.draw(st.integers(0, width))
    assert_close(scene.run(width, fill_to=fill_to), scene.expected(width))


@given(st.integers(1, 9), st.lists(st.integers(0, 120), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_uniform_step_is_bit_equal_to_the_uniform_twin(depth, lengths, seed):
    mix = [[max(length - depth + j + 1, 0) for j in range(depth)] for length in lengths]
    scene = Scene(mix, torch.Generator().manual_seed(seed), num_heads=2, head_dim=8)
    uniform = reference.paged_mqa_logits(
        scene.q.unflatten(0, (-1, depth)),
        scene.cache,
        scene.weights,
        scene.context_lens.view(-1, depth),
        scene.block_table,
        max_context_len=128,
    )
    assert torch.equal(scene.run(128), uniform)


def test_the_twin_in_float64(generator):
    scene = Scene(MIXES["depths 1 to 9"], generator)
    found = reference.ragged_paged_mqa_logits(*scene.arguments(), max_context_len=128, compute_dtype=torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, scene.expected(128), rtol=1e-12, atol=1e-12)


def test_a_row_longer_than_the_result_is_cut(generator):
    scene = Scene([[100, 200], [50]], generator)
    assert_close(scene.run(120), scene.expected(120))


def test_rows_of_no_request_see_nothing(generator):
    scene = Scene([[10, 11], [12]], generator)
    scene.query_start_loc[2] = 2
    found = scene.run(64)
    assert (found[2] == MINUS_INFINITY).all()


def test_bfloat16_is_the_float32_result_rounded(generator):
    scene = Scene(MIXES["any order in a request"], generator)
    rounded = scene.run(256).bfloat16()
    assert torch.equal(scene.run(256, out_dtype=torch.bfloat16), rounded)
    out = torch.zeros(len(rounded), 300, dtype=torch.bfloat16)
    scene.run(256, out=out[:, :256])
    assert torch.equal(out[:, :256], rounded)
    assert not out[:, 256:].any()


@pytest.mark.parametrize(("mix", "width"), [([], 64), ([[], []], 64), ([[5], [6, 7]], 0)])
def test_empty(mix, width, generator):
    found = Scene(mix, generator).run(width)
    assert found.shape == (sum(map(len, mix)), width)
    assert found.dtype == torch.float32


def test_who_computes():
    assert ragged_paged_mqa_logits_backend(torch.device("cpu")) is LogitsBackend.REFERENCE


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, H, D)}, TypeError, "q has dtype torch.float32; allowed: torch.float8_e4m3fn"),
        ({"q": torch.zeros(3, D, H).to(torch.float8_e4m3fn)}, ValueError, "cache has a head_dim of 128; allowed: 16"),
        ({"q": torch.zeros(6, H, D).to(torch.float8_e4m3fn)[::2]}, ValueError, "q has strides"),
        ({"cache": IndexKCacheLayout(head_dim=64).allocate(1, "cpu")}, ValueError, "head_dim of 64"),
        ({"weights": torch.zeros(2, H)}, ValueError, r"weights has shape \(2, 16\); allowed: \(3, 16\)"),
        ({"weights": torch.zeros(3, H).bfloat16()}, TypeError, "weights has dtype torch.bfloat16"),
        ({"weights": torch.zeros(3, 2 * H)[:, :H]}, ValueError, "weights has strides"),
        ({"context_lens": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "context_lens has shape"),
        ({"context_lens": torch.zeros(3)}, TypeError, "context_lens has dtype"),
        ({"query_start_loc": torch.zeros(0, dtype=torch.int32)}, ValueError, r"shape \(0,\); allowed: \(requests"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int64)}, TypeError, "query_start_loc has dtype"),
        ({"query_start_loc": torch.zeros(4, dtype=torch.int32)}, ValueError, r"allowed: \(3, any\)"),
        ({"block_table": torch.zeros(2, 8, dtype=torch.int64)}, TypeError, "block_table has dtype"),
        ({"block_table": torch.zeros(8, 2, dtype=torch.int32).T}, ValueError, "block_table has strides"),
        ({"max_context_len": -1}, ValueError, "max_context_len is -1; allowed: at least 0"),
        ({"fill_to": 81}, ValueError, "fill_to is 81; allowed: 0 to 80"),
        ({"fill_to": 1.0}, TypeError, "fill_to is 1.0"),
        ({"out": torch.zeros(3, 79)}, ValueError, r"out has shape \(3, 79\); allowed: \(3, 80\)"),
        ({"out": torch.zeros(3, 80).double()}, TypeError, "out has dtype torch.float64"),
        ({"out": torch.zeros(3, 80, device="meta")}, ValueError, "out is on meta; allowed: cpu"),
        ({"out_dtype": torch.float16}, TypeError, "out_dtype is torch.float16; allowed: torch.float32, torch.bfloat16"),
    ],
)
def test_refuses_and_leaves_out_alone(change, error, message, generator):
    scene = Scene([[70, 71], [5]], generator)
    out = torch.full((3, 80), 7.0)
    names = ("q", "cache", "weights", "context_lens", "query_start_loc", "block_table")
    good = dict(zip(names, scene.arguments(), strict=True)) | {"max_context_len": 80, "out": out}
    with pytest.raises(error, match=message):
        ops.ragged_paged_mqa_logits(**(good | change))
    assert (out == 7.0).all()


class TestKernelLimits:
    """What only the kernel's path refuses, seen without a GPU: no launch is reached."""

    @pytest.fixture(autouse=True)
    def pretend_hopper(self, mocker):
        module = "vllm_dsa.ops.ragged_paged_mqa_logits"
        mocker.patch(f"{module}.ragged_paged_mqa_logits_backend", return_value=LogitsBackend.SM90)
        self.launch = mocker.patch(f"{module}.launch_sm90_paged_mqa_logits")

    def test_a_good_call_is_handed_on(self, generator):
        scene = Scene([[70, 71], [5]], generator)
        out = scene.run(80, fill_to=7, early_kv=True, out_dtype=torch.bfloat16)
        assert (out.shape, out.dtype) == ((3, 80), torch.bfloat16)
        (call,) = self.launch.call_args_list
        assert all(have is want for have, want in zip(call.args, (*scene.arguments(), out), strict=True))
        assert call.kwargs == {"fill_to": 7, "early_kv": True}

    @pytest.mark.parametrize(("mix", "width"), [([], 64), ([[], []], 64), ([[5]], 0)])
    def test_nothing_to_do_is_no_launch(self, mix, width, generator):
        Scene(mix, generator).run(width)
        self.launch.assert_not_called()

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ({"num_heads": 8}, r"q has shape \(1, 8, 128\); allowed: \(1, one of \(64, 32, 16\), 128\)"),
            ({"head_dim": 64}, r"q has shape \(1, 16, 64\)"),
        ],
    )
    def test_shapes(self, shape, message, generator):
        with pytest.raises(ValueError, match=message):
            Scene([[5]], generator, **shape).run(64)

    @pytest.mark.parametrize("name", ["q", "cache", "weights"])
    def test_alignment(self, name, generator):
        scene = Scene([[5]], generator)
        tensor = getattr(scene, name)
        shifted = torch.empty(tensor.nbytes + 16, dtype=torch.uint8)[4 : 4 + tensor.nbytes]
        setattr(scene, name, shifted.view(tensor.dtype).view(tensor.shape).copy_(tensor))
        with pytest.raises(ValueError, match=rf"{name} starts at 0x.*; allowed: multiples of 16 bytes"):
            scene.run(64)

    def test_page_stride(self, generator):
        scene = Scene([[5]], generator)
        layout = IndexKCacheLayout()
        pool = torch.zeros(len(scene.cache), layout.page_bytes + 4, dtype=torch.uint8)
        scene.cache = pool[:, : layout.page_bytes].unflatten(1, (64, 1, layout.token_bytes))
        with pytest.raises(ValueError, match="cache has pages 8452 bytes apart; allowed: multiples of 16"):
            scene.run(64)

    def test_too_many_logits(self, generator):
        with pytest.raises(ValueError, match=r"q has 2 rows and max_context_len is 2147483649; .* 4294967296"):
            Scene([[5, 6]], generator).run(2**31 + 1)
        self.launch.assert_not_called()


class TestValidate:
    @pytest.fixture(autouse=True)
    def validate(self, monkeypatch, generator):
        monkeypatch.setenv("VDSA_VALIDATE", "1")
        self.scene = Scene([[70, 71], [], [5]], generator)
        self.out = torch.full((3, 80), 7.0)

    def refuses(self, message, width=80):
        with pytest.raises(ValueError, match=message):
            self.scene.run(width, out=self.out[:, :width])
        assert (self.out == 7.0).all()

    def test_good(self):
        assert_close(self.scene.run(80), self.scene.expected(80))

    @pytest.mark.parametrize(
        ("starts", "message"),
        [
            ([1, 2, 2, 3], r"query_start_loc\[0\] is 1; allowed: ascending from 0 to 3"),
            ([0, 2, 1, 3], r"query_start_loc\[2\] is 1"),
            ([0, 2, 2, 2], r"query_start_loc\[3\] is 2"),
            ([0, 2, 4, 3], r"query_start_loc\[2\] is 4"),
            ([0, -1, 2, 3], r"query_start_loc\[1\] is -1"),
        ],
    )
    def test_starts(self, starts, message):
        self.scene.query_start_loc.copy_(torch.tensor(starts))
        self.refuses(message)

    def test_lengths(self):
        self.refuses(r"context_lens\[1\] is 71; allowed: 0 to 70", width=70)
        self.scene.context_lens[2] = -1
        self.refuses(r"context_lens\[2\] is -1")

    def test_a_table_too_narrow(self):
        self.scene.block_table = self.scene.block_table[:, :1]
        self.refuses(r"context_lens\[0\] is 70; allowed: 0 to 64")

    def test_pages(self):
        pages = self.scene.cache.shape[0]
        self.scene.block_table[2, 0] = pages
        self.refuses(rf"block_table\[2, 0\] is {pages}; allowed: 0 to {pages - 1}")
