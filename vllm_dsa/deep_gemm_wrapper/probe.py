"""What the loaded build really takes, found by asking it.

The library checks shapes on the host before it launches anything, so a refusal costs microseconds and leaves the
context healthy; what it accepts runs once on one page, which also compiles what the server will need.
"""

import functools
from dataclasses import dataclass

import torch

from vllm_dsa.deep_gemm_wrapper.builds import DeepGemmUnavailableError, LoadedDeepGemm, load_deep_gemm

PROBED_NEXT_N = (1, 2, 4)
_HEADS, _HEAD_DIM, _PAGE = 64, 128, 64


@dataclass(frozen=True, slots=True)
class ProbedNextN:
    """Query rows per request that the build accepts.

    Attributes
    ----------
    native : frozenset of int
        Accepted with a schedule of some size.
    paired : frozenset of int
        Of these, accepted with one slot for two SMs only.
    """

    native: frozenset[int]
    paired: frozenset[int]


@functools.cache
def probe_next_n(device_index: int, num_sms: int) -> ProbedNextN:
    """Ask the loaded build which next_n its paged kernel takes, once per process, device and SM count.

    Parameters
    ----------
    device_index : int
        CUDA device, the current one.
    num_sms : int
        SMs that the library schedules for.

    Raises
    ------
    DeepGemmUnavailableError
        If the kernel cannot run here at all: nothing is accepted, or the build fails otherwise than by refusing.
    """
    loaded = load_deep_gemm()
    device = torch.device("cuda", device_index)
    full = frozenset(n for n in PROBED_NEXT_N if _accepts(loaded, n, num_sms, device))
    halved = frozenset(n for n in PROBED_NEXT_N if n not in full and _accepts(loaded, n, num_sms // 2, device))
    if not full | halved:
        raise DeepGemmUnavailableError(
            f"{loaded.build.provider} {loaded.build.version} refuses next_n {PROBED_NEXT_N} with schedules for "
            f"{num_sms} and {num_sms // 2} slots on {device}: see docs/deepgemm_builds.md"
        )
    return ProbedNextN(native=full | halved, paired=halved)


def _accepts(loaded: LoadedDeepGemm, next_n: int, num_slots: int, device: torch.device) -> bool:
    # One token in one page: split 0 of request 0 for the first slot, nothing for the others.
    schedule = torch.tensor([[0, 0]] + [[1, 0]] * num_slots, dtype=torch.int32, device=device)
    try:
        loaded.function("fp8_fp4_paged_mqa_logits")(
            q=(torch.zeros(1, next_n, _HEADS, _HEAD_DIM, dtype=torch.float8_e4m3fn, device=device), None),
            kv_cache=torch.zeros(1, _PAGE, 1, _HEAD_DIM + 4, dtype=torch.uint8, device=device),
            weights=torch.zeros(next_n, _HEADS, device=device),
            context_lens=torch.ones(1, next_n, dtype=torch.int32, device=device),
            block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
            schedule_meta=schedule,
            max_context_len=_PAGE,
        )
    except RuntimeError as error:
        if _is_refusal(error):
            return False
        raise DeepGemmUnavailableError(
            f"{loaded.build.provider} {loaded.build.version} cannot run its paged MQA logits on {device}: {error}"
        ) from error
    schedule.cpu()  # waits, so that a launch that fails fails here
    return True


def _is_refusal(error: RuntimeError) -> bool:
    """Tell a refused shape from a compiler that is missing, which asserts too."""
    text = str(error)
    return "ssert" in text and "csrc/jit/" not in text
