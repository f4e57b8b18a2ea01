"""Building a value once per key, from several threads."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class OncePerKey(Generic[K, V]):
    """Values built on first use. Two threads with one key build it once; other keys are built meanwhile.

    A build that raises leaves nothing behind: the next call tries again.
    """

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._building: dict[K, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: K, build: Callable[[], V]) -> V:
        """Return the value of `key`, made by `build` the first time."""
        if key not in self._values:
            with self._lock:
                key_lock = self._building.setdefault(key, threading.Lock())
            with key_lock:
                if key not in self._values:
                    self._values[key] = build()
        return self._values[key]
