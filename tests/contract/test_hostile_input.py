"""Values that no honest caller passes: each is refused with a clear error, at once, and nothing changes or dangles."""

from __future__ import annotations

import contextlib
import gc
import time

import numpy as np
import pytest

from kvpool.errors import ArgumentError, ConfigError, CuOOMError, LogicError, NeverFitsError
from kvpool.v2 import BatchDesc, KVCacheDesc
from tests.support.arms import build
from tests.support.configs import config, full, full_and_window, one, windowed

INT32_MAX = 2**31 - 1


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def arguments(*caches, capacity: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Handles, rows, capacities, histories."""
    n = len(caches)
    handles = np.array([cache.handle for cache in caches], np.int64)
    return handles, np.arange(n, dtype=np.int32), np.full(n, capacity, np.int32), np.zeros(n, np.int32)


def table_of(manager, rows: int, blocks: int) -> np.ndarray:
    return np.full((len(manager.layer_grouping), rows, blocks), -9, np.int32)


def unaligned(dtype, shape) -> np.ndarray:
    return np.ndarray(shape, dtype, buffer=bytearray(np.dtype(dtype).itemsize * int(np.prod(shape)) + 1), offset=1)


# ---------------------------------------------------------------------------------------------------------- lengths


def test_a_capacity_that_never_fits_is_refused_at_once(make) -> None:
    """The number of pages is compared before any page is planned."""
    for cfg in (full(4, tpb=1), windowed(4, 2, tpb=1), full_and_window(4, 4, 2, tpb=1)):
        manager = make(cfg)
        cache = make.open(manager)
        before = manager.snapshot()
        started = time.monotonic()
        with pytest.raises(NeverFitsError, match=f"capacity {INT32_MAX} needs .* which has 4 in all"):
            cache.resize(INT32_MAX)
        with pytest.raises(NeverFitsError, match="request 0"):
            manager.step(*arguments(cache, capacity=5000), table_of(manager, 1, 5000))
        assert time.monotonic() - started < 1
        assert manager.snapshot() == before


def test_never_fits_names_the_capacity(make) -> None:
    cache = make.open(make(full(4, tpb=16)))
    with pytest.raises(NeverFitsError, match=r"resize\(\): capacity 65 needs 5 slots of pool group 0.*has 4 in all"):
        cache.resize(65)


@pytest.mark.parametrize("width", [0, 65537, INT32_MAX])
def test_beam_widths_out_of_range(make, width) -> None:
    """A cache without pages could have any number of beams, were there no limit."""
    manager = make(full(4))
    cache = make.open(manager)
    with pytest.raises(ArgumentError, match="beam_width"):
        cache.beam_width = width
    assert cache.beam_width == 1
    cache.beam_width = 65536
    cache.beam_width = 1


def test_no_addresses_left(arm) -> None:
    with pytest.raises(CuOOMError, match="addresses"):
        build(arm, config([one(0, 2**60)], 2**62))


# -------------------------------------------------------------------------------------------------- arrays of step


@pytest.mark.parametrize("which", ["rows", "capacities", "histories", "handles"])
def test_arrays_inside_the_table(make, which) -> None:
    """All of the batch is read before the first entry of the table is written."""
    manager = make(full(16, tpb=4))
    caches = [make.open(manager) for _ in range(3)]
    table = table_of(manager, 4, 8)
    named = dict(zip(("handles", "rows", "capacities", "histories"), arguments(*caches), strict=True))
    inside = table.reshape(-1)[: 3 * named[which].itemsize // 4].view(named[which].dtype)
    inside[:] = named[which]
    named[which] = inside
    result = manager.step(**named, table=table)
    assert result.ok.all()
    for row, cache in enumerate(caches):
        assert table[0, row].tolist() == [*cache.get_base_page_indices(0), *[-1] * 6]


def test_arrays_that_are_not_aligned(make) -> None:
    manager = make(full(16))
    cache = make.open(manager)
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="table must be aligned"):
        manager.step(*arguments(cache), unaligned(np.int32, (1, 1, 8)))
    for position, name in enumerate(("handles", "rows", "capacities", "histories")):
        lists = list(arguments(cache))
        lists[position] = unaligned(lists[position].dtype, (1,))
        with pytest.raises(ArgumentError, match=f"{name} must be aligned"):
            manager.step(*lists, table_of(manager, 1, 8))
    with pytest.raises(ArgumentError, match="aligned"):
        cache.set_base_page_index_buf(0, 0, unaligned(np.int32, (8,)))
    assert manager.snapshot() == before


def test_a_table_of_too_many_rows(make) -> None:
    manager = make(full(4))
    with pytest.raises(ArgumentError, match="1099511627776 rows"):
        manager.step(*arguments(), np.empty((1, 2**40, 0), np.int32))


@pytest.mark.parametrize("stream", [-1, 2**63, 2**100])
def test_streams_out_of_range(make, stream) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="stream"):
        manager.step(*arguments(cache), table_of(manager, 1, 8), stream=stream)
    assert manager.snapshot() == before


def test_the_end_of_a_table_may_step_again(make) -> None:
    """The manager holds the table of the last step; letting it go for the next one runs the caller's code."""
    manager = make(full(64, tpb=4))
    outer, inner = make.open(manager), [make.open(manager) for _ in range(20)]
    nested: list[int] = []

    class Table(np.ndarray):
        def __del__(self) -> None:
            if not nested:
                nested.append(len(manager.step(*arguments(*inner), table_of(manager, 20, 40)).ok))

    def step() -> tuple[int, int]:
        result = manager.step(*arguments(outer), table_of(manager, 1, 8).view(Table))
        return len(result.ok), len(result.dirty)

    assert [step(), step(), step()] == [(1, 1)] * 3
    assert nested == [20]
    manager.audit()


def test_the_end_of_an_index_buffer_may_call_again(make) -> None:
    manager = make(full(64, tpb=4))
    outer, inner = make.open(manager), make.open(manager)
    ended: list[int] = []

    class Row(np.ndarray):
        def __del__(self) -> None:
            inner.resize(inner.capacity + 1)
            ended.append(inner.capacity)

    def attach() -> None:
        outer.set_base_page_index_buf(0, 0, np.zeros(16, np.int32).view(Row))

    attach()
    attach()
    outer.set_base_page_index_buf(0, 0, None)
    attach()
    outer.suspend()
    assert ended == [1, 2, 3]
    manager.audit()


def test_finalizers_never_wait_for_their_own_thread(make) -> None:
    """A collection may happen inside any call; what it runs is refused or served, but never waits for that call."""
    manager = make(full(64, tpb=4, max_util_for_resume=1.0))
    outer = make.open(manager)
    table = table_of(manager, 1, 16)

    class Request:
        def __init__(self) -> None:
            self.cache = manager.create_kv_cache()
            self.me = self

        def __del__(self) -> None:
            left.append(self.cache)
            with contextlib.suppress(LogicError):  # refused while the Python backend is inside a call
                self.cache.close()

    left: list = []
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for i in range(200):
            Request()
            assert manager.step(*arguments(outer, capacity=i % 40 + 1), table).ok.all()
            assert outer.resize(i % 64 + 1)
            manager.snapshot()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(left) == 200
    for cache in left:
        cache.close()
    manager.audit()


# ---------------------------------------------------------------------------------------------------------- queries


@pytest.mark.parametrize("mode", [-1, 2, 2**70])
def test_index_modes_that_do_not_exist(make, mode) -> None:
    manager = make(full(4))
    for call in (
        manager.supports_index_mode,
        make.open(manager).supports_index_mode,
        lambda value: manager.get_mem_pool_base_address(0, "key", value),
    ):
        with pytest.raises(ArgumentError, match="index mode"):
            call(mode)
        with pytest.raises(TypeError, match="index mode"):
            call("SHARED")


def test_aggregated_pages_want_pairs(make) -> None:
    manager = make(full(4))
    for wrong in (["key"], [0], [(0,)], [(0, "key", 1)], [np.zeros((2, 2))]):
        with pytest.raises(TypeError, match="pairs"):
            manager.get_aggregated_pages(wrong)


def test_arrays_where_a_word_is_wanted(arm, make) -> None:
    """numpy compares element by element; such a value is refused as any other of a wrong type."""
    empty = np.array([], np.int64)
    with pytest.raises(ConfigError, match="device"):
        build(arm, full(4), empty)
    with pytest.raises(ConfigError, match="pool_sizing"):
        full(4, pool_sizing=empty)
    with pytest.raises(TypeError, match="layout"):
        make(full(4), "host").get_buffers(0, "key", np.float16, 1, 1, empty)


def test_numpy_booleans(make) -> None:
    cache = make.open(make(full(4)))
    cache.text_only = np.True_
    cache.enable_swa_scratch_reuse = np.False_
    assert cache.text_only is True
    assert cache.enable_swa_scratch_reuse is False


def test_batches_changed_after_construction_are_checked_again(arm) -> None:
    for field in ("typical_step", "constraints"):
        batch = BatchDesc([KVCacheDesc(1, 0)])
        cfg = full(4, **{field: batch if field == "typical_step" else [batch]})
        batch.kv_caches.append("a request")
        with pytest.raises(ConfigError, match="kv_caches"):
            build(arm, cfg)
