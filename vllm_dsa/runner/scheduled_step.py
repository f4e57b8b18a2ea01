"""What the scheduler says about a step: before it runs, and after."""

from dataclasses import dataclass

from vllm_dsa.runner.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledDecode:
    """A decode: the token sampled last and the drafts after it.

    Attributes
    ----------
    request : Request
        The request.
    depth : int
        Query rows: 1 plus the drafts.
    start : int
        Position of the first row, ``num_tokens - 1``.
    """

    request: Request
    depth: int
    start: int

    @property
    def seq_len(self) -> int:
        """Tokens in the cache once the rows are written; what the last row may look at."""
        return self.start + self.depth


@dataclass(frozen=True, slots=True)
class ScheduledPrefill:
    """A chunk of prefill: the tokens at positions ``start .. stop - 1``.

    Attributes
    ----------
    request : Request
        The request.
    start, stop : int
        Positions of the chunk.
    is_last : bool
        Whether the chunk reaches the last known token, so that the step samples a token.
    """

    request: Request
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What runs in a step, oldest request first.

    Attributes
    ----------
    decodes : tuple of ScheduledDecode
        The decodes.
    prefills : tuple of ScheduledPrefill
        The chunks of prefill, admissions last.
    preempted : tuple of Request
        Requests that lost their pages to this step, youngest first.
    num_tokens : int
        Query rows of the step; 0 when nothing can run yet.
    """

    decodes: tuple[ScheduledDecode, ...]
    prefills: tuple[ScheduledPrefill, ...]
    preempted: tuple[Request, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did for a request.

    Attributes
    ----------
    request : Request
        The request.
    accepted : int
        Drafts accepted; 0 for a prefill.
    num_new_tokens : int
        Tokens emitted: ``accepted + 1`` for a decode, 1 for a last chunk, 0 for another chunk.
    finished : bool
        Whether the request emitted its last token; it holds no pages any more.
    """

    request: Request
    accepted: int
    num_new_tokens: int
    finished: bool
