"""The two questions every engine asks: is this next_n native, and how many slots has its schedule."""

from vllm_dsa.deep_gemm_wrapper.capabilities import PagedMQALogitsCapabilities, resolve_capabilities


def native_next_n_supported(next_n: int, caps: PagedMQALogitsCapabilities | None = None) -> bool:
    """Whether the paged kernel takes `next_n` query rows per request in one launch.

    Parameters
    ----------
    next_n : int
        Query rows per request, ``1 + num_speculative_tokens``.
    caps : PagedMQALogitsCapabilities, optional
        What to ask; by default the loaded DeepGEMM on the current device.

    Raises
    ------
    ValueError
        If `next_n` is not a positive whole number.
    """
    check_next_n(next_n)
    caps = resolve_capabilities() if caps is None else caps
    if caps.native_next_n is not None and next_n not in caps.native_next_n:
        return False
    # Half of an odd SM count would leave one SM without a partner and the library's row check off by one.
    return not (next_n in caps.paired_next_n and caps.num_sms % 2)


def paged_mqa_logits_schedule_slots(num_sms: int, next_n: int, caps: PagedMQALogitsCapabilities | None = None) -> int:
    """Return how many slots the schedule of a paged-logits launch has; its tensor has one row more.

    Parameters
    ----------
    num_sms : int
        Streaming multiprocessors, never halved by the caller.
    next_n : int
        Columns of the 2-D ``context_lens`` of the launch.
    caps : PagedMQALogitsCapabilities, optional
        By default the loaded DeepGEMM on the current device.

    Raises
    ------
    ValueError
        If `num_sms` or `next_n` is not a positive whole number, or the launch pairs SMs and `num_sms` is odd.
    """
    check_next_n(next_n)
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 1:
        raise ValueError(f"num_sms must be a positive whole number, got {num_sms!r}")
    caps = resolve_capabilities() if caps is None else caps
    if next_n not in caps.paired_next_n:
        return num_sms
    if num_sms % 2:
        raise ValueError(
            f"num_sms must be even for next_n {next_n}, which runs on pairs of SMs, got {num_sms}: "
            "group the rows by a smaller native next_n"
        )
    return num_sms // 2


def check_next_n(next_n: int) -> None:
    """Raise ``ValueError`` unless `next_n` is a positive whole number."""
    if isinstance(next_n, bool) or not isinstance(next_n, int) or next_n < 1:
        raise ValueError(f"next_n must be a positive whole number, got {next_n!r}")
