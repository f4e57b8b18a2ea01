"""A request on its way through the engine, and the identity of the content of each of its tokens."""

import enum
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np

from vllm_dsa.runner.splitmix import Uint64Array, extend_hash, extend_hash_array
from vllm_dsa.runner.trace import HASH_BLOCK_TOKENS, TraceRequest

# One salt for each kind of content: a prompt token never looks like an output token.
_PAGE_SALT = 0x9A6E
_PROMPT_SALT = 0x9403
_OUTPUT_SALT = 0x0E7B
_REJECTED_SALT = 0x4E1E
_WORD_MASK = (1 << 64) - 1


class RequestState(enum.Enum):
    """Where a request stands; a preempted request is WAITING again."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """The state of one request. Only the scheduler writes it.

    Attributes
    ----------
    trace : TraceRequest
        What was asked.
    block_size : int
        Tokens of a cache page; divides 512, so that a page lies inside one hash block.
    state : RequestState
        Where the request stands.
    num_output : int
        Output tokens emitted so far.
    num_computed : int
        Tokens, from the first, whose index K is valid in the cache. In decode ``num_tokens - 1``: the token
        sampled last was not fed yet.
    num_cached_tokens : int
        Prompt tokens found in the cache at the first admission.
    block_ids : list of int
        Pages held, in order of position.
    num_published_blocks : int
        Leading pages already offered for reuse (or found there).
    num_preemptions : int
        Times the request lost its pages.
    num_decode_steps : int
        Decode steps completed; the step number of the acceptance model.

    Raises
    ------
    ValueError
        When ``block_size`` does not divide 512.
    """

    trace: TraceRequest
    block_size: int = 64
    state: RequestState = field(default=RequestState.WAITING, init=False)
    num_output: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    block_ids: list[int] = field(default_factory=list, init=False)
    num_published_blocks: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_decode_steps: int = field(default=0, init=False)
    num_prompt: int = field(init=False)
    target_output: int = field(init=False)
    _page_keys: list[int] | None = field(default=None, init=False, repr=False)
    _prompt_states: Uint64Array | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_size < 1 or HASH_BLOCK_TOKENS % self.block_size:
            raise ValueError(f"block_size must divide {HASH_BLOCK_TOKENS}, got {self.block_size}")
        self.num_prompt = self.trace.input_length
        self.target_output = self.trace.output_length

    @property
    def index(self) -> int:
        """Identity of the request: its place in the trace."""
        return self.trace.index

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and the outputs emitted so far."""
        return self.num_prompt + self.num_output

    @property
    def num_remaining(self) -> int:
        """Output tokens still to emit."""
        return self.target_output - self.num_output

    def prefix_page_keys(self) -> list[int]:
        """Return the reuse key of every page that lies fully inside the prompt.

        A key chains the hash ids of all blocks up to the page's own and the place of the page in it: equal keys
        mean equal content of the whole prefix. Stable across processes. The list is kept; do not change it.
        """
        if self._page_keys is None:
            self._page_keys = self._chain_page_keys()
        return self._page_keys

    def _chain_page_keys(self) -> list[int]:
        chain = accumulate(self.trace.hash_ids, extend_hash, initial=_PAGE_SALT)
        block_states = np.fromiter(islice(chain, 1, None), dtype=np.uint64)
        places = np.arange(HASH_BLOCK_TOKENS // self.block_size, dtype=np.uint64)
        keys: list[int] = extend_hash_array(block_states[:, None], places).ravel().tolist()
        return keys[: self.num_prompt // self.block_size]

    def content_keys(self, start: int, stop: int) -> Uint64Array:
        """Return an identity for the content of the tokens at positions ``start .. stop - 1``.

        A prompt token is its hash id and its offset in the 512-token block, so shared prefixes share content.
        An output token is the request and its position, known in advance of its being emitted.

        Raises
        ------
        ValueError
            Unless ``0 <= start <= stop <= num_prompt + target_output``.
        """
        self._check_range(start, stop, lowest=0)
        positions = np.arange(start, stop, dtype=np.uint64)
        num_prompt = max(self.num_prompt - start, 0)
        outputs = output_content_keys(np.uint64(self.index), positions[num_prompt:])
        if num_prompt == 0:
            return outputs
        return np.concatenate([self._prompt_content_keys(positions[:num_prompt]), outputs])

    def _prompt_content_keys(self, positions: Uint64Array) -> Uint64Array:
        if self._prompt_states is None:
            words = np.array([hash_id & _WORD_MASK for hash_id in self.trace.hash_ids], dtype=np.uint64)
            self._prompt_states = extend_hash_array(_PROMPT_SALT, words)
        block, offset = np.divmod(positions, np.uint64(HASH_BLOCK_TOKENS))
        return extend_hash_array(self._prompt_states[block], offset)

    def draft_keys(self, start: int, stop: int, accepted: int, step: int) -> Uint64Array:
        """Return the content of the draft tokens fed at positions ``start .. stop - 1``.

        Parameters
        ----------
        start, stop : int
            Positions of the drafts, without the row of the token sampled last.
        accepted : int
            Leading drafts that are right; they have the content of the final tokens.
        step : int
            Decode step of this request; a rejected draft is told from one of another step at its position.

        Returns
        -------
        ndarray of uint64
            ``stop - start`` identities.

        Raises
        ------
        ValueError
            Unless ``num_prompt <= start <= stop <= num_prompt + target_output`` and
            ``0 <= accepted <= stop - start``.
        """
        self._check_range(start, stop, lowest=self.num_prompt)
        if not 0 <= accepted <= stop - start:
            raise ValueError(f"accepted must be in [0, {stop - start}], got {accepted}")
        positions = np.arange(start, stop, dtype=np.uint64)
        index = np.uint64(self.index)
        right = output_content_keys(index, positions[:accepted])
        wrong = rejected_draft_keys(index, positions[accepted:], np.uint64(step))
        return np.concatenate([right, wrong])

    def _check_range(self, start: int, stop: int, lowest: int) -> None:
        end = self.num_prompt + self.target_output
        if not lowest <= start <= stop <= end:
            raise ValueError(f"start and stop must satisfy {lowest} <= start <= stop <= {end}, got {start} and {stop}")


def output_content_keys(request_indices: Uint64Array | np.uint64, positions: Uint64Array) -> Uint64Array:
    """Return the content identity of output tokens, one for each (request, position).

    The same as :meth:`Request.content_keys`, for the rows of many requests at once; the arguments broadcast.
    """
    states = extend_hash_array(_OUTPUT_SALT, np.atleast_1d(request_indices))
    return extend_hash_array(states, positions)


def rejected_draft_keys(
    request_indices: Uint64Array | np.uint64, positions: Uint64Array, steps: Uint64Array | np.uint64
) -> Uint64Array:
    """Return the content identity of wrong drafts, one for each (request, position, step).

    The same as the tail of :meth:`Request.draft_keys`, for the rows of many requests; the arguments broadcast.
    """
    states = extend_hash_array(_REJECTED_SALT, np.atleast_1d(request_indices))
    return extend_hash_array(extend_hash_array(states, positions), np.atleast_1d(steps))
