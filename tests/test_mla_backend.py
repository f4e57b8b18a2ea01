"""The adapters of FlashMLA and FlashInfer, against fakes of their public signatures, and who is chosen."""

import math
import sys
from types import SimpleNamespace

import fake_mla_libraries
import pytest
import torch
from mla_cases import SCALE, assert_close, make_dense, make_sparse, naive

from vllm_dsa import ops
from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.ops import MlaBackend, mla_backend, mla_flash_mla, mla_flashinfer
from vllm_dsa.ops.mla_backend import resolve_mla_backend
from vllm_dsa.ops.mla_flash_mla import flash_mla_decode, sparse_flash_mla_decode
from vllm_dsa.ops.mla_flashinfer import flashinfer_decode, sparse_flashinfer_decode
from vllm_dsa.platform import DeviceInfo

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LENS = [3, 70, 71, 72, 0, 64, -1]
DEPTHS = [1, 3, 0, 2, 1]
HOPPER, SM100 = (DeviceInfo(family, 0, 132, "fake") for family in (9, 10))


@pytest.fixture(autouse=True)
def forget_libraries():
    caches = (
        *(mla_backend.load_function, mla_backend.takes_keyword, mla_flash_mla._attend),
        *(mla_flashinfer._wrapper, mla_flashinfer._zeroed_workspace),
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(params=["2025", "2026", "sgl"])
def flash_mla(request, monkeypatch):
    library = fake_mla_libraries.FlashMla(request.param)
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    return library


@pytest.fixture(params=["0.6", "0.7"])
def flashinfer(request, monkeypatch):
    library = fake_mla_libraries.flashinfer(request.param)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=library))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", library)
    monkeypatch.setattr(mla_flashinfer, "current_device", lambda _: HOPPER)
    return library


def dense(decode, case):
    return decode(*case.inputs, softmax_scale=SCALE, query_start_loc=case.query_start_loc)


def sparse(decode, case):
    return decode(case.q, case.cache, case.slots, softmax_scale=SCALE, topk_lens=case.topk_lens)


def assert_natural(found, expected):
    assert found.base is LseBase.E
    assert_close(found, expected)


def assert_base_2(found, expected):
    assert found.base is LseBase.TWO
    assert_close(DecodeAttnResult(found.out, found.lse * math.log(2), LseBase.E), expected)


class TestFlashMla:
    def test_dense_gives_each_row_its_own_length(self, flash_mla, generator):
        case = make_dense(generator, DEPTHS, LENS, block_size=64, orphans=2)
        assert_natural(dense(flash_mla_decode, case), naive(case.q, case.cache, case.slots()))

    @pytest.mark.parametrize("next_n", [1, 2])
    def test_dense_without_starts(self, flash_mla, next_n, generator):
        case = make_dense(generator, [next_n] * 2, list(range(60, 60 + 2 * next_n)), block_size=64)
        found = flash_mla_decode(*case.inputs, softmax_scale=SCALE)
        assert_natural(found, naive(case.q, case.cache, case.slots()))

    @pytest.mark.parametrize(("heads", "padded"), [(2, 64), (64, 64), (65, 128)])
    def test_sparse_pads_heads_and_columns(self, flash_mla, heads, padded, generator):
        case = make_sparse(generator, [0, 1, 70, 66], width=70, heads=heads, fp8=True)
        assert_natural(sparse(sparse_flash_mla_decode, case), naive(case.q, case.cache, case.named()))
        assert flash_mla.calls == [(4, 1, padded, 576)]

    def test_sparse_without_lens(self, flash_mla, generator):
        case = make_sparse(generator, [2, 128], width=128, fp8=True, holes=False)
        slots = case.slots.where(torch.arange(128) < case.topk_lens[:, None], -7)
        found = sparse_flash_mla_decode(case.q, case.cache, slots, softmax_scale=SCALE)
        assert_natural(found, naive(case.q, case.cache, case.named()))

    def test_refuses_what_flash_mla_does_not_take(self, flash_mla, generator):
        for options in ({"block_size": 16}, {"block_size": 64, "fp8": True}):
            with pytest.raises(NotImplementedError, match="the flash_mla backend of MLA decode does not take"):
                dense(flash_mla_decode, make_dense(generator, [1], [5], **options))
        for options, message in (
            ({"fp8": False}, "sparse attention over a cache of"),
            ({"heads": 129, "fp8": True}, "heads"),
        ):
            with pytest.raises(NotImplementedError, match=f"does not take {message}"):
                sparse(sparse_flash_mla_decode, make_sparse(generator, [1], width=64, **options))
        assert flash_mla.calls == []


class TestFlashInfer:
    @pytest.mark.parametrize("block_size", [1, 16, 64])
    def test_dense_is_planned_with_a_request_for_each_row(self, flashinfer, block_size, generator):
        case = make_dense(generator, DEPTHS, LENS, block_size=block_size, orphans=1)
        assert_base_2(dense(flashinfer_decode, case), naive(case.q, case.cache, case.slots()))
        assert flashinfer.BatchMLAPagedAttentionWrapper.backends == ("fa3",)

    def test_sparse_takes_pages_of_one_token(self, flashinfer, generator):
        case = make_sparse(generator, [0, 1, 40, 33], width=40)
        assert_base_2(sparse(sparse_flashinfer_decode, case), naive(case.q, case.cache, case.named()))

    def test_a_wrapper_serves_every_call(self, flashinfer, generator):
        for _ in range(2):
            dense(flashinfer_decode, make_dense(generator, [1], [5]))
        assert flashinfer.BatchMLAPagedAttentionWrapper.backends == ("fa3",)

    @pytest.mark.parametrize("block_size", [32, 64])
    def test_dense_on_sm100_is_trtllm_gen(self, flashinfer, block_size, monkeypatch, generator):
        monkeypatch.setattr(mla_flashinfer, "current_device", lambda _: SM100)
        case = make_dense(generator, DEPTHS, LENS, block_size=block_size, orphans=1)
        assert_base_2(dense(flashinfer_decode, case), naive(case.q, case.cache, case.slots()))
        assert flashinfer.BatchMLAPagedAttentionWrapper.backends == ()

    def test_refuses_what_flashinfer_does_not_take(self, flashinfer, monkeypatch, generator):
        bf16, fp8 = make_sparse(generator, [1], width=4), make_sparse(generator, [1], width=4, fp8=True)
        gapped = make_dense(generator, [1], [5], page_gap=64)
        with pytest.raises(NotImplementedError, match=r"does not take a cache of torch.uint8; allowed: torch.bfloat16"):
            sparse(sparse_flashinfer_decode, fp8)
        with pytest.raises(NotImplementedError, match=r"does not take a cache of torch.uint8"):
            dense(flashinfer_decode, make_dense(generator, [1], [5], fp8=True))
        with pytest.raises(NotImplementedError, match="does not take sparse attention over a cache with strides"):
            sparse_flashinfer_decode(gapped.q, gapped.cache, bf16.slots, softmax_scale=SCALE)
        monkeypatch.setattr(mla_flashinfer, "current_device", lambda _: SM100)
        with pytest.raises(NotImplementedError, match="does not take sparse attention on sm100"):
            sparse(sparse_flashinfer_decode, bf16)
        with pytest.raises(NotImplementedError, match="does not take pages of 16; allowed: 32, 64"):
            dense(flashinfer_decode, make_dense(generator, [1], [5]))


@pytest.mark.parametrize("decode", [flash_mla_decode, flashinfer_decode])
@pytest.mark.parametrize("fault", ["missing", "without the name", "without the keyword"])
def test_a_library_that_cannot_serve_is_an_import_error(decode, fault, monkeypatch, generator):
    module = {flash_mla_decode: "flash_mla", flashinfer_decode: "flashinfer.mla"}[decode]
    library = {
        "missing": None,
        "without the name": SimpleNamespace(),
        "without the keyword": SimpleNamespace(
            get_mla_metadata=lambda *_: (None, None),
            flash_mla_with_kvcache=lambda q, k_cache: None,
            BatchMLAPagedAttentionWrapper=lambda workspace: None,
        ),
    }[fault]
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=library))
    monkeypatch.setitem(sys.modules, module, library)
    with pytest.raises(ImportError, match=f"MLA decode by {module} needs {module}.*; install"):
        dense(decode, make_dense(generator, [1], [5], block_size=64))


class TestChoice:
    def test_auto_is_never_a_library(self, monkeypatch):
        monkeypatch.delenv("VDSA_MLA_BACKEND", raising=False)
        assert resolve_mla_backend(None, CUDA) is MlaBackend.TRITON
        assert resolve_mla_backend(None, CPU) is MlaBackend.REFERENCE

    @pytest.mark.parametrize("backend", list(MlaBackend))
    def test_the_variable_names_every_backend(self, backend, monkeypatch):
        monkeypatch.setenv("VDSA_MLA_BACKEND", backend.value)
        assert resolve_mla_backend(None, CUDA) is backend
        assert resolve_mla_backend(MlaBackend.REFERENCE, CUDA) is MlaBackend.REFERENCE

    def test_a_backend_that_needs_a_gpu_is_refused_without_one(self, monkeypatch):
        monkeypatch.setenv("VDSA_MLA_BACKEND", "flash_mla")
        with pytest.raises(
            NotImplementedError, match="the flash_mla backend of MLA decode needs CUDA tensors, got cpu"
        ):
            resolve_mla_backend(None, CPU)

    def test_the_operators_hand_everything_to_the_library(self, monkeypatch, generator):
        library = fake_mla_libraries.FlashMla("2026")
        monkeypatch.setitem(sys.modules, "flash_mla", library)
        # The check that keeps CPU tensors from it is what has to go.
        monkeypatch.setattr(sys.modules["vllm_dsa.ops.mla_decode"], "resolve_mla_backend", lambda backend, _: backend)
        case = make_dense(generator, DEPTHS, LENS, block_size=64, orphans=2)
        out = torch.full((*case.q.shape[:2], 512), torch.nan, dtype=torch.bfloat16)
        found = ops.mla_decode(
            *case.inputs,
            softmax_scale=SCALE,
            query_start_loc=case.query_start_loc,
            max_query_len=case.max_query_len,
            backend=MlaBackend.FLASH_MLA,
            out=out,
        )
        assert found.out is out
        assert_natural(found, naive(case.q, case.cache, case.slots()))
        case = make_sparse(generator, [3, 60], width=64, fp8=True)
        found = ops.sparse_mla_decode(
            *(case.q, case.cache, case.slots),
            softmax_scale=SCALE,
            topk_lens=case.topk_lens,
            backend=MlaBackend.FLASH_MLA,
        )
        assert_natural(found, naive(case.q, case.cache, case.named()))
        assert len(library.calls) == 2
