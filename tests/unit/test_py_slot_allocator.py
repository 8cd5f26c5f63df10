from __future__ import annotations

import random

import pytest

from kvpool._py.storage.slot_allocator import SlotAllocator
from kvpool.errors import ArgumentError, LogicError, OutOfPagesError


def test_counts_are_plain_ints() -> None:  # scenario 1
    allocator = SlotAllocator(3)
    counts = (allocator.capacity, allocator.num_free, allocator.num_occupied, allocator.active)
    assert counts == (3, 3, 0, 0)
    assert all(type(count) is int for count in counts)


def test_lowest_id_first() -> None:
    allocator = SlotAllocator(8)
    assert allocator.allocate_many(6) == [0, 1, 2, 3, 4, 5]
    for slot in (4, 1, 3):
        allocator.release(slot)
    assert allocator.allocate() == 1
    assert allocator.allocate_many(3) == [3, 4, 6]
    assert allocator.active == 7


def test_all_or_nothing() -> None:
    allocator = SlotAllocator(3)
    allocator.allocate()
    with pytest.raises(OutOfPagesError):
        allocator.allocate_many(3)
    assert (allocator.num_free, allocator.num_occupied) == (2, 1)
    assert allocator.allocate_many(2) == [1, 2]
    with pytest.raises(ArgumentError):
        allocator.allocate_many(-1)
    with pytest.raises(OutOfPagesError):
        allocator.allocate()


def test_release_of_what_is_not_out() -> None:
    allocator = SlotAllocator(3)
    slot = allocator.allocate()
    allocator.release(slot)
    for wrong in (slot, 2, 3, -1):
        with pytest.raises(LogicError):
            allocator.release(wrong)


def test_shrink_below_the_high_water_mark_of_nothing() -> None:  # scenario 4
    allocator = SlotAllocator(184064)
    for slot in allocator.allocate_many(2048):
        allocator.release(slot)
    allocator.prepare_for_shrink(122624)
    assert allocator.num_overflow == 0
    assert allocator.shrink_in_progress
    assert allocator.finish_shrink()
    assert (allocator.capacity, allocator.active, allocator.shrink_in_progress) == (122624, 2048, False)


def test_shrink_of_free_slots() -> None:  # scenario 5
    allocator = SlotAllocator(16)
    slots = allocator.allocate_many(16)
    for slot in slots[8:]:
        allocator.release(slot)
    allocator.prepare_for_shrink(8)
    assert allocator.num_overflow == 8
    assert allocator.finish_shrink()
    assert (allocator.capacity, allocator.active) == (8, 8)
    for slot in slots[:8]:
        allocator.release(slot)
    assert allocator.audit()


def test_shrink_waits_for_ids_that_are_out() -> None:
    allocator = SlotAllocator(8)
    allocator.allocate_many(8)
    allocator.release(2)
    allocator.prepare_for_shrink(4)
    assert not allocator.finish_shrink()
    assert allocator.slots_blocking_shrink() == [4, 5, 6, 7]
    with pytest.raises(LogicError):
        allocator.expand(16)
    with pytest.raises(LogicError):
        allocator.prepare_for_shrink(3)
    for slot in (4, 5, 6, 7):
        allocator.release(slot)
    assert allocator.num_free == 1
    assert allocator.finish_shrink()
    assert allocator.allocate() == 2
    allocator.expand(6)
    assert allocator.allocate() == 4
    with pytest.raises(ArgumentError):
        allocator.expand(1)


def test_undo_is_exact() -> None:
    rng = random.Random(5)
    allocator = SlotAllocator(40)
    out: list[int] = []
    for _ in range(400):
        before = (sorted(out), allocator.active, allocator.num_free, allocator.occupied_ids())
        active = allocator.active
        released = rng.sample(out, rng.randint(0, len(out)))
        for slot in released:
            allocator.release(slot)
        allocated = allocator.allocate_many(rng.randint(0, allocator.num_free))
        if rng.random() < 0.5:
            allocator.undo_allocate(allocated, active)
            for slot in reversed(released):
                allocator.undo_release(slot)
            assert (sorted(out), allocator.active, allocator.num_free, allocator.occupied_ids()) == before
        else:
            out = [slot for slot in out if slot not in released] + allocated
        assert allocator.audit()
        free = sorted(set(range(40)) - set(out))
        again = allocator.allocate_many(len(free))
        assert again == free
        for slot in again:
            allocator.release(slot)
