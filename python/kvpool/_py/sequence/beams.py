"""Beam width: more beams share the full blocks of the past and get copies of what will still be written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.device.device import CopyTask
from kvpool._py.sequence.block_table import detach_buffers
from kvpool._py.sequence.kv_cache import ACTIVE, KVCache
from kvpool._py.sequence.transitions import Slots, Transitions, require, stream_of
from kvpool._py.storage.tier import Shortage
from kvpool.errors import ArgumentError, LogicError, NeverFitsError, OutOfPagesError

MAX_BEAM_WIDTH = 65536
"""A cache without pages could have any number else, and use up the memory."""


@dataclass(slots=True)
class _Growth:
    """New beams as a value: life cycle to the ordinals that each new beam gets a page for."""

    num_new: int
    begin: int  # full blocks of history before this ordinal stay with beam 0
    tail: int  # ordinal of the partly filled block, -1 when history ends on a block boundary
    ordinals: dict[int, list[int]] = field(default_factory=dict)
    wanted: dict[int, int] = field(default_factory=dict)


def set_beam_width(transitions: Transitions, cache: KVCache, width: int) -> None:
    """Change the number of beams.

    Raises LogicError unless ACTIVE, or when growing while scratch blocks are in use; ArgumentError for a width out of range;
    NeverFitsError or OutOfPagesError, nothing changed, when slots lack.
    """
    require(cache, "beam_width", ACTIVE)
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise ArgumentError(f"beam_width must be from 1 to {MAX_BEAM_WIDTH}, not {width}")
    if width > cache.beam_width:
        _grow(transitions, cache, width)
    elif width < cache.beam_width:
        _shrink(transitions, cache, width)


def _grow(transitions: Transitions, cache: KVCache, width: int) -> None:
    if any(cache.scratch):
        raise LogicError("beam_width: can not grow while scratch blocks are in use")
    growth = _plan_growth(transitions, cache, width)
    _check_fits(transitions, cache, growth)

    def copies(allocated: Slots) -> list[CopyTask]:
        return _copy_tasks(transitions, cache, growth, allocated)

    allocated = transitions.exchange(stream_of(cache), {}, growth.wanted, copies=copies)
    if isinstance(allocated, Shortage):
        raise OutOfPagesError(
            f"beam_width {width}: {allocated.lacking} slots of pool group {allocated.pool_group} lack"
        )
    for index, new_beams, states in _distribute(transitions, cache, growth, allocated):
        if states is None:
            cache.slots[index].extend(new_beams)
        else:
            cache.ssm[index].extend(states)
    for group, slots in allocated.items():
        cache.owned[group] += len(slots)
    cache.beam_begin.extend([growth.begin] * growth.num_new)
    cache.beam_width = width
    cache.drop_binding()


def _plan_growth(transitions: Transitions, cache: KVCache, width: int) -> _Growth:
    rules = transitions.rules
    begin, rest = divmod(cache.history, rules.tokens_per_block)
    growth = _Growth(width - cache.beam_width, begin, begin if rest else -1)
    for life_cycle in rules.attention:
        slots = cache.slots[life_cycle.index][0]
        ordinals = [o for o in range(begin, cache.num_blocks) if slots[o] != BAD_PAGE_INDEX]
        growth.ordinals[life_cycle.index] = ordinals
        group = life_cycle.pool_group
        growth.wanted[group] = growth.wanted.get(group, 0) + len(ordinals) * growth.num_new
    for life_cycle in rules.ssm:
        group = life_cycle.pool_group
        growth.wanted[group] = growth.wanted.get(group, 0) + growth.num_new
    return growth


def _check_fits(transitions: Transitions, cache: KVCache, growth: _Growth) -> None:
    rules = transitions.rules
    held = [0] * rules.num_pool_groups
    for life_cycle in rules.windowed:
        stale = range(*cache.stale[life_cycle.index])
        for slots in cache.slots[life_cycle.index]:
            held[life_cycle.pool_group] += sum(slots[ordinal] != BAD_PAGE_INDEX for ordinal in stale)
    for group, wanted in sorted(growth.wanted.items()):
        total = cache.owned[group] - held[group] + wanted
        if total > rules.pool_group_slots[group]:
            raise NeverFitsError(
                f"beam_width {growth.num_new + cache.beam_width}: {total} slots of pool group {group} needed, which has "
                f"{rules.pool_group_slots[group]} in all"
            )


def _distribute(
    transitions: Transitions, cache: KVCache, growth: _Growth, allocated: Slots
) -> Iterator[tuple[int, list[list[int]], list[int] | None]]:
    """Hand slots out: life cycles ascending; pages by ordinal, then beam; states by beam.

    Yields (life cycle, new beams, None) for attention and (position among the states, [], slots) for states.
    """
    rules = transitions.rules
    supply = {group: iter(slots) for group, slots in allocated.items()}
    positions = {life_cycle.index: position for position, life_cycle in enumerate(rules.ssm)}
    for life_cycle in sorted((*rules.attention, *rules.ssm), key=lambda lc: lc.index):
        source = supply[life_cycle.pool_group]
        if life_cycle.is_ssm:
            yield positions[life_cycle.index], [], [next(source) for _ in range(growth.num_new)]
            continue
        beams = [[BAD_PAGE_INDEX] * cache.num_blocks for _ in range(growth.num_new)]
        for ordinal in growth.ordinals[life_cycle.index]:
            for slots in beams:
                slots[ordinal] = next(source)
        yield life_cycle.index, beams, None


def _copy_tasks(transitions: Transitions, cache: KVCache, growth: _Growth, allocated: Slots) -> list[CopyTask]:
    """The partly filled block and the states of beam 0, to every new beam: life cycles, beams, pools ascending."""
    rules = transitions.rules
    tasks: list[CopyTask] = []
    for index, beams, states in _distribute(transitions, cache, growth, allocated):
        if states is not None:
            group, source = rules.ssm[index].pool_group, cache.ssm[index][0]
            targets = states
        elif growth.tail in growth.ordinals[index]:
            group = next(lc.pool_group for lc in rules.attention if lc.index == index)
            source = cache.slots[index][0][growth.tail]
            targets = [slots[growth.tail] for slots in beams]
        else:
            continue
        for target in targets:
            tasks.extend(transitions.tier.copy_tasks(group, target, source))
    return tasks


def _shrink(transitions: Transitions, cache: KVCache, width: int) -> None:
    rules = transitions.rules
    released: Slots = {}
    for life_cycle in rules.attention:
        for slots in cache.slots[life_cycle.index][width:]:
            own = [slot for slot in slots if slot != BAD_PAGE_INDEX]
            released.setdefault(life_cycle.pool_group, []).extend(own)
    for position, life_cycle in enumerate(rules.ssm):
        released.setdefault(life_cycle.pool_group, []).extend(cache.ssm[position][width:])
    transitions.release(cache, released)
    for life_cycle in rules.attention:
        del cache.slots[life_cycle.index][width:]
    for states in cache.ssm:
        del states[width:]
    del cache.beam_begin[width:]
    detach_buffers(cache, width)
    cache.beam_width = width
    cache.drop_binding()
