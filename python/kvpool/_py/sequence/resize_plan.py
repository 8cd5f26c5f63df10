"""What new lengths mean for one request, as a value: which pages go, which come, which entries change.

The plan is a pure function of the record and the lengths; it knows nothing of free slots.  ``resize``, ``resume``
and the batch step all follow it.  Order, which decides slot ids: life cycles ascending; in each the missing scratch slots, then
pages by ordinal and, within one, by beam.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.math import div_up
from kvpool._py.sequence.kv_cache import KVCache, SequenceRules
from kvpool._py.storage.layout import LifeCycle
from kvpool._py.storage.live_ranges import Range, overlap, scratch_range, scratch_slots, stale_range


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
    take_states: bool = False  # first resume: a slot per state life cycle and beam
    released: dict[int, list[int]] = field(default_factory=dict)  # pool group -> slots that come back
    wanted: dict[int, int] = field(default_factory=dict)  # pool group -> slots
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
    plan = ResizePlan(history, capacity, div_up(capacity, rules.tokens_per_block))
    plan.parts = [_count_attention(rules, cache, life_cycle, plan) for life_cycle in rules.attention]
    _plan_states(rules, cache, plan)
    if plan.never_fits(rules) is None:  # else the list of its pages could be longer than the memory
        for part in plan.parts:
            _plan_pages(rules, cache, part, plan)
    return plan


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
    index, group = part.life_cycle, part.pool_group
    newly_stale = range(max(cache.stale[index][1], part.stale[0]), min(part.stale[1], cache.num_blocks))
    hold = cache.commit_allowed and not rules.commit_min_snapshot  # a stale page may still be committed
    part.drop = _pages_to_drop(cache, index, range(0) if hold else newly_stale, part.scratch, plan.num_blocks)
    part.take = _pages_to_take(cache, index, part.stale, part.scratch, plan.num_blocks)
    common = min(cache.num_blocks, plan.num_blocks)
    part.changed = _hull(newly_stale if hold else range(0), part.drop, part.take, common)

    released = plan.released.setdefault(group, [])
    for slots in cache.slots[index]:
        released.extend(slot for slot in map(slots.__getitem__, part.drop) if slot != BAD_PAGE_INDEX)
    released.extend(cache.scratch[index][part.num_scratch :])
    wanted = max(0, part.num_scratch - len(cache.scratch[index]))
    for begin in cache.beam_begin:
        wanted += len(part.take) if begin == 0 else sum(ordinal >= begin for ordinal in part.take)
    plan.wanted[group] = plan.wanted.get(group, 0) + wanted


def needs_scratch(rules: SequenceRules, cache: KVCache) -> bool:
    """Whether the present lengths have scratch blocks when scratch reuse is on."""
    ranges = (_scratch_blocks(rules, lc, cache.history, cache.capacity) for lc in rules.windowed)
    return any(begin < end for begin, end in ranges)


def _scratch_blocks(rules: SequenceRules, life_cycle: LifeCycle, history: int, capacity: int) -> Range:
    if rules.max_rewind is None:
        return 0, 0
    tpb, window, sinks = rules.tokens_per_block, life_cycle.window, life_cycle.sink_blocks
    return scratch_range(history, capacity, rules.max_rewind, tpb, window, sinks)


def _pages_to_drop(cache: KVCache, index: int, stale: range, scratch: Range, num_blocks: int) -> list[int]:
    """Ordinals whose pages go: newly stale, now scratch, or beyond the end."""
    slots = cache.slots[index][0]  # beam 0 has every page that a beam has
    ordinals = list(stale)
    ordinals.extend(range(scratch[0], min(scratch[1], cache.num_blocks)))
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


def _hull(hidden: range, drop: list[int], take: list[int], common_blocks: int) -> Range:
    """Smallest range over the blocks that are held from now on and all pages that come or go below ``common_blocks``."""
    changed = [ordinal for ordinal in (*drop, *take) if ordinal < common_blocks]
    if hidden:
        changed += [hidden[0], hidden[-1]]
    return (min(changed), max(changed) + 1) if changed else (0, 0)


def _plan_states(rules: SequenceRules, cache: KVCache, plan: ResizePlan) -> None:
    for position, life_cycle in enumerate(rules.ssm):
        group = life_cycle.pool_group
        plan.total[group] = plan.total.get(group, 0) + cache.beam_width
        if cache.ssm[position][0] == BAD_PAGE_INDEX:
            plan.take_states = True
            plan.wanted[group] = plan.wanted.get(group, 0) + cache.beam_width


def apply_resize(rules: SequenceRules, cache: KVCache, plan: ResizePlan, allocated: dict[int, list[int]]) -> None:
    """Bring the record to the plan; ``allocated`` are the slots that it wanted, per pool group.  Can not fail."""
    supply = {group: iter(slots) for group, slots in allocated.items()}
    parts = {part.life_cycle: part for part in plan.parts}
    states = 0
    for index in range(rules.num_life_cycles):
        part = parts.get(index)
        if part is not None:
            _apply_part(cache, plan, part, supply.get(part.pool_group, iter(())))
            continue
        if plan.take_states:
            source = supply[rules.ssm[states].pool_group]
            cache.ssm[states] = [next(source) for _ in range(cache.beam_width)]
        states += 1
    for group, slots in allocated.items():
        cache.owned[group] += len(slots)
    for group, slots in plan.released.items():
        cache.owned[group] -= len(slots)
    cache.history, cache.capacity, cache.num_blocks = plan.history, plan.capacity, plan.num_blocks
    cache.refresh_limits(rules)


def _apply_part(cache: KVCache, plan: ResizePlan, part: LifeCyclePlan, supply: Iterator[int]) -> None:
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
