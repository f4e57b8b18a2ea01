"""Cubins on disk: entries appear whole by one rename, are checked when read, and are never trusted from strangers."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vllm_dsa import envs

_ENTRY_NAME = re.compile(r"\w+-[0-9a-f]{64}")
_BUILD_PREFIX = ".build-"
_QUARANTINE = "quarantine"
_CUBIN, _META, _TEXT = "kernel.cubin", "meta.json", "kernel.cu"
# What reading an entry raises when a file is missing, cut short, or not what was written.
_DAMAGE = (ValueError, KeyError, TypeError, FileNotFoundError, NotADirectoryError)
# A build takes seconds: an older one was killed.
_ABANDONED_AFTER_S = 3600


class CacheRefusedError(OSError):
    """A cache that others could have written into."""


@dataclass(frozen=True, slots=True)
class CubinMeta:
    """What an entry says of its cubin: for people, except `log` and `arch`."""

    kernel: str
    arch: str
    compiler: str
    options: list[str]
    log: str


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry as listed; `meta` is ``None`` when it is damaged."""

    name: str
    num_bytes: int
    meta: CubinMeta | None


def cache_root() -> Path:
    """Return where cubins are kept: ``$VDSA_CACHE_DIR``, else ``$XDG_CACHE_HOME/vllm_dsa``, else ``~/.cache/vllm_dsa``.

    Raises
    ------
    CacheRefusedError
        If none of them is set and the user has no home.
    """
    chosen: Path | None = envs.get("VDSA_CACHE_DIR")
    if chosen is not None:
        return chosen
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():  # the XDG specification: a relative one is ignored
        return shared / "vllm_dsa"
    try:
        return Path.home() / ".cache" / "vllm_dsa"
    except RuntimeError as error:
        raise CacheRefusedError(f"{error} Set VDSA_CACHE_DIR to an absolute path.") from None


class CubinCache:
    """The entries ``{source}-{key}/{kernel.cu, kernel.cubin, meta.json}`` of one folder.

    Parameters
    ----------
    root : Path
        Made with mode 0700 at the first write. If it exists, it must belong to this user or to root and be closed to
        writing by all users; it may be read-only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, name: str) -> tuple[bytes, CubinMeta] | None:
        """Return an entry, or ``None`` if there is none; a damaged one is moved to ``quarantine/``.

        Raises
        ------
        CacheRefusedError
            If the root is not to be trusted or the entry is a symbolic link.
        OSError
            If the entry cannot be read, or is damaged and cannot be moved.
        """
        self._check_root()
        entry = self.root / name
        if not os.path.lexists(entry):
            return None
        _refuse_links(entry)
        try:
            return _read_entry(entry)
        except _DAMAGE:
            self._quarantine(entry)
            return None

    def publish(self, name: str, text: str, cubin: bytes, meta: CubinMeta) -> tuple[bytes, CubinMeta]:
        """Add an entry and return it; if another process was first, return that one's.

        Raises
        ------
        OSError
            If the root is not to be trusted or cannot be written.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_root()
        build = Path(tempfile.mkdtemp(prefix=_BUILD_PREFIX, dir=self.root))
        try:
            digest = hashlib.sha256(cubin).hexdigest()
            contents = {"name": name, "size": len(cubin), "sha256": digest, **asdict(meta)}
            _write_synced(build / _TEXT, text.encode())
            _write_synced(build / _CUBIN, cubin)
            _write_synced(build / _META, json.dumps(contents, indent=2).encode())
            _sync_folder(build)
            try:
                build.rename(self.root / name)
            except OSError:
                if (first := self.load(name)) is None:
                    raise
                return first
            _sync_folder(self.root)
        finally:
            shutil.rmtree(build, ignore_errors=True)
        return cubin, meta

    def entries(self) -> list[CacheEntry]:
        """List the entries, by name.

        Raises
        ------
        CacheRefusedError
            If the root is not to be trusted.
        """
        return [_describe_entry(path) for path in self._paths() if _ENTRY_NAME.fullmatch(path.name)]

    def clear(self) -> int:
        """Remove entries, quarantine and unfinished builds, nothing else; return how many entries went."""
        return _remove([path for path in self._paths() if _is_ours(path)])

    def prune(self, keep: Collection[str]) -> int:
        """Remove the entries that `keep` does not name, the quarantine and abandoned builds; return how many went."""
        ours = [path for path in self._paths() if _is_ours(path)]
        return _remove([path for path in ours if path.name not in keep and not _is_recent_build(path)])

    def _paths(self) -> list[Path]:
        self._check_root()
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _check_root(self) -> None:
        try:
            status = self.root.stat()
        except FileNotFoundError:
            return
        if status.st_uid not in (os.geteuid(), 0):
            raise CacheRefusedError(f"{self.root} belongs to user id {status.st_uid}, allowed: {os.geteuid()} or 0")
        if status.st_mode & 0o002:
            raise CacheRefusedError(f"{self.root} can be written by every user: chmod o-w {self.root}")

    def _quarantine(self, entry: Path) -> None:
        quarantine = self.root / _QUARANTINE
        quarantine.mkdir(mode=0o700, exist_ok=True)
        # Another process may have been first.
        with contextlib.suppress(FileNotFoundError):
            entry.rename(quarantine / f"{entry.name}.{secrets.token_hex(4)}")


def _read_entry(entry: Path) -> tuple[bytes, CubinMeta]:
    contents = json.loads((entry / _META).read_bytes())
    cubin = (entry / _CUBIN).read_bytes()
    if contents["name"] != entry.name:
        raise ValueError(f"{entry} was made as {contents['name']}")
    if len(cubin) != contents["size"] or hashlib.sha256(cubin).hexdigest() != contents["sha256"]:
        raise ValueError(f"{entry / _CUBIN} is not what was written")
    return cubin, CubinMeta(**{field.name: contents[field.name] for field in fields(CubinMeta)})


def _describe_entry(entry: Path) -> CacheEntry:
    try:
        cubin, meta = _read_entry(entry)
    except (OSError, *_DAMAGE):
        return CacheEntry(entry.name, 0, None)
    return CacheEntry(entry.name, len(cubin), meta)


def _refuse_links(entry: Path) -> None:
    for path in (entry, entry / _CUBIN, entry / _META):
        if path.is_symlink():
            raise CacheRefusedError(f"{path} is a symbolic link, allowed: what this package wrote")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_ours(path: Path) -> bool:
    return (
        path.name == _QUARANTINE or path.name.startswith(_BUILD_PREFIX) or _ENTRY_NAME.fullmatch(path.name) is not None
    )


def _is_recent_build(path: Path) -> bool:
    return path.name.startswith(_BUILD_PREFIX) and time.time() - path.lstat().st_mtime < _ABANDONED_AFTER_S


def _remove(paths: list[Path]) -> int:
    for path in paths:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    return sum(_ENTRY_NAME.fullmatch(path.name) is not None for path in paths)
