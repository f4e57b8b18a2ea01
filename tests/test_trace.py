import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dsa.runner.trace import TraceError, TraceRequest, read_trace

GOOD = {"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [7, 8]}


def write(path: Path, *lines: Any) -> Path:
    file = path / "trace.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"\n".join(raw) + b"\n")
    return file


def test_a_good_line_becomes_a_request(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, GOOD))
    assert trace.requests == (TraceRequest(0, 5, 513, 2, (7, 8)),)
    assert trace.skipped == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"timestamp": -1}, "timestamp must be"),
        ({"timestamp": True}, "timestamp must be"),
        ({"timestamp": "5"}, "timestamp must be"),
        ({"timestamp": None}, "timestamp must be"),
        ({"timestamp": float("nan")}, "timestamp must be"),
        ({"timestamp": float("inf")}, "timestamp must be"),
        ({"timestamp": 10**400}, "timestamp must be"),
        ({"input_length": 0, "hash_ids": []}, "input_length must be"),
        ({"input_length": 513.0}, "input_length must be"),
        ({"input_length": True, "hash_ids": [7]}, "input_length must be"),
        ({"output_length": 0}, "output_length must be"),
        ({"output_length": True}, "output_length must be"),
        ({"output_length": [2]}, "output_length must be"),
        ({"hash_ids": [7]}, "hash_ids must hold 2 ids"),
        ({"hash_ids": [7, 8, 9]}, "hash_ids must hold 2 ids"),
        ({"hash_ids": [7, "8"]}, "hash_ids must hold 64-bit integers"),
        ({"hash_ids": [7, False]}, "hash_ids must hold 64-bit integers"),
        ({"hash_ids": [7, 8.0]}, "hash_ids must hold 64-bit integers"),
        ({"hash_ids": [7, 2**63]}, "hash_ids must hold 64-bit integers"),
        ({"hash_ids": "78"}, "hash_ids must be a list"),
        ({"hash_ids": None}, "hash_ids must be a list"),
    ],
)
def test_a_bad_value_is_skipped_or_raised(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    file = write(tmp_path, GOOD, {**GOOD, **changes}, GOOD)
    trace = read_trace(file)
    assert len(trace.requests) == 2
    assert [line.line_number for line in trace.skipped] == [2]
    assert reason in trace.skipped[0].reason
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: " + reason):
        read_trace(file, strict=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"timestamp": "\xc3\x28"}', "not UTF-8"),
        (b"[1, 2]", "must be a JSON object, got [1, 2] (list)"),
        (b"null", "must be a JSON object"),
        (b"{}", "missing timestamp, input_length, output_length, hash_ids"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_a_bad_line_is_skipped_or_raised(tmp_path: Path, line: bytes, reason: str) -> None:
    file = write(tmp_path, line, GOOD)
    trace = read_trace(file)
    assert len(trace.requests) == 1
    assert [skipped.line_number for skipped in trace.skipped] == [1]
    assert reason in trace.skipped[0].reason
    assert len(trace.skipped[0].reason) < 300
    with pytest.raises(TraceError, match="line 1: "):
        read_trace(file, strict=True)


def test_each_missing_key_is_named(tmp_path: Path) -> None:
    for key in GOOD:
        line = {name: value for name, value in GOOD.items() if name != key}
        assert read_trace(write(tmp_path, line)).skipped[0].reason == f"missing {key}"


def test_blank_lines_count_but_are_no_fault(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, b"", GOOD, b"  \t", b"{", b"\r"))
    assert len(trace.requests) == 1
    assert [line.line_number for line in trace.skipped] == [4]


def test_windows_line_ends_a_byte_order_mark_and_further_keys_are_accepted(tmp_path: Path) -> None:
    line = json.dumps({**GOOD, "session": "x"}).encode()
    trace = read_trace(write(tmp_path, b"\xef\xbb\xbf" + line + b"\r", line + b"\r"), strict=True)
    assert len(trace.requests) == 2


def test_limit_counts_good_requests_in_order_of_the_file(tmp_path: Path) -> None:
    late = {**GOOD, "timestamp": 9}
    file = write(tmp_path, late, b"{", GOOD, b"{", GOOD)
    trace = read_trace(file, limit=2)
    assert [request.arrival_ms for request in trace.requests] == [5, 9]
    assert [line.line_number for line in trace.skipped] == [2]
    assert read_trace(file, limit=0).requests == ()
    assert len(read_trace(file, limit=99).requests) == 3
    with pytest.raises(ValueError, match=r"limit must be at least 0 or None, got -1"):
        read_trace(file, limit=-1)


def test_requests_are_sorted_by_arrival_and_numbered_in_that_order(tmp_path: Path) -> None:
    lines = [{**GOOD, "timestamp": time, "output_length": place + 1} for place, time in enumerate([3, 1, 3, 1.5])]
    requests = read_trace(write(tmp_path, *lines)).requests
    assert [request.output_length for request in requests] == [2, 4, 1, 3]
    assert [request.index for request in requests] == [0, 1, 2, 3]


def test_a_missing_file_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.jsonl")


def test_an_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path)) == read_trace(write(tmp_path, b" "))


@given(data=st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "trace.jsonl"
    file.write_bytes(data)
    trace = read_trace(file)
    filled = [line for line in data.split(b"\n") if line.strip()]
    assert len(trace.requests) + len(trace.skipped) == len(filled)


@pytest.mark.trace
def test_the_mooncake_trace_has_no_bad_line(mooncake_trace: Path) -> None:
    trace = read_trace(mooncake_trace, strict=True)
    assert len(trace.requests) == 3000
    assert sum(request.input_length for request in trace.requests) == 40_550_180
    assert read_trace(mooncake_trace, limit=500).requests == trace.requests[:500]
