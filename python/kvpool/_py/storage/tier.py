"""One memory level: the pools and the slots of every pool group, and since when a free slot may be used again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool._py.core.ids import NO_EVENT
from kvpool._py.device.device import CopyTask, Device
from kvpool._py.storage.layout import StorageLayout
from kvpool._py.storage.pool import Pool
from kvpool._py.storage.slot_allocator import SlotAllocator
from kvpool.errors import CorruptedError, LogicError


@dataclass(frozen=True, slots=True)
class Shortage:
    """Slots ran out: a value, not an error."""

    level: int
    pool_group: int
    lacking: int


@dataclass(slots=True)
class Reservation:
    """Slots exchanged by one plan; can be undone until :meth:`Tier.settle`."""

    released: dict[int, list[int]]  # pool group -> slot ids
    allocated: dict[int, list[int]]  # pool group -> slot ids, ascending
    active_before: dict[int, int] = field(default_factory=dict)


class Tier:
    """Level 0."""

    def __init__(self, device: Device, layout: StorageLayout, slot_counts: Sequence[int], grain: int) -> None:
        self.slot_counts = list(slot_counts)
        self.allocators = [SlotAllocator(count) for count in slot_counts]
        # Slots whose last use may still run: slot id -> event. Complete ones need no entry.
        self._ready_events: list[dict[int, int]] = [{} for _ in slot_counts]
        self.pools: list[list[Pool]] = []
        try:
            for group, count in zip(layout.pool_groups, slot_counts, strict=True):
                pools: list[Pool] = []
                self.pools.append(pools)
                for slot_bytes in group.slot_sizes:
                    pools.append(Pool(device, count, slot_bytes, grain))
        except BaseException:
            self.release()
            raise

    @property
    def mapped_bytes(self) -> int:
        """Bytes that have memory in all pools."""
        return sum(pool.mapped_bytes for pools in self.pools for pool in pools)

    def release(self) -> None:
        """Give all memory back."""
        for pools in self.pools:
            for pool in pools:
                pool.release()

    # ------------------------------------------------------------------------------------ exchanging slots

    def shortage(self, released: dict[int, list[int]], wanted: dict[int, int]) -> Shortage | None:
        """First pool group that could not serve ``wanted`` even with ``released`` back."""
        for group in sorted(wanted):
            lacking = wanted[group] - self.allocators[group].num_free - len(released.get(group, ()))
            if lacking > 0:
                return Shortage(0, group, lacking)
        return None

    def reserve(self, released: dict[int, list[int]], wanted: dict[int, int]) -> Reservation | Shortage:
        """Take ``released`` back and hand out ``wanted``; a shortage changes nothing.

        A slot that is released here may be handed out again here: its user is the same stream.
        """
        shortage = self.shortage(released, wanted)
        if shortage is not None:
            return shortage
        reservation = Reservation(released, {})
        for group in sorted(released.keys() | wanted.keys()):
            allocator = self.allocators[group]
            reservation.active_before[group] = allocator.active
            try:
                for slot in released.get(group, ()):
                    allocator.release(slot)
            except LogicError as error:  # a record named a slot that it does not own
                raise CorruptedError(str(error)) from error
            reservation.allocated[group] = allocator.allocate_many(wanted.get(group, 0))
        return reservation

    def undo(self, reservation: Reservation) -> None:
        """Take a reservation back; several are undone latest first."""
        for group, active in reservation.active_before.items():
            self.allocators[group].undo(reservation.allocated[group], reservation.released.get(group, ()), active)

    def events_to_wait_for(self, reservations: Iterable[Reservation]) -> list[int]:
        """Distinct events behind the allocated slots, oldest first.

        Slots released by an earlier reservation of the same call (or this one) are used by the same stream already.
        """
        events: set[int] = set()
        released: set[tuple[int, int]] = set()
        for reservation in reservations:
            for group, slots in reservation.released.items():
                released.update((group, slot) for slot in slots)
            for group, slots in reservation.allocated.items():
                pending = self._ready_events[group]
                if pending:
                    events.update(pending[slot] for slot in slots if slot in pending and (group, slot) not in released)
        return sorted(events)

    def settle(self, reservations: Iterable[Reservation], event: int) -> None:
        """Make reservations final: what they released may be used after ``event``."""
        for reservation in reservations:
            if event != NO_EVENT:
                for group, slots in reservation.released.items():
                    self._ready_events[group].update((slot, event) for slot in slots)
            for group, slots in reservation.allocated.items():
                pending = self._ready_events[group]
                if pending:
                    for slot in slots:
                        pending.pop(slot, None)

    def copy_tasks(self, pool_group: int, destination: int, source: int) -> list[CopyTask]:
        """Copies of one whole slot: one per pool."""
        return [
            (pool.slot_address(destination), pool.slot_address(source), pool.slot_bytes)
            for pool in self.pools[pool_group]
        ]
