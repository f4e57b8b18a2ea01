"""The merge's kernels and twins against attention over all tokens at once, shards simulated in one process."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.context_parallel.merge_buffers import MergeBuffers, MergeMethod
from vllm_dsa.kernels.merge_lse import launch_combine_shards, launch_pack_shard, launch_scale_shard
from vllm_dsa.reference.merge_lse import merge_lse_reference, scale_shard

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = range(1, 10)
INF, NAN = math.inf, math.nan
# Twice half a unit in the last place: Triton's interpreter truncates where hardware rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def attention(scores, values):
    """(lse, out) of rows of scores (T, H, N) over values (N, V), in float64; (-inf, 0) without tokens."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -INF, 0).unsqueeze(-1)).exp()
    return lse, weights @ values


def in_base(lse, base):
    return (lse if base is LseBase.E else lse / math.log(2)).float()


def random_shards(size, tokens, heads, v_dim, dtype, generator, device="cpu"):
    """Outputs and natural LSE of unequal weight; each row is empty in some shards, the first in all, NaN there."""
    lses = torch.randn(size, tokens, heads, generator=generator) * 4
    outs = torch.randn(size, tokens, heads, v_dim, generator=generator).to(dtype)
    draw = torch.rand(size, tokens, heads, generator=generator)
    lses[draw < 0.2], lses[draw < 0.1] = -INF, INF
    lses[:, :1] = -INF
    outs[lses.isinf()] = NAN
    return outs.to(device), lses.to(device)


def natural_shards(outs, lses):
    return [DecodeAttnResult(out, lse, LseBase.E) for out, lse in zip(outs, lses, strict=True)]


def poisoned(*shape, dtype=torch.float32, device="cpu"):
    return torch.full(shape, NAN, dtype=dtype, device=device)


def assert_close(found, want, dtype=torch.float32):
    torch.testing.assert_close(found.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4)


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 4), min_size=1, max_size=24),
    st.sampled_from(list(LseBase)),
    st.integers(0, 2**31),
)
def test_shards_merge_to_attention_over_all_tokens(size, owners, base, seed):
    """The law itself: however the tokens are dealt out, also with ranks that get none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, len(owners), generator=generator, dtype=torch.float64) * 5
    values = torch.randn(len(owners), 4, generator=generator, dtype=torch.float64)
    owner = torch.tensor(owners) % size
    shards = [attention(scores[..., owner == rank], values[owner == rank]) for rank in range(size)]
    out, lse = merge_lse_reference([DecodeAttnResult(out.float(), in_base(lse, base), base) for lse, out in shards])
    want_lse, want_out = attention(scores, values)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "lses"), [(LseBase.E, [math.log(2), math.log(8)]), (LseBase.TWO, [math.log2(2), math.log2(8)])]
)
def test_partition_sums_of_two_and_eight(base, lses):
    """The right weight of the second shard is 0.8; its natural LSE read to base 2 would give 0.723."""
    shards = [
        DecodeAttnResult(torch.full((1, 1, 1), x), torch.full((1, 1), s), base)
        for x, s in zip((0.0, 10.0), lses, strict=True)
    ]
    out, lse = merge_lse_reference(shards)
    assert out.item() == pytest.approx(8.0, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(10), rel=1e-6)


def test_shards_of_different_bases_merge(generator):
    outs, lses = random_shards(3, 4, 2, 8, torch.float32, generator)
    bases = [LseBase.E, LseBase.TWO, LseBase.E]
    natural, _ = merge_lse_reference(natural_shards(outs, lses))
    mixed, _ = merge_lse_reference(
        [DecodeAttnResult(o, in_base(s, b), b) for o, s, b in zip(outs, lses, bases, strict=True)]
    )
    torch.testing.assert_close(mixed, natural, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_empty_everywhere_is_finite_zeros():
    shards = [DecodeAttnResult(poisoned(1, 2, 4), torch.full((1, 2), empty), LseBase.E) for empty in (INF, -INF)]
    out, lse = merge_lse_reference(shards)
    assert (out == 0).all()
    assert (lse == -INF).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_scaled_shards_of_any_number_sum_to_the_merge(device, size, generator):
    tokens, heads, v_dim = 2, size if size > 3 else 5 * size, 24
    share = heads // size
    outs, lses = random_shards(size, tokens, heads, v_dim, torch.float32, generator, device)
    want, want_lse = merge_lse_reference(natural_shards(outs, lses))
    total = torch.zeros(size, tokens, share, v_dim, device=device)
    for rank in range(size):
        scaled, lse = poisoned(*total.shape, device=device), poisoned(tokens, share, device=device)
        launch_scale_shard(outs[rank], lses, rank, scaled, lse, part=rank)
        assert_close(lse, want_lse[:, share * rank : share * (rank + 1)])
        total += scaled
    assert_close(total.transpose(0, 1).reshape(want.shape), want)
    assert (total[:, 0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_shards_combines_as_its_twin(device, size, generator):
    outs, lses = random_shards(size, 4, 7, 20, torch.float32, generator, device)
    out, lse = poisoned(4, 7, 20, device=device), poisoned(4, 7, device=device)
    launch_combine_shards(outs, lses, out, lse)
    want, want_lse = merge_lse_reference(natural_shards(outs, lses))
    assert_close(out, want)
    assert_close(lse, want_lse)
    assert (out[0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "v_dim"), [(1, 1), (3, 512), (13, 48), (16, 513), (21, 16)])
def test_any_heads_v_dim_and_dtype(device, dtype, heads, v_dim, generator):
    outs, lses = random_shards(3, 2, heads, v_dim, dtype, generator, device)
    want, want_lse = merge_lse_reference(natural_shards(outs, lses))
    out, lse = poisoned(2, heads, v_dim, dtype=dtype, device=device), poisoned(2, heads, device=device)
    launch_combine_shards(outs, lses, out, lse)
    assert_close(out, want, dtype)
    assert_close(lse, want_lse)
    scaled, lse = poisoned(1, 2, heads, v_dim, dtype=dtype, device=device), poisoned(2, heads, device=device)
    launch_scale_shard(outs[1], lses, 1, scaled, lse, part=0)
    assert_close(scaled[0], scale_shard(outs[1], lses, 1)[0], dtype)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_outputs_and_head_major_lse_are_read_as_they_are(device, generator):
    """FlashMLA pads heads and puts its LSE as (heads, tokens)."""
    outs, lses = random_shards(2, 4, 6, 16, torch.bfloat16, generator, device)
    wide = poisoned(4, 9, 20, dtype=torch.bfloat16, device=device)
    wide[:, 2:8, :16] = outs[1]
    head_major = lses[1].t().contiguous().t()
    scaled, lse = poisoned(2, 4, 3, 16, dtype=torch.bfloat16, device=device), poisoned(4, 3, device=device)
    launch_scale_shard(wide[:, 2:8, :16], lses, 1, scaled, lse, part=0)
    want = scale_shard(outs[1], lses, 1)[0]
    assert_close(scaled.transpose(0, 1).reshape(4, 6, 16), want, torch.bfloat16)

    buffers = make_buffers(MergeMethod.ALL_TO_ALL, 2, dtype=torch.bfloat16, device=device)
    sent, _ = buffers.messages(4)
    sent.data.fill_(0x7F)
    launch_pack_shard(wide[:, 2:8, :16], head_major, sent.outs, sent.lses, to_natural=math.log(2))
    for rank in range(2):
        heads = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(sent.outs[rank].nan_to_num(7), outs[1][:, heads].nan_to_num(7))
        torch.testing.assert_close(sent.lses[rank], lses[1][:, heads] * math.log(2), rtol=1e-6, atol=0)


def make_buffers(method, size, *, max_tokens=4, num_heads=6, v_dim=16, dtype=torch.float32, device="cpu"):
    return MergeBuffers.allocate(
        method, size, max_tokens=max_tokens, num_heads=num_heads, v_dim=v_dim, dtype=dtype, device=device
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lse", [NAN, 3.0])
def test_a_fault_is_not_hidden(device, lse):
    """NaN of a shard that has tokens reaches the result of its own row, and of no other."""
    lses = torch.tensor([[[lse], [3.0]], [[1.0], [1.0]]], device=device)
    outs = torch.ones(2, 2, 1, 4, device=device)
    outs[0, 0] = NAN
    out, merged = poisoned(2, 1, 4, device=device), poisoned(2, 1, device=device)
    launch_combine_shards(outs, lses, out, merged)
    assert out[0].isnan().all()
    assert_close(out[1], torch.ones(1, 4, dtype=torch.float64, device=device))
    assert merged.isnan().tolist() == [[math.isnan(lse)], [False]]
    scaled, merged = poisoned(1, 2, 1, 4, device=device), poisoned(2, 1, device=device)
    launch_scale_shard(outs[0], lses, 0, scaled, merged, part=0)
    assert scaled[0, 0].isnan().all()
    assert not scaled[0, 1].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_shard_keeps_its_bits(device, generator):
    outs, lses = random_shards(1, 3, 4, 16, torch.bfloat16, generator, device)
    out, lse = poisoned(3, 4, 16, dtype=torch.bfloat16, device=device), poisoned(3, 4, device=device)
    launch_combine_shards(outs, lses, out, lse)
    is_empty = lses[0].isinf()
    assert torch.equal(out, outs[0].masked_fill(is_empty.unsqueeze(-1), 0))
    assert torch.equal(lse, lses[0].masked_fill(is_empty, -INF))


@pytest.mark.parametrize("device", DEVICES)
def test_very_unequal_and_very_large_lse_stay_finite(device):
    lses = torch.tensor([[[1e4], [-1e4], [-1e38], [88.0]], [[-1e4], [-1.00001e4], [1e38], [-88.0]]], device=device)
    outs = torch.stack([torch.zeros(4, 1, 2), torch.ones(4, 1, 2)]).to(device)
    out, lse = poisoned(4, 1, 2, device=device), poisoned(4, 1, device=device)
    launch_combine_shards(outs, lses, out, lse)
    want, want_lse = merge_lse_reference(natural_shards(outs, lses))
    assert_close(out, want)
    assert_close(lse, want_lse)


@settings(max_examples=20)
@given(st.sampled_from(list(MergeMethod)), st.integers(2, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 40))
def test_the_views_of_a_step_do_not_overlap(method, size, tokens, heads, v_dim):
    buffers = make_buffers(method, size, max_tokens=9, num_heads=heads * size, v_dim=v_dim, dtype=torch.bfloat16)
    merged = buffers.merged(tokens)
    assert merged.out.shape == (tokens, heads * (size if method is MergeMethod.ALL_REDUCE else 1), v_dim)
    if method is MergeMethod.ALL_TO_ALL:
        sent, received = buffers.messages(tokens)
        views = [sent.outs, sent.lses, received.outs, received.lses]
        assert all(message.data.is_contiguous() for message in (sent, received))
        assert all(
            (view.data_ptr() - sent.data.data_ptr()) % 128 == 0 and view.stride(0) % 16 == 0 for view in views[:2]
        )
    else:
        views = [*buffers.gathered_lses(tokens)]
        if method is MergeMethod.REDUCE_SCATTER:
            views.append(buffers.scaled_parts(tokens))
        assert all(view.is_contiguous() for view in views)
    views += [merged.out, merged.lse]
    for mark, view in enumerate(views):
        view.fill_(mark)
    assert all((view == mark).all() for mark, view in enumerate(views))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "a2a"}, TypeError, "method is 'a2a'; allowed: MergeMethod.REDUCE_SCATTER"),
        ({"size": 0}, ValueError, "size is 0; allowed: at least 1"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0; allowed: at least 1"),
        ({"num_heads": 7}, ValueError, "num_heads is 7; allowed: multiples of 3"),
        ({"v_dim": 0}, ValueError, "v_dim is 0"),
        ({"dtype": torch.float64}, TypeError, "dtype is torch.float64; allowed: torch.float32"),
    ],
)
def test_buffers_of_what_is_not_allowed_are_refused(change, error, message):
    arguments = {"method": MergeMethod.REDUCE_SCATTER, "size": 3, **change}
    with pytest.raises(error) as caught:
        make_buffers(**arguments)
    assert message in str(caught.value)


def test_all_heads_of_any_number_stay_together():
    assert make_buffers(MergeMethod.ALL_REDUCE, 3, num_heads=7).merged(2).out.shape == (2, 7, 16)
