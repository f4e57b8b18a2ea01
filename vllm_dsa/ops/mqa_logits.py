"""Public operator: indexer logits of prefill."""

import torch

from vllm_dsa import envs, reference
from vllm_dsa.ops._checks import FP8_DTYPES, check_tensor, check_values


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
) -> torch.Tensor:
    """Score every token of each query's window ``[row_starts, row_ends)``.

    ``logit[i, t] = k_scale[t] * sum_h relu(q[i, h] . k[t]) * weights[i, h]``.

    Parameters
    ----------
    q : torch.Tensor
        (T, H, D) float8_e4m3fn, last stride 1, any device, see `fold_q`.
    k : torch.Tensor
        (N, D) float8_e4m3fn, last stride 1, same device: the K of all requests, one after the other.
    k_scale : torch.Tensor
        (N,) float32, same device.
    weights : torch.Tensor
        (T, H) float32, same device, folded.
    row_starts, row_ends : torch.Tensor
        (T,) int32, same device: tokens of `k`. A window with ``end <= start`` is empty.

    Returns
    -------
    torch.Tensor
        (T, N) float32, -inf outside the window.

    Raises
    ------
    TypeError, ValueError
        If an argument has a type, dtype, shape, stride or device that is not allowed; with
        ``VDSA_VALIDATE=1`` also if a bound is not within 0 to N.

    Notes
    -----
    Not checked otherwise: the bounds, which are clipped. The torch backend reads them on the host, so it is
    not capturable in a CUDA graph. Source: see `vllm_dsa.reference.mqa_logits`.
    """
    check_tensor("q", q, dtypes=FP8_DTYPES, shape=(None, None, None))
    num_tokens, num_heads, head_dim = q.shape
    device = q.device
    check_tensor("k", k, dtypes=FP8_DTYPES, shape=(None, head_dim), device=device)
    num_kv = k.shape[0]
    check_tensor("k_scale", k_scale, dtypes=(torch.float32,), shape=(num_kv,), device=device)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(num_tokens, num_heads), device=device)
    check_tensor("row_starts", row_starts, dtypes=(torch.int32,), shape=(num_tokens,), device=device)
    check_tensor("row_ends", row_ends, dtypes=(torch.int32,), shape=(num_tokens,), device=device)
    if num_tokens == 0 or num_kv == 0:
        return q.new_empty((num_tokens, num_kv), dtype=torch.float32)
    if envs.get("VDSA_VALIDATE"):
        for name, bounds in (("row_starts", row_starts), ("row_ends", row_ends)):
            check_values(name, bounds, (bounds < 0) | (bounds > num_kv), f"0 to {num_kv}")
    return reference.mqa_logits(q, k, k_scale, weights, row_starts, row_ends)
