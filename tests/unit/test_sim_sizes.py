from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

from kvpool.sim.sizes import format_size, parse_size
from kvpool.sim.usage import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 KiB", 1536),
        (" 4MiB ", 4 * 2**20),
        ("2TiB", 2**41),
        ("4096", 4096),
        ("12B", 12),
        ("0.1GiB", None),  # not a whole number of bytes
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(UsageError, match="whole number"):
            parse_size("--memory", text)
    else:
        assert parse_size("--memory", text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "80GB", "80gib", "-1GiB", "nan", "inf", "1e3", "8 0GiB", "1,5GiB", "٣GiB", "9" * 30]
)
def test_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_size("--memory", text)


def test_zero_only_where_it_is_legal() -> None:
    assert parse_size("--host-memory", "0", zero=True) == 0
    with pytest.raises(UsageError, match="too small"):
        parse_size("--memory", "0GiB")


def test_largest() -> None:
    assert parse_size("--memory", "4194304TiB") == 2**62
    with pytest.raises(UsageError):
        parse_size("--memory", "4194305TiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (10 * 2**30, "10 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text
