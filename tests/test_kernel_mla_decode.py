"""The Triton MLA decode against softmax written out: interpreted without a GPU, compiled on one."""

import dataclasses
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mla_cases import NAN, SCALE, assert_close, make_dense, make_sparse, naive

from vllm_dsa import ops
from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.kernels import mla_combine
from vllm_dsa.kernels.mla_combine import launch_mla_combine
from vllm_dsa.kernels.mla_decode import launch_mla_decode, launch_sparse_mla_decode
from vllm_dsa.kernels.mla_tiles import choose_splits, choose_tile, num_places, workspace_floats
from vllm_dsa.ops import MlaBackend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
# On a GPU the kernel rounds dequantised latents to bfloat16, the twin does not.
FP8_LSE_ERROR = {"cpu": 1e-4, "cuda": 1e-2}


@pytest.fixture
def generator(seed, request):
    return torch.Generator(request.getfixturevalue("device")).manual_seed(seed)


def results(q, num_splits):
    """Poisoned results and workspace."""
    num_rows = q.shape[0] * q.shape[1]
    out = torch.full((*q.shape[:2], 512), NAN, dtype=torch.bfloat16, device=q.device)
    lse = torch.full(q.shape[:2], NAN, device=q.device)
    return out, lse, torch.full((num_rows * num_splits * 513,), NAN, device=q.device)


def run_dense(case, num_splits, *, uniform=False):
    out, lse, workspace = results(case.q, num_splits)
    launch_mla_decode(
        *(*case.inputs, out, lse, workspace),
        softmax_scale=SCALE,
        max_query_len=case.max_query_len,
        query_start_loc=None if uniform else case.query_start_loc,
        num_splits=num_splits,
    )
    return DecodeAttnResult(out, lse, LseBase.E)


def run_sparse(case, num_splits, *, topk_lens=True):
    out, lse, workspace = results(case.q, num_splits)
    launch_sparse_mla_decode(
        *(case.q, case.cache, case.slots, out, lse, workspace),
        softmax_scale=SCALE,
        topk_lens=case.topk_lens if topk_lens else None,
        num_splits=num_splits,
    )
    return DecodeAttnResult(out, lse, LseBase.E)


def check_dense(case, splits=(1, 2), **options):
    expected = naive(case.q, case.cache, case.slots())
    error = FP8_LSE_ERROR[case.q.device.type] if case.cache.dtype == torch.uint8 else 1e-4
    for num_splits in splits:
        assert_close(run_dense(case, num_splits, **options), expected, lse_error=error)


@devices
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_ragged_depths(device, block_size, fp8, generator):
    lens = [1, 70, 71, 0, 33, 32, 31, 100]
    check_dense(
        make_dense(generator, [1, 2, 0, 4, 1], lens, heads=1, block_size=block_size, fp8=fp8, orphans=2, page_gap=64)
    )


@devices
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_every_request_has_as_many_rows(device, next_n, generator):
    lens = [*range(40, 40 + next_n), *range(3, 3 + next_n)]
    case = make_dense(generator, [next_n] * 2, lens, heads=2)
    check_dense(case, uniform=True)
    check_dense(case, splits=(1,))


@devices
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 65, 127])
def test_lengths_about_a_tile(device, length, generator):
    check_dense(make_dense(generator, [1], [length], heads=1), splits=(1, 2, 3))


@devices
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 16, 17, 33])
def test_any_number_of_splits_gives_the_same(device, num_splits, generator):
    check_dense(make_dense(generator, [1, 1], [150, 20], heads=1), splits=(num_splits,))


@devices
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 17, 32, 33, 64, 65, 80])
def test_heads_fill_every_tile(device, heads, fp8, generator):
    check_dense(make_dense(generator, [1], [70], heads=heads, block_size=64, fp8=fp8), splits=(1,))


@devices
def test_rows_of_a_request_cross_a_tiles_end(device, generator):
    check_dense(make_dense(generator, [3, 1], [66, 67, 68, 5], heads=24), splits=(1,))


@devices
def test_lengths_may_fall_within_a_request(device, generator):
    check_dense(make_dense(generator, [4], [50, 3, 0, 64], heads=2))


@devices
def test_a_row_that_sees_a_nan_shows_it(device, generator):
    case = make_dense(generator, [1, 1], [40, 50], heads=1)
    page = int(case.block_table[0, 1])
    case.cache[page, 3] = NAN
    for num_splits in (1, 2):
        found = run_dense(case, num_splits)
        assert found.out[0].isnan().all()
        assert found.out[1].isfinite().all()


@devices
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_sparse(device, fp8, num_splits, generator):
    case = make_sparse(generator, [0, 1, 33, 70, 67], width=70, heads=2, fp8=fp8)
    expected = naive(case.q, case.cache, case.named())
    error = FP8_LSE_ERROR[device] if fp8 else 1e-4
    assert_close(run_sparse(case, num_splits), expected, lse_error=error)
    case.slots[case.slots == case.slots.max()] = -1
    assert_close(run_sparse(case, num_splits, topk_lens=False), expected, lse_error=error)


@devices
def test_sparse_heads_of_several_tiles(device, generator):
    case = make_sparse(generator, [70, 3], width=80, heads=80)
    assert_close(run_sparse(case, 1), naive(case.q, case.cache, case.named()))


@devices
def test_sparse_lens_below_zero_and_past_the_columns(device, generator):
    case = make_sparse(generator, [20, 20], width=20, heads=1, holes=False)
    case = dataclasses.replace(case, topk_lens=torch.tensor([-5, 10**9], dtype=torch.int32, device=device))
    for num_splits in (1, 2):
        found = run_sparse(case, num_splits)
        assert (found.out[0] == 0).all()
        assert (found.lse[0] == -float("inf")).all()
        assert found.out[1].abs().sum() > 0


@devices
def test_queries_may_be_a_slice_of_wider_ones(device, generator):
    case = make_dense(generator, [1, 1], [40, 50], heads=2)
    wide = torch.full((2, 4, 640), NAN, dtype=torch.bfloat16, device=device)
    wide[:, :2, :576] = case.q
    check_dense(dataclasses.replace(case, q=wide[:, :2, :576]))


@pytest.fixture
def kernel_everywhere(monkeypatch):
    """Lets the operators take our kernel on CPU tensors, where it is interpreted."""
    monkeypatch.setattr(sys.modules["vllm_dsa.ops.mla_decode"], "resolve_mla_backend", lambda *_: MlaBackend.TRITON)
    monkeypatch.setattr(sys.modules["vllm_dsa.ops.mla_decode"], "check_current_device", lambda _: None)


@devices
def test_operators_run_the_kernel_in_what_they_are_given(device, kernel_everywhere, generator):
    case = make_dense(generator, [2, 1], [150, 151, 20], heads=2, orphans=1)
    out, lse, _ = results(case.q, 1)
    workspace = ops.mla_decode_workspace(torch.device(device)).fill_(NAN)
    arguments = {"softmax_scale": SCALE, "query_start_loc": case.query_start_loc, "max_query_len": 2}
    found = ops.mla_decode(*case.inputs, **arguments, out=out, lse=lse, workspace=workspace)
    assert found.out is out
    assert found.lse is lse
    assert found.base is LseBase.E
    expected = naive(case.q, case.cache, case.slots())
    assert_close(found, expected)
    assert_close(ops.mla_decode(*case.inputs, **arguments), expected)
    case = make_sparse(generator, [0, 70], width=80)
    found = ops.sparse_mla_decode(case.q, case.cache, case.slots, softmax_scale=SCALE, topk_lens=case.topk_lens)
    assert_close(found, naive(case.q, case.cache, case.named()))


@devices
def test_warmups_run_every_variant(device, kernel_everywhere, monkeypatch, generator):
    monkeypatch.setattr(mla_combine, "_FEW_ROWS", 4)
    cache = make_dense(generator, [1], [3], fp8=True).cache
    before = cache.clone()
    ops.warmup_mla_decode(cache, 3)
    ops.warmup_mla_decode(cache, 2, max_query_len=2, is_ragged=True)
    for has_topk_lens in (False, True):
        ops.warmup_sparse_mla_decode(cache, 3, has_topk_lens=has_topk_lens)
    assert torch.equal(cache, before)


@devices
def test_combining_reads_no_output_of_an_empty_part(device, generator):
    out = torch.randn(3, 4, 512, generator=generator, device=device)
    lse = torch.randn(3, 4, generator=generator, device=device)
    lse[0], lse[1, 1:] = -float("inf"), -float("inf")
    out[lse == -float("inf")] = NAN
    found = torch.full((3, 512), NAN, dtype=torch.bfloat16, device=device), torch.full((3,), NAN, device=device)
    launch_mla_combine(out.flatten(), lse.flatten(), *found, 4)
    weights = lse[2].double().exp2()
    want = (weights[:, None] * out[2].double()).sum(dim=0) / weights.sum()
    torch.testing.assert_close(found[0][2].double(), want, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(found[0][1].float(), out[1, 0], rtol=2.0**-7, atol=1e-6)
    assert found[1][2].item() == pytest.approx(weights.sum().log().item(), abs=1e-6)
    assert (found[0][0] == 0).all()
    assert found[1][0] == -float("inf")


@given(num_blocks=st.integers(0, 3000), num_tiles=st.integers(0, 5000), places=st.sampled_from([1, 78, 132, 264]))
def test_splits_make_the_shortest_waves(num_blocks, num_tiles, places):
    splits = choose_splits(num_blocks, num_tiles, places)
    assert 1 <= splits <= max(1, min(64, num_tiles))
    assert splits == 1 or num_blocks * splits <= 4 * places

    def cost(count):
        return -(-num_blocks * count // places) * (-(-num_tiles // count) + 4)

    others = [count for count in range(1, min(64, num_tiles) + 1) if num_blocks * count <= 4 * places]
    assert cost(splits) == min(map(cost, [1, *others]))


def test_a_few_requests_fill_the_gpu_and_many_are_not_split():
    assert choose_splits(8, 2048, 132) == 16
    assert choose_splits(1, 2048, 132) == 64
    assert choose_splits(128, 2048, 132) == 1
    assert choose_splits(1000, 2048, 132) == 1


@given(
    num_tokens=st.integers(1, 600),
    heads=st.integers(1, 140),
    depth=st.integers(1, 8),
    capacity=st.integers(1, 200_000),
    is_sparse=st.booleans(),
    is_fp8=st.booleans(),
)
def test_one_workspace_holds_the_parts_of_any_shape(num_tokens, heads, depth, capacity, is_sparse, is_fp8):
    device = torch.device("cpu")
    tile = choose_tile(heads * (1 if is_sparse else depth), is_sparse=is_sparse, is_fp8=is_fp8)
    num_blocks = -(-num_tokens * heads // tile.rows)
    splits = choose_splits(num_blocks, -(-capacity // tile.tokens), num_places(tile, device))
    assert splits == 1 or num_tokens * heads * splits * 513 <= workspace_floats(device)
