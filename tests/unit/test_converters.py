"""From slot ids to page indices, and the small value types around it (v2_storage §2.1, 3.4, 3.5)."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from kvpool.errors import ArgumentError, UnknownBufferError
from kvpool.v2 import (
    AttentionLayerConfig,
    AttnLifeCycle,
    BufferConfig,
    BufferId,
    GpuCacheTierConfig,
    HalfOpenRange,
    KVCacheManager,
    KVCacheManagerConfig,
    PageIndexConverter,
    PageIndexMode,
    ScratchDesc,
    SsmLayerConfig,
    SsmLifeCycle,
    SwaScratchReuseConfig,
    exact_div,
    typed_range,
)

SHARED, PER_LAYER = PageIndexMode.SHARED, PageIndexMode.PER_LAYER


def manager_of(layers: list, backend: str = "python", **fields: object) -> KVCacheManager:
    config = KVCacheManagerConfig(32, [GpuCacheTierConfig(64 << 20)], layers, **fields)  # type: ignore[arg-type]
    return KVCacheManager(config, backend=backend, device="virtual")


# -- plain blocks ------------------------------------------------------------------------------------------------------


def test_affine_map() -> None:
    convert = PageIndexConverter(4, 1, 3, 2)
    assert convert([0, 5, -1, 2]) == [0, 20, -1, 8]
    assert convert([0, 5, -1, 2], SHARED) == [0, 20, -1, 8]
    assert convert([0, 5, -1, 2], PER_LAYER) == [3, 23, -1, 11]
    assert convert([]) == []


def test_expansion() -> None:
    convert = PageIndexConverter(scale=2, expansion=3, layer_offset=1, scratch_pages_per_block=1)
    assert convert([4, -1]) == [24, 25, 26, -1, -1, -1]
    assert convert([4, -1], PER_LAYER) == [27, 28, 29, -1, -1, -1]


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda x: np.array(x, np.int32), lambda x: np.array(x, "i").data])
def test_kinds_of_indices(kind) -> None:
    indices = PageIndexConverter(3, 1, 1, 1)(kind([1, -1, 2]), PER_LAYER)
    assert indices == [4, -1, 7]
    assert all(type(index) is int for index in indices)


def test_is_a_value() -> None:
    convert = PageIndexConverter(4, 2, 3, 1)
    assert (convert.scale, convert.expansion, convert.layer_offset, convert.scratch_pages_per_block) == (4, 2, 3, 1)
    assert convert == PageIndexConverter(4, 2, 3, 1)
    assert pickle.loads(pickle.dumps(convert)) == convert
    with pytest.raises(AttributeError):
        convert.scale = 3  # type: ignore[misc]


# -- scratch blocks ----------------------------------------------------------------------------------------------------


def test_scratch_needs_a_mode() -> None:
    scratch = ScratchDesc(HalfOpenRange(1, 3), (9,))
    with pytest.raises(ArgumentError, match="index_mode"):
        PageIndexConverter(8, 1, 0, 1)([0, -1, -1, 4], scratch=scratch)
    with pytest.raises(ArgumentError, match="1 slots"):
        PageIndexConverter(2, 1, 0, 2)([0, -1, -1, 4], PER_LAYER, scratch)


def test_scratch_formula() -> None:
    scratch = ScratchDesc(HalfOpenRange(1, 6), (9, 20))
    assert PageIndexConverter(3, 1, 2, 1)([7, -1, -1, -1, -1, -1, 8], PER_LAYER, scratch) == [
        23,
        29,  # block 1: offset 0 → sub-page (0 + 2) mod 3 of slot 9
        27,
        28,
        62,
        60,
        26,
    ]
    assert PageIndexConverter(3, 1, 2, 1)([7, -1, -1], SHARED, ScratchDesc(HalfOpenRange(1, 3), [9])) == [21, 27, 28]


@pytest.mark.parametrize(("scale", "util"), [(8, 1), (8, 2), (6, 3), (4, 4), (2, 1)])
def test_scratch_pages_of_one_layer_never_meet(scale: int, util: int) -> None:
    """While one layer runs, every (block, sub-page) of it has its own bytes; other layers may share them."""
    blocks = 13
    slots = tuple(range(100, 100 + -(-blocks * util // scale)))
    scratch = ScratchDesc(HalfOpenRange(2, 2 + blocks), slots)
    for first in range(0, scale, util):  # the layer's sub-pages are adjacent in the slot
        seen: set[int] = set()
        for offset in range(first, first + util):
            pages = PageIndexConverter(scale, 1, offset, util)([-1] * (2 + blocks), PER_LAYER, scratch)
            assert pages[:2] == [-1, -1]
            assert seen.isdisjoint(pages[2:])
            assert all(page // scale in slots for page in pages[2:])
            seen.update(pages[2:])
        assert len(seen) == blocks * util


# -- against addresses of a manager ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [False, True])
def test_both_modes_name_one_address(backend: str, scratch: bool) -> None:
    layers = [
        AttentionLayerConfig(
            i, [BufferConfig("key", 8192), BufferConfig("value", 4096, 16), BufferConfig("s", 256)], 64
        )
        for i in range(3)
    ]
    fields = {"swa_scratch_reuse": SwaScratchReuseConfig()} if scratch else {}
    with manager_of(layers, backend, **fields) as manager:
        slots = manager.pool_group_descs[0].num_slots
        picked = [*random.Random(0).sample(range(slots), 5), slots - 1]
        for layer, role in manager.all_buffer_ids:
            convert = manager.get_page_index_converter(layer, role)
            stride = manager.get_page_stride(layer, role)
            assert convert.scale == manager.get_page_index_scale(layer, role)
            bases = {mode: manager.get_mem_pool_base_address(layer, role, mode) for mode in (SHARED, PER_LAYER)}
            shared = [bases[SHARED] + stride * i for i in convert(picked, SHARED)]
            assert shared == [bases[PER_LAYER] + stride * i for i in convert(picked, PER_LAYER)]
            bound = manager.get_page_index_upper_bound(layer, role)
            assert max(convert(picked, SHARED)) < bound
            assert max(convert([slots - 1], SHARED)) >= bound - convert.scale * convert.expansion
            if scratch:
                with pytest.raises(ValueError, match="index_mode"):
                    manager.get_mem_pool_base_address(layer, role)
            else:
                assert manager.get_mem_pool_base_address(layer, role) == bases[SHARED]
        assert manager.supports_index_mode(PER_LAYER) is True
        assert manager.supports_index_mode(SHARED) is (None if scratch else True)


def test_aggregated_pages(backend: str) -> None:
    layers: list = [
        AttentionLayerConfig(0, [BufferConfig("key", 8192), BufferConfig("value", 8192), BufferConfig("scale", 512)]),
        AttentionLayerConfig(
            1, [BufferConfig("key", 8192), BufferConfig("value", 4096, 16), BufferConfig("scale", 512)]
        ),
        AttentionLayerConfig(2, [BufferConfig("key", 8192)], 64),
        SsmLayerConfig(3, [BufferConfig("state", 1024)]),
    ]
    with manager_of(layers, backend, commit_min_snapshot=True) as manager:
        everything = list(manager.get_aggregated_pages(manager.all_buffer_ids))
        assert [(page.layer_group_id, page.size) for page in everything] == [
            (0, 4 * 8192),
            (0, 1024),
            (1, 8192),
            (2, 1024),
        ]
        assert [page.stride for page in everything] == [32768, 1024, 8192, 1024]
        assert [(b.id, b.expansion) for b in everything[0].buffers] == [
            (BufferId(0, "key"), 1),
            (BufferId(0, "value"), 1),
            (BufferId(1, "key"), 1),
            (BufferId(1, "value"), 2),
        ]
        ends = [BufferId(1, "value"), BufferId(0, "key"), BufferId(0, "key")]
        split = list(manager.get_aggregated_pages(ends))
        base = manager.get_mem_pool_base_address(0, "key")
        assert [(page.base - base, page.size) for page in split] == [(0, 8192), (3 * 8192, 8192)]
        assert list(manager.get_aggregated_pages(reversed(ends))) == split
        assert list(manager.get_aggregated_pages([])) == []
        with pytest.raises(UnknownBufferError):
            manager.get_aggregated_pages([BufferId(2, "value")])


# -- small values ------------------------------------------------------------------------------------------------------


def test_half_open_range() -> None:
    span = HalfOpenRange(2, 5)
    assert (span.beg, span.end, len(span), bool(span)) == (2, 5, 3, True)
    assert span == HalfOpenRange(beg=2, end=5)
    assert span != HalfOpenRange(2, 6)
    assert HalfOpenRange(7, 7) == HalfOpenRange(3, 1) == HalfOpenRange(0, 0)
    assert hash(HalfOpenRange(7, 7)) == hash(HalfOpenRange(3, 1))
    assert (len(HalfOpenRange(3, 1)), bool(HalfOpenRange(3, 1))) == (0, False)
    assert span != (2, 5)
    assert 2 in span
    assert 5 not in span
    assert not ScratchDesc(HalfOpenRange(1, 1), ())
    assert ScratchDesc(HalfOpenRange(1, 2), (4,))


@pytest.mark.parametrize(
    ("history", "block", "window", "sinks", "stale"),
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
        (10_000, 32, None, 0, (0, 0)),
    ],
)
def test_stale_range(history: int, block: int, window: int | None, sinks: int, stale: tuple[int, int]) -> None:
    life_cycle = AttnLifeCycle.make(window, sinks, block)
    assert life_cycle.get_stale_range(history, block) == HalfOpenRange(*stale)


def test_life_cycles() -> None:
    assert AttnLifeCycle.make(128, 1, 32) == AttnLifeCycle.make(128, 32, 32)
    assert AttnLifeCycle.make(128, 33, 32).num_sink_blocks == 2
    assert AttnLifeCycle.make(None, None, 32) == AttnLifeCycle.make(None, 0, 32)
    assert SsmLifeCycle().get_stale_range(70, 32) == HalfOpenRange(0, 2)
    for bad in ((0, None, 32), (-1, None, 32), (None, 3, 32), (8, -1, 32), (8, 0, 0)):
        with pytest.raises(ArgumentError):
            AttnLifeCycle.make(*bad)


def test_helpers() -> None:
    assert exact_div(12, 4) == 3
    with pytest.raises(AssertionError):
        exact_div(13, 4)
    assert list(typed_range(2, 8, 3)) == [2, 5]
