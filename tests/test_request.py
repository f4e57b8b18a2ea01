import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.runner.request import Request, RequestState, output_content_keys, rejected_draft_keys
from vllm_dsa.runner.splitmix import extend_hash, extend_hash_array
from vllm_dsa.runner.trace import TraceRequest


def make(hash_ids: list[int], input_length: int, output_length: int = 40, index: int = 3) -> Request:
    return Request(TraceRequest(index, 0, input_length, output_length, tuple(hash_ids)))


@given(state=st.integers(0, 2**64 - 1), words=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_the_hash_of_an_array_is_that_of_its_elements(state: int, words: list[int]) -> None:
    array = extend_hash_array(state, np.array(words, dtype=np.uint64))
    assert array.tolist() == [extend_hash(state, word) for word in words]


def test_the_hash_chain_keeps_order_and_takes_negative_words() -> None:
    assert extend_hash(extend_hash(1, 2), 3) != extend_hash(extend_hash(1, 3), 2)
    assert extend_hash(1, -1) == extend_hash(1, 2**64 - 1)
    # The first output of the splitmix64 generator with seed 0.
    assert extend_hash(0, 0) == 0xE220A8397B1DCDAF


def test_a_new_request_waits_with_its_prompt_known() -> None:
    request = make([1, 2], 600)
    assert request.state is RequestState.WAITING
    assert (request.num_tokens, request.num_prompt, request.num_output, request.num_remaining) == (600, 600, 0, 40)
    request.num_output = 5
    assert (request.num_tokens, request.num_remaining) == (605, 35)


@pytest.mark.parametrize("block_size", [0, -64, 48, 1024])
def test_a_page_must_lie_inside_a_hash_block(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must divide 512, got {block_size}"):
        Request(TraceRequest(0, 0, 1, 1, (1,)), block_size)


def test_only_full_prompt_pages_have_keys() -> None:
    for input_length, expected in ((1, 0), (63, 0), (64, 1), (127, 1), (512, 8), (513, 8), (576, 9)):
        hash_ids = list(range(-(-input_length // 512)))
        assert len(make(hash_ids, input_length).prefix_page_keys()) == expected


def test_page_keys_are_shared_exactly_along_the_common_prefix() -> None:
    left = make([1, 2, 3], 1536).prefix_page_keys()
    right = make([1, 2, 4], 1536, index=9).prefix_page_keys()
    swapped = make([2, 1, 3], 1536).prefix_page_keys()
    assert left[:16] == right[:16]
    assert not set(left[16:]) & set(right[16:])
    assert not set(left) & set(swapped)
    assert len({*left, *right}) == 32


def test_the_keys_are_the_same_in_every_process() -> None:
    assert make([1, -2], 600).prefix_page_keys()[::8] == [17200863802676960213, 6934262261521128176]
    assert make([1, -2], 600).content_keys(599, 601).tolist() == [4963641425339056121, 5380200215994264025]


def test_smaller_pages_have_keys_of_their_own_count() -> None:
    request = Request(TraceRequest(0, 0, 100, 1, (5,)), block_size=16)
    assert len(set(request.prefix_page_keys())) == 6


def test_shared_blocks_share_content_and_nothing_else_does() -> None:
    left = make([1, 2], 1000).content_keys(0, 1040)
    right = make([1, 7], 1000, index=4).content_keys(0, 1040)
    assert np.array_equal(left[:512], right[:512])
    assert not set(left[512:].tolist()) & set(right[512:].tolist())
    assert len(set(left.tolist())) == 1040
    assert left.dtype == np.uint64


@given(data=st.data(), input_length=st.integers(1, 1300), output_length=st.integers(1, 50))
def test_a_range_of_content_is_a_slice_of_the_whole(data: st.DataObject, input_length: int, output_length: int) -> None:
    end = input_length + output_length
    request = make(list(range(-(-input_length // 512))), input_length, output_length)
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    assert np.array_equal(request.content_keys(start, stop), request.content_keys(0, end)[start:stop])


def test_right_drafts_have_the_final_content_and_wrong_ones_are_their_own() -> None:
    request = make([1, 2], 600)
    final = request.content_keys(601, 606)
    drafts = request.draft_keys(601, 606, accepted=2, step=7)
    assert np.array_equal(drafts[:2], final[:2])
    assert not set(drafts[2:].tolist()) & set(request.content_keys(0, 640).tolist())
    later = request.draft_keys(601, 606, accepted=2, step=8)
    assert not set(drafts[2:].tolist()) & set(later[2:].tolist())
    other = make([1, 2], 600, index=4).draft_keys(601, 606, accepted=0, step=7)
    assert not set(drafts.tolist()) & set(other.tolist())
    assert request.draft_keys(601, 601, accepted=0, step=7).shape == (0,)


def test_the_keys_of_many_requests_at_once_are_those_of_each() -> None:
    requests = [make([1], 500, index=index) for index in range(3)]
    indices = np.arange(3, dtype=np.uint64)
    positions = np.array([501, 510, 520], dtype=np.uint64)
    steps = np.array([4, 5, 6], dtype=np.uint64)
    outputs = output_content_keys(indices, positions)
    wrong = rejected_draft_keys(indices, positions, steps)
    for request, position, step, output, draft in zip(requests, positions, steps, outputs, wrong, strict=True):
        start = int(position)
        assert request.content_keys(start, start + 1).tolist() == [output]
        assert request.draft_keys(start, start + 1, accepted=0, step=int(step)).tolist() == [draft]


def test_positions_out_of_range_are_refused() -> None:
    request = make([1], 500)
    for start, stop in ((-1, 4), (5, 4), (0, 541)):
        with pytest.raises(ValueError, match=f"0 <= start <= stop <= 540, got {start} and {stop}"):
            request.content_keys(start, stop)
    with pytest.raises(ValueError, match="500 <= start <= stop <= 540, got 499 and 501"):
        request.draft_keys(499, 501, accepted=0, step=0)
    for accepted in (-1, 3):
        with pytest.raises(ValueError, match=rf"accepted must be in \[0, 2\], got {accepted}"):
            request.draft_keys(501, 503, accepted=accepted, step=0)
