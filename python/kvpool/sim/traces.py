"""Request traces from files: Mooncake JSON lines and Azure CSV.

A malformed line is a UsageError that names the file and the line; only the lines that are taken are read.
Every request has at least one prompt token and at least one output token: a request without output is malformed.
"""

from __future__ import annotations

import calendar
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpool.sim.requests import TraceRequest
from kvpool.sim.usage import UsageError

PIECE_TOKENS = 512
"""Prompt tokens that one Mooncake hash id stands for."""
_MOST = 2**31 - 1
_MOST_ID = _MOST // PIECE_TOKENS
_CSV_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_CSV_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?", re.ASCII)


_Parsed = tuple[int, int, int, "tuple[int, ...] | None"]  # nanoseconds, prompt, output, ids


class _Malformed(Exception):
    """What is wrong with one line."""


def read_trace(path: Path, limit: int) -> list[TraceRequest]:
    """The first ``limit`` requests, arrivals counted from the earliest of them."""
    readers = {".jsonl": _mooncake_line, ".csv": _azure_line}
    parse = readers.get(path.suffix.lower())
    if parse is None:
        raise UsageError("--trace", f"{path} has neither ending", "a Mooncake .jsonl or an Azure .csv file")
    found: list[_Parsed] = []
    number = 1
    try:
        for number, line in _lines(path):
            if number == 1 and path.suffix.lower() == ".csv":
                if line.lower() != _CSV_HEADER.lower():
                    raise _Malformed(f"the first line must be {_CSV_HEADER}")
                continue
            found.append(parse(line))
            if len(found) == limit:
                break
    except _Malformed as error:
        raise UsageError("--trace", f"{path}:{number}: {error}") from None
    if not found:
        raise UsageError("--trace", f"{path} holds no request", "a file with at least one")
    first = min(parsed[0] for parsed in found)
    return [
        TraceRequest(index, (moment - first) / 1e9, prompt, output, ids)
        for index, (moment, prompt, output, ids) in enumerate(found)
    ]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without blank ones; a UTF-8 mark at the start and any line ending are accepted."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise UsageError("--trace", f"{path}:{number}: not UTF-8 text") from None
                if line:
                    yield number, line
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError("--trace", f"{path} can't be read ({reason})", "a readable file") from None


def _mooncake_line(line: str) -> _Parsed:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _Malformed("not a JSON object") from None
    if not isinstance(record, dict):
        raise _Malformed("not a JSON object")
    stamp = record.get("timestamp")
    if isinstance(stamp, bool) or not isinstance(stamp, (int, float)) or not 0 <= stamp <= 2**53:
        raise _Malformed(f"timestamp must be milliseconds ≥ 0, not {_short(stamp)}")
    prompt = _count(record, "input_length")
    output = _count(record, "output_length")
    return round(stamp * 1e6), prompt, output, _hash_ids(record.get("hash_ids"), prompt)


def _hash_ids(ids: Any, prompt: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    want = -(-prompt // PIECE_TOKENS)
    if not isinstance(ids, list) or len(ids) != want:
        raise _Malformed(f"hash_ids must be a list of {want} ids, one for each {PIECE_TOKENS} prompt tokens")
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= _MOST_ID:
            raise _Malformed(f"hash_ids must be integers in [0, {_MOST_ID}], not {_short(one)}")
    return tuple(ids)


def _azure_line(line: str) -> _Parsed:
    fields = line.split(",")
    if len(fields) != 3:
        raise _Malformed(f"{len(fields)} fields where {_CSV_HEADER} needs 3")
    values: dict[str, Any] = dict(zip(("ContextTokens", "GeneratedTokens"), map(_number, fields[1:]), strict=True))
    return _nanoseconds(fields[0]), _count(values, "ContextTokens"), _count(values, "GeneratedTokens"), None


def _nanoseconds(text: str) -> int:
    match = _CSV_TIME.fullmatch(text.strip())
    if match is None:
        raise _Malformed(f"TIMESTAMP must look like 2023-11-16 18:17:03.9799600, not {_short(text)}")
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    in_month = calendar.monthrange(year, month)[1] if year and 1 <= month <= 12 else 0
    if not 1 <= day <= in_month or hour > 23 or minute > 59 or second > 60:
        raise _Malformed(f"TIMESTAMP is no date and time: {_short(text)}")
    whole = calendar.timegm((year, month, day, hour, minute, second))
    return whole * 10**9 + int((match[7] or "0").ljust(9, "0"))


def _number(text: str) -> Any:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else text


def _count(record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise _Malformed(f"{name} must be an integer in [1, {_MOST}], not {_short(value)}")
    return value


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
