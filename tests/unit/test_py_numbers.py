from __future__ import annotations

import pytest

from kvpool._py.core.ids import handle_index, make_handle
from kvpool._py.core.math import decimal_fraction, div_up, div_up_by_limit, round_up
from kvpool._py.storage.live_ranges import scratch_range, scratch_slots, stale_range


def test_rounding() -> None:
    assert [div_up(n, 32) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
    assert round_up(33, 32) == 64


@pytest.mark.parametrize(
    ("x", "fraction"),
    [
        (0.95, (95, 100)),
        (0.97, (97, 100)),
        (1.0, (1, 1)),
        (0.5, (5, 10)),
        (1e-18, (1, 10**18)),
        (1e-30, (1, 10**18)),
        (1 / 3, (3333333333333333, 10**16)),
        (5e-324, (1, 10**18)),
        (0.1 + 0.2, (30000000000000004, 10**17)),
        (1.23456789e-12, (1234567, 10**18)),  # truncated to 18 decimals
    ],
)
def test_decimal_fraction(x: float, fraction: tuple[int, int]) -> None:
    assert decimal_fraction(x) == fraction


def test_div_up_by_limit_is_exact_and_saturates() -> None:
    assert div_up_by_limit(19, decimal_fraction(0.95)) == 20  # in floating point 19 / 0.95 is above 20
    assert div_up_by_limit(3458, decimal_fraction(0.95)) == 3640
    assert div_up_by_limit(1 << 40, decimal_fraction(1e-18)) == 1 << 62


def test_handles() -> None:
    handle = make_handle(3, 7)
    assert handle == 3 << 32 | 7
    assert handle_index(handle) == 7


@pytest.mark.parametrize(
    ("h", "tpb", "w", "sink", "expected"),
    [
        (1024, 32, 128, 0, (0, 28)),
        (256, 32, 32, 0, (0, 7)),
        (127, 32, 64, 0, (0, 2)),
        (128, 32, 64, 0, (0, 2)),
        (96, 32, 64, 0, (0, 1)),
        (512, 32, 128, 32, (1, 12)),
        (512, 32, 128, 48, (2, 12)),
        (15, 4, 8, 0, (0, 2)),
        (24, 8, 8, 0, (0, 2)),
        (95, 32, 33, 0, (0, 1)),
        (96, 32, 33, 0, (0, 2)),
        (48, 32, 33, 0, (0, 0)),
        (96, 32, 1, 0, (0, 3)),
        (4096, 32, None, 0, (0, 0)),
        (20, 32, 64, 48, (1, 1)),
    ],
)
def test_stale_range(h: int, tpb: int, w: int | None, sink: int, expected: tuple[int, int]) -> None:
    assert stale_range(h, tpb, w, div_up(sink, tpb)) == expected


def test_straddling_window_never_needs_more_blocks() -> None:  # B002
    peak = 0
    for h in range(201):
        begin, end = stale_range(h, 16, 11, 0)
        peak = max(peak, div_up(h + 1, 16) - (end - begin))
    assert peak == 2


def test_first_needed_block() -> None:  # B032
    assert stale_range(300, 16, 64, 0) == (0, 14)


def test_window_reached_token_by_token() -> None:  # B034
    visible = [list(range(stale_range(n, 1, 4, 0)[1], n)) for n in range(13)]
    # The next query sits at position n, so n - 3 .. n - 1 of the history are read with it.
    assert visible == [list(range(max(0, n - 3), n)) for n in range(13)]


def test_scratch_range() -> None:
    assert scratch_range(0, 4096, 3, 32, 128, 0) == (0, 123)
    assert scratch_range(0, 256, 0, 32, 32, 0) == (0, 7)  # scenario 83
    assert scratch_range(0, 256, 64, 32, 32, 0) == (0, 5)
    assert scratch_range(0, 4096, 0, 32, None, 0) == (0, 0)
    assert scratch_range(4095, 4096, 0, 32, 128, 0) == (0, 0)
    assert scratch_range(0, 1024, 0, 32, 128, 2) == (2, 28)
    assert scratch_range(100, 1024, 0, 32, 128, 0) == (4, 28)


def test_scratch_slots() -> None:
    assert [scratch_slots(n, (1, 8)) for n in (0, 1, 7, 8, 9)] == [0, 1, 1, 1, 2]


def test_no_scratch_while_the_chunk_is_shorter_than_rewind_and_window() -> None:
    for tpb, window, rewind, sinks in ((4, 6, 0, 0), (4, 1, 3, 1), (1, 3, 2, 0), (8, 8, 5, 2)):
        for h in range(60):
            for c in range(h, h + window + rewind):
                assert scratch_range(h, c, rewind, tpb, window, sinks) == (0, 0)
