"""Where compiled cubins are kept: on disk, and in this process's memory when the disk cannot be used."""

import logging

from vllm_dsa.kernels.jit_cache import CubinCache, CubinMeta, cache_root

_logger = logging.getLogger("vllm_dsa")


class CubinStore:
    """The disk cache that the environment names at each call, forgiving: what it refuses costs one warning."""

    def __init__(self) -> None:
        self._in_memory: dict[str, tuple[bytes, CubinMeta]] = {}
        self._has_warned = False

    def load(self, name: str) -> tuple[bytes, CubinMeta] | None:
        """Return an entry, or ``None``."""
        if name in self._in_memory:
            return self._in_memory[name]
        try:
            return CubinCache(cache_root()).load(name)
        except OSError as error:
            self._warn(error)
            return None

    def keep(self, name: str, text: str, cubin: bytes, meta: CubinMeta) -> tuple[bytes, CubinMeta]:
        """Add an entry and return it; if another process was first, return that one's."""
        try:
            return CubinCache(cache_root()).publish(name, text, cubin, meta)
        except OSError as error:
            self._warn(error)
            return self._in_memory.setdefault(name, (cubin, meta))

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("the kernel cache cannot be used, so this process keeps its kernels in memory: %s", error)
