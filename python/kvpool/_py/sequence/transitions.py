"""What can happen to one request: resize, resume, suspend, another stream, scratch on or off.

Every function plans first, then changes slots and pages under the journal, then calls the device, then changes the record.
Device calls may fail; they come before the record changes, and the journal takes the rest back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpool._py.core.ids import BAD_PAGE_INDEX, MAX_INT32
from kvpool._py.core.math import div_up
from kvpool._py.sequence.adoption import apply_private, choose_optional, plan_private, take_private
from kvpool._py.sequence.block_table import detach_buffers, write_all_buffers, write_buffers
from kvpool._py.sequence.ground import Ground
from kvpool._py.sequence.kv_cache import ACTIVE, SUSPENDED, KVCache
from kvpool._py.sequence.resize_plan import Grants, Page, ResizePlan, apply_resize, needs_scratch, plan_resize
from kvpool._py.storage.tier import Shortage
from kvpool.errors import ArgumentError, LogicError, NeverFitsError


class Transitions:
    """The operations on a request."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.rules = ground.rules
        self.device = ground.device

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
        with self.ground.journal.call() as journal:
            granted = self.ground.exchange(plan.released, plan.wanted)
            if isinstance(granted, Shortage):
                journal.undo_to(0)
                return False
            self.ground.order(cache.stream)
        self.apply(cache, plan, granted)
        cache.drop_binding()
        return True

    def check_lengths(self, cache: KVCache, capacity: int, history: int, where: str, committed: int = 0) -> None:
        """Refuse lengths that no state of the pools could serve, and a history below the ``committed`` tokens to be."""
        if history < cache.history:
            raise ArgumentError(f"{where}: History length cannot be decreased: {history} is below {cache.history}")
        if history < committed:
            raise ArgumentError(f"{where}: history {history}: must be at least the {committed} committed tokens")
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
        self.check_fits(plan, where)
        return plan

    def check_fits(self, plan: ResizePlan, where: str) -> None:
        """NeverFitsError when the plan needs more slots than a pool group has."""
        too_many = plan.never_fits(self.rules)
        if too_many is not None:
            group, slots = too_many
            raise NeverFitsError(
                f"{where}: capacity {plan.capacity} needs {slots} slots of pool group {group}, which has "
                f"{self.rules.pool_group_slots[group]} in all"
            )

    def apply(self, cache: KVCache, plan: ResizePlan, granted: Grants) -> None:
        """Bring the record, and attached buffers, to a plan whose slots were exchanged."""
        old_blocks = cache.num_blocks
        apply_resize(self.rules, cache, plan, granted)
        if cache.buffers:
            changes = [(p.life_cycle, r) for p in plan.parts for r in plan.intervals(p, old_blocks)]
            write_buffers(cache, changes)

    # ------------------------------------------------------------------------------------------------- states

    def resume(self, cache: KVCache, stream: int | None, optional_groups: Sequence[int] | None) -> bool:
        """SUSPENDED to ACTIVE on ``stream`` (None: the cached one, else the device's own).

        False, and nothing changed, when the pools are too full: the share that other caches hold is above the limit
        while another cache is ACTIVE, or slots for copies, states and scratch are short.
        """
        require(cache, "resume", SUSPENDED)
        chosen = choose_optional(self.rules, cache, optional_groups)
        if stream is None:
            stream = self.device.own_stream() if cache.stream is None else cache.stream
        plan = self.plan(cache, cache.capacity, cache.history, "resume()")
        if self.ground.num_active and self._gate_is_shut(cache):
            return False
        private = plan_private(self.rules, cache, plan, chosen) if cache.copy_pending else None
        with self.ground.journal.call() as journal:
            if private is not None:
                granted = take_private(self.ground, private)
            else:
                granted = self.ground.exchange(plan.released, plan.wanted)
            if isinstance(granted, Shortage):
                journal.undo_to(0)
                return False
            self.ground.hand_over(cache.stream, stream)
            self.ground.order(stream, () if private is None else private.copies)
        if private is not None:
            apply_private(self.rules, cache, private, granted)
        apply_resize(self.rules, cache, plan, granted)
        cache.optional_groups = chosen
        cache.opened = True
        cache.stream = stream
        cache.status = ACTIVE
        self.ground.num_active += 1
        cache.drop_binding()
        write_all_buffers(cache)
        return True

    def _gate_is_shut(self, cache: KVCache) -> bool:
        numerator, denominator = self.rules.max_util_for_resume
        shared: list[int] | None = None
        for group in self.rules.gated_pool_groups:
            allocator = self.ground.tier.allocators[group]
            limit = numerator * self.rules.pool_group_slots[group]
            held = allocator.num_occupied - self.ground.pages.evictable(group)
            if held * denominator <= limit:
                continue
            if shared is None:
                shared = self._shared_pages(cache)
            if (held - cache.owned[group] + shared[group]) * denominator > limit:
                return True
        return False

    def _shared_pages(self, cache: KVCache) -> list[int]:
        """Slots per pool group that other requests own too: only committed blocks can be."""
        pages, shared = self.ground.pages, [0] * self.rules.num_pool_groups
        for index, slot in committed_pages(self.ground, cache):
            shared[self.rules.pool_group_of[index]] += pages.refs(index, slot) > 1
        return shared

    def suspend(self, cache: KVCache) -> None:
        """ACTIVE to SUSPENDED: pages stay, scratch slots go, attached buffers are let go."""
        require(cache, "suspend", ACTIVE)
        with self.ground.journal.call():
            for life_cycle in self.rules.windowed:
                for slot in cache.scratch[life_cycle.index]:
                    self.ground.pages.release(life_cycle.index, slot)
            self.ground.order(cache.stream)
        for life_cycle in self.rules.windowed:
            scratch = cache.scratch[life_cycle.index]
            cache.owned[life_cycle.pool_group] -= len(scratch)
            scratch.clear()
        cache.status = SUSPENDED
        self.ground.num_active -= 1
        detach_buffers(cache)
        cache.drop_binding()

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
        self.ground.hand_over(cache.stream, stream)
        cache.stream = stream


def committed_pages(ground: Ground, cache: KVCache) -> Iterator[Page]:
    """Pages of the committed blocks of beam 0, and the matched states: those that the tree may know."""
    count = div_up(cache.committed, ground.rules.tokens_per_block)
    for life_cycle in ground.rules.attention:
        index = life_cycle.index
        yield from ((index, slot) for slot in cache.slots[index][0][:count] if slot != BAD_PAGE_INDEX)
    for life_cycle, slot in zip(ground.rules.ssm, cache.ssm_source, strict=True):
        if slot != BAD_PAGE_INDEX:
            yield life_cycle.index, slot


def require(cache: KVCache, call: str, status: int) -> None:
    """LogicError unless the cache has that status."""
    if cache.status != status:
        wanted = "an ACTIVE" if status == ACTIVE else "a SUSPENDED"
        is_now = "ACTIVE" if cache.status == ACTIVE else "SUSPENDED"
        raise LogicError(f"{call}() needs {wanted} KV cache; this one is {is_now}")
