"""What can happen to one request: resize, resume, suspend, close, another stream, the end of committing.

Every function plans first, then calls the device, then changes the record.  Device calls may fail; they come before the
record changes, and the exchange of slots is undone, so a failing call leaves everything as before.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpool._py.core.ids import BAD_PAGE_INDEX, MAX_INT32, NO_EVENT
from kvpool._py.core.math import div_up
from kvpool._py.device.device import CopyTask, Device
from kvpool._py.sequence.block_table import detach_buffers, write_all_buffers, write_buffers
from kvpool._py.sequence.kv_cache import ACTIVE, CLOSED, SUSPENDED, KVCache, SequenceRules
from kvpool._py.sequence.resize_plan import ResizePlan, apply_resize, needs_scratch, plan_resize
from kvpool._py.storage.tier import Shortage, Tier
from kvpool.errors import ArgumentError, LogicError, NeverFitsError

Slots = dict[int, list[int]]
"""Pool group to slot ids."""


class Transitions:
    """The operations on a request; they share the tier and the device, and keep only the number of ACTIVE requests."""

    def __init__(self, rules: SequenceRules, tier: Tier, device: Device) -> None:
        self.rules = rules
        self.tier = tier
        self.device = device
        self.num_active = 0

    # ------------------------------------------------------------------------------------------------ lengths

    def resize(self, cache: KVCache, capacity: int | None, history: int | None) -> bool:
        """New lengths; None keeps one.  False, and nothing changed, when there are not enough free slots now.

        Raises LogicError unless ACTIVE, ArgumentError for lengths out of order, NeverFitsError for more than exists.
        """
        if capacity is None and history is None:
            return True
        require(cache, "resize", ACTIVE)
        new_capacity = cache.capacity if capacity is None else capacity
        new_history = cache.history if history is None else history
        self.check_lengths(cache, new_capacity, new_history, "resize()")
        plan = self.plan(cache, new_capacity, new_history, "resize()")
        allocated = self.exchange(stream_of(cache), plan.released, plan.wanted)
        if isinstance(allocated, Shortage):
            return False
        self.apply(cache, plan, allocated)
        cache.drop_binding()
        return True

    def check_lengths(self, cache: KVCache, capacity: int, history: int, where: str) -> None:
        """Refuse lengths that no state of the pools could serve."""
        if history < cache.history:
            raise ArgumentError(f"{where}: History length cannot be decreased: {history} is below {cache.history}")
        if capacity < history:
            raise ArgumentError(f"{where}: capacity {capacity}: must be at least the history length {history}")
        if capacity > MAX_INT32:
            raise ArgumentError(f"{where}: capacity {capacity}: must be at most {MAX_INT32}")
        num_blocks = div_up(capacity, self.rules.tokens_per_block)
        for (life_cycle, beam), buffer in cache.buffers.items():
            if len(buffer) < num_blocks:
                raise ArgumentError(
                    f"{where}: capacity {capacity} needs {num_blocks} blocks; the buffer attached for layer group "
                    f"{life_cycle}, beam {beam} has only {len(buffer)} entries"
                )

    def plan(self, cache: KVCache, capacity: int, history: int, where: str) -> ResizePlan:
        """Plan for checked lengths; NeverFitsError when they need more slots than a pool group has."""
        plan = plan_resize(self.rules, cache, history, capacity)
        too_many = plan.never_fits(self.rules)
        if too_many is not None:
            group, slots = too_many
            raise NeverFitsError(
                f"{where}: capacity {capacity} needs {slots} slots of pool group {group}, which has "
                f"{self.rules.pool_group_slots[group]} in all"
            )
        return plan

    def apply(self, cache: KVCache, plan: ResizePlan, allocated: Slots) -> None:
        """Bring the record, and attached buffers, to a plan whose slots were exchanged."""
        old_blocks = cache.num_blocks
        apply_resize(self.rules, cache, plan, allocated)
        if cache.buffers:
            changes = [(p.life_cycle, r) for p in plan.parts for r in plan.intervals(p, old_blocks)]
            write_buffers(cache, changes)

    # ------------------------------------------------------------------------------------------------- states

    def resume(self, cache: KVCache, stream: int | None) -> bool:
        """SUSPENDED to ACTIVE on ``stream`` (None: the cached one, else the device's own).

        False, and nothing changed, when the pools are too full: the share that other caches hold is above the limit
        while another cache is ACTIVE, or slots for states and scratch are short.
        """
        require(cache, "resume", SUSPENDED)
        if stream is None:
            stream = self.device.own_stream() if cache.stream is None else cache.stream
        plan = self.plan(cache, cache.capacity, cache.history, "resume()")
        if self.num_active and self._gate_is_shut(cache):
            return False
        allocated = self.exchange(stream, plan.released, plan.wanted, previous=cache.stream)
        if isinstance(allocated, Shortage):
            return False
        apply_resize(self.rules, cache, plan, allocated)
        cache.stream = stream
        cache.status = ACTIVE
        self.num_active += 1
        cache.drop_binding()
        write_all_buffers(cache)
        return True

    def _gate_is_shut(self, cache: KVCache) -> bool:
        numerator, denominator = self.rules.max_util_for_resume
        for group in self.rules.gated_pool_groups:
            held_by_others = self.tier.allocators[group].num_occupied - cache.owned[group]
            if held_by_others * denominator > numerator * self.rules.pool_group_slots[group]:
                return True
        return False

    def suspend(self, cache: KVCache) -> None:
        """ACTIVE to SUSPENDED: pages stay, scratch slots go, attached buffers are let go."""
        require(cache, "suspend", ACTIVE)
        released: Slots = {}
        for life_cycle in self.rules.windowed:
            released.setdefault(life_cycle.pool_group, []).extend(cache.scratch[life_cycle.index])
        self.release(cache, released)
        for scratch in cache.scratch:
            scratch.clear()
        cache.status = SUSPENDED
        self.num_active -= 1
        detach_buffers(cache)
        cache.drop_binding()

    def close(self, cache: KVCache) -> None:
        """Give everything back; the record is dead."""
        released: Slots = {}
        for life_cycle in self.rules.attention:
            slots = released.setdefault(life_cycle.pool_group, [])
            slots.extend(cache.scratch[life_cycle.index])
            for beam in cache.slots[life_cycle.index]:
                slots.extend(slot for slot in beam if slot != BAD_PAGE_INDEX)
        for position, life_cycle in enumerate(self.rules.ssm):
            states = [slot for slot in cache.ssm[position] if slot != BAD_PAGE_INDEX]
            released.setdefault(life_cycle.pool_group, []).extend(states)
        self.release(cache, released)
        self.num_active -= cache.status == ACTIVE
        cache.status = CLOSED
        detach_buffers(cache)

    def stop_committing(self, cache: KVCache) -> None:
        """No block will be committed any more, so held stale pages go.  Legal in every state but CLOSED; idempotent."""
        if not cache.commit_allowed:
            return
        held = [
            (life_cycle, ordinal)
            for life_cycle in self.rules.windowed
            for ordinal in range(*cache.stale[life_cycle.index])
            if cache.slots[life_cycle.index][0][ordinal] != BAD_PAGE_INDEX
        ]
        released: Slots = {}
        for life_cycle, ordinal in held:
            slots = [beam[ordinal] for beam in cache.slots[life_cycle.index] if beam[ordinal] != BAD_PAGE_INDEX]
            released.setdefault(life_cycle.pool_group, []).extend(slots)
        self.release(cache, released)
        for life_cycle, ordinal in held:
            for beam in cache.slots[life_cycle.index]:
                beam[ordinal] = BAD_PAGE_INDEX
        cache.commit_allowed = False

    def set_scratch_enabled(self, cache: KVCache, value: bool) -> None:
        """Use scratch slots from the next change of lengths on, or no longer."""
        if not value and any(cache.scratch):
            raise ArgumentError("enable_swa_scratch_reuse: can not be switched off while scratch blocks are in use")
        if value and not cache.scratch_enabled:
            if self.rules.max_rewind is None:
                raise ArgumentError("enable_swa_scratch_reuse: the manager's swa_scratch_reuse is not configured")
            if needs_scratch(self.rules, cache):
                raise ArgumentError(
                    f"enable_swa_scratch_reuse: history {cache.history}, capacity {cache.capacity} would need scratch "
                    "blocks now"
                )
        cache.scratch_enabled = value
        cache.refresh_limits(self.rules)

    # ------------------------------------------------------------------------------------------------ streams

    def set_stream(self, cache: KVCache, stream: int) -> None:
        """Hand the request over to another stream, which waits for what the old one has been given so far."""
        if cache.stream is not None and cache.stream != stream:
            self.device.wait(stream, self.device.record(cache.stream))
        cache.stream = stream

    # ---------------------------------------------------------------------------------------- exchanging slots

    def exchange(
        self,
        stream: int,
        released: Slots,
        wanted: dict[int, int],
        previous: int | None = None,
        copies: Callable[[Slots], list[CopyTask]] | None = None,
    ) -> Slots | Shortage:
        """Swap slots and order the streams: what was allocated, or a shortage; undone when a device call fails.

        Device calls, in this order: the hand-over from ``previous`` to ``stream``, one event behind what is released,
        one wait per distinct event behind what is allocated, one batch of copies.
        """
        reservation = self.tier.reserve(released, wanted)
        if isinstance(reservation, Shortage):
            return reservation
        event = NO_EVENT
        try:
            if previous is not None and previous != stream:
                self.device.wait(stream, self.device.record(previous))
            if any(released.values()):
                event = self.device.record(stream)
            for pending in self.tier.events_to_wait_for([reservation]):
                self.device.wait(stream, pending)
            tasks = copies(reservation.allocated) if copies is not None else []
            if tasks:
                self.device.copy(stream, tasks)
        except BaseException:
            self.tier.undo(reservation)
            raise
        self.tier.settle([reservation], event)
        return reservation.allocated

    def release(self, cache: KVCache, released: Slots) -> None:
        """Give slots back behind one event; the caller clears the record's entries afterwards."""
        if not any(released.values()):
            return
        self.exchange(stream_of(cache), released, {})
        for group, slots in released.items():
            cache.owned[group] -= len(slots)


def require(cache: KVCache, call: str, status: int) -> None:
    """LogicError unless the cache has that status."""
    if cache.status != status:
        wanted = "an ACTIVE" if status == ACTIVE else "a SUSPENDED"
        is_now = "ACTIVE" if cache.status == ACTIVE else "SUSPENDED"
        raise LogicError(f"{call}() needs {wanted} KV cache; this one is {is_now}")


def stream_of(cache: KVCache) -> int:
    """Stream of a cache that has been resumed at least once."""
    assert cache.stream is not None, "only a resumed cache owns slots"
    return cache.stream
