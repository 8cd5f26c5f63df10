"""One memory level: the pools and the slots of every pool group, and since when a free slot may be used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvpool._py.core.ids import NO_EVENT
from kvpool._py.core.journal import Journal
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


class _Use(Enum):
    """What a call does with a slot."""

    FINISHED = auto()  # released or linked: whoever comes next waits for this call
    HANDED_OUT = auto()
    BORROWED = auto()


_Note = tuple[_Use, int, int]
"""Use, pool group, slot."""


MANY_EVENTS = 8
"""A larger ready set loses its complete events."""


class Tier:
    """Level 0.

    A slot's *ready set* has at most one event per stream: work on the slot that may still run.  Who is handed a free slot
    waits for all of it; who starts to use a page beside its owner waits for it too, but leaves it to others.  During a
    call the tier notes which slots that concerns; :meth:`settle` brings the sets up to date when the call is certain.
    """

    def __init__(
        self,
        device: Device,
        layout: StorageLayout,
        slot_counts: Sequence[int],
        grain: int,
        journal: Journal,
    ) -> None:
        self._device = device
        self._journal = journal
        self._notes: list[_Note] = []  # of the running call, in order
        self._ready: list[dict[int, dict[int, int]]] = [{} for _ in slot_counts]  # slot -> stream -> event; none empty
        self.slot_counts = list(slot_counts)
        self.allocators = [SlotAllocator(count) for count in slot_counts]
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

    # ------------------------------------------------------------------------------------ slots

    def num_free(self, group: int) -> int:
        """Slots that can be handed out now."""
        return self.allocators[group].num_free

    def allocate(self, group: int, count: int) -> list[int]:
        """The ``count`` lowest free slots, ascending: handed out to the running call.  OutOfPagesError without."""
        allocator = self.allocators[group]
        active = allocator.active
        slots = allocator.allocate_many(count)
        self._journal.on_undo(allocator.undo_allocate, slots, active)
        for slot in slots:
            self._note(_Use.HANDED_OUT, group, slot)
        return slots

    def free(self, group: int, slot: int) -> None:
        """Take a slot back.  Its ready set stays; :meth:`finish` adds the call's own event."""
        allocator = self.allocators[group]
        try:
            allocator.release(slot)
        except LogicError as error:  # a record named a slot that it does not own
            raise CorruptedError(str(error)) from error
        self._journal.on_undo(allocator.undo_release, slot)

    # ------------------------------------------------------------------------------------ who waits for whom

    def finish(self, group: int, slot: int) -> None:
        """The running call's event will be a ready event of the slot."""
        self._note(_Use.FINISHED, group, slot)

    def borrow(self, group: int, slot: int) -> None:
        """The running call starts to use another owner's page."""
        if slot in self._ready[group]:
            self._note(_Use.BORROWED, group, slot)

    def events_to_wait_for(self, stream: int) -> list[int]:
        """Distinct events that the running call waits for on ``stream``, ascending."""
        events: set[int] = set()
        for use, group, slot in self._notes:
            if use is not _Use.FINISHED:
                pending = self._ready[group].get(slot)
                if pending:
                    events.update(event for other, event in pending.items() if other != stream)
        return sorted(events)

    def needs_event(self, handed_out_too: bool = False) -> bool:
        """Whether the running call must record an event: it released or linked pages (or was handed slots)."""
        uses = (_Use.FINISHED, _Use.HANDED_OUT) if handed_out_too else (_Use.FINISHED,)
        return any(note[0] in uses for note in self._notes)

    def settle(self, stream: int, event: int) -> None:
        """The running call is certain; ``event``, recorded on ``stream`` behind all that it does, is 0 without one."""
        for use, group, slot in self._notes:
            if use is _Use.HANDED_OUT:
                self._ready[group].pop(slot, None)
            elif use is _Use.FINISHED and event != NO_EVENT:
                self._add_event(group, slot, stream, event)
        self._notes.clear()

    def ready_set(self, group: int, slot: int) -> dict[int, int]:
        """Stream to event; a copy."""
        return dict(self._ready[group].get(slot, ()))

    def _note(self, use: _Use, group: int, slot: int) -> None:
        self._journal.append(self._notes, (use, group, slot))

    def _add_event(self, group: int, slot: int, stream: int, event: int) -> None:
        pending = self._ready[group].setdefault(slot, {})
        pending[stream] = event
        if len(pending) > MANY_EVENTS:
            for other in [other for other, older in pending.items() if self._device.query(older)]:
                del pending[other]

    def copy_tasks(self, pool_group: int, destination: int, source: int) -> list[CopyTask]:
        """Copies of one whole slot: one per pool."""
        return [
            (pool.slot_address(destination), pool.slot_address(source), pool.slot_bytes)
            for pool in self.pools[pool_group]
        ]
