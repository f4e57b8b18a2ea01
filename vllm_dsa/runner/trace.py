"""Reading a Mooncake-style request trace (JSON lines)."""

import json
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HASH_BLOCK_TOKENS = 512
"""Tokens of the prefix block that one hash id stands for."""

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A malformed line of a trace read with ``strict=True``; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes
    ----------
    index : int
        Place in the order of arrival, from 0; the identity of the request.
    arrival_ms : float
        Time of arrival, in milliseconds since the start of the trace.
    input_length, output_length : int
        Tokens of the prompt and tokens to emit, each at least 1.
    hash_ids : tuple of int
        One id per 512-token block of the prompt, the last block maybe partial. Equal ids mean equal content.

    Raises
    ------
    ValueError
        When a value has the wrong type or is out of range, or ``hash_ids`` does not cover the prompt exactly.
    """

    index: int
    arrival_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_arrival(self.arrival_ms)
        _check_length("input_length", self.input_length)
        _check_length("output_length", self.output_length)
        _check_hash_ids(self.hash_ids, self.input_length)


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A malformed line: its number, from 1, and what is wrong with it."""

    line_number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace in order of arrival, and the lines left out in order of the file."""

    requests: tuple[TraceRequest, ...]
    skipped: tuple[SkippedLine, ...]


def read_trace(path: str | os.PathLike[str], *, limit: int | None = None, strict: bool = False) -> Trace:
    """Read a trace of one JSON object a line.

    Every object holds ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and ``hash_ids``
    (one integer per 512-token block of the prompt). Further keys and blank lines are ignored.

    Parameters
    ----------
    path : path-like
        A UTF-8 file.
    limit : int, optional
        Stop after this many good requests, in order of the file; lines after that are not looked at.
    strict : bool
        Raise on the first malformed line instead of skipping it.

    Returns
    -------
    Trace
        The requests sorted by arrival (requests of the same time keep the order of the file), numbered in
        that order, and the malformed lines.

    Raises
    ------
    TraceError
        On a malformed line, under ``strict``.
    ValueError
        When ``limit`` is negative.
    OSError
        When the file cannot be read.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit must be at least 0 or None, got {limit}")
    requests: list[TraceRequest] = []
    skipped: list[SkippedLine] = []
    for line_number, line in _content_lines(Path(path)):
        if limit is not None and len(requests) >= limit:
            break
        try:
            requests.append(_parse_line(line, index=len(requests)))
        except ValueError as error:
            if strict:
                raise TraceError(f"{os.fspath(path)}, line {line_number}: {error}") from error
            skipped.append(SkippedLine(line_number, str(error)))
    requests.sort(key=lambda request: request.arrival_ms)
    ordered = tuple(replace(request, index=index) for index, request in enumerate(requests))
    return Trace(ordered, tuple(skipped))


def _content_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    # Read as bytes: one undecodable line must not end the reading of the others.
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if line.strip():
                yield line_number, line


def _parse_line(line: bytes, index: int) -> TraceRequest:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not usable JSON: nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, got {_describe(record)}")
    missing = [key for key in _KEYS if key not in record]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids must be a list of integers, got {_describe(hash_ids)}")
    return TraceRequest(
        index=index,
        arrival_ms=record["timestamp"],
        input_length=record["input_length"],
        output_length=record["output_length"],
        hash_ids=tuple(hash_ids),
    )


def _check_arrival(value: Any) -> None:
    # The comparison is false for NaN; the upper end keeps out infinity and what no float holds.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        raise ValueError(f"timestamp must be a finite number of milliseconds >= 0, got {_describe(value)}")


def _check_length(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {_describe(value)}")


def _check_hash_ids(hash_ids: tuple[Any, ...], input_length: int) -> None:
    for hash_id in hash_ids:
        if type(hash_id) is not int or not -(2**63) <= hash_id < 2**63:
            raise ValueError(f"hash_ids must hold 64-bit integers, got {_describe(hash_id)}")
    expected = -(-input_length // HASH_BLOCK_TOKENS)
    if len(hash_ids) != expected:
        raise ValueError(
            f"hash_ids must hold {expected} ids, one per {HASH_BLOCK_TOKENS} tokens of input_length "
            f"{input_length}, got {len(hash_ids)}"
        )


def _describe(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
