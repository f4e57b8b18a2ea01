"""The refresh and the slots of DCP on a real GPU: budgets, and graphs around and over them."""

import pytest
import torch
import triton
from dcp_steps import draw_requests

from vllm_dsa.bench.launches import count_launches
from vllm_dsa.bench.timing import capture, syncs_with_host
from vllm_dsa.context_parallel import (
    DcpDecodeMetadata,
    DcpLayout,
    DecodeMode,
    ReqToToken,
    localize_slot_mapping,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
MAX_REQS, MAX_SEQ_LEN, NEXT_N, BLOCK = 64, 20_000, 4, 64
LAYOUTS = [DcpLayout(), DcpLayout(2, 1), DcpLayout(3, 2, 64), DcpLayout(8, 5, 16)]


def allocate(layout, device=CUDA, **changes):
    sizes = {"max_reqs": MAX_REQS, "max_seq_len": MAX_SEQ_LEN, "block_size": BLOCK, "next_n": NEXT_N}
    return DcpDecodeMetadata.allocate(layout, device=device, **{**sizes, **changes})


def draw_step(layout, num_reqs, longest, generator):
    """Lengths, some of padding requests, and both kinds of pages, on the CPU."""
    lengths = torch.randint(-longest // 8, longest + 1, (num_reqs,), generator=generator).clamp(min=0)
    tokens = [length + NEXT_N if length else 0 for length in lengths.tolist()]
    return lengths, draw_requests(tokens, layout, BLOCK, MAX_SEQ_LEN + NEXT_N, generator)


def to_cuda(pages):
    if isinstance(pages, ReqToToken):
        return ReqToToken(pages.req_to_token.to(CUDA), pages.req_pool_indices.to(CUDA))
    return pages.to(CUDA)


def assert_same(metadata, twin):
    for name, buffer in twin.buffers().items():
        assert torch.equal(metadata.buffers()[name].cpu(), buffer), name


def assert_in_budget(run):
    """One launch, no allocation, no host sync, once warm."""
    for _ in range(2):
        run()
    assert count_launches(run) == (1, 0)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not syncs_with_host(run)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", DecodeMode)
def test_a_refresh_is_one_launch_no_allocation_no_sync(layout, mode, generator):
    metadata = allocate(layout)
    lengths, requests = draw_step(layout, 40, MAX_SEQ_LEN, generator)
    seq_lens = lengths.to(CUDA)
    for pages in map(to_cuda, requests.sources()):
        assert_in_budget(lambda pages=pages: metadata.refresh(mode, seq_lens, pages))


def test_localised_slots_are_one_launch_no_allocation_no_sync():
    slots, out = torch.arange(300, device=CUDA), torch.empty(512, dtype=torch.int64, device=CUDA)
    assert_in_budget(lambda: localize_slot_mapping(slots, out, DcpLayout(3, 1, 2), block_size=BLOCK))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_sequence_of_refreshes_equals_the_twin_at_fixed_addresses(layout, generator):
    metadata, twin = allocate(layout), allocate(layout, "cpu")
    addresses = {name: buffer.data_ptr() for name, buffer in metadata.buffers().items()}
    modes = list(DecodeMode)
    for step in range(12):
        num_reqs = int(torch.randint(0, MAX_REQS + 1, (1,), generator=generator))
        lengths, requests = draw_step(layout, num_reqs, (MAX_SEQ_LEN, 70)[step % 2], generator)
        seq_lens = lengths.to((torch.int32, torch.int64)[step // 2 % 2])
        for pages in requests.sources():
            twin.refresh(modes[step % 3], seq_lens, pages)
            metadata.refresh(modes[step % 3], seq_lens.to(CUDA), to_cuda(pages))
            assert_same(metadata, twin)
    assert {name: buffer.data_ptr() for name, buffer in metadata.buffers().items()} == addresses


def test_a_table_wider_than_one_block_of_columns_equals_the_twin(generator):
    layout = DcpLayout(2, 1, 8)
    sizes = {"max_reqs": 3, "max_seq_len": 1_000_000}
    metadata, twin = allocate(layout, **sizes), allocate(layout, "cpu", **sizes)
    lengths = torch.tensor([1_000_000, 1024 * 2 * BLOCK, 77])
    requests = draw_requests([n + NEXT_N for n in lengths.tolist()], layout, BLOCK, 1_000_000 + NEXT_N, generator)
    for pages in requests.sources():
        twin.refresh(DecodeMode.TARGET_VERIFY, lengths, pages)
        metadata.refresh(DecodeMode.TARGET_VERIFY, lengths.to(CUDA), to_cuda(pages))
        assert_same(metadata, twin)


@pytest.mark.parametrize("from_slots", [True, False])
@pytest.mark.parametrize("mode", DecodeMode)
def test_a_captured_refresh_follows_its_inputs_among_eager_ones(mode, from_slots, generator):
    layout = DcpLayout(3, 1, 4)
    metadata, twin = allocate(layout), allocate(layout, "cpu")
    bucket = 16
    lengths, requests = draw_step(layout, bucket, MAX_SEQ_LEN, generator)
    seq_lens, pages = lengths.to(CUDA), to_cuda(requests.sources()[0 if from_slots else 1])

    def run():
        metadata.refresh(mode, seq_lens, pages)
        # What a captured kernel would read, of the bucket.
        read = (metadata.seq_lens_k[:bucket], metadata.row_lens_of(mode, bucket), metadata.block_table[:bucket])
        return [buffer + 0 for buffer in read]

    captured = capture(run)
    for longest in (MAX_SEQ_LEN, 70, 5_000, 1):
        # An eager step over all rows in between must leave nothing to the replay.
        wide, wide_requests = draw_step(layout, MAX_REQS, MAX_SEQ_LEN, generator)
        metadata.refresh(DecodeMode.DRAFT_EXTEND, wide.to(CUDA), to_cuda(wide_requests.block_table))
        lengths, requests = draw_step(layout, bucket, longest, generator)
        source = requests.sources()[0 if from_slots else 1]
        seq_lens.copy_(lengths)
        if from_slots:
            pages.req_to_token.copy_(source.req_to_token)
            pages.req_pool_indices.copy_(source.req_pool_indices)
        else:
            pages.copy_(source)
        captured.replay()
        twin.refresh(mode, lengths, source)
        assert_same(metadata, twin)
        wanted = (twin.seq_lens_k[:bucket], twin.row_lens_of(mode, bucket), twin.block_table[:bucket])
        for have, want in zip(captured.result, wanted, strict=True):
            assert torch.equal(have.cpu(), want)


def test_a_graph_of_a_reader_sees_each_eager_refresh(generator):
    layout = DcpLayout(2, 0)
    metadata, twin = allocate(layout), allocate(layout, "cpu")
    captured = capture(lambda: (metadata.block_table + 0, metadata.seq_lens_k + 0))
    for num_reqs, longest in ((64, MAX_SEQ_LEN), (3, 70), (64, 1), (17, 9_000)):
        lengths, requests = draw_step(layout, num_reqs, longest, generator)
        metadata.refresh(DecodeMode.DECODE, lengths.to(CUDA), to_cuda(requests.block_table))
        captured.replay()
        twin.refresh(DecodeMode.DECODE, lengths, requests.block_table)
        table, lens = captured.result
        assert torch.equal(table.cpu(), twin.block_table)
        assert torch.equal(lens.cpu(), twin.seq_lens_k)


def test_localised_slots_replay_right():
    layout = DcpLayout(3, 1, 2)
    slots, out = torch.zeros(300, dtype=torch.int64, device=CUDA), torch.empty(512, dtype=torch.int64, device=CUDA)
    captured = capture(lambda: localize_slot_mapping(slots, out, layout, block_size=BLOCK))
    for _ in range(3):
        slots.random_(-2, 100_000)
        out.fill_(7)
        captured.replay()
        owned = (slots >= 0) & (slots // 2 % 3 == 1)
        assert torch.equal(out[:300], torch.where(owned, slots // 6 * 2 + slots % 2, -1))
        assert (out[300:] == -1).all()


def test_after_one_refresh_of_a_kind_nothing_compiles(generator, monkeypatch):
    # Sizes of no other test, so that the first refresh is seen to compile.
    metadata = allocate(DcpLayout(2, 1), next_n=9)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **known: compiled.append(known["repr"]))
    lengths, requests = draw_step(DcpLayout(2, 1), 1, 50, generator)
    for pages in map(to_cuda, requests.sources()):
        metadata.refresh(DecodeMode.DECODE, lengths.to(CUDA), pages)
    assert len(compiled) == 2
    compiled.clear()
    for layout in LAYOUTS:
        other = allocate(layout, next_n=9, max_reqs=33)
        for mode in DecodeMode:
            for num_reqs in (1, 16, 17, 33):
                lengths, requests = draw_step(layout, num_reqs, MAX_SEQ_LEN - 9, generator)
                # An engine's views start anywhere.
                shifted = torch.cat([lengths[:1], lengths]).to(CUDA)[1:]
                for pages in map(to_cuda, requests.sources()):
                    other.refresh(mode, shifted, pages)
    assert compiled == []


def test_foreign_devices_are_refused_before_any_launch(generator):
    layout = DcpLayout(2, 1)
    metadata = allocate(layout)
    lengths, requests = draw_step(layout, 3, 500, generator)
    before = {name: buffer.clone() for name, buffer in metadata.buffers().items()}
    with pytest.raises(ValueError, match="seq_lens is on cpu; allowed: cuda:0"):
        metadata.refresh(DecodeMode.DECODE, lengths, requests.block_table.to(CUDA))
    with pytest.raises(ValueError, match="block_table is on cpu; allowed: cuda:0"):
        metadata.refresh(DecodeMode.DECODE, lengths.to(CUDA), requests.block_table)
    with pytest.raises(ValueError, match="slot_mapping is on cpu; allowed: cuda:0"):
        localize_slot_mapping(torch.arange(3), torch.zeros(3, dtype=torch.int64, device=CUDA), layout, block_size=64)
    assert all(torch.equal(buffer, before[name]) for name, buffer in metadata.buffers().items())
