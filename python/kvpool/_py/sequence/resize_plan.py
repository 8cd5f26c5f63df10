"""What new lengths mean for one request, as a value: which pages go, which come, which entries change.

The plan is a pure function of the record and the lengths; it knows nothing of free slots.  ``resize``, ``resume``
and the batch step all follow it.  Order, which decides slot ids: life cycles ascending; in each the missing scratch slots, then
pages by ordinal and, within one, by beam.  What goes: life cycles ascending; in each pages by beam and ordinal, then scratch
slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.math import div_up
from kvpool._py.sequence.kv_cache import DEFAULT_PRIORITY, KVCache, SequenceRules
from kvpool._py.storage.layout import LifeCycle
from kvpool._py.storage.live_ranges import Range, overlap, scratch_range, scratch_slots, stale_range

Page = tuple[int, int]
"""Life cycle and slot."""

Grants = dict[int, list[int]]
"""Life cycle to slots, in the order in which they were asked for."""


@dataclass(slots=True)
class LifeCyclePlan:
    """The part of a plan that concerns one attention life cycle."""

    life_cycle: int
    pool_group: int
    stale: Range
    scratch: Range
    num_scratch: int  # slots for the scratch range
    drop: list[int] = field(default_factory=list)  # ordinals whose pages go, ascending
    take: list[int] = field(default_factory=list)  # ordinals that get pages, ascending
    changed: Range = (0, 0)  # hull of exposed entries that change among blocks that exist before and after


@dataclass(slots=True)
class ResizePlan:
    """New lengths and all that follows from them."""

    history: int
    capacity: int
    num_blocks: int
    parts: list[LifeCyclePlan] = field(default_factory=list)
    released: list[Page] = field(default_factory=list)  # in the order in which they go
    wanted: dict[int, list[int]] = field(default_factory=dict)  # life cycle -> priority of each slot
    total: dict[int, int] = field(default_factory=dict)  # pool group -> slots owned after, held ones not counted

    def never_fits(self, rules: SequenceRules) -> tuple[int, int] | None:
        """Pool group and slots wanted there, where the request is larger than the pool group."""
        for group, slots in sorted(self.total.items()):
            if slots > rules.pool_group_slots[group]:
                return group, slots
        return None

    def intervals(self, part: LifeCyclePlan, old_blocks: int) -> list[Range]:
        """Blocks whose exposed entries changed: at most two ranges, ascending, that neither touch nor overlap."""
        ranges = [part.changed] if part.changed[0] < part.changed[1] else []
        tail = min(old_blocks, self.num_blocks), max(old_blocks, self.num_blocks)
        if tail[0] < tail[1]:
            if ranges and ranges[0][1] >= tail[0]:
                return [(ranges[0][0], tail[1])]
            ranges.append(tail)
        return ranges


def plan_resize(rules: SequenceRules, cache: KVCache, history: int, capacity: int) -> ResizePlan:
    """Plan for the lengths ``history`` ≤ ``capacity``; with the present ones it restores what a suspend gave up."""
    plan = count_resize(rules, cache, history, capacity)
    if plan.never_fits(rules) is None:  # else the list of its pages could be longer than the memory
        add_pages(rules, cache, plan)
    return plan


def count_resize(rules: SequenceRules, cache: KVCache, history: int, capacity: int) -> ResizePlan:
    """The ranges and totals of a plan; they depend on lengths alone."""
    plan = ResizePlan(history, capacity, div_up(capacity, rules.tokens_per_block))
    plan.parts = [_count_attention(rules, cache, life_cycle, plan) for life_cycle in rules.attention]
    for life_cycle in rules.ssm:
        group = life_cycle.pool_group
        plan.total[group] = plan.total.get(group, 0) + cache.beam_width
    return plan


def add_pages(rules: SequenceRules, cache: KVCache, plan: ResizePlan) -> None:
    """The pages that go and come."""
    for part in plan.parts:
        _plan_pages(rules, cache, part, plan)
    if not cache.opened:
        for life_cycle in rules.ssm:
            priority = cache.priority(life_cycle.index, cache.committed // rules.tokens_per_block)
            plan.wanted[life_cycle.index] = [priority] * cache.beam_width


def _count_attention(rules: SequenceRules, cache: KVCache, life_cycle: LifeCycle, plan: ResizePlan) -> LifeCyclePlan:
    """Ranges and numbers of slots; costs the same for any lengths."""
    tpb, window, sinks = rules.tokens_per_block, life_cycle.window, life_cycle.sink_blocks
    stale = stale_range(plan.history, tpb, window, sinks)
    scratch: Range = (0, 0)
    if cache.scratch_enabled:
        scratch = _scratch_blocks(rules, life_cycle, plan.history, plan.capacity)
    num_scratch = scratch_slots(scratch[1] - scratch[0], life_cycle.scratch_fraction)
    total = num_scratch
    for begin in cache.beam_begin:
        blocks = begin, plan.num_blocks
        total += max(0, plan.num_blocks - begin) - overlap(stale, blocks) - overlap(scratch, blocks)
    group = life_cycle.pool_group
    plan.total[group] = plan.total.get(group, 0) + total
    return LifeCyclePlan(life_cycle.index, group, stale, scratch, num_scratch)


def _plan_pages(rules: SequenceRules, cache: KVCache, part: LifeCyclePlan, plan: ResizePlan) -> None:
    """The pages that go and come, and the entries that change."""
    index = part.life_cycle
    stale, held = newly_stale(rules, cache, index, part.stale)
    part.drop = stale + _pages_to_drop(cache, index, part.scratch, plan.num_blocks)
    part.take = _pages_to_take(cache, index, part.stale, part.scratch, plan.num_blocks)
    common = min(cache.num_blocks, plan.num_blocks)
    part.changed = hull((ordinal for ordinal in (*part.drop, *part.take) if ordinal < common), held)

    for slots in cache.slots[index]:
        plan.released.extend((index, slots[ordinal]) for ordinal in part.drop if slots[ordinal] != BAD_PAGE_INDEX)
    scratch = cache.scratch[index]
    plan.released.extend((index, slot) for slot in scratch[part.num_scratch :])
    wanted = [DEFAULT_PRIORITY] * (part.num_scratch - len(scratch))
    for ordinal in part.take:
        beams = sum(ordinal >= begin for begin in cache.beam_begin)
        wanted += [cache.priority(index, ordinal)] * beams
    if wanted:
        plan.wanted[index] = wanted


def newly_stale(rules: SequenceRules, cache: KVCache, index: int, stale: Range) -> tuple[list[int], Range]:
    """What a longer history means for a life cycle: ordinals whose pages go, and blocks that are held from now on.

    Committed pages go: the tree keeps them.  Others are held while they may still be committed.
    """
    slots = cache.slots[index][0]
    begin, end = max(cache.stale[index][1], stale[0]), min(stale[1], cache.num_blocks)
    first_held = end
    if cache.commit_allowed and not rules.commit_min_snapshot:
        first_held = min(end, max(begin, cache.committed // rules.tokens_per_block))
    return [o for o in range(begin, first_held) if slots[o] != BAD_PAGE_INDEX], (first_held, end)


def needs_scratch(rules: SequenceRules, cache: KVCache) -> bool:
    """Whether the present lengths have scratch blocks when scratch reuse is on."""
    ranges = (_scratch_blocks(rules, lc, cache.history, cache.capacity) for lc in rules.windowed)
    return any(begin < end for begin, end in ranges)


def _scratch_blocks(rules: SequenceRules, life_cycle: LifeCycle, history: int, capacity: int) -> Range:
    if rules.max_rewind is None:
        return 0, 0
    tpb, window, sinks = rules.tokens_per_block, life_cycle.window, life_cycle.sink_blocks
    return scratch_range(history, capacity, rules.max_rewind, tpb, window, sinks)


def _pages_to_drop(cache: KVCache, index: int, scratch: Range, num_blocks: int) -> list[int]:
    """Ordinals whose pages go though they are not stale: now scratch, or beyond the end."""
    slots = cache.slots[index][0]  # beam 0 has every page that a beam has
    ordinals = list(range(scratch[0], min(scratch[1], cache.num_blocks)))
    ordinals.extend(range(num_blocks, cache.num_blocks))
    return [ordinal for ordinal in ordinals if slots[ordinal] != BAD_PAGE_INDEX]


def _pages_to_take(cache: KVCache, index: int, stale: Range, scratch: Range, num_blocks: int) -> list[int]:
    """Live ordinals without a page: new blocks, and blocks that were scratch before."""
    old_scratch = cache.scratch_ranges[index]
    take = _without((old_scratch[0], min(old_scratch[1], cache.num_blocks, num_blocks)), stale, scratch)
    return take + _without((cache.num_blocks, num_blocks), stale, scratch)


def _without(blocks: Range, first: Range, second: Range) -> list[int]:
    """Ordinals of ``blocks`` in neither range, ascending; a ``second`` that is not empty lies behind ``first``."""
    begin, end = blocks
    ordinals: list[int] = []
    for hole_begin, hole_end in (first, second):
        if hole_begin < hole_end:
            ordinals.extend(range(begin, min(end, hole_begin)))
            begin = max(begin, hole_end)
    ordinals.extend(range(begin, end))
    return ordinals


def hull(ordinals: Iterable[int], *ranges: Range) -> Range:
    """Smallest range over all of it."""
    found = list(ordinals)
    for begin, end in ranges:
        if begin < end:
            found += (begin, end - 1)
    return (min(found), max(found) + 1) if found else (0, 0)


def apply_resize(rules: SequenceRules, cache: KVCache, plan: ResizePlan, granted: Grants) -> None:
    """Bring the record to the plan; ``granted`` are the slots that it wanted.  Can not fail."""
    for part in plan.parts:
        _apply_part(cache, plan, part, granted.get(part.life_cycle, []))
    for position, life_cycle in enumerate(rules.ssm):
        if life_cycle.index in granted:
            cache.ssm[position] = granted[life_cycle.index]
    for index, slots in granted.items():
        cache.owned[rules.pool_group_of[index]] += len(slots)
    for index, _ in plan.released:
        cache.owned[rules.pool_group_of[index]] -= 1
    cache.history, cache.capacity, cache.num_blocks = plan.history, plan.capacity, plan.num_blocks
    cache.refresh_limits(rules)


def _apply_part(cache: KVCache, plan: ResizePlan, part: LifeCyclePlan, granted: list[int]) -> None:
    index = part.life_cycle
    beams = cache.slots[index]
    grown = plan.num_blocks - cache.num_blocks
    for slots in beams:
        for ordinal in part.drop:
            slots[ordinal] = BAD_PAGE_INDEX
        if grown >= 0:
            slots.extend([BAD_PAGE_INDEX] * grown)
        else:
            del slots[plan.num_blocks :]
    supply = iter(granted)
    scratch = cache.scratch[index]
    del scratch[part.num_scratch :]
    while len(scratch) < part.num_scratch:
        scratch.append(next(supply))
    for ordinal in part.take:
        for slots, begin in zip(beams, cache.beam_begin, strict=True):
            if ordinal >= begin:
                slots[ordinal] = next(supply)
    cache.stale[index] = part.stale
    cache.scratch_ranges[index] = part.scratch
