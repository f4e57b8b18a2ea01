"""Public operators: MLA decode attention over the paged latent cache, dense and sparse, with its log-sum-exp."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.kernels.mla_combine import warmup_mla_combine
from vllm_dsa.kernels.mla_decode import ALIGNMENT, launch_mla_decode, launch_sparse_mla_decode
from vllm_dsa.kernels.mla_tiles import workspace_floats
from vllm_dsa.ops._checks import check_contiguous, check_int, check_pages, check_tensor, check_values
from vllm_dsa.ops.mla_backend import MlaBackend, resolve_mla_backend
from vllm_dsa.ops.mla_flash_mla import flash_mla_decode, sparse_flash_mla_decode
from vllm_dsa.ops.mla_flashinfer import flashinfer_decode, sparse_flashinfer_decode
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference import FP8_LATENT_BYTES, KV_LORA_RANK, LATENT_DIM

_INT32 = (torch.int32,)
_ROW_WIDTHS = {torch.bfloat16: LATENT_DIM, torch.uint8: FP8_LATENT_BYTES}
# Strides of q in elements: a kernel is compiled for multiples of it.
_Q_STRIDE = 16


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    softmax_scale: float,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    backend: MlaBackend | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> DecodeAttnResult:
    """Attend with each query row to the first tokens of its request.

    ``score[row, h, t] = softmax_scale * q[row, h] . latent[t]`` for ``t`` below the row's length, and ``out[row, h] =
    sum_t softmax(score)[t] * latent[t, :512]``: the latent is key and, but for its rotated part, value.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, 576) bfloat16, last stride 1, any device: the query that took in the up-projection of the keys (512),
        then its rotated part (64). Rows of a request lie packed, one request after the other.
    cache : torch.Tensor
        (num_blocks, block_size, 576) bfloat16, or (num_blocks, block_size, 656) uint8 (``fp8_ds_mla``, see
        `pack_fp8_latent`), same device: rows of a page dense, pages any distance apart.
    block_table : torch.Tensor
        (R, W) int32 page ids, last stride 1, same device. Columns past a request's longest row are not read.
    context_lens : torch.Tensor
        (T,) int32, contiguous, same device: tokens that each row sees, in any order within a request. Less than 1 is
        nothing; past ``W * block_size`` is cut. Under DCP: the row's own share on this rank.
    softmax_scale : float
        Of the scores; for DeepSeek-V3.2 ``192 ** -0.5`` times the square of YaRN's mscale.
    query_start_loc : torch.Tensor, optional
        (R + 1,) int32, contiguous, same device: first row of each request; any depth up to `max_query_len`, 0 included.
        Rows past its end are no request's. Without it every request has ``T / R`` rows.
    max_query_len : int, optional
        Depth of the deepest request that a call, or a replay of it, may have: with `query_start_loc`, and only then.
    backend : MlaBackend, optional
        Who computes; by default as ``VDSA_MLA_BACKEND`` says.
    workspace : torch.Tensor, optional
        From `mla_decode_workspace`, for our kernel; calls that share it must not overlap. Allocated by default.
    out, lse : torch.Tensor, optional
        (T, H, 512) bfloat16 and (T, H) float32, contiguous, same device: overwritten, every element.

    Returns
    -------
    DecodeAttnResult
        `out` and `lse`, with the base of who computed: e of our kernel, of the twin and of FlashMLA, 2 of FlashInfer. A
        row that sees nothing, or is no request's, is exactly 0 and -inf, whatever the memory holds.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride, alignment, device or range that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a start, a length or a page id that is read is out of range. Nothing is written
        then.
    RuntimeError
        If the tensors are on another CUDA device than the current one.
    NotImplementedError
        If the backend does not take the arguments. Nothing is written then.
    ImportError
        If the backend is a library that is not there, or lacks a keyword. Nothing is written then.

    Notes
    -----
    Not checked otherwise: starts, depths, lengths and page ids. Our kernel: two launches (one where the requests alone
    fill the GPU), no host sync, and with `workspace`, `out` and `lse` no allocation: graph safe once
    `warmup_mla_decode` or a first call has compiled it, and a captured call follows lengths, pages and starts of as
    many rows and requests.
    Rows of a request that lie in one program (64 rows times heads) share one read of its latents; so a NaN in a token
    that only one of them sees reaches all of these. A result's bits depend on the shapes of the batch. The twin and the
    libraries allocate; the twin syncs, and of FlashInfer see `vllm_dsa.ops.mla_flashinfer`. Source:
    `vllm_dsa.kernels.mla_decode`, and for the twin `vllm_dsa.reference.mla_decode`.
    """
    num_tokens, num_heads = _check_inputs(q, cache, softmax_scale)
    device, block_size = q.device, cache.shape[1]
    check_tensor("block_table", block_table, dtypes=_INT32, shape=(None, None), device=device)
    check_tensor("context_lens", context_lens, dtypes=_INT32, shape=(num_tokens,), device=device)
    check_contiguous(context_lens=context_lens)
    depth = _check_depth(num_tokens, block_table, query_start_loc, max_query_len)
    _check_results(out, lse, num_tokens, num_heads, device)
    backend = _check_backend(backend, q, cache, workspace)
    if envs.get("VDSA_VALIDATE") and num_tokens:
        _check_dense_values(context_lens, block_table, query_start_loc, depth, block_size, cache.shape[0])
    if backend is MlaBackend.TRITON:
        out, lse, workspace = _results(q, out, lse, workspace)
        if num_tokens:
            launch_mla_decode(
                *(q, cache, block_table, context_lens, out, lse, workspace),
                softmax_scale=softmax_scale,
                max_query_len=depth,
                query_start_loc=query_start_loc,
            )
        return DecodeAttnResult(out, lse, LseBase.E)
    run = {
        MlaBackend.REFERENCE: reference.mla_decode,
        MlaBackend.FLASH_MLA: flash_mla_decode,
        MlaBackend.FLASHINFER: flashinfer_decode,
    }[backend if num_tokens else MlaBackend.REFERENCE]
    found = run(q, cache, block_table, context_lens, softmax_scale=softmax_scale, query_start_loc=query_start_loc)
    return _copied(found, out, lse)


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lens: torch.Tensor | None = None,
    backend: MlaBackend | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> DecodeAttnResult:
    """Attend with each query row to chosen tokens.

    Parameters
    ----------
    q, cache, softmax_scale, backend, workspace, out, lse
        As in `mla_decode`.
    slots : torch.Tensor
        (T, K) int32, last stride 1, same device: the tokens' places in the cache, page times block_size plus place in
        the page, as `topk_indices` returns them with a `SlotMap`. Less than 0, anywhere in a row, is none. A slot that
        comes twice counts twice.
    topk_lens : torch.Tensor, optional
        (T,) int32, contiguous, same device: leading columns of each row that are looked at; less than 1 is none, past K
        is cut. By default all; the rows' context lengths spare a short row its tail of -1.

    Returns
    -------
    DecodeAttnResult
        As of `mla_decode`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, NotImplementedError, ImportError
        As `mla_decode`; with ``VDSA_VALIDATE=1`` also if a slot is past the cache's end.

    Notes
    -----
    Not checked otherwise: slots. Nothing that a row does not name reaches it. Otherwise as `mla_decode`.
    """
    num_tokens, num_heads = _check_inputs(q, cache, softmax_scale)
    device = q.device
    check_tensor("slots", slots, dtypes=_INT32, shape=(num_tokens, None), device=device)
    if topk_lens is not None:
        check_tensor("topk_lens", topk_lens, dtypes=_INT32, shape=(num_tokens,), device=device)
        check_contiguous(topk_lens=topk_lens)
    _check_results(out, lse, num_tokens, num_heads, device)
    backend = _check_backend(backend, q, cache, workspace)
    if envs.get("VDSA_VALIDATE"):
        num_slots = cache.shape[0] * cache.shape[1]
        check_values("slots", slots, slots >= num_slots, f"below {num_slots}")
    if backend is MlaBackend.TRITON:
        out, lse, workspace = _results(q, out, lse, workspace)
        if num_tokens:
            launch_sparse_mla_decode(
                *(q, cache, slots, out, lse, workspace), softmax_scale=softmax_scale, topk_lens=topk_lens
            )
        return DecodeAttnResult(out, lse, LseBase.E)
    run = {
        MlaBackend.REFERENCE: reference.sparse_mla_decode,
        MlaBackend.FLASH_MLA: sparse_flash_mla_decode,
        MlaBackend.FLASHINFER: sparse_flashinfer_decode,
    }[backend if num_tokens else MlaBackend.REFERENCE]
    return _copied(run(q, cache, slots, softmax_scale=softmax_scale, topk_lens=topk_lens), out, lse)


def mla_decode_workspace(device: torch.device) -> torch.Tensor:
    """Return what our kernel needs to hold partial results, for any call on a device.

    Parameters
    ----------
    device : torch.device

    Returns
    -------
    torch.Tensor
        Contiguous float32; 66 MiB on an H200. Its contents do not matter. Layers and steps of one stream can share it.
    """
    return torch.empty(workspace_floats(device), dtype=torch.float32, device=device)


def warmup_mla_decode(cache: torch.Tensor, num_heads: int, *, max_query_len: int = 1, is_ragged: bool = False) -> None:
    """Compile what `mla_decode` over a cache needs, before a capture or a step does.

    Parameters
    ----------
    cache : torch.Tensor
        The cache to come, or one of the same dtype, block_size and page stride. Not read.
    num_heads : int
    max_query_len : int
        Rows of a request, or with `query_start_loc` its limit.
    is_ragged : bool
        Whether `query_start_loc` will be given.

    Notes
    -----
    Does nothing where the cache is not on a CUDA device or ``VDSA_MLA_BACKEND`` names another backend.
    """
    if resolve_mla_backend(None, cache.device) is not MlaBackend.TRITON:
        return
    q, out, lse, zeros, workspace = _warmup_tensors(cache, max_query_len, num_heads)
    starts = zeros.new_zeros(2) if is_ragged else None
    for num_splits in (1, 2):
        launch_mla_decode(
            *(q, cache, zeros.new_zeros(1, 1), zeros, out, lse, workspace),
            softmax_scale=1.0,
            max_query_len=max_query_len,
            query_start_loc=starts,
            num_splits=num_splits,
        )


def warmup_sparse_mla_decode(cache: torch.Tensor, num_heads: int, *, has_topk_lens: bool = False) -> None:
    """Compile what `sparse_mla_decode` over a cache needs, before a capture or a step does.

    Parameters
    ----------
    cache, num_heads
        As in `warmup_mla_decode`.
    has_topk_lens : bool
        Whether `topk_lens` will be given.

    Notes
    -----
    As `warmup_mla_decode`.
    """
    if resolve_mla_backend(None, cache.device) is not MlaBackend.TRITON:
        return
    q, out, lse, zeros, workspace = _warmup_tensors(cache, 1, num_heads)
    for num_splits in (1, 2):
        launch_sparse_mla_decode(
            *(q, cache, zeros.new_full((1, 1), -1), out, lse, workspace),
            softmax_scale=1.0,
            topk_lens=zeros if has_topk_lens else None,
            num_splits=num_splits,
        )


def _warmup_tensors(cache: torch.Tensor, num_tokens: int, num_heads: int) -> tuple[torch.Tensor, ...]:
    device = cache.device
    check_current_device(device)
    warmup_mla_combine(device)
    q = torch.zeros(num_tokens, num_heads, LATENT_DIM, dtype=torch.bfloat16, device=device)
    out = torch.empty(num_tokens, num_heads, KV_LORA_RANK, dtype=torch.bfloat16, device=device)
    lse = torch.empty(num_tokens, num_heads, device=device)
    workspace = torch.empty(2 * num_tokens * num_heads * (KV_LORA_RANK + 1), device=device)
    return q, out, lse, torch.zeros(num_tokens, dtype=torch.int32, device=device), workspace


def _check_inputs(q: torch.Tensor, cache: torch.Tensor, softmax_scale: float) -> tuple[int, int]:
    """Check q, the cache and the scale; return tokens and heads."""
    check_tensor("q", q, dtypes=(torch.bfloat16,), shape=(None, None, LATENT_DIM))
    num_tokens, num_heads, _ = q.shape
    if num_heads == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; allowed: at least one head")
    check_tensor("cache", cache, dtypes=tuple(_ROW_WIDTHS), shape=(None, None, None), device=q.device)
    num_blocks, block_size, width = cache.shape
    row = _ROW_WIDTHS[cache.dtype]
    if width != row or block_size == 0:
        raise ValueError(f"cache has shape {tuple(cache.shape)}; allowed for {cache.dtype}: (any, at least 1, {row})")
    if (block_size > 1 and cache.stride(1) != row) or (num_blocks > 1 and cache.stride(0) < block_size * row):
        raise ValueError(
            f"cache has strides {cache.stride()}; allowed: (at least {block_size * row}, {row}, 1), the "
            "rows of a page side by side"
        )
    if not isinstance(softmax_scale, float):
        raise TypeError(f"softmax_scale is {softmax_scale!r}; allowed: a float")
    return num_tokens, num_heads


def _check_depth(
    num_tokens: int, block_table: torch.Tensor, query_start_loc: torch.Tensor | None, max_query_len: int | None
) -> int:
    """Check how rows belong to requests; return the rows of the deepest request."""
    num_reqs = block_table.shape[0]
    if query_start_loc is None:
        if max_query_len is not None:
            raise ValueError(f"max_query_len is {max_query_len} without query_start_loc; allowed: None")
        if num_tokens and (num_reqs == 0 or num_tokens % num_reqs):
            raise ValueError(f"q has {num_tokens} rows; allowed: multiples of {num_reqs}, the requests of block_table")
        return num_tokens // max(1, num_reqs)
    check_tensor("query_start_loc", query_start_loc, dtypes=_INT32, shape=(num_reqs + 1,), device=block_table.device)
    check_contiguous(query_start_loc=query_start_loc)
    if max_query_len is None:
        raise ValueError("max_query_len is None with query_start_loc; allowed: an int of at least 1")
    check_int("max_query_len", max_query_len, at_least=1)
    return max_query_len


def _check_results(
    out: torch.Tensor | None, lse: torch.Tensor | None, num_tokens: int, num_heads: int, device: torch.device
) -> None:
    if out is not None:
        shape = (num_tokens, num_heads, KV_LORA_RANK)
        check_tensor("out", out, dtypes=(torch.bfloat16,), shape=shape, device=device)
        check_contiguous(out=out)
    if lse is not None:
        check_tensor("lse", lse, dtypes=(torch.float32,), shape=(num_tokens, num_heads), device=device)
        check_contiguous(lse=lse)


def _check_backend(
    backend: MlaBackend | None, q: torch.Tensor, cache: torch.Tensor, workspace: torch.Tensor | None
) -> MlaBackend:
    """Choose who computes, and check what only our kernel asks for."""
    backend = resolve_mla_backend(backend, q.device)
    if workspace is not None:
        check_tensor("workspace", workspace, dtypes=(torch.float32,), shape=(None,), device=q.device)
        if workspace.numel() < workspace_floats(q.device):
            needed = workspace_floats(q.device)
            raise ValueError(f"workspace has {workspace.numel()} elements; allowed: at least {needed}")
    if q.is_cuda:
        check_current_device(q.device)
    if backend is MlaBackend.TRITON:
        page_bytes = cache.stride(0) * cache.element_size()
        if q.data_ptr() % ALIGNMENT or cache.data_ptr() % ALIGNMENT or page_bytes % ALIGNMENT:
            raise ValueError(
                f"q starts at {q.data_ptr():#x}, cache at {cache.data_ptr():#x} with pages {page_bytes} bytes apart; "
                f"allowed: multiples of {ALIGNMENT}"
            )
        if q.stride(0) % _Q_STRIDE or q.stride(1) % _Q_STRIDE:
            raise ValueError(f"q has strides {q.stride()}; allowed: multiples of {_Q_STRIDE}, then 1")
    return backend


def _check_dense_values(
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    depth: int,
    block_size: int,
    num_blocks: int,
) -> None:
    num_reqs, width = block_table.shape
    capacity = width * block_size
    check_values("context_lens", context_lens, context_lens > capacity, f"up to {capacity}, what block_table holds")
    if query_start_loc is None:
        longest = context_lens.view(num_reqs, depth).amax(dim=1)
    else:
        depths = query_start_loc.diff()
        allowed = f"ascending by up to {depth} from 0, to at most {len(context_lens)}"
        wrong = (query_start_loc < 0) | (query_start_loc > len(context_lens))
        wrong[0] |= query_start_loc[0] != 0
        wrong[1:] |= (depths < 0) | (depths > depth)
        check_values("query_start_loc", query_start_loc, wrong, allowed)
        request = torch.arange(num_reqs, device=depths.device).repeat_interleave(depths)
        longest = torch.zeros_like(depths).scatter_reduce_(0, request, context_lens[: len(request)], "amax")
    check_pages(block_table, longest, block_size, num_blocks)


def _results(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if out is None:
        out = q.new_empty((*q.shape[:2], KV_LORA_RANK))
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return out, lse, mla_decode_workspace(q.device) if workspace is None else workspace


def _copied(found: DecodeAttnResult, out: torch.Tensor | None, lse: torch.Tensor | None) -> DecodeAttnResult:
    return DecodeAttnResult(
        out=found.out if out is None else out.copy_(found.out),
        lse=found.lse if lse is None else lse.copy_(found.lse),
        base=found.base,
    )
