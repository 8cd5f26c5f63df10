"""What a new request takes over from the tree, and how the first resume makes it the request's own.

At creation the request becomes an owner of the matched pages; nothing is copied.  The first resume copies what the
request will write to: the last block when the match ends inside it, and the states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.math import div_up
from kvpool._py.reuse.match import MatchResult
from kvpool._py.sequence.ground import Ground, SlotCopy
from kvpool._py.sequence.kv_cache import KVCache, SequenceRules
from kvpool._py.sequence.resize_plan import Grants, Page, ResizePlan
from kvpool._py.storage.layout import LifeCycle
from kvpool._py.storage.live_ranges import Range, stale_range
from kvpool._py.storage.tier import Shortage
from kvpool.errors import ArgumentError


def adopt_match(ground: Ground, cache: KVCache, match: MatchResult) -> None:
    """Make a new request an owner of what was matched: all blocks that are live at the end point."""
    rules, pages = ground.rules, ground.pages
    cache.divergence, cache.hybrid = match.divergence, match.hybrid
    end = match.end
    cache.matched = cache.committed = cache.history = cache.capacity = end
    cache.num_blocks = div_up(end, rules.tokens_per_block)
    cache.copy_pending = end > 0
    for life_cycle in rules.attention:
        _adopt_blocks(ground, cache, match, life_cycle)
    if end:
        rest = end % rules.tokens_per_block
        last = match.chain[-1] if match.source is None else match.source
        for position, life_cycle in enumerate(rules.ssm):
            slot = pages.page(last, life_cycle.index)
            pages.adopt(life_cycle.index, slot, cache.priority(life_cycle.index, end // rules.tokens_per_block))
            cache.ssm_source[position] = slot
            cache.owned[life_cycle.pool_group] += 1
        cache.last_node = match.chain[-1] if match.chain else last.parent
        assert cache.last_node is not None, "a matched block has a parent"
        pages.hold_node(cache.last_node)
        cache.tail = last.tokens[: 4 * rest]
        pages.retain_tokens(cache.tail)
    cache.refresh_limits(rules)


def _adopt_blocks(ground: Ground, cache: KVCache, match: MatchResult, life_cycle: LifeCycle) -> None:
    tpb, pages, index = ground.rules.tokens_per_block, ground.pages, life_cycle.index
    cache.stale[index] = stale_range(match.end, tpb, life_cycle.window, life_cycle.sink_blocks)
    slots = [BAD_PAGE_INDEX] * cache.num_blocks
    covered: list[Range] = []
    for ordinal in live_blocks(cache, index):
        node = match.chain[ordinal] if ordinal < len(match.chain) else match.source
        assert node is not None, "every block of a match has a node"
        slot = pages.page(node, index)
        if slot == BAD_PAGE_INDEX:
            continue  # of an optional life cycle
        slots[ordinal] = slot
        pages.adopt(index, slot, cache.priority(index, ordinal))
        cache.owned[life_cycle.pool_group] += 1
        begin = ordinal * tpb
        end = min(begin + pages.coverage(node, index), match.end)
        if covered and covered[-1][1] == begin:
            covered[-1] = covered[-1][0], end
        else:
            covered.append((begin, end))
    cache.slots[index][0] = slots
    missing = match.end - sum(end - begin for begin, end in covered)
    stale_begin, stale_end = cache.stale[index]
    cache.coverage.append((missing == (stale_end - stale_begin) * tpb, covered))


def live_blocks(cache: KVCache, life_cycle: int) -> Iterator[int]:
    """Ordinals of the blocks that are not stale, ascending."""
    stale_begin, stale_end = cache.stale[life_cycle]
    if stale_begin >= stale_end:
        yield from range(cache.num_blocks)
    else:
        yield from range(stale_begin)
        yield from range(stale_end, cache.num_blocks)


# ------------------------------------------------------------------------------------------------- first resume


def choose_optional(rules: SequenceRules, cache: KVCache, groups: Sequence[int] | None) -> frozenset[int]:
    """The optional life cycles that share matched pages; None: every complete one.  Chosen once, at the first resume."""
    if cache.optional_groups is not None:
        if groups is not None and frozenset(groups) != cache.optional_groups:
            raise ArgumentError("optional_reuse_groups: chosen at the first resume already")
        return cache.optional_groups
    complete = {lc.index: not cache.coverage or cache.coverage[i][0] for i, lc in enumerate(rules.attention)}
    optional = {lc.index for lc in rules.attention if lc.optional}
    if groups is None:
        return frozenset(index for index in optional if complete[index])
    for group in groups:
        if group not in optional:
            raise ArgumentError(f"optional_reuse_groups: {group} is not an optional layer group")
        if not complete[group]:
            raise ArgumentError(f"optional_reuse_groups: layer group {group} is not complete")
    return frozenset(groups)


@dataclass(slots=True)
class PrivatePages:
    """What the first resume gives a request of its own."""

    dropped: list[Page] = field(default_factory=list)  # of optional life cycles that do not share
    wanted: dict[int, list[int]] = field(default_factory=dict)  # life cycle -> priority of each slot
    entries: dict[int, list[int]] = field(default_factory=dict)  # life cycle -> ordinals that get new slots
    sources: dict[int, int] = field(default_factory=dict)  # life cycle -> slot to copy to the one new page
    shared: list[Page] = field(default_factory=list)  # matched pages that are used from now on, sources too
    copies: list[SlotCopy] = field(default_factory=list)


def plan_private(rules: SequenceRules, cache: KVCache, plan: ResizePlan, chosen: frozenset[int]) -> PrivatePages:
    """Pure: ``plan`` is that of the resume, for the scratch slots and states that it wants as always."""
    private = PrivatePages(wanted=dict(plan.wanted))
    last = cache.num_blocks - 1 if cache.committed % rules.tokens_per_block else -1
    for life_cycle in rules.attention:
        index = life_cycle.index
        slots = cache.slots[index][0]
        own = [(index, slot) for slot in slots if slot != BAD_PAGE_INDEX]
        if life_cycle.optional and index not in chosen:
            private.dropped += own
            fresh = list(live_blocks(cache, index))
        else:
            private.shared += own
            fresh = [last] if last >= 0 and slots[last] != BAD_PAGE_INDEX else []
            if fresh:
                private.sources[index] = slots[last]
        if fresh:
            private.entries[index] = fresh
            priorities = [cache.priority(index, ordinal) for ordinal in fresh]
            private.wanted[index] = private.wanted.get(index, []) + priorities
    for life_cycle, source in zip(rules.ssm, cache.ssm_source, strict=True):
        if source != BAD_PAGE_INDEX:
            private.sources[life_cycle.index] = source
            private.shared.append((life_cycle.index, source))
    return private


def take_private(ground: Ground, private: PrivatePages) -> Grants | Shortage:
    """Slots for the private pages, with the copies noted; a shortage is to be undone.

    A source that nobody else owns is taken over instead of copied where slots for copies lack: else a match that fills
    a pool group could never be resumed.
    """
    rules, pages = ground.rules, ground.pages
    for index, slot in private.dropped:
        pages.release(index, slot)
    for index, slot in private.shared:
        ground.tier.borrow(rules.pool_group_of[index], slot)
    for group, count in sorted(ground.need(private.wanted).items()):
        lacking = count - ground.room(group)
        for index in sorted(private.sources):
            if lacking <= 0:
                break
            source = private.sources[index]
            if rules.pool_group_of[index] == group and pages.refs(index, source) == 1:
                pages.take_over(index, source)
                private.wanted[index] = private.wanted[index][:-1]
                private.entries.pop(index, None)
                del private.sources[index]
                lacking -= 1
        if lacking > 0:
            return Shortage(0, group, lacking)
    granted = ground.take(private.wanted)
    for index, source in sorted(private.sources.items()):
        private.copies.append((rules.pool_group_of[index], granted[index][-1], source))
        pages.release(index, source)
    return granted


def apply_private(rules: SequenceRules, cache: KVCache, private: PrivatePages, granted: Grants) -> None:
    """Enter the private pages and take them out of ``granted``; the rest is the resize plan's.  Can not fail."""
    for index in (*(index for index, _ in private.dropped), *private.sources):
        cache.owned[rules.pool_group_of[index]] -= 1
    for index, ordinals in private.entries.items():
        slots, new = cache.slots[index][0], granted[index][-len(ordinals) :]
        del granted[index][-len(ordinals) :]
        cache.owned[rules.pool_group_of[index]] += len(new)
        for ordinal, slot in zip(ordinals, new, strict=True):
            slots[ordinal] = slot
    for position, life_cycle in enumerate(rules.ssm):
        index, source = life_cycle.index, cache.ssm_source[position]
        if source != BAD_PAGE_INDEX and index not in private.sources:  # taken over
            granted[index] = [source]
            cache.owned[life_cycle.pool_group] -= 1
        cache.ssm_source[position] = BAD_PAGE_INDEX
    cache.copy_pending = False
