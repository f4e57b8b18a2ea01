from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_dsa.runner.block_pool import BlockPool


def take(pool: BlockPool, n: int) -> list[int]:
    pages = pool.allocate(n)
    assert pages is not None
    return pages


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert take(pool, 3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert take(pool, 0) == []
    assert take(pool, 1) == [3]


def test_a_refused_allocation_evicts_nothing() -> None:
    pool = BlockPool(2)
    held, cached = take(pool, 2)
    pool.publish(cached, 10)
    pool.release([cached])
    assert pool.allocate(2) is None
    assert pool.match_prefix([10]) == [cached]
    assert pool.ref_count(held) == 1


def test_the_longest_cached_prefix_is_matched_and_referenced() -> None:
    pool = BlockPool(4)
    pages = take(pool, 3)
    for page, key in zip(pages, (10, 11, 12), strict=True):
        pool.publish(page, key)
    pool.release([pages[1]])
    assert pool.match_prefix([10, 11, 99, 12]) == pages[:2]
    assert [pool.ref_count(page) for page in pages] == [2, 1, 1]
    assert pool.match_prefix([]) == []
    assert pool.match_prefix([99, 10]) == []


def test_pages_without_content_go_first_then_the_least_recently_released() -> None:
    pool = BlockPool(4)
    pages = take(pool, 4)
    for page in pages[:3]:
        pool.publish(page, 100 + page)
    pool.release([2, 0, 1])
    pool.release(pool.match_prefix([102]))
    pool.release([3])
    assert take(pool, 4) == [3, 0, 1, 2]


def test_an_evicted_page_loses_its_key() -> None:
    pool = BlockPool(1)
    pool.publish(take(pool, 1)[0], 10)
    pool.release([0])
    assert take(pool, 1) == [0]
    assert pool.match_prefix([10]) == []
    pool.publish(0, 11)
    assert pool.match_prefix([11]) == [0]


def test_the_first_publisher_wins() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.publish(first, 10)
    pool.publish(first, 10)
    pool.publish(second, 10)
    assert pool.match_prefix([10]) == [first]
    pool.release([second, first])
    assert take(pool, 1) == [second]


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockPool(1, 0)
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match=r"block_id must be in \[0, 2\), got 2"):
        pool.ref_count(2)
    with pytest.raises(ValueError, match=r"block_id must be in \[0, 2\), got -1"):
        pool.release([-1])
    with pytest.raises(ValueError, match="block_id must be a referenced page, got free page 0"):
        pool.publish(0, 10)
    with pytest.raises(ValueError, match="block_ids must be referenced pages, got free page 1"):
        pool.release([1])
    pool.publish(take(pool, 1)[0], 10)
    with pytest.raises(ValueError, match="page 0 is published under key 10, got key 11"):
        pool.publish(0, 11)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that knows every holder and the content of every page."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.held: list[int] = []
        self.cached: dict[int, int] = {}

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, n: int) -> None:
        num_free = self.NUM_BLOCKS - len(set(self.held))
        pages = self.pool.allocate(n)
        if n > num_free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == n
        assert not set(pages) & set(self.held)
        self.held += pages
        lost = [key for key, page in self.cached.items() if page in pages]
        unreferenced = set(range(self.NUM_BLOCKS)) - set(self.held)
        if lost:
            assert unreferenced <= set(self.cached.values()), "a page without content was left while one was evicted"
        for key in lost:
            del self.cached[key]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 7))
    def publish(self, data: st.DataObject, key: int) -> None:
        page = data.draw(st.sampled_from(self.held))
        if page in self.cached.values() and self.cached.get(key) != page:
            with pytest.raises(ValueError, match="is published under"):
                self.pool.publish(page, key)
            return
        self.pool.publish(page, key)
        self.cached.setdefault(key, page)

    @rule(keys=st.lists(st.integers(0, 7), max_size=4))
    def match(self, keys: list[int]) -> None:
        expected: list[int] = []
        for key in keys:
            if key not in self.cached:
                break
            expected.append(self.cached[key])
        assert self.pool.match_prefix(keys) == expected
        self.held += expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        places = data.draw(st.sets(st.integers(0, len(self.held) - 1), min_size=1))
        self.pool.release([self.held[place] for place in sorted(places)])
        self.held = [page for place, page in enumerate(self.held) if place not in places]

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        holders = Counter(self.held)
        assert [self.pool.ref_count(page) for page in range(self.NUM_BLOCKS)] == [
            holders[page] for page in range(self.NUM_BLOCKS)
        ]

    @invariant()
    def every_page_is_free_or_referenced(self) -> None:
        assert self.pool.num_free + len(set(self.held)) == self.NUM_BLOCKS


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
