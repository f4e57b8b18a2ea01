"""The schedule of a paged-logits launch, from the loaded DeepGEMM or from its exact twin."""

import torch

from vllm_dsa.deep_gemm_wrapper import (
    PagedMQALogitsCapabilities,
    check_schedule_request,
    get_paged_mqa_logits_metadata,
)
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
        ``(slots + 1, 2)`` int32, a view of `out` when given. On CUDA with a DeepGEMM build the library computes it,
        elsewhere the reference does; the cut of either suits every build.

    Raises
    ------
    ValueError, TypeError
        If an argument is not as above; nothing is written then.
    """
    slots = check_schedule_request(context_lens, block_size, caps.num_sms, indices=indices, out=out, caps=caps)
    if context_lens.is_cuda and caps.provider is not None and len(context_lens):
        return get_paged_mqa_logits_metadata(
            context_lens, block_size, caps.num_sms, indices=indices, out=out, caps=caps
        )
    if caps.arch_family == 10:
        schedule = sm100_schedule(context_lens, slots, indices=indices)
    else:
        schedule = sm90_schedule(context_lens, slots)
    return schedule if out is None else out[: slots + 1].copy_(schedule)
