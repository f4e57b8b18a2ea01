"""How many draft tokens are proposed and how many of them are right: a seeded model of the drafter."""

from vllm_dsa.runner.splitmix import extend_hash

_DRAW_SALT = 0xACCE
_LENGTH_SALT = 0xD4AF
_GIVE_UP_SHARE = 0.1


class AcceptanceModel:
    """Drafts proposed and accepted, drawn for each (seed, request, step).

    A draw depends on nothing else: not on the batch, not on the order of the calls, not on the process. One
    draw serves all limits, so a smaller limit gives ``min`` of the unlimited outcome and that limit.

    Parameters
    ----------
    rate : float
        Probability in ``[0, 1]`` that a draft is right, given that those before it are.
    seed : int
        Any integer; taken modulo ``2**64``.

    Raises
    ------
    ValueError
        When ``rate`` is outside ``[0, 1]`` or NaN.
    """

    __slots__ = ("_continue_rate", "_draw_state", "_length_state", "rate", "seed")

    def __init__(self, rate: float, seed: int) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rate must be in [0, 1], got {rate}")
        self.rate = rate
        self.seed = seed
        self._continue_rate = 1.0 - _GIVE_UP_SHARE * (1.0 - rate)
        self._draw_state = extend_hash(_DRAW_SALT, seed)
        self._length_state = extend_hash(_LENGTH_SALT, seed)

    def draw(self, request_index: int, step_of_request: int, num_drafts: int) -> int:
        """Return the number of accepted drafts: the right ones before the first wrong one.

        Parameters
        ----------
        request_index : int
            Identity of the request.
        step_of_request : int
            Decode steps of that request before this one.
        num_drafts : int
            Drafts fed, at least 0.

        Returns
        -------
        int
            In ``[0, num_drafts]``.

        Raises
        ------
        ValueError
            When ``num_drafts`` is negative.
        """
        _check_count("num_drafts", num_drafts)
        return _run_length(_uniform(self._draw_state, request_index, step_of_request), self.rate, num_drafts)

    def draft_length(self, request_index: int, step_of_request: int, max_drafts: int) -> int:
        """Return how many drafts the drafter proposes before it is too unsure to go on.

        It always proposes the first, and after each draft it gives up with probability ``(1 - rate) * 0.1``;
        independent of :meth:`draw`.

        Parameters
        ----------
        request_index, step_of_request : int
            As in :meth:`draw`.
        max_drafts : int
            Drafts allowed, at least 0.

        Returns
        -------
        int
            In ``[1, max_drafts]``, or 0 when ``max_drafts`` is 0.

        Raises
        ------
        ValueError
            When ``max_drafts`` is negative.
        """
        _check_count("max_drafts", max_drafts)
        if max_drafts == 0:
            return 0
        uniform = _uniform(self._length_state, request_index, step_of_request)
        return 1 + _run_length(uniform, self._continue_rate, max_drafts - 1)


def _check_count(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


def _uniform(state: int, request_index: int, step_of_request: int) -> float:
    # One word for both numbers halves the hashing, which is most of the cost of a draw. Keep 53 bits, so that the
    # quotient is exact and below 1.
    return (extend_hash(state, (request_index << 32) + step_of_request) >> 11) / (1 << 53)


def _run_length(uniform: float, rate: float, limit: int) -> int:
    # P(at least n successes in a row) = rate**n, so one uniform number gives the whole run.
    length = 0
    threshold = rate
    while length < limit and uniform < threshold:
        length += 1
        threshold *= rate
    return length
