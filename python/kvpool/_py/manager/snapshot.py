"""The whole state as plain values, and the check that it makes sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.math import div_up
from kvpool._py.page.prefix_cache import PrefixCache
from kvpool._py.sequence.block_table import exposed_slots
from kvpool._py.sequence.kv_cache import SUSPENDED, KVCache, SequenceRules
from kvpool._py.storage.live_ranges import Range, stale_range
from kvpool._py.storage.tier import Tier
from kvpool.errors import CorruptedError


def take_snapshot(tier: Tier, pages: PrefixCache, caches: Collection[KVCache]) -> dict[str, Any]:
    """State of slots, caches, tree and queues; caches by ascending handle.  Copies: later calls do not change it."""
    return {
        "pool_groups": [
            {"total": allocator.capacity, "free": allocator.num_free, "used": allocator.occupied_ids()}
            for allocator in tier.allocators
        ],
        "caches": [_cache_snapshot(pages, cache) for cache in sorted(caches, key=lambda cache: cache.handle)],
        "tree": pages.dump_tree(),
        "queues": pages.dump_queues(),
    }


def _cache_snapshot(pages: PrefixCache, cache: KVCache) -> dict[str, Any]:
    return {
        "handle": cache.handle,
        "status": cache.status,
        "committed": cache.committed,
        "history": cache.history,
        "capacity": cache.capacity,
        "beam_width": cache.beam_width,
        "commit_allowed": cache.commit_allowed,
        "scope": list(cache.scope),
        "tail": pages.readable(cache.tail),
        "match": [cache.divergence, cache.hybrid],
        "slots": [[list(slots) for slots in beams] for beams in cache.slots],
        "ssm": [list(states) for states in cache.ssm],
        "ssm_source": list(cache.ssm_source),
        "scratch": [list(slots) for slots in cache.scratch],
    }


def audit(rules: SequenceRules, tier: Tier, pages: PrefixCache, caches: Collection[KVCache]) -> None:
    """Raise CorruptedError when an invariant does not hold.  O(slots + blocks + tree)."""
    owners: Counter[tuple[int, int]] = Counter()  # (life cycle, slot)
    for cache in caches:
        _audit_lengths(rules, cache)
        owned = _owned_pages(rules, cache)
        places = Counter((rules.pool_group_of[index], slot) for index, slot in owned)
        _expect(set(places.values()) <= {1}, f"cache {cache.handle:#x} owns a slot twice")
        counts = [sum(place[0] == group for place in places) for group in range(rules.num_pool_groups)]
        _expect(counts == cache.owned, f"cache {cache.handle:#x} counts {cache.owned} slots, owns {counts}")
        owners.update(owned)
        _audit_blocks(rules, cache)
        _audit_committed(rules, pages, cache)
        _audit_buffers(cache)
    for group, allocator in enumerate(tier.allocators):
        _expect(allocator.audit(), f"slot allocator of pool group {group}")
        used = {slot for index, slot in owners if rules.pool_group_of[index] == group}
        occupied = set(allocator.occupied_ids())
        _expect(used <= occupied, f"pool group {group}: a slot that a cache owns is free")
        cached = len(occupied) - len(used)
        _expect(cached == pages.evictable(group), f"pool group {group}: {cached} slots without an owner")
        free_and_occupied = allocator.num_free + allocator.num_occupied + allocator.num_overflow
        _expect(free_and_occupied == allocator.capacity, f"pool group {group}: free + occupied is not total")
    last_nodes = [cache.last_node for cache in caches if cache.last_node is not None]
    pages.audit(owners, last_nodes, [cache.tail for cache in caches])


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise CorruptedError(f"invariant broken: {what}")


def _audit_lengths(rules: SequenceRules, cache: KVCache) -> None:
    name = f"cache {cache.handle:#x}"
    _expect(0 <= cache.committed <= cache.history <= cache.capacity, f"{name}: committed ≤ history ≤ capacity")
    _expect(cache.num_blocks == div_up(cache.capacity, rules.tokens_per_block), f"{name}: number of blocks")
    _expect(len(cache.beam_begin) == cache.beam_width, f"{name}: beams")


def _owned_pages(rules: SequenceRules, cache: KVCache) -> list[tuple[int, int]]:
    """(Life cycle, slot) of everything that a request owns."""
    owned: list[tuple[int, int]] = []
    for life_cycle in rules.attention:
        index = life_cycle.index
        owned.extend((index, slot) for slot in cache.scratch[index])
        for beam in cache.slots[index]:
            owned.extend((index, slot) for slot in beam if slot != BAD_PAGE_INDEX)
    for life_cycle, states, source in zip(rules.ssm, cache.ssm, cache.ssm_source, strict=True):
        owned.extend((life_cycle.index, slot) for slot in (source, *states) if slot != BAD_PAGE_INDEX)
    return owned


def _audit_committed(rules: SequenceRules, pages: PrefixCache, cache: KVCache) -> None:
    """The last node and the tail are where the committed tokens end; what the tree knows of a page fits its place."""
    name = f"cache {cache.handle:#x}"
    blocks, rest = divmod(cache.committed, rules.tokens_per_block)
    node = cache.last_node
    _expect(len(cache.tail) == 4 * rest, f"{name}: tail")
    _expect(blocks == (0 if node is None else node.ordinal + 1), f"{name}: last node")
    for ordinal in reversed(range(blocks)):
        assert node is not None, "ordinals go down by one"
        for life_cycle in rules.attention:
            slot = cache.slots[life_cycle.index][0][ordinal]
            known = None if slot == BAD_PAGE_INDEX else pages.node_of(life_cycle.index, slot)
            _expect(known is None or known is node, f"{name}: page {ordinal} of group {life_cycle.index}")
        node = node.parent


def _audit_blocks(rules: SequenceRules, cache: KVCache) -> None:
    """Live blocks have pages, scratch blocks none, stale ones only while they may still be committed."""
    committed = cache.committed // rules.tokens_per_block
    may_hold = cache.commit_allowed and not rules.commit_min_snapshot
    for life_cycle in rules.attention:
        index = life_cycle.index
        stale = stale_range(cache.history, rules.tokens_per_block, life_cycle.window, life_cycle.sink_blocks)
        scratch = cache.scratch_ranges[index]
        _expect(_length(stale) == _length(cache.stale[index]), f"cache {cache.handle:#x}: stale range of group {index}")
        for beam, slots in enumerate(cache.slots[index]):
            name = f"cache {cache.handle:#x}, layer group {index}, beam {beam}"
            _expect(len(slots) == cache.num_blocks, f"{name}: number of blocks")
            for ordinal, slot in enumerate(slots):
                has_page = slot != BAD_PAGE_INDEX
                if stale[0] <= ordinal < stale[1]:
                    is_held = may_hold and ordinal >= committed
                    _expect(is_held or not has_page, f"{name}: stale block {ordinal} has a page")
                elif not (cache.copy_pending and life_cycle.optional):
                    live = not scratch[0] <= ordinal < scratch[1] and ordinal >= cache.beam_begin[beam]
                    _expect(live == has_page, f"{name}: block {ordinal}")


def _length(blocks: Range) -> int:
    return blocks[1] - blocks[0]


def _audit_buffers(cache: KVCache) -> None:
    _expect(cache.status != SUSPENDED or not any(cache.scratch), f"cache {cache.handle:#x}: suspended with scratch")
    for (life_cycle, beam), buffer in cache.buffers.items():
        expected = exposed_slots(cache, life_cycle, beam, 0, cache.num_blocks)
        expected += [BAD_PAGE_INDEX] * (len(buffer) - cache.num_blocks)
        _expect(buffer.tolist() == expected, f"cache {cache.handle:#x}: buffer of group {life_cycle}, beam {beam}")
