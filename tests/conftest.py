"""Fixtures and rules shared by all tests."""

import os
import zlib
from pathlib import Path

import hypothesis
import pytest
import torch

from vllm_dsa import envs
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, resolve_capabilities
from vllm_dsa.platform import is_cuda

if not is_cuda():
    # Read when a kernel is decorated, so it must stand before anything imports vllm_dsa.kernels.
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

MOONCAKE_TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation_3000.jsonl"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, so that it is the same alone and in the suite."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def caps() -> PagedMQALogitsCapabilities:
    """What the loaded DeepGEMM takes on this GPU; without a build a GPU test that asks for it fails."""
    found = resolve_capabilities()
    if found.provider is None:
        pytest.fail("a GPU test needs a DeepGEMM build: see docs/deepgemm_builds.md")
    return found


@pytest.fixture
def mooncake_trace() -> Path:
    if not MOONCAKE_TRACE.exists():
        pytest.skip(f"the Mooncake trace is not at {MOONCAKE_TRACE}")
    return MOONCAKE_TRACE


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not is_cuda():
        if envs.get("VDSA_REQUIRE_GPU"):
            pytest.fail("VDSA_REQUIRE_GPU=1 but torch sees no CUDA device")
        pytest.skip("needs a CUDA device")
