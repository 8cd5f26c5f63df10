"""The slot allocators of both backends: scenarios 1, 2, 4, 5, then random use against a set of free ids."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool.errors import ArgumentError, LogicError, OutOfPagesError


@pytest.fixture
def allocator_class(arm: str) -> Any:
    if arm == "v2cpp":
        from kvpool._native import SlotAllocator
    else:
        from kvpool._py.storage.slot_allocator import SlotAllocator
    return SlotAllocator


@pytest.fixture
def sizing(arm: str) -> Any:
    if arm == "v2cpp":
        import kvpool._native as module
    else:
        import kvpool._py.storage.sizing as module
    return module


def test_scenario_1_counts(allocator_class) -> None:
    a = allocator_class(3)
    assert (a.capacity, a.num_free, a.num_occupied, a.active, a.target_capacity, a.num_overflow) == (3, 3, 0, 0, 3, 0)
    for value in (a.capacity, a.num_free, a.num_occupied, a.active, a.target_capacity, a.num_overflow):
        assert type(value) is int
    assert a.allocate() == 0
    assert (a.num_free, a.num_occupied) == (2, 1)


def test_scenario_2_grains(sizing) -> None:
    sizes = [16_252_928, 4_063_232]
    grain = 16 << 20
    grains = sizing.grains_for_slots(157, sizes, grain)
    slots, used = sizing.grains_to_slots(grains, sizes, grain)
    assert slots >= 157
    assert used <= grains
    assert grains == sum(-(-157 * s // grain) for s in sizes)


def test_scenario_4_unused_tail(allocator_class) -> None:
    a = allocator_class(184_064)
    ids = a.allocate_many(2048)
    assert list(ids) == list(range(2048))
    for slot in ids:
        a.release(slot)
    a.prepare_for_shrink(122_624)
    assert a.num_overflow == 0
    assert a.finish_shrink() is True
    assert (a.capacity, a.active, a.shrink_in_progress) == (122_624, 2048, False)


def test_scenario_5_shrink_with_overflow(allocator_class) -> None:
    a = allocator_class(16)
    ids = list(a.allocate_many(16))
    for slot in ids[8:]:
        a.release(slot)
    a.prepare_for_shrink(8)
    assert a.num_overflow == 8
    assert a.finish_shrink() is True
    assert (a.capacity, a.active) == (8, 8)
    for slot in ids[:8]:
        a.release(slot)
    assert (a.num_free, a.num_occupied) == (8, 0)


def test_a_held_id_blocks_the_shrink(allocator_class) -> None:
    a = allocator_class(16)
    ids = list(a.allocate_many(16))
    a.prepare_for_shrink(8)
    assert a.shrink_in_progress
    assert a.finish_shrink() is False
    assert list(a.slots_blocking_shrink()) == list(range(8, 16))
    a.release(3)
    assert a.allocate() == 3
    with pytest.raises(OutOfPagesError):
        a.allocate()
    with pytest.raises(LogicError):
        a.expand(20)
    for slot in ids[8:]:
        a.release(slot)
    assert a.finish_shrink() is True
    a.expand(10)
    assert (a.capacity, a.num_free) == (10, 2)
    assert [a.allocate(), a.allocate()] == [8, 9]


def test_errors(allocator_class) -> None:
    a = allocator_class(4)
    assert list(a.allocate_many(0)) == []
    with pytest.raises(OutOfPagesError):
        a.allocate_many(5)
    assert (a.num_free, a.active) == (4, 0)
    slot = a.allocate()
    for bad in (slot + 1, 4, -1):
        with pytest.raises(LogicError):
            a.release(bad)
    a.release(slot)
    with pytest.raises(LogicError):
        a.release(slot)
    with pytest.raises(ArgumentError):
        a.allocate_many(-1)
    with pytest.raises(ArgumentError):
        allocator_class(-1)
    empty = allocator_class(0)
    with pytest.raises(OutOfPagesError):
        empty.allocate()


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 4095, 4096, 4097, 300_000])
def test_lowest_free_id_always(allocator_class, capacity: int) -> None:
    rng = random.Random(capacity)
    a = allocator_class(capacity)
    free = set(range(capacity))
    held: list[int] = []
    import heapq

    heap = list(range(capacity))
    for _ in range(4000):
        if held and rng.random() < 0.45:
            slot = held.pop(rng.randrange(len(held)))
            a.release(slot)
            free.add(slot)
            heapq.heappush(heap, slot)
        else:
            count = min(len(free), rng.choice([1, 1, 1, 5, 70]))
            want = [heapq.heappop(heap) for _ in range(count)]
            assert list(a.allocate_many(count)) == want
            free.difference_update(want)
            held += want
        assert a.num_free == len(free)
        assert a.num_occupied == len(held)
    assert a.audit() is True
    assert sorted(held) == list(a.occupied_ids())
