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
    drop: list[int]  # ordinals whose pages go, ascending
    take: list[int]  # ordinals that get pages, ascending
    changed: Range  # hull of exposed entries that change among blocks that exist before and after


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
    for life_cycle in rules.attention:
        _plan_attention(rules, cache, life_cycle, plan)
    _plan_states(rules, cache, plan)
    return plan


def _plan_attention(rules: SequenceRules, cache: KVCache, life_cycle: LifeCycle, plan: ResizePlan) -> None:
    tpb, window, sinks = rules.tokens_per_block, life_cycle.window, life_cycle.sink_blocks
    index, group = life_cycle.index, life_cycle.pool_group
    stale = stale_range(plan.history, tpb, window, sinks)
    scratch: Range = (0, 0)
    if cache.scratch_enabled:
        scratch = _scratch_blocks(rules, life_cycle, plan.history, plan.capacity)
    num_scratch = scratch_slots(scratch[1] - scratch[0], life_cycle.scratch_fraction)
    newly_stale = range(max(cache.stale[index][1], stale[0]), min(stale[1], cache.num_blocks))
    hold = cache.commit_allowed and not rules.commit_min_snapshot  # a stale page may still be committed
    drop = _pages_to_drop(cache, index, range(0) if hold else newly_stale, scratch, plan.num_blocks)
    take = _pages_to_take(cache, index, stale, scratch, plan.num_blocks)
    changed = _hull(newly_stale if hold else range(0), drop, take, min(cache.num_blocks, plan.num_blocks))
    plan.parts.append(LifeCyclePlan(index, group, stale, scratch, num_scratch, drop, take, changed))

    released = plan.released.setdefault(group, [])
    beams = cache.slots[index]
    for slots in beams:
        released.extend(slot for slot in map(slots.__getitem__, drop) if slot != BAD_PAGE_INDEX)
    released.extend(cache.scratch[index][num_scratch:])
    wanted = max(0, num_scratch - len(cache.scratch[index]))
    total = num_scratch
    for begin in cache.beam_begin:
        wanted += len(take) if begin == 0 else sum(ordinal >= begin for ordinal in take)
        blocks = begin, plan.num_blocks
        total += max(0, plan.num_blocks - begin) - overlap(stale, blocks) - overlap(scratch, blocks)
    plan.wanted[group] = plan.wanted.get(group, 0) + wanted
    plan.total[group] = plan.total.get(group, 0) + total


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
    candidates = list(range(old_scratch[0], min(old_scratch[1], cache.num_blocks, num_blocks)))
    candidates.extend(range(cache.num_blocks, num_blocks))
    return [
        ordinal for ordinal in candidates if not (stale[0] <= ordinal < stale[1] or scratch[0] <= ordinal < scratch[1])
    ]


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
