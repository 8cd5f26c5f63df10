"""What every operation on a request stands on: pages and the tree, slots, the device, and the journal of the call.

A call changes state first, under the journal, then calls the device, then is kept.  A device call may fail; the journal
then takes everything back.  :meth:`Ground.order` makes the device calls of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvpool._py.core.ids import NO_EVENT
from kvpool._py.core.journal import Journal
from kvpool._py.device.device import CopyTask, Device
from kvpool._py.page.prefix_cache import PrefixCache
from kvpool._py.sequence.kv_cache import KVCache, SequenceRules
from kvpool._py.sequence.resize_plan import Grants, Page
from kvpool._py.storage.tier import Shortage, Tier

SlotCopy = tuple[int, int, int]
"""Pool group, destination slot, source slot."""


class Ground:
    """Shared by all requests of a manager."""

    def __init__(self, rules: SequenceRules, tier: Tier, device: Device, journal: Journal, pages: PrefixCache) -> None:
        self.rules = rules
        self.tier = tier
        self.device = device
        self.journal = journal
        self.pages = pages
        self.num_active = 0  # requests

    # -------------------------------------------------------------------------------------------------- slots

    def exchange(self, released: Iterable[Page], wanted: dict[int, list[int]]) -> Grants | Shortage:
        """Let go of pages, then take slots for new ones, given as life cycle to priorities.

        A shortage leaves the pages released: the caller undoes.
        """
        for life_cycle, slot in released:
            self.pages.release(life_cycle, slot)
        need = self.need(wanted)
        for group in sorted(need):
            if need[group] > self.room(group):
                return Shortage(0, group, need[group] - self.room(group))
        return self.take(wanted)

    def take(self, wanted: dict[int, list[int]]) -> Grants:
        """Slots for new pages: evictions first, then the lowest ids, life cycles ascending.  There is room."""
        need = self.need(wanted)
        for group in sorted(need):
            self.pages.make_room(group, need[group])
        supply = {group: iter(self.pages.allocate(group, count)) for group, count in need.items()}
        granted: Grants = {}
        for life_cycle in sorted(wanted):
            source = supply[self.rules.pool_group_of[life_cycle]]
            granted[life_cycle] = slots = []
            for priority in wanted[life_cycle]:
                slot = next(source)
                self.pages.new_page(life_cycle, slot, priority)
                slots.append(slot)
        return granted

    def take_one(self, life_cycle: int, priority: int) -> int | None:
        """A slot for one page more, of a cached page if none is free; None when there is neither."""
        group = self.rules.pool_group_of[life_cycle]
        if not self.room(group):
            return None
        return self.take({life_cycle: [priority]})[life_cycle][0]

    def need(self, wanted: dict[int, list[int]]) -> dict[int, int]:
        """Slots per pool group."""
        need: dict[int, int] = {}
        for life_cycle, priorities in wanted.items():
            group = self.rules.pool_group_of[life_cycle]
            need[group] = need.get(group, 0) + len(priorities)
        return need

    def room(self, group: int) -> int:
        """Slots that are free or can be made so."""
        return self.tier.num_free(group) + self.pages.evictable(group)

    # ------------------------------------------------------------------------------------------------- device

    def order(self, stream: int | None, copies: Sequence[SlotCopy] = (), handed_out_too: bool = False) -> int:
        """The device calls that this call's changes need, on ``stream``; None: no stream has used these pages.

        One wait per event behind what is used from now on, the copies, and one event behind what others may use; that
        event, or NO_EVENT.
        """
        event = NO_EVENT
        if stream is not None:
            for pending in self.tier.events_to_wait_for(stream):
                self.device.wait(stream, pending)
            for batch in self._batches(copies):
                self.device.copy(stream, batch)
            if self.tier.needs_event(handed_out_too):
                event = self.device.record(stream)
        self.tier.settle(0 if stream is None else stream, event)
        return event

    def hand_over(self, previous: int | None, stream: int) -> None:
        """``stream`` waits for what ``previous`` has been given so far."""
        if previous is not None and previous != stream:
            self.device.wait(stream, self.device.record(previous))

    def _batches(self, copies: Sequence[SlotCopy]) -> Iterator[list[CopyTask]]:
        """Copies in their order; within a batch none uses what another one writes."""
        batch: list[CopyTask] = []
        read: set[tuple[int, int]] = set()
        written: set[tuple[int, int]] = set()
        for group, destination, source in copies:
            target, origin = (group, destination), (group, source)
            if target in read or target in written or origin in written:
                yield batch
                batch, read, written = [], set(), set()
            read.add(origin)
            written.add(target)
            batch.extend(self.tier.copy_tasks(group, destination, source))
        if batch:
            yield batch


def stream_of(cache: KVCache) -> int | None:
    """The stream that has used the pages of a request; None before its first resume."""
    return cache.stream if cache.opened else None
