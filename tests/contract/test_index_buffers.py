"""Page-index buffers of the caller: filled, kept up to date in place, refused when they can not hold the blocks."""

from __future__ import annotations

import array
import gc

import numpy as np
import pytest

from kvpool.errors import ArgumentError
from tests.support.configs import MIB, attention, config, full, ssm, windowed


def test_scenario_20_lengths(make, device) -> None:
    manager = make(full(8, tpb=4), device)
    cache = make.open(manager)
    assert cache.resize(8)
    short = np.full(cache.num_blocks - 1, 123, np.int32)
    before = manager.snapshot()
    with pytest.raises((ValueError, AssertionError), match="(?i)buf"):
        cache.set_base_page_index_buf(0, 0, memoryview(short))
    assert (short == 123).all()
    assert manager.snapshot() == before
    longer = np.full(cache.num_blocks + 2, 123, np.int32)
    cache.set_base_page_index_buf(0, 0, memoryview(longer))
    assert longer.tolist() == [0, 1, -1, -1]


def test_written_in_place(make) -> None:
    manager = make(windowed(8, 8, tpb=4))
    cache = make.open(manager)
    buf = np.full(16, 77, np.int32)
    cache.set_base_page_index_buf(0, 0, memoryview(buf))
    assert (buf == -1).all()
    for history in range(50):
        assert cache.resize(history + 1, history)
        inside = cache.get_base_page_indices(0)
        assert len(inside) == 16  # the whole attached row (C7)
        assert [int(i) for i in inside] == buf.tolist()
        live = [o for o, i in enumerate(buf.tolist()) if i >= 0]
        assert live == list(range(max(0, history + 1 - 8) // 4, history // 4 + 1))
    assert cache.resize(50, 49)
    assert (buf[13:] == -1).all()
    with pytest.raises(ArgumentError, match="(?i)buf|block"):
        cache.resize(16 * 4 + 1)
    assert cache.resize(16 * 4)
    cache.set_base_page_index_buf(0, 0, None)
    frozen = buf.copy()
    assert cache.resize(50, 49)
    assert (buf == frozen).all()
    assert len(cache.get_base_page_indices(0)) == 13


def test_resize_past_the_buffer_changes_nothing(make) -> None:
    manager = make(full(8, tpb=4))
    cache = make.open(manager)
    assert cache.resize(8)
    buf = np.full(3, 5, np.int32)
    cache.set_base_page_index_buf(0, 0, memoryview(buf))
    before, bytes_before = manager.snapshot(), buf.copy()
    with pytest.raises(ValueError, match="(?i)buf|block"):
        cache.resize(13)
    assert manager.snapshot() == before
    assert (buf == bytes_before).all()


def test_c9_attach_suspended_and_every_group(make) -> None:
    manager = make(config([attention(0), attention(1, window=64), ssm(2, 4096)], 64 * MIB))
    cache = make.track(manager.create_kv_cache())
    cache.stop_committing()
    rows = np.full((3, 12), 9, np.int32)
    for group in range(3):
        cache.set_base_page_index_buf(0, group, memoryview(rows[group]))
    assert (rows == -1).all()
    assert cache.resume()
    assert cache.resize(300, 200)
    full_row, window_row, state_row = rows.tolist()
    assert full_row[:10] == list(range(10))
    assert full_row[10:] == [-1, -1]
    assert [i >= 0 for i in window_row] == [False] * 4 + [True] * 6 + [False] * 2
    assert state_row == [-1] * 12
    cache.suspend()  # detaches: the entries of the blocks are -1 and nothing more is written
    assert (rows == -1).all()
    assert cache.resume()
    assert (rows == -1).all()
    for group in range(3):
        cache.set_base_page_index_buf(0, group, memoryview(rows[group]))
    assert rows.tolist() == [full_row, window_row, state_row]
    cache.close()


def test_B032_blocks_behind_the_window_are_bad(make) -> None:
    """w=64, B=16, h=300: entries before (301-64)//16 = 14 are -1, 14..18 valid; resizes and resumes leave no garbage."""
    manager = make(windowed(32, 64, tpb=16))
    cache = make.open(manager)
    buf = np.full(32, 99, np.int32)
    cache.set_base_page_index_buf(0, 0, memoryview(buf))
    assert cache.resize(301, 0)
    assert cache.resize(301, 300)

    def check(first: int, last: int) -> None:
        row = buf.tolist()
        assert row[:first] == [-1] * first
        assert all(0 <= i < 32 for i in row[first : last + 1])
        assert row[last + 1 :] == [-1] * (32 - last - 1)
        assert [int(i) for i in cache.get_base_page_indices(0)][: cache.num_blocks] == row[: cache.num_blocks]

    check(14, 18)
    assert cache.resize(340, 310)
    check((311 - 64) // 16, 21)
    cache.suspend()
    assert (buf[: cache.num_blocks] == -1).all()
    buf.fill(1234)
    assert cache.resume()
    cache.set_base_page_index_buf(0, 0, memoryview(buf))
    check((311 - 64) // 16, 21)


def test_c7_buffer_protocol(make) -> None:
    manager = make(full(8))
    cache = make.open(manager)
    assert cache.resize(96)
    indices = cache.get_base_page_indices(0)
    assert np.frombuffer(indices, np.int32, count=3).tolist() == [0, 1, 2]
    view = memoryview(indices)
    assert view.c_contiguous
    assert view.itemsize == 4
    assert [int(i) for i in indices[: cache.num_blocks]] == [0, 1, 2]
    assert [int(i) for i in indices] == [0, 1, 2]


def test_array_and_numpy_are_buffers(make) -> None:
    manager = make(full(8))
    cache = make.open(manager)
    assert cache.resize(64)
    for buf in (array.array("i", [7] * 4), np.full(4, 7, np.int32), memoryview(array.array("i", [7] * 4))):
        cache.set_base_page_index_buf(0, 0, buf)
        assert list(buf) == [0, 1, -1, -1]
        cache.set_base_page_index_buf(0, 0, None)


BAD_BUFFERS = [
    ("dtype", lambda: np.zeros(8, np.int64)),
    ("float", lambda: np.zeros(8, np.float32)),
    ("unsigned", lambda: np.zeros(8, np.uint32)),
    ("two axes", lambda: np.zeros((2, 8), np.int32)),
    ("strided", lambda: np.zeros(16, np.int32)[::2]),
    ("read only", lambda: np.frombuffer(bytes(32), np.int32)),
    ("bytes", lambda: bytearray(32)),
]


@pytest.mark.parametrize(("name", "build_buffer"), BAD_BUFFERS, ids=[name for name, _ in BAD_BUFFERS])
def test_bad_buffers(make, name, build_buffer) -> None:
    manager = make(full(8))
    cache = make.open(manager)
    assert cache.resize(64)
    before = manager.snapshot()
    with pytest.raises((ValueError, TypeError), match="(?i)buf"):
        cache.set_base_page_index_buf(0, 0, build_buffer())
    with pytest.raises(TypeError):
        cache.set_base_page_index_buf(0, 0, [0, 1, 2])
    assert manager.snapshot() == before
    assert cache.resize(96)
    assert [int(i) for i in cache.get_base_page_indices(0)] == [0, 1, 2]


def test_unknown_group_or_beam(make) -> None:
    manager = make(full(8))
    cache = make.open(manager)
    buf = np.zeros(4, np.int32)
    for beam, group in ((0, 1), (0, -1), (1, 0), (-1, 0)):
        with pytest.raises((ValueError, LookupError)):
            cache.set_base_page_index_buf(beam, group, memoryview(buf))
    assert (buf == 0).all()


def test_per_beam_buffers(make) -> None:
    manager = make(full(16))
    cache = make.open(manager)
    assert cache.resize(40, 40)
    cache.beam_width = 2
    rows = np.zeros((2, 6), np.int32)
    for beam in range(2):
        cache.set_base_page_index_buf(beam, 0, memoryview(rows[beam]))
    assert cache.resize(70, 40)
    assert rows.tolist() == [[0, 1, 3, -1, -1, -1], [-1, 2, 4, -1, -1, -1]]


def test_the_buffer_is_kept_alive(make) -> None:
    manager = make(full(32))
    cache = make.open(manager)
    buf = array.array("i", [5] * 32)
    cache.set_base_page_index_buf(0, 0, memoryview(buf))
    with pytest.raises(BufferError):
        buf.append(1)  # the export is held: the memory can not move
    gc.collect()
    assert cache.resize(20 * 32)
    assert buf[:20].tolist() == list(range(20))
    cache.set_base_page_index_buf(0, 0, None)
    buf.append(1)
    cache.set_base_page_index_buf(0, 0, memoryview(buf))
    cache.close()
    buf.append(2)


def test_dropping_the_callers_reference_is_safe(make) -> None:
    manager = make(full(32))
    cache = make.open(manager)
    cache.set_base_page_index_buf(0, 0, memoryview(array.array("i", [5] * 32)))
    gc.collect()
    filler = [array.array("i", [5] * 32) for _ in range(64)]
    assert cache.resize(32 * 32)
    assert all(set(f) == {5} for f in filler)
    assert [int(i) for i in cache.get_base_page_indices(0)] == list(range(32))
