"""Slot ids of one pool group.

Words: an id is *occupied* (handed out), *free* (came back, or was never issued and lies below the target), or, while a
shrink is pending, *overflow* (came back, and lies at or above the target).
Invariant: recycled + overflow + occupied = active, where ids below ``active`` have been issued at some time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvpool.errors import ArgumentError, LogicError, OutOfPagesError


class SlotAllocator:
    """Hands out the lowest free id, so that the tail of a pool stays empty and can be unmapped."""

    __slots__ = ("_active", "_capacity", "_is_tidy", "_num_occupied", "_occupied", "_overflow", "_recycled", "_target")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ArgumentError(f"capacity must not be negative, not {capacity}")
        self._capacity = capacity
        self._target = capacity
        self._active = 0
        self._recycled: list[int] = []  # heap of ids below _target
        self._is_tidy = True  # else an undo left ids there that are occupied, or never issued, or there twice
        self._overflow: list[int] = []
        self._occupied = bytearray(capacity)
        self._num_occupied = 0

    @property
    def capacity(self) -> int:
        """Ids are below this."""
        return self._capacity

    @property
    def target_capacity(self) -> int:
        """Capacity after the pending shrink."""
        return self._target

    @property
    def active(self) -> int:
        """High-water mark of issued ids."""
        return self._active

    @property
    def num_free(self) -> int:
        """Ids that can be handed out now."""
        self._tidy()
        return len(self._recycled) + max(self._target - self._active, 0)

    @property
    def num_occupied(self) -> int:
        """Ids handed out."""
        return self._num_occupied

    @property
    def num_overflow(self) -> int:
        """Ids that came back and wait for the shrink to finish."""
        return len(self._overflow)

    @property
    def shrink_in_progress(self) -> bool:
        """Whether a shrink is pending."""
        return self._target != self._capacity

    def is_occupied(self, slot: int) -> bool:
        """Whether ``slot`` is handed out."""
        return 0 <= slot < self._capacity and bool(self._occupied[slot])

    def occupied_ids(self) -> list[int]:
        """All ids handed out, ascending."""
        return [slot for slot in range(self._active) if self._occupied[slot]]

    def allocate(self) -> int:
        """Lowest free id; OutOfPagesError when there is none."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """The ``count`` lowest free ids, ascending; OutOfPagesError, and nothing taken, when there are fewer."""
        if count < 0:
            raise ArgumentError(f"count must not be negative, not {count}")
        if count > self.num_free:  # which tidies up
            raise OutOfPagesError(f"{count} slots wanted, {self.num_free} of {self._capacity} free")
        recycled = min(count, len(self._recycled))  # every recycled id is below every id never issued
        slots = [heapq.heappop(self._recycled) for _ in range(recycled)]
        if recycled < count:
            first = self._active
            self._active += count - recycled
            slots.extend(range(first, self._active))
        occupied = self._occupied
        for slot in slots:
            occupied[slot] = 1
        self._num_occupied += count
        return slots

    def release(self, slot: int) -> None:
        """Take ``slot`` back; LogicError when it is not handed out."""
        if not self.is_occupied(slot):
            raise LogicError(f"slot {slot} is not occupied (capacity {self._capacity})")
        self._occupied[slot] = 0
        self._num_occupied -= 1
        if slot < self._target:
            heapq.heappush(self._recycled, slot)
        else:
            self._overflow.append(slot)

    def undo_allocate(self, slots: Iterable[int], active: int) -> None:
        """Take the latest ``allocate_many`` that was not undone back; ``active`` is its value from before."""
        for slot in slots:
            self._occupied[slot] = 0
            self._num_occupied -= 1
            self._recycled.append(slot)
        self._active = active
        self._is_tidy = False

    def undo_release(self, slot: int) -> None:
        """Take the latest ``release`` that was not undone back.  Only while no shrink is pending."""
        self._occupied[slot] = 1
        self._num_occupied += 1
        self._is_tidy = False

    def _tidy(self) -> None:
        """Bring the free ids in order after undos: once, however many there were."""
        if not self._is_tidy:
            free = {slot for slot in self._recycled if slot < self._active and not self._occupied[slot]}
            self._recycled = sorted(free)
            self._is_tidy = True

    def expand(self, capacity: int) -> None:
        """Allow ids up to ``capacity``."""
        self._refuse_during_shrink("expand")
        if capacity < self._capacity:
            raise ArgumentError(f"expand to {capacity} is below the capacity of {self._capacity}")
        self._occupied.extend(bytes(capacity - self._capacity))
        self._capacity = self._target = capacity

    def prepare_for_shrink(self, capacity: int) -> None:
        """From now on hand out ids below ``capacity`` only."""
        self._refuse_during_shrink("prepare_for_shrink")
        self._tidy()
        if not 0 <= capacity <= self._capacity:
            raise ArgumentError(f"shrink to {capacity} is not within 0..{self._capacity}")
        self._target = capacity
        self._overflow = sorted(slot for slot in self._recycled if slot >= capacity)
        self._recycled = [slot for slot in self._recycled if slot < capacity]
        heapq.heapify(self._recycled)

    def finish_shrink(self) -> bool:
        """Lower the capacity when no id at or above the target is handed out; False, and nothing done, otherwise."""
        if len(self._overflow) != max(0, self._active - self._target):
            return False
        self._overflow = []
        self._capacity = self._target
        self._active = min(self._active, self._capacity)
        del self._occupied[self._capacity :]
        return True

    def slots_blocking_shrink(self) -> list[int]:
        """Ids handed out at or above the target, ascending."""
        return [slot for slot in range(self._target, self._active) if self._occupied[slot]]

    def audit(self) -> bool:
        """Whether the invariants hold; O(n)."""
        self._tidy()
        known = self._recycled + self._overflow
        return (
            len(known) + self._num_occupied == self._active
            and len(set(known)) == len(known)
            and sum(self._occupied) == self._num_occupied
            and not any(self._occupied[slot] for slot in known)
            and all(slot < self._target for slot in self._recycled)
            and self._active <= self._capacity
        )

    def _refuse_during_shrink(self, call: str) -> None:
        if self.shrink_in_progress:
            raise LogicError(f"{call}() while a shrink to {self._target} is pending")
