import dataclasses

import pytest

from vllm_dsa.deep_gemm_wrapper import DeepGemmUnavailableError, planned_capabilities
from vllm_dsa.ops import LogitsBackend, resolve_logits_backends

CPU = planned_capabilities("cpu")
SM90 = planned_capabilities("sm90")
SM90_BARE = dataclasses.replace(SM90, provider=None)
# The main line of DeepGEMM.
SM90_MAIN = dataclasses.replace(SM90, block_sizes=frozenset({64}), num_heads=frozenset({32, 64}))
SM100 = planned_capabilities("sm100")
DEEP_GEMM, OURS, TWIN = LogitsBackend.DEEP_GEMM, LogitsBackend.SM90, LogitsBackend.REFERENCE


def resolve(choice, caps, block_size=64, num_heads=64, head_dim=128):
    return resolve_logits_backends(choice, caps, block_size=block_size, num_heads=num_heads, head_dim=head_dim)


@pytest.mark.parametrize(
    ("choice", "caps", "shape", "backends"),
    [
        ("auto", SM90, {}, {DEEP_GEMM, OURS}),
        ("auto", SM90_BARE, {}, {OURS}),
        ("auto", SM90, {"num_heads": 8}, {DEEP_GEMM}),
        ("auto", SM90, {"head_dim": 64}, {DEEP_GEMM}),
        ("auto", SM90_BARE, {"head_dim": 64}, {TWIN}),
        ("auto", SM90_MAIN, {"block_size": 32}, {OURS}),
        ("auto", SM90_MAIN, {"num_heads": 16}, {OURS}),
        ("auto", SM90_MAIN, {"num_heads": 32}, {DEEP_GEMM, OURS}),
        ("auto", SM100, {}, {DEEP_GEMM}),
        ("auto", CPU, {}, {TWIN}),
        ("deep_gemm", SM90, {}, {DEEP_GEMM}),
        ("deep_gemm", SM100, {}, {DEEP_GEMM}),
        ("sm90", SM90, {"block_size": 32, "num_heads": 16}, {OURS}),
        ("sm90", SM90_BARE, {}, {OURS}),
        ("reference", SM90, {}, {TWIN}),
        ("reference", SM90_MAIN, {"block_size": 32, "num_heads": 3, "head_dim": 12}, {TWIN}),
        ("reference", CPU, {}, {TWIN}),
    ],
)
def test_who_may_be_planned(choice, caps, shape, backends):
    assert resolve(choice, caps, **shape) == backends


@pytest.mark.parametrize(
    ("choice", "caps", "shape", "error", "message"),
    [
        ("sm90", CPU, {}, NotImplementedError, r"needs a Hopper GPU \(sm90\), got cpu"),
        ("sm90", SM100, {}, NotImplementedError, "got sm100"),
        ("sm90", SM90, {"num_heads": 8}, NotImplementedError, "takes a num_heads of 64, 32, 16, got 8"),
        ("sm90", SM90, {"head_dim": 64}, NotImplementedError, "takes a head_dim of 128, got 64"),
        ("sm90", SM90, {"block_size": 128}, NotImplementedError, "takes a block_size of 64, 32, got 128"),
        ("deep_gemm", CPU, {}, DeepGemmUnavailableError, "needs a DeepGEMM build"),
        ("deep_gemm", SM90_BARE, {}, DeepGemmUnavailableError, "needs a DeepGEMM build"),
        ("deep_gemm", SM90_MAIN, {"block_size": 32}, ValueError, r"block_size must be one of \[64\].*got 32"),
        ("auto", SM90_MAIN, {"block_size": 32, "num_heads": 8}, ValueError, r"block_size must be one of \[64\]"),
    ],
)
def test_refusals(choice, caps, shape, error, message):
    with pytest.raises(error, match=message):
        resolve(choice, caps, **shape)
