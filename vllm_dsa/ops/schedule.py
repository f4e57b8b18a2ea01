"""The schedule of a paged-logits launch, by our own kernel or its twin.

The library's own call allocates, runs on one warp and compiles anew for every 32 requests.
"""

import torch

from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities, check_schedule_request
from vllm_dsa.kernels.schedule import launch_schedule
from vllm_dsa.platform import check_current_device
from vllm_dsa.reference.schedule import sm90_schedule, sm100_schedule


def paged_mqa_schedule(
    context_lens: torch.Tensor,
    block_size: int,
    caps: PagedMQALogitsCapabilities,
    *,
    indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divide the splits of a paged-logits launch among the SMs.

    Parameters
    ----------
    context_lens : torch.Tensor
        ``(rows, next_n)`` int32, contiguous; a row's work is that of its last column. Lengths must not be negative
        (not checked).
    block_size : int
        Tokens per page.
    caps : PagedMQALogitsCapabilities
        Decides the number of slots and the split rule (SM100's or SM90's).
    indices : torch.Tensor, optional
        ``(rows,)`` int32 request of each row, for varlen kernels.
    out : torch.Tensor, optional
        ``(at least slots + 1, 2)`` int32 buffer whose first rows receive the schedule.

    Returns
    -------
    torch.Tensor
        ``(slots + 1, 2)`` int32, a view of `out` when given. Bit-equal to what DeepGEMM's own call gives (SM100, and
        SM90 builds with next_n 4; older ones order their runs the other way, and take either).

    Raises
    ------
    ValueError, TypeError
        If an argument is not as above; nothing is written then.
    RuntimeError
        If the tensors are on another CUDA device than the current one.

    Notes
    -----
    On CUDA one launch, no host sync, and with `out` no allocation: graph safe.
    """
    slots = check_schedule_request(context_lens, block_size, caps.num_sms, indices=indices, out=out, caps=caps)
    sm100_rule = uses_sm100_rule(caps)
    if context_lens.is_cuda:
        check_current_device(context_lens.device)
        if out is None:
            out = torch.empty((slots + 1, 2), dtype=torch.int32, device=context_lens.device)
        launch_schedule(context_lens, out[: slots + 1], indices=indices, sm100_rule=sm100_rule)
        return out[: slots + 1]
    if sm100_rule:
        schedule = sm100_schedule(context_lens, slots, indices=indices)
    else:
        schedule = sm90_schedule(context_lens, slots)
    return schedule if out is None else out[: slots + 1].copy_(schedule)


def uses_sm100_rule(caps: PagedMQALogitsCapabilities) -> bool:
    """Whether the kernel cuts (split, query token) pairs (SM100) instead of splits (everything else)."""
    return caps.arch_family == 10
