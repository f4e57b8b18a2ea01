"""The Triton refresh against its twin, into poisoned buffers: interpreted without a GPU, compiled on one."""

import hypothesis.strategies as st
import pytest
import torch
from dcp_steps import POISON, draw_requests, layouts
from hypothesis import given, settings

from vllm_dsa.context_parallel import DcpLayout, ReqToToken
from vllm_dsa.kernels.dcp_metadata import DcpBuffers, launch_dcp_metadata
from vllm_dsa.reference.dcp_metadata import dcp_metadata

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_equals_twin(seq_lens, pages, layout, device="cpu", *, max_reqs, max_rows, rows, drafts, block_size, width):
    table, indices = (pages.req_to_token, pages.req_pool_indices) if isinstance(pages, ReqToToken) else (pages, None)
    shapes = ((max_reqs,), (max_reqs,), (max_reqs * max_rows,), (max_reqs, width))
    buffers = DcpBuffers(*(torch.full(shape, POISON, dtype=torch.int32, device=device) for shape in shapes))
    step = {"num_draft_tokens": drafts, "rows_per_req": rows, "block_size": block_size}
    sizes = {"max_reqs": max_reqs, "max_rows_per_req": max_rows, "width": width}
    expected = dcp_metadata(seq_lens, table, indices, dcp=layout, **step, **sizes)
    launch_dcp_metadata(
        seq_lens.to(device),
        table.to(device),
        None if indices is None else indices.to(device),
        buffers,
        dcp=(layout.size, layout.rank, layout.interleave),
        **step,
    )
    for name, buffer, want in zip(DcpBuffers._fields, buffers, expected, strict=True):
        assert torch.equal(buffer.cpu(), want), name


@settings(max_examples=25)
@given(
    layouts(),
    st.lists(st.integers(-2, 60), max_size=4),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 2**31),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_any_step_equals_the_twin(layout, lengths, max_rows, drafts, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    block_size = layout.interleave * (1 + seed % 3)
    tokens = [length + drafts if length > 0 else 0 for length in lengths]
    requests = draw_requests(tokens, layout, block_size, 65, generator, pool_dtype=dtype)
    for pages in requests.sources():
        assert_equals_twin(
            torch.tensor(lengths, dtype=dtype),
            pages,
            layout,
            max_reqs=4 + seed % 2,
            max_rows=max_rows,
            rows=1 + seed % max_rows,
            drafts=drafts,
            block_size=block_size,
            width=70 // block_size + 1,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [DcpLayout(), DcpLayout(2, 1, 64), DcpLayout(7, 3, 1), DcpLayout(8, 5, 16)])
def test_long_requests_equal_the_twin(device, layout, generator):
    max_seq_len = 1100 * 64 * layout.size  # wider than one block of columns
    lengths = [max_seq_len - 4, 0, 1, 1024 * 64 * layout.size, 64 * layout.size, 5]
    requests = draw_requests([n + 4 if n else 0 for n in lengths], layout, 64, max_seq_len, generator)
    for pages in requests.sources():
        assert_equals_twin(
            torch.tensor(lengths), pages, layout, device,
            max_reqs=9, max_rows=4, rows=4, drafts=4, block_size=64, width=1100,
        )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_tables_with_far_rows_missing_rows_and_freed_slots_equal_the_twin(device, generator):
    layout = DcpLayout(3, 1, 2)
    slots = torch.randint(-50, 600, (6, 131), generator=generator, dtype=torch.int32)[:, :100]
    lengths = torch.tensor([100, 99, 50, 100, 7])
    sizes = {"max_reqs": 5, "max_rows": 2, "rows": 2, "drafts": 0, "block_size": 4, "width": 9}
    for indices in ([5, 0, 2, 2, 1], [6, -1, 99, 0, -(2**31)]):
        assert_equals_twin(lengths, ReqToToken(slots, torch.tensor(indices)), layout, device, **sizes)
    # Lengths reach past the table's columns and past the buffer's.
    assert_equals_twin(lengths * 3, ReqToToken(slots, torch.tensor([5, 0, 2, 2, 1])), layout, device, **sizes)
    assert_equals_twin(lengths * 3, slots[:5, :6], layout, device, **sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_step_clears_everything(device):
    pages = ReqToToken(torch.zeros(2, 64, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    for source in (pages, torch.zeros(0, 4, dtype=torch.int32)):
        assert_equals_twin(
            torch.zeros(0, dtype=torch.int32), source, DcpLayout(2, 1), device,
            max_reqs=3, max_rows=3, rows=2, drafts=2, block_size=8, width=5,
        )  # fmt: skip
