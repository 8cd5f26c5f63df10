"""How many slots a quota buys: integers only, one bisection on real byte cost, never above the quota."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from kvpool._py.core.math import decimal_fraction, div_up, div_up_by_limit, largest_that_fits, round_up
from kvpool._py.storage.demand import batch_demand, pool_group_demand, requests_demand
from kvpool._py.storage.layout import StorageLayout
from kvpool.errors import ConfigError

_MIB = 1 << 20
_GIB = 1 << 30
_RATIO_SCALE = 1e9  # a ratio of 1 as an integer weight
_NEED_SCALE = 1 << 20  # keeps needs of small shares of large slots apart
_FALLBACK_REQUEST = (2049, 2048)  # capacity, history: used when the configuration describes no workload

Key = tuple[int, ...]


# ------------------------------------------------------------------------------------------------- grains and cost


def grain_for_quota(quota: int, granularity: int) -> int:
    """Bytes of one grain: 2 MiB below 2 GiB of quota, doubling to 32 MiB at 16 GiB, in whole granules."""
    gibibytes = quota // _GIB
    exponent = min(4, gibibytes.bit_length() - 1) if gibibytes else 0
    return round_up(2 * _MIB << exponent, granularity)


def cost_of_slots(num_slots: int, slot_sizes: Sequence[int], grain: int) -> int:
    """Bytes that ``num_slots`` slots take: every pool is whole grains."""
    return sum(round_up(num_slots * size, grain) for size in slot_sizes)


def grains_for_slots(num_slots: int, slot_sizes: Sequence[int], grain: int) -> int:
    """The same in grains."""
    return sum(div_up(num_slots * size, grain) for size in slot_sizes)


def grains_to_slots(grains: int, slot_sizes: Sequence[int], grain: int) -> tuple[int, int]:
    """Most slots that ``grains`` grains hold, and the grains these really use."""
    most = max(grains, 0) * grain // sum(slot_sizes)
    slots = largest_that_fits(most, lambda n: grains_for_slots(n, slot_sizes, grain) <= grains)
    return slots, grains_for_slots(slots, slot_sizes, grain)


# ------------------------------------------------------------------------------------------------------ the solver


def solve_slot_counts(
    quota: int,
    grain: int,
    slot_sizes: Sequence[Sequence[int]],
    floors: Sequence[int],
    needs: Sequence[int],
    keys: Sequence[Key],
    names: Sequence[str] | None = None,
) -> list[int]:
    """Slots per pool group.

    ``count_i(m) = max(floor_i, m * need_i // max(needs))`` for the largest m whose cost is within ``quota`` bytes; then
    what is left goes slot by slot to the group with the smallest count / need (ties: larger slot, then smaller key).
    ``needs`` are positive; ``keys`` identify groups independently of their order.  Raises ConfigError when the floors
    alone cost more than the quota; ``names`` describe the groups in that message.
    """
    if not slot_sizes:
        return []
    _check_floors(quota, grain, slot_sizes, floors, names or [f"pool group {i}" for i in range(len(floors))])
    top = max(needs)

    def counts_at(scale: int) -> list[int]:
        return [max(floor, scale * need // top) for floor, need in zip(floors, needs, strict=True)]

    def fits(scale: int) -> bool:
        return _total_cost(counts_at(scale), slot_sizes, grain) <= quota

    most = quota // sum(slot_sizes[list(needs).index(top)]) + 1
    counts = counts_at(largest_that_fits(most, fits))
    _spend_rest(quota, grain, slot_sizes, needs, keys, counts)
    return counts


def _total_cost(counts: Sequence[int], slot_sizes: Sequence[Sequence[int]], grain: int) -> int:
    return sum(cost_of_slots(n, sizes, grain) for n, sizes in zip(counts, slot_sizes, strict=True))


def _check_floors(
    quota: int, grain: int, slot_sizes: Sequence[Sequence[int]], floors: Sequence[int], names: Sequence[str]
) -> None:
    total = _total_cost(floors, slot_sizes, grain)
    if total <= quota:
        return
    lines = [
        f"{name}: floor {floor} slots = {cost_of_slots(floor, sizes, grain)} bytes"
        for name, floor, sizes in zip(names, floors, slot_sizes, strict=True)
    ]
    raise ConfigError(
        f"the quota of {quota} bytes is below the floors of {total} bytes (grain {grain}): " + "; ".join(lines)
    )


def _spend_rest(
    quota: int,
    grain: int,
    slot_sizes: Sequence[Sequence[int]],
    needs: Sequence[int],
    keys: Sequence[Key],
    counts: list[int],
) -> None:
    """Give what is left, in place.  The rest only shrinks, so a group that can not take a slot is out for good."""
    costs = [cost_of_slots(n, sizes, grain) for n, sizes in zip(counts, slot_sizes, strict=True)]
    left = quota - sum(costs)
    product = 1
    for need in needs:
        product *= need
    weights = [product // need for need in needs]  # count * weight orders as count / need, exactly

    def order(group: int) -> tuple[int, int, Key]:
        return counts[group] * weights[group], -sum(slot_sizes[group]), keys[group]

    queue = [(order(group), group) for group in range(len(counts))]
    heapq.heapify(queue)
    while len(queue) > 1:
        group = queue[0][1]
        cost = cost_of_slots(counts[group] + 1, slot_sizes[group], grain)
        if cost - costs[group] > left:
            heapq.heappop(queue)
            continue
        left -= cost - costs[group]
        costs[group] = cost
        counts[group] += 1
        heapq.heapreplace(queue, (order(group), group))
    for _, group in queue:
        counts[group] = _slots_within(costs[group] + left, slot_sizes[group], grain)


def _slots_within(budget: int, slot_sizes: Sequence[int], grain: int) -> int:
    """Most slots whose cost is within ``budget`` bytes."""
    return largest_that_fits(budget // sum(slot_sizes), lambda n: cost_of_slots(n, slot_sizes, grain) <= budget)


# -------------------------------------------------------------------------------------- floors and needs of a config


def plan_floors(layout: StorageLayout, config: Any, max_rewind: int | None) -> list[int]:
    """Slots per pool group below which a constraint batch, or any request at all, could not run."""
    structural = _structural_floors(layout)
    floors = pool_group_demand(layout, structural)
    limit = decimal_fraction(config.max_util_for_resume)
    for batch in config.constraints or ():
        demand = pool_group_demand(layout, batch_demand(layout, batch, max_rewind))
        for group in layout.pool_groups:
            # The resume gate leaves groups of states alone, so they may run full.
            needed = div_up_by_limit(demand[group.index], (1, 1) if group.is_ssm_only else limit)
            floors[group.index] = max(floors[group.index], needed)
    return floors


def _structural_floors(layout: StorageLayout) -> list[int]:
    """Per life cycle: a window of W tokens straddles up to (W + tpb - 2) // tpb + 1 blocks; others see its length."""
    tpb = layout.tokens_per_block
    windowed = {
        lc.index: lc.sink_blocks + (lc.window + tpb - 2) // tpb + 1
        for lc in layout.life_cycles
        if lc.window is not None
    }
    full = max(1, *windowed.values()) if windowed else 1
    return [1 if lc.is_ssm else windowed.get(lc.index, full) for lc in layout.life_cycles]


def plan_needs(layout: StorageLayout, config: Any, max_rewind: int | None) -> list[int]:
    """Positive weights per pool group: the proportion in which slots are wanted.  First rule that applies."""
    if config.initial_pool_ratio is not None:
        weights = [int(ratio * _RATIO_SCALE + 0.5) for ratio in config.initial_pool_ratio]
        shares = pool_group_demand(layout, weights)
        return [share_need(shares[pg.index], pg.slot_bytes) for pg in layout.pool_groups]
    if config.typical_step is not None:
        demand = batch_demand(layout, config.typical_step, max_rewind)
    elif config.constraints:
        demand = _constraint_needs(layout, config, max_rewind)
    else:
        demand = requests_demand(layout, [_FALLBACK_REQUEST], 0, max_rewind)
    return [max(1, n) for n in pool_group_demand(layout, demand)]


def _constraint_needs(layout: StorageLayout, config: Any, max_rewind: int | None) -> list[int]:
    """Per life cycle the most that a constraint batch asks of it below the limit, or its structural floor."""
    limit = decimal_fraction(config.max_util_for_resume)
    needs = _structural_floors(layout)
    for batch in config.constraints:
        for lc, demand in zip(layout.life_cycles, batch_demand(layout, batch, max_rewind), strict=True):
            of_group = (1, 1) if layout.pool_groups[lc.pool_group].is_ssm_only else limit
            needs[lc.index] = max(needs[lc.index], div_up_by_limit(demand, of_group))
    return needs


def share_need(weight: int, slot_bytes: int) -> int:
    """Relative slots of a byte share (``weight`` is in billionths): six digits, since a ratio says no more.

    So groups whose slots differ by a few bytes count as equally needy, and the tie rules decide between them.
    """
    need = max(1, weight * _NEED_SCALE // slot_bytes)
    unit: int = 10 ** max(0, len(str(need)) - 6)
    return (need + unit // 2) // unit * unit


def plan_slot_counts(layout: StorageLayout, config: Any, grain: int) -> tuple[list[int], list[int]]:
    """Slot counts and floors per pool group for the first tier of a configuration."""
    scratch = config.swa_scratch_reuse
    max_rewind = None if scratch is None else scratch.max_rewind_len
    floors = plan_floors(layout, config, max_rewind)
    counts = solve_slot_counts(
        config.cache_tiers[0].quota,
        grain,
        [pg.slot_sizes for pg in layout.pool_groups],
        floors,
        plan_needs(layout, config, max_rewind),
        [min(layout.life_cycles[lc].key for lc in pg.life_cycles) for pg in layout.pool_groups],
        [_describe(layout, pg.index) for pg in layout.pool_groups],
    )
    return counts, floors


def _describe(layout: StorageLayout, pool_group: int) -> str:
    def one(index: int) -> str:
        lc = layout.life_cycles[index]
        kind = "ssm" if lc.is_ssm else "full attention" if lc.window is None else f"window {lc.window}"
        sinks = f" + {lc.sink_blocks} sink block(s)" if lc.sink_blocks else ""
        return f"layer group {index} ({kind}{sinks})"

    return f"pool group {pool_group} of " + ", ".join(one(lc) for lc in layout.pool_groups[pool_group].life_cycles)
