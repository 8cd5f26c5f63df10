"""The whole state as plain values, and the check that it makes sense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.math import div_up
from kvpool._py.sequence.block_table import exposed_slots
from kvpool._py.sequence.kv_cache import SUSPENDED, KVCache, SequenceRules
from kvpool._py.storage.live_ranges import Range, stale_range
from kvpool._py.storage.tier import Tier
from kvpool.errors import CorruptedError


def take_snapshot(tier: Tier, caches: Iterable[KVCache]) -> dict[str, Any]:
    """State of slots and caches; caches by ascending handle.  Copies: later calls do not change it."""
    return {
        "pool_groups": [
            {"total": allocator.capacity, "free": allocator.num_free, "used": allocator.occupied_ids()}
            for allocator in tier.allocators
        ],
        "caches": [_cache_snapshot(cache) for cache in sorted(caches, key=lambda cache: cache.handle)],
    }


def _cache_snapshot(cache: KVCache) -> dict[str, Any]:
    return {
        "handle": cache.handle,
        "status": cache.status,
        "committed": cache.committed,
        "history": cache.history,
        "capacity": cache.capacity,
        "beam_width": cache.beam_width,
        "commit_allowed": cache.commit_allowed,
        "slots": [[list(slots) for slots in beams] for beams in cache.slots],
        "ssm": [list(states) for states in cache.ssm],
        "scratch": [list(slots) for slots in cache.scratch],
    }


def audit(rules: SequenceRules, tier: Tier, caches: Iterable[KVCache]) -> None:
    """Raise CorruptedError when an invariant does not hold.  O(slots + blocks)."""
    owned: list[list[int]] = [[] for _ in range(rules.num_pool_groups)]
    for cache in caches:
        _audit_lengths(rules, cache)
        before = [len(slots) for slots in owned]
        _collect_slots(rules, cache, owned)
        counts = [len(slots) - n for slots, n in zip(owned, before, strict=True)]
        _expect(counts == cache.owned, f"cache {cache.handle:#x} counts {cache.owned} slots, owns {counts}")
        _audit_blocks(rules, cache)
        _audit_buffers(cache)
    for group, (allocator, slots) in enumerate(zip(tier.allocators, owned, strict=True)):
        _expect(allocator.audit(), f"slot allocator of pool group {group}")
        _expect(len(set(slots)) == len(slots), f"a slot of pool group {group} has two owners")
        _expect(sorted(slots) == allocator.occupied_ids(), f"pool group {group}: occupied slots are not the owned ones")
        free_and_occupied = allocator.num_free + allocator.num_occupied + allocator.num_overflow
        _expect(free_and_occupied == allocator.capacity, f"pool group {group}: free + occupied is not total")


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise CorruptedError(f"invariant broken: {what}")


def _audit_lengths(rules: SequenceRules, cache: KVCache) -> None:
    name = f"cache {cache.handle:#x}"
    _expect(0 <= cache.committed <= cache.history <= cache.capacity, f"{name}: committed ≤ history ≤ capacity")
    _expect(cache.num_blocks == div_up(cache.capacity, rules.tokens_per_block), f"{name}: number of blocks")
    _expect(len(cache.beam_begin) == cache.beam_width, f"{name}: beams")


def _collect_slots(rules: SequenceRules, cache: KVCache, owned: list[list[int]]) -> None:
    for life_cycle in rules.attention:
        slots = owned[life_cycle.pool_group]
        slots.extend(cache.scratch[life_cycle.index])
        for beam in cache.slots[life_cycle.index]:
            slots.extend(slot for slot in beam if slot != BAD_PAGE_INDEX)
    for life_cycle, states in zip(rules.ssm, cache.ssm, strict=True):
        owned[life_cycle.pool_group].extend(slot for slot in states if slot != BAD_PAGE_INDEX)


def _audit_blocks(rules: SequenceRules, cache: KVCache) -> None:
    """Live blocks have pages, scratch blocks none, stale ones only while they may still be committed."""
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
                    _expect(may_hold or not has_page, f"{name}: stale block {ordinal} has a page")
                else:
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
