"""FlashMLA and FlashInfer as far as MLA decode calls them: their public signatures, the twin's arithmetic, NaN for what
they leave unwritten, and the checks that their own code makes."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from vllm_dsa import reference

NAN, INF = float("nan"), float("inf")


def attend(q, cache, slots_of_rows, scale, *, empty_lse, base):
    """Each row over its own slots; an empty row's output is left unwritten."""
    width = max([1, *map(len, slots_of_rows)])
    slots = torch.full((len(slots_of_rows), width), -1, dtype=torch.int32)
    for row, mine in enumerate(slots_of_rows):
        slots[row, : len(mine)] = torch.as_tensor(mine)
    found = reference.sparse_mla_decode(q, cache, slots, softmax_scale=scale)
    is_empty = found.lse.isinf()
    return found.out.masked_fill(is_empty[:, :, None], NAN), (found.lse / math.log(base)).masked_fill(
        is_empty, empty_lse
    )


class SchedMeta:
    """FlashMLA's tile metadata of one set of lengths."""


class FlashMla:
    """``flash_mla``, of three ages: "2025", "2026" and "sgl"."""

    def __init__(self, age):
        self.calls = []
        self._is_old = age == "2025"
        self.get_mla_metadata = self._old_metadata if self._is_old else self._metadata
        self.flash_mla_with_kvcache = {
            "2025": self._with_descale,
            "2026": self._with_sched_meta,
            "sgl": self._with_legacy,
        }[age]

    def _old_metadata(
        self, cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
    ):
        assert num_heads_k == 1
        assert is_fp8_kvcache == (topk is not None) == (num_heads_q is not None)
        self._metadata_of = (cache_seqlens.clone(), num_q_tokens_per_head_k, topk)
        return torch.zeros(132, 8, dtype=torch.int32), torch.zeros(len(cache_seqlens) + 1, dtype=torch.int32)

    def _metadata(self, *args, **kwargs):
        return SchedMeta(), None

    def _with_descale(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
        descale_q=None,
        descale_k=None,
    ):
        lengths, rows, topk = self._metadata_of
        assert torch.equal(lengths, cache_seqlens)
        assert rows == q.shape[1] * q.shape[2]
        assert topk == (None if indices is None else indices.shape[2])
        assert isinstance(num_splits, torch.Tensor)
        return self._attend(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, is_fp8_kvcache, indices
        )

    def _with_sched_meta(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
    ):
        assert isinstance(tile_scheduler_metadata, SchedMeta)
        assert num_splits is None
        return self._attend(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, is_fp8_kvcache, indices
        )

    def _with_legacy(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=None,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
        enable_batch_invariant=False,
        use_legacy=False,
        kv_format=None,
        descale_q=None,
        descale_k=None,
    ):
        assert use_legacy
        assert isinstance(tile_scheduler_metadata, SchedMeta)
        return self._attend(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, is_fp8_kvcache, indices
        )

    def _attend(self, q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal, is_fp8_kvcache, indices):
        batch, rows, heads, _ = q.shape
        assert (rows, head_dim_v, k_cache.shape[2], causal) == (1, 512, 1, False)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        cache, block_size = k_cache.squeeze(2), k_cache.shape[1]
        if indices is None:
            assert not is_fp8_kvcache
            assert k_cache.dtype == torch.bfloat16
            assert block_size == 64
            slots = slots_of_tables(block_table, cache_seqlens, block_size)
        else:
            assert is_fp8_kvcache
            assert k_cache.dtype == torch.uint8
            assert k_cache.shape[3] == 656
            assert heads in (64, 128)
            assert indices.shape[:2] == (batch, 1)
            assert indices.shape[2] % 64 == 0
            assert (indices >= -1).all()
            slots = [row[row >= 0] for row in indices[:, 0]]
        self.calls.append(q.shape)
        out, lse = attend(q.squeeze(1), cache, slots, scale, empty_lse=INF, base=math.e)
        return out.unsqueeze(1), lse.unsqueeze(2)


def slots_of_tables(tables, lengths, block_size):
    assert len(tables) == len(lengths)
    position = [torch.arange(max(0, length)) for length in lengths.tolist()]
    return [table[at // block_size] * block_size + at % block_size for table, at in zip(tables, position, strict=True)]


class _Wrapper:
    """What both ages of ``BatchMLAPagedAttentionWrapper`` do."""

    backends = ()

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        assert float_workspace_buffer.numel() * float_workspace_buffer.element_size() == 128 << 20
        type(self).backends += (backend,)

    def _plan(
        self, csr, *, head_dim_ckv, head_dim_kpe, causal, num_heads, page_size, sm_scale, q_data_type, kv_data_type
    ):
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = csr
        assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, False)
        assert {tensor.dtype for tensor in csr} == {torch.int32}
        assert torch.equal(qo_indptr, torch.arange(len(kv_len_arr) + 1, dtype=torch.int32))
        assert kv_indptr[-1] == len(kv_indices)
        self._heads, self._page_size, self._scale = num_heads, page_size, sm_scale
        self._dtypes = (q_data_type, kv_data_type)
        self._slots = [
            (kv_indices[first:stop, None] * page_size + torch.arange(page_size)).flatten()[:length]
            for first, stop, length in zip(
                kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), kv_len_arr.tolist(), strict=True
            )
        ]

    def _run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        assert (q_nope.dtype, ckv_cache.dtype) == self._dtypes
        assert q_nope.shape[1] == self._heads
        assert ckv_cache.shape[1] == self._page_size
        q, cache = torch.cat([q_nope, q_pe], dim=2), torch.cat([ckv_cache, kpe_cache], dim=2)
        return attend(q, cache, self._slots, self._scale, empty_lse=NAN, base=2)


class OldWrapper(_Wrapper):
    """FlashInfer 0.6."""

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
        self._plan(
            (qo_indptr, kv_indptr, kv_indices, kv_len_arr),
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
    ):
        assert return_lse
        assert not return_lse_base_on_e
        return self._run(q_nope, q_pe, ckv_cache, kpe_cache)


@dataclass
class MLAPlanMetadata:
    """FlashInfer 0.7's form of a plan's tensors."""

    tensors: tuple

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls((qo_indptr, kv_indptr, kv_indices, kv_len_arr))


class NewWrapper(_Wrapper):
    """FlashInfer 0.7.2; the flat forms that it warns about are left out."""

    def plan(
        self,
        *,
        metadata,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
        query_layout="packed",
        kv_cache_layout="packed",
        lse_mode="none",
        output_dtype=None,
        output_scale="none",
        scale_mode="default",
        skip_softmax=False,
        enable_pdl=None,
        use_sinks=False,
    ):
        assert query_layout == kv_cache_layout == "split"
        self._lse_mode = lse_mode
        self._plan(
            metadata.tensors,
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self,
        *,
        query,
        kv_cache,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
    ):
        assert return_lse
        assert self._lse_mode == ("basee" if return_lse_base_on_e else "base2")
        return self._run(*query, *kv_cache)


def trtllm_without_base(
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    sparse_mla_top_k=0,
    out=None,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    sinks=None,
    skip_softmax_threshold_scale_factor=None,
    enable_pdl=None,
    backend="auto",
    is_var_seq=True,
    uses_shared_paged_kv_idx=True,
    lse=None,
    return_lse=False,
):
    """``trtllm_batch_decode_with_kv_cache_mla`` with its LSE but no choice of base."""
    batch, rows, heads, _ = query.shape
    page = kv_cache.shape[1]
    assert (rows, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (1, 128, 512, 64)
    assert (backend, return_lse, sparse_mla_top_k, bmm2_scale) == ("trtllm-gen", True, 0, 1.0)
    assert page in (32, 64)
    assert block_tables.shape[1] % (128 // page) == 0
    assert max_seq_len == block_tables.shape[1] * page
    assert (seq_lens > 0).all()
    assert not workspace_buffer.any()
    slots = slots_of_tables(block_tables, seq_lens, page)
    found, log = attend(query.squeeze(1), kv_cache, slots, bmm1_scale, empty_lse=NAN, base=2)
    return found.view(batch, 1, heads, 512), log


def trtllm_with_base(
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    sparse_mla_top_k=0,
    out=None,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    sinks=None,
    skip_softmax_threshold_scale_factor=None,
    enable_pdl=None,
    backend="auto",
    is_var_seq=True,
    uses_shared_paged_kv_idx=True,
    lse=None,
    return_lse=False,
    cute_dsl_impl="auto",
    kv_scale_format="auto",
    cum_seq_lens_q=None,
    max_q_len=None,
    multi_ctas_kv_counter_buffer=None,
    sparse_mla_top_k_lens=None,
    enable_dcp=False,
    cp_world=1,
    cp_rank=0,
    causal_seqlens_kv_global=None,
    use_fp16_softmax=None,
    return_lse_base=None,
):
    """The same in 0.7.2.post1, which can choose."""
    assert return_lse_base == "base2"
    return trtllm_without_base(
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        backend=backend,
        return_lse=return_lse,
    )


def flashinfer(age):
    """``flashinfer.mla`` of an age, "0.6" or "0.7"."""
    if age == "0.6":
        wrapper = type("BatchMLAPagedAttentionWrapper", (OldWrapper,), {})
        return SimpleNamespace(
            BatchMLAPagedAttentionWrapper=wrapper, trtllm_batch_decode_with_kv_cache_mla=trtllm_without_base
        )
    wrapper = type("BatchMLAPagedAttentionWrapper", (NewWrapper,), {})
    return SimpleNamespace(
        BatchMLAPagedAttentionWrapper=wrapper,
        MLAPlanMetadata=MLAPlanMetadata,
        trtllm_batch_decode_with_kv_cache_mla=trtllm_with_base,
    )
