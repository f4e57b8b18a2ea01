"""Merging decode attention over the ranks of a DCP group: every rank has attended to its own tokens."""

import math

import torch
import torch.distributed as dist

from vllm_dsa.attn_result import DecodeAttnResult, LseBase
from vllm_dsa.context_parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    size_and_rank,
)
from vllm_dsa.context_parallel.merge_buffers import MergeBuffers, MergeMethod, Messages
from vllm_dsa.kernels.merge_lse import launch_combine_shards, launch_pack_shard, launch_scale_shard
from vllm_dsa.ops._checks import check_enum
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference.merge_lse import merge_lse_reference, scale_shard

_NATURAL_OF = {LseBase.E: 1.0, LseBase.TWO: math.log(2)}


def merge_lse(
    result: DecodeAttnResult,
    group: dist.ProcessGroup | None = None,
    *,
    method: MergeMethod = MergeMethod.REDUCE_SCATTER,
    buffers: MergeBuffers | None = None,
) -> DecodeAttnResult:
    """Merge this rank's attention over its tokens with the other ranks' into attention over all tokens.

    Parameters
    ----------
    result : DecodeAttnResult
        This rank's: ``(tokens, heads, v_dim)``, of one shape, dtype and order of rows on every rank, for all query
        heads of the group. Where this rank has no tokens of a row, its LSE is an infinity and its output anything.
        Each rank may state a base of its own.
    group : torch.distributed.ProcessGroup, optional
        The DCP group, of any size; by default all processes.
    method : MergeMethod
        The same on every rank.
    buffers : MergeBuffers, optional
        From `MergeBuffers.allocate` for this method, size, dtype and device; otherwise the call allocates.

    Returns
    -------
    DecodeAttnResult
        Natural (`LseBase.E`). With ALL_REDUCE all heads; otherwise rank r's share ``[r * h, (r + 1) * h)`` with
        ``h = heads / size``. A row that is empty on every rank is ``(0, -inf)``. Views of the buffers, which the next
        merge with them overwrites; `result` is never written.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type or a value that is not allowed. Nothing has been sent then, and the other ranks, if
        theirs were allowed, wait for this one.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    Every rank must call it, also one without any token; with no rows at all (on every rank) nothing is sent. Not
    checked: that the ranks agree, and values. NaN in an LSE, or in the output of a shard that has a weight, makes that
    row NaN. An LSE is sent as natural, so bases may differ between ranks and calls.

    Weights are float32. REDUCE_SCATTER and ALL_REDUCE round the weighted outputs to their dtype before the sum and in
    it; ALL_TO_ALL sums in float32 and rounds once. Every rank of an ALL_REDUCE has the same bits if the backend's
    all-reduce promises it.

    On CUDA one launch and two collectives (and one more launch where the LSE is not natural or not contiguous), or two
    launches and one collective for ALL_TO_ALL. With `buffers` there is no allocation and no host sync: graph safe with
    NCCL once a first call has compiled the kernels and set up the group. On other devices the float64 twins compute.
    Source: see `vllm_dsa.reference.merge_lse`.
    """
    if not isinstance(result, DecodeAttnResult):
        raise TypeError(f"result is of type {type(result).__name__}; allowed: DecodeAttnResult")
    check_enum("method", method, MergeMethod)
    size, rank = size_and_rank(group)
    if buffers is None:
        buffers = _buffers_for(result, method, size)
    else:
        _check_buffers(buffers, result, method, size)
    if result.out.is_cuda:
        check_current_device(result.out.device)
    merged = buffers.merged(len(result.out))
    if len(result.out) == 0:
        return merged
    if method is MergeMethod.ALL_TO_ALL:
        _exchange(result, group, buffers, merged)
    else:
        _gather_and_sum(result, group, rank, buffers, merged)
    return merged


def _buffers_for(result: DecodeAttnResult, method: MergeMethod, size: int) -> MergeBuffers:
    num_tokens, num_heads, v_dim = result.out.shape
    return MergeBuffers.allocate(
        method,
        size,
        max_tokens=max(num_tokens, 1),
        num_heads=num_heads,
        v_dim=v_dim,
        dtype=result.out.dtype,
        device=result.out.device,
    )


def _check_buffers(buffers: MergeBuffers, result: DecodeAttnResult, method: MergeMethod, size: int) -> None:
    num_tokens, num_heads, v_dim = result.out.shape
    facts = {
        "method": (method, buffers.method),
        "the group's size": (size, buffers.size),
        "result's number of heads": (num_heads, buffers.num_heads),
        "result's v_dim": (v_dim, buffers.v_dim),
        "result's dtype": (result.out.dtype, buffers.dtype),
        "result's device": (result.out.device, buffers.out.device),
    }
    for name, (value, allowed) in facts.items():
        if value != allowed:
            raise ValueError(f"{name} is {value}; allowed: {allowed}, for which buffers were allocated")
    if num_tokens > buffers.max_tokens:
        raise ValueError(f"result has {num_tokens} tokens; allowed: up to {buffers.max_tokens}, max_tokens of buffers")


def _gather_and_sum(
    result: DecodeAttnResult,
    group: dist.ProcessGroup | None,
    rank: int,
    buffers: MergeBuffers,
    merged: DecodeAttnResult,
) -> None:
    num_tokens = len(result.out)
    lse, lses = buffers.gathered_lses(num_tokens)
    scaled = buffers.scaled_parts(num_tokens)
    all_gather(lses, _natural_lse(result, lse), group)
    if buffers.method is MergeMethod.REDUCE_SCATTER:
        _scale(result.out, lses, rank, scaled, merged.lse, part=rank)
        reduce_scatter(merged.out, scaled, group)
    else:
        _scale(result.out, lses, rank, scaled, merged.lse, part=0)
        all_reduce(merged.out, group)


def _exchange(
    result: DecodeAttnResult, group: dist.ProcessGroup | None, buffers: MergeBuffers, merged: DecodeAttnResult
) -> None:
    sent, received = buffers.messages(len(result.out))
    _pack(result, sent)
    all_to_all(received.data, sent.data, group)
    _combine(received, merged)


def _natural_lse(result: DecodeAttnResult, memory: torch.Tensor) -> torch.Tensor:
    """Return the natural LSE, contiguous: the result's own where it is that already."""
    if result.base is LseBase.E and result.lse.is_contiguous():
        return result.lse
    return torch.mul(result.lse, _NATURAL_OF[result.base], out=memory)


def _runs_triton(device: torch.device) -> bool:
    return device.type == "cuda"


def _scale(
    out: torch.Tensor, lses: torch.Tensor, shard: int, scaled: torch.Tensor, lse: torch.Tensor, *, part: int
) -> None:
    if _runs_triton(out.device):
        launch_scale_shard(out, lses, shard, scaled, lse, part=part)
        return
    exact, exact_lse = scale_shard(out, lses, shard)
    scaled.copy_(_by_part(exact, len(scaled)))
    lse.copy_(_by_part(exact_lse, len(scaled))[part])


def _pack(result: DecodeAttnResult, sent: Messages) -> None:
    to_natural = _NATURAL_OF[result.base]
    if _runs_triton(result.out.device):
        launch_pack_shard(result.out, result.lse, sent.outs, sent.lses, to_natural=to_natural)
        return
    sent.outs.copy_(_by_part(result.out, len(sent.outs)))
    sent.lses.copy_(_by_part(result.lse * to_natural, len(sent.lses)))


def _combine(received: Messages, merged: DecodeAttnResult) -> None:
    if _runs_triton(merged.out.device):
        launch_combine_shards(received.outs, received.lses, merged.out, merged.lse)
        return
    shards = zip(received.outs, received.lses, strict=True)
    out, lse = merge_lse_reference([DecodeAttnResult(out, lse, LseBase.E) for out, lse in shards])
    merged.out.copy_(out)
    merged.lse.copy_(lse)


def _by_part(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """``(P, T, H / P, ...)`` of ``(T, H, ...)``."""
    num_tokens, num_heads, *rest = tensor.shape
    return tensor.reshape(num_tokens, parts, num_heads // parts, *rest).transpose(0, 1)
