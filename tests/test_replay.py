"""The main job on small models: what it reports, and that it notices each kind of fault."""

import dataclasses
import json
import random

import pytest
import torch

from vllm_dsa.config import DsaConfig
from vllm_dsa.deep_gemm_wrapper import planned_capabilities
from vllm_dsa.runner import replay as replay_module
from vllm_dsa.runner.replay import Replay, ReplayConfig
from vllm_dsa.runner.trace import TraceRequest, read_trace

TINY = DsaConfig(
    model_type="deepseek_v32",
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    index_topk=24,
    index_head_dim=32,
    index_n_heads=4,
    max_position_embeddings=4096,
    rope_theta=10000.0,
    rope_interleaved=False,
    num_nextn_predict_layers=1,
    index_shared=(False, False, True),
)
CONFIG = ReplayConfig(
    TINY, max_num_seqs=6, max_num_batched_tokens=512, num_blocks=256, verify_every=1, verify_rows=3, seed=5
)
CPU = torch.device("cpu")


def trace(seed=0, count=12, output=(1, 30)):
    """Requests of which many share their first blocks."""
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        length = draw.randint(1, 1500)
        shared = draw.randint(0, 2)
        ids = tuple(block if block < shared else 1000 * index + block + 10 for block in range(-(-length // 512)))
        requests.append(TraceRequest(index, 40.0 * index, length, draw.randint(*output), ids))
    return requests


def run(config=CONFIG, caps=None, requests=None):
    return Replay(config, caps or planned_capabilities("sm90"), CPU).run(trace() if requests is None else requests)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "cpu"])
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 2, 3, 6])
def test_every_row_of_every_depth_is_right(arch, num_speculative_tokens):
    config = dataclasses.replace(CONFIG, num_speculative_tokens=num_speculative_tokens)
    report = run(config, planned_capabilities(arch))
    assert report.mismatches == 0, report.mismatch_notes
    assert report.verified_rows > 100
    assert report.num_finished == report.num_requests == 12
    assert report.num_output_tokens == sum(request.output_length for request in trace())
    assert sum(totals.tokens for totals in report.forms.values()) == sum(d * n for d, n in report.depths.items())


def test_forms_at_mtp_3_on_sm90():
    report = run()
    assert {"native c=4", "grouped c=4"} <= set(report.forms)
    native, grouped = report.forms["native c=4"], report.forms["grouped c=4"]
    assert native.dummy_rows == 0
    assert grouped.dummy_rows > 0
    # Four rows on one pass: a fourth of what flattening reads, up to the pages at a row's bound.
    assert native.flattened_kv_bytes == pytest.approx(4 * native.kv_bytes, rel=0.03)


@pytest.mark.parametrize("backend", ["auto", "sm90", "deep_gemm", "reference"])
def test_every_row_is_right_whoever_the_steps_are_planned_for(backend, monkeypatch):
    monkeypatch.setenv("VDSA_LOGITS_BACKEND", backend)
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(TINY, index_head_dim=128, index_n_heads=16))
    report = run(config)
    assert report.mismatches == 0, report.mismatch_notes
    assert report.startup["logits_backend"] == {"auto": "sm90"}.get(backend, backend)
    assert ("ragged" in report.forms) == (backend in ("auto", "sm90"))
    assert ("native c=1" in report.forms) == (backend != "sm90")


def test_a_backend_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.setenv("VDSA_LOGITS_BACKEND", "sm90")
    with pytest.raises(NotImplementedError, match="takes a num_heads of 64, 32, 16, got 4"):
        run()


def test_interleaved_rope_and_prefix_reuse():
    report = run(dataclasses.replace(CONFIG, model=dataclasses.replace(TINY, rope_interleaved=True)))
    assert report.mismatches == 0, report.mismatch_notes
    assert report.num_cached_tokens > 0


def test_preemption_recomputes_right():
    config = dataclasses.replace(CONFIG, num_blocks=40, max_num_seqs=6)
    report = run(config, requests=trace(seed=3, count=14, output=(20, 60)))
    assert report.num_preemptions > 0
    assert report.mismatches == 0, report.mismatch_notes
    assert report.num_finished == 14


def test_a_request_that_cannot_fit_is_named_and_left_out():
    requests = [*trace(count=2), TraceRequest(2, 0.0, 5000, 10, tuple(range(10)))]
    report = run(requests=requests)
    assert report.num_finished == 2
    assert len(report.rejected) == 1
    assert "request 2" in report.rejected[0]


def test_an_empty_trace():
    report = run(requests=[])
    assert (report.num_steps, report.mismatches) == (0, 0)
    json.dumps(report.to_json())


def test_same_seed_same_report():
    def comparable(report):
        values = report.to_json()
        del values["build_us"], values["seconds"]
        return values

    assert comparable(run()) == comparable(run())
    other = run(dataclasses.replace(CONFIG, seed=6))
    assert comparable(other) != comparable(run())


def test_verification_may_be_rare_or_off():
    assert run(dataclasses.replace(CONFIG, verify_every=0)).verified_rows == 0
    rare = run(dataclasses.replace(CONFIG, verify_every=10))
    assert rare.verified_steps == rare.num_steps // 10


class TestFaultsAreNoticed:
    """Each breaks one thing on the way: a replay that still reports 0 mismatches would prove nothing."""

    def test_a_length_off_by_one(self, mocker):
        original = replay_module.decode_batch

        def shorter(*args):
            batch = original(*args)
            batch.seq_lens.sub_(1)
            return batch

        mocker.patch.object(replay_module, "decode_batch", shorter)
        assert run().mismatches > 0

    def test_rejected_drafts_left_in_the_cache(self, mocker):
        original = replay_module.store_index_k

        def store(k, cache, slot_mapping, **kwargs):
            # The first row of a decode overwrites a rejected draft: drop such single-token writes.
            if len(slot_mapping) <= 24:
                slot_mapping = torch.where(torch.arange(len(slot_mapping)) % 4 == 0, -1, slot_mapping)
            original(k, cache, slot_mapping, **kwargs)

        mocker.patch.object(replay_module, "store_index_k", store)
        assert run().mismatches > 0

    def test_a_wrong_page_in_the_table(self, mocker):
        original = replay_module.decode_batch

        def swapped(*args):
            batch = original(*args)
            batch.block_table[:, 0] = batch.block_table[:, 0].flip(0)
            return batch

        mocker.patch.object(replay_module, "decode_batch", swapped)
        assert run().mismatches > 0

    def test_a_prefix_shared_by_different_contents(self, mocker):
        mocker.patch.object(replay_module.Request, "prefix_page_keys", lambda self: list(range(self.num_prompt // 64)))
        assert run().mismatches > 0

    def test_prefill_rows_that_see_too_much(self, mocker):
        original = replay_module.prefill_batch

        def longer(*args):
            batch = original(*args)
            batch.seq_lens_cpu.add_(1)
            return batch

        mocker.patch.object(replay_module, "prefill_batch", longer)
        assert run().mismatches > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_ms": 0}, "step_ms must be positive"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"verify_every": -1}, "verify_every"),
        ({"verify_rows": 0}, "verify_rows"),
    ],
)
def test_bad_limits(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.trace
@pytest.mark.parametrize(("backend", "forms"), [("deep_gemm", {"native c=4", "grouped c=4"}), ("auto", {"ragged"})])
def test_the_mooncake_trace_with_real_shapes(mooncake_trace, monkeypatch, backend, forms):
    monkeypatch.setenv("VDSA_LOGITS_BACKEND", backend)
    config = ReplayConfig(DsaConfig.from_name_or_path("glm-5"), verify_every=60, seed=1)
    requests = read_trace(mooncake_trace, limit=6).requests
    report = Replay(config, planned_capabilities("sm90"), CPU).run(requests)
    assert report.mismatches == 0, report.mismatch_notes
    assert report.verified_rows >= 6
    assert forms <= set(report.forms)
