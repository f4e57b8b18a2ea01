"""The float64 twin of MLA decode against softmax written out, its laws, and what the operator takes and refuses."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mla_cases import NAN, SCALE, assert_close, make_dense, make_sparse, naive

from vllm_dsa import ops, reference
from vllm_dsa.attn_result import LseBase
from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.ops import MlaBackend
from vllm_dsa.reference import FP8_LATENT_BYTES, pack_fp8_latent, read_latent

INF = float("inf")


def twin(case, out_dtype=torch.float32):
    return reference.mla_decode(
        *case.inputs, softmax_scale=SCALE, query_start_loc=case.query_start_loc, out_dtype=out_dtype
    )


def sparse_twin(case, out_dtype=torch.float32):
    return reference.sparse_mla_decode(
        case.q, case.cache, case.slots, softmax_scale=SCALE, topk_lens=case.topk_lens, out_dtype=out_dtype
    )


def assert_same(found, expected):
    torch.testing.assert_close(found.out.double(), expected.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.lse.double(), expected.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_dense_is_softmax_over_each_rows_tokens(block_size, fp8, generator):
    lens = [1, 7, 0, 65, 64, 3, -2, 130, 129, 128]
    case = make_dense(generator, [1, 2, 0, 4, 3], lens, block_size=block_size, fp8=fp8, orphans=2, page_gap=32)
    assert_same(twin(case), naive(case.q, case.cache, case.slots()))


@pytest.mark.parametrize("fp8", [False, True])
def test_sparse_is_softmax_over_the_named_tokens(fp8, generator):
    case = make_sparse(generator, [0, 1, 5, 40, 37], width=40, fp8=fp8)
    assert_same(sparse_twin(case), naive(case.q, case.cache, case.named()))


def test_without_starts_every_request_has_as_many_rows(generator):
    case = make_dense(generator, [3, 3], [9, 10, 11, 4, 5, 6])
    found = reference.mla_decode(*case.inputs, softmax_scale=SCALE)
    assert torch.equal(found.out, twin(case, torch.bfloat16).out)
    assert torch.equal(found.lse, twin(case).lse)


def test_dense_is_sparse_over_all_of_its_tokens(generator):
    case = make_dense(generator, [1, 1], [33, 50], block_size=16)
    rows = case.slots()
    slots = torch.full((2, 50), -1, dtype=torch.int32)
    for row, mine in enumerate(rows):
        slots[row, : len(mine)] = mine.flip(0)
    found = reference.sparse_mla_decode(case.q, case.cache, slots, softmax_scale=SCALE, out_dtype=torch.float32)
    torch.testing.assert_close(found.out, twin(case).out)
    torch.testing.assert_close(found.lse, twin(case).lse)


def test_a_row_ignores_what_only_its_sibling_sees(generator):
    case = make_dense(generator, [2], [20, 21], block_size=1)
    expected = twin(case)
    case.cache[case.block_table[0, 20]] = NAN
    found = twin(case)
    assert torch.equal(found.out[0], expected.out[0])
    assert found.out[1].isnan().all()


def test_lengths_are_cut_at_the_block_table(generator):
    case = make_dense(generator, [1], [48], block_size=16)
    inputs = (case.q, case.cache, case.block_table[:, :3], torch.tensor([1000], dtype=torch.int32))
    found = reference.mla_decode(*inputs, softmax_scale=SCALE, out_dtype=torch.float32)
    assert torch.equal(found.out, twin(case).out)


def test_lse_of_equal_scores_counts_them():
    cache = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    q, table = torch.ones(1, 1, 576, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    found = reference.mla_decode(q, cache, table, torch.tensor([7], dtype=torch.int32), softmax_scale=1.0)
    assert found.base is LseBase.E
    assert found.lse.item() == pytest.approx(1.945910149, abs=1e-7)


def test_scores_far_apart_neither_overflow_nor_vanish(generator):
    case = make_dense(generator, [1], [100], q_scale=1000.0)
    found = twin(case)
    assert found.out.isfinite().all()
    best = torch.stack([read_latent(case.cache, case.slots()[0]) @ q.double() for q in case.q[0]]).amax(dim=1) * SCALE
    torch.testing.assert_close(found.lse[0].double(), best, rtol=1e-6, atol=1e-3)


def merged(parts):
    """Parts weighed by the exponentials of their lse, in float64."""
    lses = torch.stack([part.lse.double() for part in parts])
    outs = torch.stack([part.out.double() for part in parts])
    highest = lses.amax(dim=0).clamp(min=-1e300)
    weights = (lses - highest).exp()
    total = weights.sum(dim=0)
    out = (weights.unsqueeze(3) * outs).sum(dim=0) / total.clamp(min=1e-300).unsqueeze(2)
    return out, highest + total.log()


@given(
    depths=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    size=st.integers(1, 4),
    interleave=st.sampled_from([1, 2, 16]),
    data=st.data(),
)
def test_attention_over_shards_merges_to_attention_over_all(depths, size, interleave, data):
    lens = data.draw(st.lists(st.integers(0, 40), min_size=sum(depths), max_size=sum(depths)))
    if not lens:
        return
    case = make_dense(torch.Generator().manual_seed(data.draw(st.integers(0, 999))), depths, lens, block_size=16)
    whole, rows, parts = twin(case), case.slots(), []
    for rank in range(size):
        layout = DcpLayout(size, rank, interleave)
        slots = torch.full((len(lens), 41), -1, dtype=torch.int32)
        for row, mine in enumerate(rows):
            position = torch.arange(len(mine))
            own = mine[position // interleave % size == rank]
            assert len(own) == layout.local_lens(max(0, lens[row]))
            slots[row, : len(own)] = own
        parts.append(
            reference.sparse_mla_decode(case.q, case.cache, slots, softmax_scale=SCALE, out_dtype=torch.float32)
        )
    out, lse = merged(parts)
    torch.testing.assert_close(out, whole.out.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole.lse.double(), rtol=1e-5, atol=1e-5)


class TestFp8Latent:
    def test_a_row_is_values_then_scales_then_rope(self):
        latent = torch.zeros(1, 576)
        latent[0, :512] = torch.tensor([448.0, 224.0, 56.0, 896.0]).repeat_interleave(128)
        latent[0, 512:] = torch.arange(64)
        row = pack_fp8_latent(latent)
        assert row.shape == (1, FP8_LATENT_BYTES) == (1, 656)
        assert (row[0, :512].view(torch.float8_e4m3fn).float() == 448).all()
        assert row[0, 512:528].view(torch.float32).tolist() == [1.0, 0.5, 0.125, 2.0]
        assert row[0, 528:].view(torch.bfloat16).tolist() == list(range(64))

    def test_reading_gives_back_what_fp8_holds(self, generator):
        latent = torch.randn(3, 16, 576, generator=generator) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
        found = read_latent(pack_fp8_latent(latent), torch.arange(48)).view_as(latent)
        amax = latent[..., :512].reshape(3, 16, 4, 128).abs().amax(dim=3).repeat_interleave(128, dim=2)
        error = (found - latent)[..., :512].abs()
        assert (error <= latent[..., :512].abs() * 2.0**-4 + amax / 448 * 2.0**-10 * 1.001).all()
        assert torch.equal(found[..., 512:], latent[..., 512:].bfloat16().double())

    def test_zeros_stay_zeros(self):
        assert (read_latent(pack_fp8_latent(torch.zeros(1, 1, 576)), torch.tensor([0])) == 0).all()


class TestOperator:
    @pytest.fixture
    def case(self, generator):
        return make_dense(generator, [1, 3, 0], [5, 20, 21, 22], orphans=1)

    @pytest.fixture
    def call(self, case):
        return functools.partial(
            ops.mla_decode,
            *case.inputs,
            softmax_scale=SCALE,
            query_start_loc=case.query_start_loc,
            max_query_len=case.max_query_len,
        )

    def test_dense_on_the_cpu_is_the_twin(self, case, call):
        found = call()
        assert found.base is LseBase.E
        assert torch.equal(found.out, twin(case, torch.bfloat16).out)
        assert torch.equal(found.lse, twin(case).lse)
        assert_close(found, naive(case.q, case.cache, case.slots()))

    def test_sparse_on_the_cpu_is_the_twin(self, generator):
        case = make_sparse(generator, [0, 3, 17], width=20)
        found = ops.sparse_mla_decode(case.q, case.cache, case.slots, softmax_scale=SCALE, topk_lens=case.topk_lens)
        assert torch.equal(found.out, sparse_twin(case, torch.bfloat16).out)
        assert torch.equal(found.lse, sparse_twin(case).lse)

    def test_results_go_where_they_are_asked_to(self, call):
        out, lse = torch.full((5, 2, 512), NAN, dtype=torch.bfloat16), torch.full((5, 2), NAN)
        found = call(out=out, lse=lse)
        assert found.out is out
        assert found.lse is lse
        assert torch.equal(out, call().out)
        assert torch.equal(lse, call().lse)

    def test_topk_finds_slots_that_attention_takes(self, generator):
        case = make_dense(generator, [1, 1], [70, 90], block_size=16)
        logits = torch.randn(2, 90, generator=generator)
        slots = ops.topk_indices(logits, case.context_lens, 128, slots=ops.SlotMap(case.block_table, 16))
        found = ops.sparse_mla_decode(case.q, case.cache, slots, softmax_scale=SCALE, topk_lens=case.context_lens)
        assert_close(found, naive(case.q, case.cache, case.slots()))

    def test_warming_up_does_nothing_on_the_cpu(self, case):
        assert ops.warmup_mla_decode(case.cache, 4) is None
        assert ops.warmup_sparse_mla_decode(case.cache, 4) is None

    def test_no_rows(self):
        q, cache = torch.zeros(0, 4, 576, dtype=torch.bfloat16), torch.zeros(2, 16, 576, dtype=torch.bfloat16)
        ints = torch.zeros(0, dtype=torch.int32)
        found = ops.mla_decode(q, cache, ints.view(0, 3), ints, softmax_scale=1.0)
        assert found.out.shape == (0, 4, 512)
        assert ops.sparse_mla_decode(q, cache, ints.view(0, 8), softmax_scale=1.0).lse.shape == (0, 4)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"q": torch.zeros(5, 2, 576)}, TypeError, "q has dtype torch.float32"),
            ({"q": torch.zeros(5, 2, 512).bfloat16()}, ValueError, r"q has shape \(5, 2, 512\); allowed: .*576"),
            ({"q": torch.zeros(5, 0, 576).bfloat16()}, ValueError, "at least one head"),
            ({"cache": torch.zeros(4, 16, 656).bfloat16()}, ValueError, r"cache has shape \(4, 16, 656\).*576"),
            ({"cache": torch.zeros(4, 16, 576, dtype=torch.uint8)}, ValueError, r"allowed for torch.uint8.* 656\)"),
            ({"cache": torch.zeros(4, 32, 576).bfloat16()[:, ::2]}, ValueError, "cache has strides"),
            ({"block_table": torch.zeros(3, 4)}, TypeError, "block_table has dtype"),
            ({"context_lens": torch.zeros(4, dtype=torch.int32)}, ValueError, r"context_lens has shape \(4,\)"),
            ({"context_lens": torch.zeros(10, dtype=torch.int32)[::2]}, ValueError, "context_lens has strides"),
            ({"softmax_scale": 1}, TypeError, "softmax_scale is 1; allowed: a float"),
            ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, ValueError, r"query_start_loc has shape \(3,\)"),
            ({"max_query_len": None}, ValueError, "max_query_len is None with query_start_loc"),
            ({"max_query_len": 0}, ValueError, "max_query_len is 0; allowed: at least 1"),
            ({"query_start_loc": None}, ValueError, "max_query_len is 3 without query_start_loc"),
            ({"query_start_loc": None, "max_query_len": None}, ValueError, "q has 5 rows; allowed: multiples of 3"),
            ({"out": torch.zeros(5, 2, 512)}, TypeError, "out has dtype torch.float32"),
            ({"out": torch.zeros(2, 5, 512).bfloat16().transpose(0, 1)}, ValueError, "out has strides"),
            ({"lse": torch.zeros(5, 3)}, ValueError, r"lse has shape \(5, 3\)"),
            ({"workspace": torch.zeros(3)}, ValueError, "workspace has 3 elements; allowed: at least"),
            ({"backend": "triton"}, TypeError, "backend is 'triton'"),
            ({"backend": MlaBackend.TRITON}, NotImplementedError, "the triton backend of MLA decode needs CUDA"),
        ],
    )
    def test_refuses(self, case, change, error, message):
        names = ("q", "cache", "block_table", "context_lens")
        arguments = dict(zip(names, case.inputs, strict=True))
        arguments |= {"softmax_scale": SCALE, "query_start_loc": case.query_start_loc, "max_query_len": 3}
        out, lse = torch.full((5, 2, 512), NAN, dtype=torch.bfloat16), torch.full((5, 2), NAN)
        with pytest.raises(error, match=message):
            ops.mla_decode(**(arguments | {"out": out, "lse": lse} | change))
        assert out.isnan().all()
        assert lse.isnan().all()

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"slots": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "slots has dtype torch.int64"),
            ({"slots": torch.zeros(3, 4, dtype=torch.int32)}, ValueError, r"slots has shape \(3, 4\)"),
            ({"topk_lens": torch.zeros(1, dtype=torch.int32)}, ValueError, r"topk_lens has shape \(1,\)"),
            (
                {"backend": MlaBackend.FLASHINFER},
                NotImplementedError,
                "the flashinfer backend of MLA decode needs CUDA",
            ),
        ],
    )
    def test_sparse_refuses(self, change, error, message, generator):
        case = make_sparse(generator, [1, 2], width=4)
        arguments = {"q": case.q, "cache": case.cache, "slots": case.slots, "softmax_scale": SCALE}
        with pytest.raises(error, match=message):
            ops.sparse_mla_decode(**(arguments | change))

    @pytest.mark.parametrize(
        ("name", "index", "value", "message"),
        [
            ("context_lens", 3, 49, r"context_lens\[3\] is 49; allowed: up to 48"),
            ("block_table", (1, 1), 999, r"block_table\[1, 1\] is 999; allowed: 0 to "),
            ("query_start_loc", 1, 4, r"query_start_loc\[1\] is 4; allowed: ascending by up to 3"),
            ("query_start_loc", 0, -1, r"query_start_loc\[0\] is -1"),
        ],
    )
    def test_validate_finds_values(self, case, call, monkeypatch, name, index, value, message):
        call()
        monkeypatch.setenv("VDSA_VALIDATE", "1")
        call()
        getattr(case, name)[index] = value
        with pytest.raises(ValueError, match=message):
            call()

    def test_validate_finds_slots(self, monkeypatch, generator):
        case = make_sparse(generator, [1, 2], width=4, holes=False)
        monkeypatch.setenv("VDSA_VALIDATE", "1")
        with pytest.raises(ValueError, match=r"slots\[0, 1\] is 2147483647; allowed: below "):
            ops.sparse_mla_decode(case.q, case.cache, case.slots, softmax_scale=SCALE, topk_lens=case.topk_lens)
