"""Trace files: what is read, and that a malformed line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from kvpool.sim.traces import read_trace
from kvpool.sim.usage import UsageError

DATA = Path(__file__).resolve().parent.parent / "data"


def test_mooncake() -> None:
    requests = read_trace(DATA / "mooncake_tiny.jsonl", 100)
    assert [r.arrival for r in requests] == [0.0, 0.0, 0.012, 0.025, 0.4, 0.4]
    assert [(r.index, r.prompt_tokens, r.output_tokens) for r in requests][:3] == [
        (0, 700, 40),
        (1, 90, 1),
        (2, 513, 60),
    ]
    assert requests[0].hash_ids == (0, 1)


def test_azure() -> None:
    requests = read_trace(DATA / "azure_tiny.csv", 100)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(120, 10), (318, 8), (11, 27)]
    assert [r.arrival for r in requests] == [0.0, 0.0520001, 60.02004]
    assert requests[0].hash_ids is None


def test_limit_stops_before_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 1, "output_length": 1}\n\nbroken\n')
    assert [r.arrival for r in read_trace(path, 1)] == [0.0]
    with pytest.raises(UsageError, match=r"t\.jsonl:3: not a JSON object"):
        read_trace(path, 2)


GOOD = {"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "1"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"timestamp": float("inf")}, "timestamp"),
        ({"timestamp": None}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": -5}, "input_length"),
        ({"input_length": 600.0}, "input_length"),
        ({"input_length": 2**31}, "input_length"),
        ({"input_length": None}, "input_length"),
        ({"output_length": 0}, "output_length"),
        ({"output_length": True}, "output_length"),
        ({"output_length": "7"}, "output_length"),
        ({"hash_ids": [1]}, "hash_ids"),
        ({"hash_ids": [1, -2]}, "hash_ids"),
        ({"hash_ids": [1, 2.0]}, "hash_ids"),
        ({"hash_ids": [1, 2**31]}, "hash_ids"),
        ({"hash_ids": 3}, "hash_ids"),
    ],
)
def test_bad_mooncake_line(tmp_path: Path, change: dict[str, object], names: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(UsageError) as caught:
        read_trace(path, 10)
    assert f"{path}:2: {names}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["[]", "1", "null", "{", '{"timestamp": 1}{', "[" * 100_000])
def test_line_is_no_object(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: "):
        read_trace(path, 10)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("2023-11-16 18:17:03,5", "2 fields"),
        ("2023-11-16 18:17:03,5,6,7", "4 fields"),
        ("yesterday,5,6", "TIMESTAMP"),
        ("2023-13-16 18:17:03,5,6", "TIMESTAMP"),
        ("2023-02-30 18:17:03,5,6", "TIMESTAMP"),
        ("0000-01-01 18:17:03,5,6", "TIMESTAMP"),
        ("2023-11-16 25:17:03,5,6", "TIMESTAMP"),
        ("2023-11-16 18:17:03,x,6", "ContextTokens"),
        ("2023-11-16 18:17:03,1_0,6", "ContextTokens"),
        ("2023-11-16 18:17:03,0,6", "ContextTokens"),
        ("2023-11-16 18:17:03,5,0", "GeneratedTokens"),
        ("2023-11-16 18:17:03,5,", "GeneratedTokens"),
        ("2023-11-16 18:17:03,5,-1", "GeneratedTokens"),
        ("2023-11-16 18:17:03,5,99999999999999999999999", "GeneratedTokens"),
    ],
)
def test_bad_azure_line(tmp_path: Path, line: str, names: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,5,6\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_trace(path, 10)
    assert f"{path}:3: {names}" in str(caught.value)


def test_csv_without_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("2023-11-16 18:17:03.1,5,6\n")
    with pytest.raises(UsageError, match=r"bad\.csv:1: the first line must be TIMESTAMP,ContextTokens,GeneratedTokens"):
        read_trace(path, 10)


def test_utf8_mark_is_skipped_and_other_bytes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\xff\xfe\n")
    assert len(read_trace(path, 1)) == 1
    with pytest.raises(UsageError, match=r"t\.jsonl:2: not UTF-8"):
        read_trace(path, 2)


@pytest.mark.parametrize("name", ["none.jsonl", "none.txt", "empty.jsonl", "folder.csv"])
def test_no_trace(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.startswith("empty"):
        path.write_text("\n\n")
    if name.startswith("folder"):
        path.mkdir()
    with pytest.raises(UsageError, match="--trace"):
        read_trace(path, 1)


def test_unsorted_file_counts_from_its_earliest_request(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({**GOOD, "timestamp": stamp}) + "\n" for stamp in (30, 10, 20)))
    assert [r.arrival for r in read_trace(path, 3)] == [0.02, 0.0, 0.01]


def test_public_traces(data_dir: Path) -> None:
    mooncake = read_trace(data_dir / "mooncake_conversation_trace.jsonl", 10**6)
    assert len(mooncake) == 12_031
    assert sum(r.prompt_tokens for r in mooncake) == 144_793_823
    azure = read_trace(data_dir / "azure_llm_2023_code.csv", 10**6)
    assert len(azure) == 8_819
    assert azure[1].arrival == pytest.approx(0.052)
