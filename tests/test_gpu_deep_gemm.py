"""The loaded DeepGEMM on a real GPU: the capability table, the schedule twin, the logits, a replay."""

import dataclasses

import pytest
import torch

from vllm_dsa import ops, reference
from vllm_dsa.config import DsaConfig
from vllm_dsa.deep_gemm_wrapper import (
    get_paged_mqa_logits_metadata,
    load_deep_gemm,
    native_next_n_supported,
)
from vllm_dsa.ops import LogitsBackend
from vllm_dsa.runner.oracle import LOGITS_TOLERANCE
from vllm_dsa.runner.replay import Replay, ReplayConfig
from vllm_dsa.runner.trace import TraceRequest

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def raw_logits(next_n, rows_in_schedule):
    """Call the library itself on one page, past every check of ours."""
    lens = torch.full((1, next_n), 64, dtype=torch.int32, device=CUDA)
    schedule = torch.zeros(rows_in_schedule, 2, dtype=torch.int32, device=CUDA)
    load_deep_gemm().function("fp8_fp4_paged_mqa_logits")(
        q=(torch.zeros(1, next_n, 64, 128, dtype=torch.float8_e4m3fn, device=CUDA), None),
        kv_cache=torch.zeros(1, 64, 1, 132, dtype=torch.uint8, device=CUDA),
        weights=torch.zeros(next_n, 64, device=CUDA),
        context_lens=lens,
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=CUDA),
        schedule_meta=schedule,
        max_context_len=64,
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("next_n", range(1, 9))
def test_the_table_is_what_the_library_accepts(caps, next_n):
    accepted = []
    for rows in {caps.num_sms + 1, caps.num_sms // 2 + 1}:
        try:
            raw_logits(next_n, rows)
        except RuntimeError:
            continue
        accepted.append(rows)
    if native_next_n_supported(next_n, caps):
        assert accepted == [caps.num_sms // (2 if next_n in caps.paired_next_n else 1) + 1]
    else:
        assert accepted == []


@pytest.fixture(scope="module")
def longer_runs_first(caps):
    """The cut of the builds that lack next_n 4 in an age before nv_dev had it."""
    return caps.version == "2.5.0.post20260424"


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 64, 200])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_schedule_twin_equals_the_library_to_the_bit(caps, longer_runs_first, generator, rows, next_n):
    if not native_next_n_supported(next_n, caps):
        next_n = 2
    slots = caps.num_sms // (2 if next_n in caps.paired_next_n else 1)
    for longest in (1, 255, 256, 257, 5000, 140_000):
        lens = torch.randint(0, longest + 1, (rows, next_n), generator=generator, dtype=torch.int32)
        lens = lens.sort(dim=1).values
        lens[torch.rand(rows, generator=generator) < 0.2] = 0
        if not lens[:, -1].any():
            lens[0] = 1  # builds differ in how they say that nobody has work
        library = get_paged_mqa_logits_metadata(lens.to(CUDA), 64, caps.num_sms, caps=caps)
        twin = reference.sm90_schedule(lens, slots, longer_runs_first=longer_runs_first)
        assert torch.equal(library.cpu(), twin)


def random_case(generator, batch, next_n, heads, width=48):
    """Arguments of paged_mqa_logits in their order, lengths around a split's border first."""
    lens = torch.randint(1, 3000, (batch, 1), generator=generator, dtype=torch.int32)
    lens = (lens + torch.arange(next_n, dtype=torch.int32)).contiguous()
    lens[0] = torch.tensor([255, 256, 257, 258][:next_n])
    cache = ops.IndexKCacheLayout().allocate(batch * width, CUDA, fill=0x7F)
    table = torch.randperm(batch * width, generator=generator).int().view(batch, width).to(CUDA)
    k = torch.randn(batch * width * 64, 128, generator=generator)
    ops.store_index_k(k.to(CUDA), cache, torch.arange(len(k), device=CUDA))
    q, weights = ops.fold_q(
        torch.randn(batch * next_n, heads, 128, generator=generator).to(CUDA),
        torch.randn(batch * next_n, heads, generator=generator).to(CUDA),
        scale_format=ops.ScaleFormat.FP32,
    )
    return q.view(batch, next_n, heads, 128), cache, weights, lens.to(CUDA), table


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize(("batch", "next_n"), [(4, 1), (2, 2), (2, 4), (33, 2), (5, 4)])
def test_logits_equal_the_dequantised_reference(caps, generator, batch, next_n, heads):
    if not native_next_n_supported(next_n, caps):
        next_n = 2
    arguments = random_case(generator, batch, next_n, heads)
    lens = arguments[3]
    schedule = get_paged_mqa_logits_metadata(lens, 64, caps.num_sms, caps=caps)
    got = ops.paged_mqa_logits(*arguments, max_context_len=3072, schedule_metadata=schedule, caps=caps)
    want = reference.paged_mqa_logits(*arguments, max_context_len=3072, compute_dtype=torch.float64)
    for row, length in enumerate(lens.flatten().tolist()):
        have, expected = got[row, :length].double(), want[row, :length]
        assert float((have - expected).norm() / expected.norm()) < LOGITS_TOLERANCE[LogitsBackend.DEEP_GEMM]


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_the_kernel_takes_either_cut_and_a_batch_without_work(caps, generator, next_n):
    if not native_next_n_supported(next_n, caps):
        next_n = 2
    arguments = random_case(generator, 9, next_n, 64)
    lens = arguments[3]
    slots = caps.num_sms // (2 if next_n in caps.paired_next_n else 1)
    first, last = (
        ops.paged_mqa_logits(
            *arguments,
            max_context_len=3072,
            schedule_metadata=reference.sm90_schedule(lens, slots, longer_runs_first=longer_runs_first),
            caps=caps,
        )
        for longer_runs_first in (True, False)
    )
    for row, length in enumerate(lens.flatten().tolist()):
        assert torch.equal(first[row, :length], last[row, :length])
    lens.zero_()
    schedule = reference.sm90_schedule(lens, slots)
    ops.paged_mqa_logits(*arguments, max_context_len=3072, schedule_metadata=schedule, caps=caps)
    torch.cuda.synchronize()


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3, 5])
def test_a_replay_on_the_gpu_has_no_mismatch(caps, num_speculative_tokens):
    model = dataclasses.replace(DsaConfig.from_name_or_path("deepseek-v3.2"), max_position_embeddings=8192)
    config = ReplayConfig(
        model,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=8,
        num_blocks=1024,
        verify_every=1,
        seed=num_speculative_tokens,
    )
    requests = [
        TraceRequest(
            i, 30.0 * i, 500 + 517 * i, 40, (1, *range(100 * i + 10, 100 * i + 10 + (500 + 517 * i - 1) // 512))
        )
        for i in range(9)
    ]
    report = Replay(config, caps, CUDA).run(requests)
    assert report.mismatches == 0, report.mismatch_notes
    assert report.verified_rows > 50
    assert report.startup["deep_gemm"].startswith("deep_gemm:")
