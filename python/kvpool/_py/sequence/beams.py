"""Beam width: more beams share the full blocks of the past and get copies of what will still be written."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.sequence.block_table import detach_buffers
from kvpool._py.sequence.ground import Ground, SlotCopy
from kvpool._py.sequence.kv_cache import ACTIVE, KVCache, SequenceRules
from kvpool._py.sequence.resize_plan import Grants, Page
from kvpool._py.sequence.transitions import require
from kvpool._py.storage.tier import Shortage
from kvpool.errors import ArgumentError, LogicError, NeverFitsError, OutOfPagesError

MAX_BEAM_WIDTH = 65536
"""A cache without pages could have any number else, and use up the memory."""


@dataclass(slots=True)
class _Growth:
    """New beams as a value: life cycle to what each new beam gets a page for."""

    num_new: int
    begin: int  # full blocks of history before this ordinal stay with beam 0
    tail: int  # ordinal of the partly filled block, -1 when history ends on a block boundary
    ordinals: dict[int, list[int]] = field(default_factory=dict)
    states: list[int] = field(default_factory=list)  # state life cycles


def set_beam_width(ground: Ground, cache: KVCache, width: int) -> None:
    """Change the number of beams.

    Raises LogicError unless ACTIVE, or when growing while scratch blocks are in use; ArgumentError for a width out of range;
    NeverFitsError or OutOfPagesError, nothing changed, when slots lack.
    """
    require(cache, "beam_width", ACTIVE)
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise ArgumentError(f"beam_width must be from 1 to {MAX_BEAM_WIDTH}, not {width}")
    if width > cache.beam_width:
        _grow(ground, cache, width)
    elif width < cache.beam_width:
        _shrink(ground, cache, width)


def _grow(ground: Ground, cache: KVCache, width: int) -> None:
    if any(cache.scratch):
        raise LogicError("beam_width: can not grow while scratch blocks are in use")
    rules = ground.rules
    growth = _plan_growth(rules, cache, width)
    _check_fits(ground, cache, growth)
    with ground.journal.call():
        granted = ground.exchange((), _wanted(rules, cache, growth))
        if isinstance(granted, Shortage):
            raise OutOfPagesError(
                f"beam_width {width}: {granted.lacking} slots of pool group {granted.pool_group} lack"
            )
        ground.order(cache.stream, _copies(rules, cache, growth, granted))
    for life_cycle in rules.attention:
        index = life_cycle.index
        cache.slots[index].extend(_new_beams(cache, growth, index, granted.get(index, [])))
    for position, life_cycle in enumerate(rules.ssm):
        cache.ssm[position].extend(granted.get(life_cycle.index, [BAD_PAGE_INDEX] * growth.num_new))
    for index, slots in granted.items():
        cache.owned[rules.pool_group_of[index]] += len(slots)
    cache.beam_begin.extend([growth.begin] * growth.num_new)
    cache.beam_width = width
    cache.drop_binding()


def _plan_growth(rules: SequenceRules, cache: KVCache, width: int) -> _Growth:
    begin, rest = divmod(cache.history, rules.tokens_per_block)
    growth = _Growth(width - cache.beam_width, begin, begin if rest else -1)
    for life_cycle in rules.attention:
        index = life_cycle.index
        slots = cache.slots[index][0]
        ordinals = [o for o in range(begin, cache.num_blocks) if slots[o] != BAD_PAGE_INDEX]
        growth.ordinals[index] = ordinals
    for life_cycle, states in zip(rules.ssm, cache.ssm, strict=True):
        if states[0] != BAD_PAGE_INDEX:  # it may have been given to the tree for good
            growth.states.append(life_cycle.index)
    return growth


def _wanted(rules: SequenceRules, cache: KVCache, growth: _Growth) -> dict[int, list[int]]:
    """Life cycle to priorities, by ordinal, then beam."""
    wanted = {
        index: [cache.priority(index, ordinal) for ordinal in ordinals for _ in range(growth.num_new)]
        for index, ordinals in growth.ordinals.items()
    }
    for index in growth.states:
        wanted[index] = [cache.priority(index, cache.committed // rules.tokens_per_block)] * growth.num_new
    return wanted


def _check_fits(ground: Ground, cache: KVCache, growth: _Growth) -> None:
    rules = ground.rules
    held = [0] * rules.num_pool_groups
    for life_cycle in rules.windowed:
        stale = range(*cache.stale[life_cycle.index])
        for slots in cache.slots[life_cycle.index]:
            held[life_cycle.pool_group] += sum(slots[ordinal] != BAD_PAGE_INDEX for ordinal in stale)
    wanted = [0] * rules.num_pool_groups
    for index, ordinals in growth.ordinals.items():
        wanted[rules.pool_group_of[index]] += len(ordinals) * growth.num_new
    for index in growth.states:
        wanted[rules.pool_group_of[index]] += growth.num_new
    for group, count in enumerate(wanted):
        total = cache.owned[group] - held[group] + count
        if total > rules.pool_group_slots[group]:
            raise NeverFitsError(
                f"beam_width {growth.num_new + cache.beam_width}: {total} slots of pool group {group} needed, which has "
                f"{rules.pool_group_slots[group]} in all"
            )


def _new_beams(cache: KVCache, growth: _Growth, index: int, granted: list[int]) -> list[list[int]]:
    """Tables of the new beams; pages go out by ordinal, then beam."""
    beams = [[BAD_PAGE_INDEX] * cache.num_blocks for _ in range(growth.num_new)]
    supply = iter(granted)
    for ordinal in growth.ordinals[index]:
        for slots in beams:
            slots[ordinal] = next(supply)
    return beams


def _copies(rules: SequenceRules, cache: KVCache, growth: _Growth, granted: Grants) -> list[SlotCopy]:
    """The partly filled block and the states of beam 0, to every new beam: life cycles, beams ascending."""
    pairs: list[tuple[int, int, int]] = []  # life cycle, destination, source
    for life_cycle in rules.attention:
        index = life_cycle.index
        if growth.tail in growth.ordinals[index]:
            first = growth.ordinals[index].index(growth.tail) * growth.num_new
            source = cache.slots[index][0][growth.tail]
            pairs.extend((index, slot, source) for slot in granted[index][first : first + growth.num_new])
    for life_cycle, states in zip(rules.ssm, cache.ssm, strict=True):
        pairs.extend((life_cycle.index, slot, states[0]) for slot in granted.get(life_cycle.index, ()))
    return [(rules.pool_group_of[index], target, source) for index, target, source in sorted(pairs, key=_life_cycle)]


def _life_cycle(pair: tuple[int, int, int]) -> int:
    return pair[0]


def _shrink(ground: Ground, cache: KVCache, width: int) -> None:
    rules = ground.rules
    released: list[Page] = []
    for life_cycle in rules.attention:
        for slots in cache.slots[life_cycle.index][width:]:
            released.extend((life_cycle.index, slot) for slot in slots if slot != BAD_PAGE_INDEX)
    for life_cycle, states in zip(rules.ssm, cache.ssm, strict=True):
        released.extend((life_cycle.index, slot) for slot in states[width:] if slot != BAD_PAGE_INDEX)
    with ground.journal.call():
        for index, slot in released:
            ground.pages.release(index, slot)
        ground.order(cache.stream)
    for index, _ in released:
        cache.owned[rules.pool_group_of[index]] -= 1
    for life_cycle in rules.attention:
        del cache.slots[life_cycle.index][width:]
    for states in cache.ssm:
        del states[width:]
    del cache.beam_begin[width:]
    detach_buffers(cache, width)
    cache.beam_width = width
    cache.drop_binding()
