import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_dsa.kernels.jit_cache import CacheRefusedError, CubinCache, CubinMeta, cache_root

NAME = "scale-" + "0" * 64
OTHER = "scale-" + "1" * 64
META = CubinMeta(kernel="scale[]", arch="sm_90a", compiler="nvrtc 13.0", options=["std=c++20"], log="no spills")
ENTRY = (b"\x7fELF cubin", META)


@pytest.fixture
def cache(tmp_path):
    return CubinCache(tmp_path / "cache")


def publish(cache, name=NAME, cubin=ENTRY[0]):
    return cache.publish(name, "// text", cubin, META)


def names(cache):
    return sorted(path.name for path in cache.root.iterdir())


class TestRoot:
    def test_order_of_the_variables(self, monkeypatch, tmp_path):
        monkeypatch.delenv("VDSA_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_root() == tmp_path / ".cache" / "vllm_dsa"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert cache_root() == tmp_path / ".cache" / "vllm_dsa"
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert cache_root() == Path("/xdg/vllm_dsa")
        monkeypatch.setenv("VDSA_CACHE_DIR", "/chosen")
        assert cache_root() == Path("/chosen")

    def test_a_user_without_a_home(self, monkeypatch, mocker):
        monkeypatch.delenv("VDSA_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        mocker.patch("pathlib.Path.home", side_effect=RuntimeError("Could not determine home directory."))
        with pytest.raises(CacheRefusedError, match="Set VDSA_CACHE_DIR"):
            cache_root()

    def test_it_is_made_private_and_by_the_first_write_only(self, cache):
        assert cache.load(NAME) is None
        assert cache.entries() == []
        assert not cache.root.exists()
        publish(cache)
        assert cache.root.stat().st_mode & 0o777 == 0o700

    def test_a_foreign_owner_is_refused(self, cache, mocker):
        publish(cache)
        mocker.patch("os.geteuid", return_value=os.geteuid() + 1)
        mocker.patch("pathlib.Path.stat", return_value=mocker.Mock(st_uid=os.geteuid() + 1, st_mode=0o40700))
        for use in (lambda: cache.load(NAME), lambda: publish(cache, OTHER), cache.entries, cache.clear):
            with pytest.raises(CacheRefusedError, match="belongs to user id"):
                use()

    def test_root_may_own_what_another_user_reads(self, cache, mocker):
        publish(cache)
        mocker.patch("os.geteuid", return_value=1234)
        mocker.patch("pathlib.Path.stat", return_value=mocker.Mock(st_uid=0, st_mode=0o40755))
        assert cache.load(NAME) == ENTRY

    def test_one_that_every_user_can_write_is_refused(self, cache):
        cache.root.mkdir()
        cache.root.chmod(0o1777)
        with pytest.raises(CacheRefusedError, match="chmod o-w"):
            publish(cache)


class TestEntries:
    def test_round_trip(self, cache):
        assert publish(cache) == ENTRY
        assert cache.load(NAME) == ENTRY
        assert cache.load(OTHER) is None
        assert names(cache) == [NAME]
        assert sorted(path.name for path in (cache.root / NAME).iterdir()) == [
            "kernel.cu",
            "kernel.cubin",
            "meta.json",
        ]
        assert (cache.root / NAME / "kernel.cu").read_text() == "// text"

    def test_the_first_of_two_builders_wins(self, cache):
        publish(cache, cubin=b"first")
        assert publish(cache, cubin=b"second") == (b"first", META)
        assert names(cache) == [NAME]

    @pytest.mark.parametrize("damage", ["truncated", "changed", "no cubin", "no meta", "bad meta", "renamed", "a file"])
    def test_a_damaged_entry_is_moved_away_and_can_be_rebuilt(self, cache, damage):
        publish(cache)
        entry = cache.root / NAME
        cubin, meta = entry / "kernel.cubin", entry / "meta.json"
        if damage == "truncated":
            cubin.write_bytes(ENTRY[0][:-1])
        elif damage == "changed":
            cubin.write_bytes(ENTRY[0][::-1])
        elif damage == "no cubin":
            cubin.unlink()
        elif damage == "no meta":
            meta.unlink()
        elif damage == "bad meta":
            meta.write_text("[]")
        elif damage == "renamed":
            meta.write_text(json.dumps(json.loads(meta.read_text()) | {"name": OTHER}))
        else:
            entry.rename(cache.root / "aside")
            entry.write_text("")
        assert [entry.meta for entry in cache.entries()] == [None]
        assert cache.load(NAME) is None
        assert [path.name.partition(".")[0] for path in (cache.root / "quarantine").iterdir()] == [NAME]
        assert publish(cache) == ENTRY
        assert cache.load(NAME) == ENTRY

    @pytest.mark.parametrize("link", ["", "kernel.cubin", "meta.json"])
    def test_a_symbolic_link_is_refused(self, cache, tmp_path, link):
        publish(cache)
        path = cache.root / NAME / link
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CacheRefusedError, match="is a symbolic link"):
            cache.load(NAME)
        assert cache.clear() == 1
        assert not cache.root.joinpath(NAME).exists()

    def test_a_read_only_root_is_read(self, cache, mocker):
        publish(cache)
        # These tests may run as root, whom no mode stops.
        mocker.patch("tempfile.mkdtemp", side_effect=OSError(30, "Read-only file system"))
        assert cache.load(NAME) == ENTRY
        with pytest.raises(OSError, match="Read-only"):
            publish(cache, OTHER)


class TestRemoval:
    @pytest.fixture
    def full(self, cache):
        publish(cache)
        publish(cache, OTHER)
        (cache.root / "quarantine").mkdir()
        (cache.root / ".build-recent").mkdir()
        (cache.root / ".build-old").mkdir()
        os.utime(cache.root / ".build-old", (0, 0))
        (cache.root / "notes.txt").write_text("the user's own")
        return cache

    def test_clear_takes_all_but_what_is_not_ours(self, full):
        assert full.clear() == 2
        assert names(full) == ["notes.txt"]

    def test_prune_takes_what_is_not_named(self, full):
        assert full.prune({OTHER}) == 1
        assert names(full) == [".build-recent", "notes.txt", OTHER]

    def test_nothing_to_remove(self, cache):
        assert cache.clear() == cache.prune(set()) == 0


# Each builder is an interpreter of its own; the module imports no torch, so it starts at once.
PROGRAM = """
import os, pathlib, sys, time
from vllm_dsa.kernels.jit_cache import CubinCache, CubinMeta
root, name, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
cache, meta = CubinCache(root / "cache"), CubinMeta("scale[]", "sm_90a", "nvrtc 13.0", ["std=c++20"], "no spills")
"""
BUILD_AT_ONCE = """
(root / f"ready-{number}").touch()
while not (root / "go").exists():
    time.sleep(0.0001)
cubin, _ = cache.publish(name, "", bytes([number]) * 50_000, meta)
sys.stdout.write(str(cubin[0]))
"""
BUILD_FOR_EVER = """
while True:
    number += 1
    cache.publish(f"scale-{number:064x}", "", os.urandom(200_000), meta)
"""


def start(program, folder, number):
    arguments = [sys.executable, "-c", PROGRAM + program, str(folder), NAME, str(number)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestProcesses:
    def test_of_eight_builders_one_survives_and_all_return_its_cubin(self, cache, tmp_path):
        builders = [start(BUILD_AT_ONCE, tmp_path, number) for number in range(8)]
        wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 8)
        (tmp_path / "go").touch()
        built = {int(builder.communicate(timeout=30)[0]) for builder in builders}
        assert built == {cache.load(NAME)[0][0]}
        assert names(cache) == [NAME]

    def test_a_builder_killed_in_the_middle_leaves_nothing_bad(self, cache, tmp_path):
        for milliseconds in (5, 10, 20):
            builder = start(BUILD_FOR_EVER, tmp_path, 0)
            wait_for(cache.entries)
            time.sleep(milliseconds / 1000)
            builder.kill()
            builder.communicate()
            entries = cache.entries()
            assert all(entry.meta == META for entry in entries)
            assert all(cache.load(entry.name) for entry in entries)
            assert not (cache.root / "quarantine").exists()
            assert cache.clear() == len(entries) > 0
        assert names(cache) == []


def test_the_meta_survives_json():
    assert CubinMeta(**json.loads(json.dumps(dataclasses.asdict(META)))) == META
