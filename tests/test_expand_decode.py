"""Every form's expansion gives each token the logits of the plain definition."""

import dataclasses

import hypothesis.strategies as st
import torch
from hypothesis import given

from vllm_dsa.context_parallel import DcpLayout
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.indexer import plan_step
from vllm_dsa.reference.expand_decode import expand_decode
from vllm_dsa.reference.index_k_cache import IndexKCacheLayout
from vllm_dsa.reference.paged_mqa_logits import paged_mqa_logits

HEADS, HEAD_DIM, BLOCK = 2, 8, 32
LAYOUT = IndexKCacheLayout(block_size=BLOCK, head_dim=HEAD_DIM)
CAPS = [
    planned_capabilities("sm90"),
    planned_capabilities("sm90", frozenset({1})),
    planned_capabilities("sm90", frozenset({1, 2})),
    planned_capabilities("sm90", frozenset({3})),
    planned_capabilities("sm90", frozenset({4})),
    planned_capabilities("sm100"),
    dataclasses.replace(planned_capabilities("sm100"), supports_varlen=False),
]


@st.composite
def batches(draw):
    depths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    lengths = [draw(st.integers(0, 4 * BLOCK)) for _ in depths]
    return depths, lengths, draw(st.integers(0, 2**31))


def expand(depths, lengths, table, plan, dcp, ratio):
    starts = torch.tensor([0, *depths]).cumsum(0).to(torch.int32)
    return expand_decode(
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        table,
        group_size=plan.group_size,
        num_groups=plan.num_groups,
        num_tokens=plan.num_tokens,
        block_size=BLOCK,
        dcp=dcp,
        compress_ratio=ratio,
    )


def plain_bounds(depths, lengths, dcp, ratio):
    """What each token sees, by the definition: count the visible tokens that live here, then compress."""
    bounds = []
    for depth, length in zip(depths, lengths, strict=True):
        for j in range(depth):
            visible = max(length - depth + j + 1, 0)
            local = sum((t // dcp.interleave) % dcp.size == dcp.rank for t in range(visible))
            bounds.append(local // ratio)
    return bounds


@given(batches(), st.sampled_from(CAPS))
def test_every_form_gives_the_logits_of_the_plain_definition(batch, caps):
    depths, lengths, seed = batch
    generator = torch.Generator().manual_seed(seed)
    plan = plan_step(depths, caps)
    pages = torch.randperm(64, generator=generator)[: len(depths) * 4].view(len(depths), 4).to(torch.int32)
    cache = LAYOUT.allocate(64, "cpu")
    values, scales = LAYOUT.views(cache)
    values.copy_(torch.randn(values.shape, generator=generator).to(torch.float8_e4m3fn))
    scales.copy_(torch.rand(scales.shape, generator=generator))
    tokens = sum(depths)
    q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, HEADS, generator=generator)

    expanded = expand(depths, lengths, pages, plan, DcpLayout(), 1)
    rows = expanded.row_to_token.long()
    row_q = q.view(torch.uint8)[rows.clamp(min=0)].view(torch.float8_e4m3fn)
    row_weights = torch.where(rows[:, None] >= 0, weights[rows.clamp(min=0)], 0)
    shape = (plan.num_groups, plan.group_size, HEADS, HEAD_DIM)
    got = paged_mqa_logits(
        row_q.view(shape),
        cache,
        row_weights,
        expanded.context_lens,
        expanded.block_table,
        max_context_len=4 * BLOCK,
        compute_dtype=torch.float64,
    )[expanded.token_to_row.long()]

    request = [r for r, depth in enumerate(depths) for _ in range(depth)]
    bounds = plain_bounds(depths, lengths, DcpLayout(), 1)
    keys = (values.double() * scales[..., None].double())[pages.long()].flatten(1, 2)
    for token in range(tokens):
        expected = (q[token].double() @ keys[request[token]].T).relu().T @ weights[token].double()
        expected[bounds[token] :] = -torch.inf
        torch.testing.assert_close(got[token], expected, rtol=1e-9, atol=1e-9)


@given(batches(), st.sampled_from(CAPS), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_bounds_are_expanded_then_localised_then_compressed(batch, caps, size, interleave, ratio):
    depths, lengths, _ = batch
    plan = plan_step(depths, caps)
    for rank in range(size):
        dcp = DcpLayout(size, rank, interleave * ratio)
        table = torch.ones(len(depths), 4, dtype=torch.int32)
        expanded = expand(depths, lengths, table, plan, dcp, ratio)
        flat = expanded.context_lens.flatten()
        assert flat[expanded.token_to_row.long()].tolist() == plain_bounds(depths, lengths, dcp, ratio)
        assert (flat >= 0).all()
        # DeepGEMM schedules from the last row of a group: it must be the longest, dummy rows included.
        assert (expanded.context_lens == expanded.context_lens.cummax(dim=1).values).all()


@given(batches(), st.sampled_from(CAPS))
def test_maps_are_inverse_and_only_live_columns_are_copied(batch, caps):
    depths, lengths, _ = batch
    plan = plan_step(depths, caps)
    table = torch.arange(1, 1 + 4 * len(depths), dtype=torch.int32).view(-1, 4)
    expanded = expand(depths, lengths, table, plan, DcpLayout(), 1)
    tokens = torch.arange(sum(depths), dtype=torch.int32)
    assert torch.equal(expanded.row_to_token[expanded.token_to_row.long()], tokens)
    assert int((expanded.row_to_token == -1).sum()) == plan.num_dummy_rows
    if plan.rows_are_tokens:
        assert torch.equal(expanded.row_to_token, tokens)
    assert expanded.decode_lens.tolist() == depths
    for group, request in enumerate(expanded.request_of_group.tolist()):
        live = -(-int(expanded.context_lens[group].max()) // BLOCK)
        assert expanded.block_table[group, :live].tolist() == table[request, :live].tolist()
        assert not expanded.block_table[group, live:].any()


def test_localising_is_per_token():
    plan = plan_step([3], planned_capabilities("sm90", frozenset({1})))
    expanded = expand([3], [10], torch.zeros(1, 4, dtype=torch.int32), plan, DcpLayout(2, 1), 1)
    assert expanded.context_lens.flatten().tolist() == [4, 4, 5]


def test_a_padding_request_has_length_zero_at_every_row():
    plan = plan_step([2, 2], planned_capabilities("sm90"))
    expanded = expand([2, 2], [7, 0], torch.zeros(2, 4, dtype=torch.int32), plan, DcpLayout(), 1)
    assert expanded.context_lens.tolist() == [[6, 7], [0, 0]]
