"""How many slots a described batch needs, per life cycle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool._py.core.math import div_up
from kvpool._py.storage.layout import LifeCycle, StorageLayout
from kvpool._py.storage.live_ranges import overlap, scratch_range, scratch_slots, stale_range


def batch_demand(layout: StorageLayout, batch: Any, max_rewind: int | None) -> list[int]:
    """Slots per life cycle for a ``BatchDesc``; ``max_rewind`` is None when scratch reuse is off."""
    requests = [(desc.capacity, desc.history_length) for desc in batch.kv_caches]
    return requests_demand(layout, requests, batch.system_prompt_length, max_rewind)


def requests_demand(
    layout: StorageLayout,
    requests: Sequence[tuple[int, int]],
    system_prompt_length: int,
    max_rewind: int | None,
) -> list[int]:
    """The same for requests given as (capacity, history) that share their first ``system_prompt_length`` tokens."""
    shared_blocks = system_prompt_length // layout.tokens_per_block
    return [
        len(requests)
        if life_cycle.is_ssm
        else _attention_demand(layout.tokens_per_block, life_cycle, requests, shared_blocks, max_rewind)
        for life_cycle in layout.life_cycles
    ]


def pool_group_demand(layout: StorageLayout, demand: Sequence[int]) -> list[int]:
    """Slots per pool group of slots per life cycle."""
    return [sum(demand[lc] for lc in group.life_cycles) for group in layout.pool_groups]


def _attention_demand(
    tokens_per_block: int,
    life_cycle: LifeCycle,
    requests: Sequence[tuple[int, int]],
    shared_blocks: int,
    max_rewind: int | None,
) -> int:
    window, sinks = life_cycle.window, life_cycle.sink_blocks
    prompt = (0, shared_blocks)
    # A shared block is live as long as one request reads it: stale is what is stale for all.  No request reads nothing.
    stale_for_all = prompt
    demand = 0
    for capacity, history in requests:
        stale = stale_range(history, tokens_per_block, window, sinks)
        stale_for_all = max(stale_for_all[0], stale[0]), min(stale_for_all[1], stale[1])
        live = div_up(capacity, tokens_per_block) - (stale[1] - stale[0])
        unique = max(0, live - (shared_blocks - overlap(stale, prompt)))
        if max_rewind is not None:
            begin, end = scratch_range(history, capacity, max_rewind, tokens_per_block, window, sinks)
            in_scratch = min(end - begin, unique)  # shared blocks of the range are counted once, below
            unique += scratch_slots(in_scratch, life_cycle.scratch_fraction) - in_scratch
        demand += unique
    return demand + shared_blocks - overlap(stale_for_all, prompt)
