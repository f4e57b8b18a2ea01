"""The pages of the cache: allocation, references, and reuse of full prompt pages."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Allocator of cache pages ``0 .. num_blocks - 1`` with prefix reuse.

    A page is referenced (its count is at least 1) or free. A free page that was published keeps its content
    until it is needed for something else: pages without reusable content go first, then published ones, least
    recently released first.

    Parameters
    ----------
    num_blocks : int
        Pages of the pool, at least 1.
    block_size : int
        Tokens of a page, at least 1.

    Raises
    ------
    ValueError
        When a size is below 1.
    """

    __slots__ = ("_blank", "_evictable", "_key_of", "_page_of", "_ref_counts", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int = 64) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Not a plain dict: popping the oldest entry of one again and again scans the slots of those gone.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages without a reference, those with reusable content included."""
        return len(self._blank) + len(self._evictable)

    def ref_count(self, block_id: int) -> int:
        """Return the references to a page.

        Raises
        ------
        ValueError
            When ``block_id`` is not a page of the pool.
        """
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id must be in [0, {self.num_blocks}), got {block_id}")
        return self._ref_counts[block_id]

    def match_prefix(self, keys: Sequence[int]) -> list[int]:
        """Take a reference to the pages of the longest cached prefix.

        Parameters
        ----------
        keys : sequence of int
            Keys of the pages of a prompt, in order. A key must identify the whole prefix up to its page.

        Returns
        -------
        list of int
            The pages of ``keys[:n]`` for the largest ``n`` such that all of them are cached.
        """
        matched: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._ref_counts[page] == 0:
                del self._evictable[page]
            self._ref_counts[page] += 1
            matched.append(page)
        return matched

    def allocate(self, n: int) -> list[int] | None:
        """Take ``n`` pages, each with one reference and nothing published.

        Returns
        -------
        list of int or None
            The pages; ``None``, and nothing taken or evicted, when fewer than ``n`` are free.

        Raises
        ------
        ValueError
            When ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if n > self.num_free:
            return None
        pages = [self._blank.pop() if self._blank else self._evict() for _ in range(n)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def publish(self, block_id: int, key: int) -> None:
        """Make a full page reusable under its key.

        When another page holds the key already, that one stays and ``block_id`` remains private.

        Raises
        ------
        ValueError
            When ``block_id`` is not a referenced page of the pool, or is published under another key.
        """
        if self.ref_count(block_id) == 0:
            raise ValueError(f"block_id must be a referenced page, got free page {block_id}")
        published = self._key_of.get(block_id)
        if published is not None and published != key:
            raise ValueError(f"page {block_id} is published under key {published}, got key {key}")
        if key not in self._page_of:
            self._page_of[key] = block_id
            self._key_of[block_id] = key

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each page, in the order given.

        A page without references is free: published pages are evicted in the order in which they got there, so
        release the last page of a prefix first to lose prefixes from their end.

        Raises
        ------
        ValueError
            When a page has no reference to drop; the pages before it are released.
        """
        for block_id in block_ids:
            if self.ref_count(block_id) == 0:
                raise ValueError(f"block_ids must be referenced pages, got free page {block_id}")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._key_of:
                    self._evictable[block_id] = None
                else:
                    self._blank.append(block_id)

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
