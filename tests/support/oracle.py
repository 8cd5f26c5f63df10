"""An oracle of its own: token-by-token definitions and brute force, no code and no formula shared with the product.

Lengths, windows and scratch are derived from which *tokens* a query needs; demand is counted block by block; sizing is
found by trying every count.  :class:`Model` predicts the snapshot of a whole manager after each command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

SUSPENDED, ACTIVE = 0, 1
GRAIN = 2 << 20


# windows, token by token ---------------------------------------------------------------------------------------
def needed(position: int, history: int, window: int | None, sink_tokens: int = 0) -> bool:
    """Is the token at ``position`` < history still read by the query at position ``history`` or a later one?"""
    return window is None or position < sink_tokens or position > history - window


def blocks(tokens: int, tpb: int) -> int:
    return len(range(0, tokens, tpb))


def stale(history: int, tpb: int, window: int | None, sink_blocks: int = 0, limit: int | None = None) -> set[int]:
    """Block ordinals without live data: all their tokens are behind the window, and they are no sink blocks.

    (A sink block that the history has not reached is not protected: ranges start at ``min(blocks, sinks)``.)
    """
    if window is None:
        return set()
    last = blocks(history, tpb) if limit is None else limit
    found = set()
    for ordinal in range(last):
        if ordinal < sink_blocks:
            continue
        if (ordinal + 1) * tpb - 1 <= history - window:
            found.add(ordinal)
    return found


def scratch(capacity: int, history: int, tpb: int, window: int | None, sink_blocks: int, rewind: int) -> set[int]:
    """Blocks new in this chunk that are out of the window once the chunk, less the rewind, is history."""
    gone = stale(max(0, capacity - rewind), tpb, window, sink_blocks)
    return {o for o in gone if o * tpb >= history and blocks(history, tpb) <= o < blocks(capacity, tpb)}


# sizing --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LC:
    """A life cycle as the oracle sees it."""

    window: int | None = None
    sink_blocks: int = 0
    is_ssm: bool = False
    fraction: Fraction = Fraction(1)

    @property
    def key(self) -> tuple[int, int, int]:
        return (int(self.is_ssm), -1 if self.window is None else self.window, self.sink_blocks)


def decimal_fraction(value: float) -> Fraction:
    return Fraction(Decimal(repr(value)))


def ceil_fraction(value: Fraction) -> int:
    return -((-value.numerator) // value.denominator)


def demand(lc: LC, requests: list[tuple[int, int]], system: int, tpb: int, rewind: int | None) -> int:
    """Slots a batch of (capacity, history) needs in one life cycle, block by block."""
    if lc.is_ssm:
        return len(requests)
    shared_blocks = range(system // tpb)
    gone = [stale(h, tpb, lc.window, lc.sink_blocks) for _, h in requests]
    total = sum(1 for o in shared_blocks if not requests or any(o not in g for g in gone))
    for (capacity, history), g in zip(requests, gone, strict=True):
        own = [o for o in range(blocks(capacity, tpb)) if o not in g]
        shared = [o for o in shared_blocks if o not in g]
        unique = max(0, len(own) - len(shared))
        if rewind is None:
            total += unique
        else:
            n = len(scratch(capacity, history, tpb, lc.window, lc.sink_blocks, rewind))
            total += unique - n + ceil_fraction(n * lc.fraction)
    return total


def share_need(weight: int, slot_bytes: int) -> int:
    """Relative slots of a byte share in billionths, to six significant digits (half up): a ratio says no more."""
    need = Decimal(max(1, weight * 2**20 // slot_bytes))
    step = Decimal(1).scaleb(max(0, need.adjusted() - 5))
    return int((need / step).to_integral_value(ROUND_HALF_UP) * step)


def structural_floor(lc: LC, all_lcs: list[LC], tpb: int) -> int:
    """Most live blocks that the window can straddle, found by sliding it."""
    if lc.is_ssm:
        return 1
    if lc.window is not None:
        return lc.sink_blocks + max((offset + lc.window - 1) // tpb + 1 for offset in range(tpb))
    windows = [structural_floor(other, all_lcs, tpb) for other in all_lcs if other.window is not None]
    return max([1, *windows])


@dataclass
class Group:
    lcs: list[LC]
    slot_bytes: list[int]
    need: int = 1
    floor: int = 1

    @property
    def key(self) -> tuple[int, int, int]:
        return min(lc.key for lc in self.lcs)

    def cost(self, count: int, grain: int = GRAIN) -> int:
        return sum(len(range(0, count * size, grain)) * grain for size in self.slot_bytes)


def solve(groups: list[Group], quota: int, grain: int = GRAIN) -> list[int] | None:
    """Slot counts by trying every scale, then every slot that is left. None: the floors do not fit."""

    def cost(counts: list[int]) -> int:
        return sum(g.cost(c, grain) for g, c in zip(groups, counts, strict=True))

    top = max(g.need for g in groups)
    best = None
    scale = 0
    while True:
        counts = [max(g.floor, scale * g.need // top) for g in groups]
        if cost(counts) > quota:
            break
        best = counts
        scale += 1
    if best is None:
        return None
    open_groups = set(range(len(groups)))
    while open_groups:
        order = sorted(
            open_groups,
            key=lambda i: (Fraction(best[i], groups[i].need), -sum(groups[i].slot_bytes), groups[i].key),
        )
        chosen = order[0]
        trial = list(best)
        trial[chosen] += 1
        if cost(trial) <= quota:
            best = trial
        else:
            open_groups.discard(chosen)
    return best


# the whole manager ---------------------------------------------------------------------------------------------
@dataclass
class Cache:
    handle: int
    status: int = SUSPENDED
    history: int = 0
    capacity: int = 0
    beams: int = 1
    commit_allowed: bool = True
    scratch_on: bool = False
    opened: bool = False
    pages: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (lc, ordinal, beam) -> slot
    state: dict[tuple[int, int], int] = field(default_factory=dict)  # (lc, beam) -> slot
    scratch: dict[int, list[int]] = field(default_factory=dict)  # lc -> slots


class Shortage(Exception):
    pass


class Never(Exception):
    pass


class Misuse(Exception):
    pass


class Model:
    """Predicts slot ids from the rules: release first, then the lowest free id, life cycles and ordinals ascending."""

    def __init__(
        self,
        lcs: list[LC],
        group_of: list[int],
        totals: list[int],
        tpb: int,
        limit: float,
        rewind: int | None,
        keep_stale: bool,
    ) -> None:
        self.lcs, self.group_of, self.totals, self.tpb = lcs, group_of, totals, tpb
        self.limit, self.rewind, self.keep_stale = decimal_fraction(limit), rewind, keep_stale
        self.free = [set(range(n)) for n in totals]
        self.caches: dict[int, Cache] = {}

    # helpers
    def wanted(self, c: Cache, lc: int, capacity: int, history: int) -> tuple[set[int], set[int]]:
        """(ordinals with a page of their own, scratch ordinals)"""
        rule = self.lcs[lc]
        if rule.is_ssm:
            return set(), set()
        gone = stale(history, self.tpb, rule.window, rule.sink_blocks)
        shared: set[int] = set()
        if c.scratch_on and self.rewind is not None:
            shared = scratch(capacity, history, self.tpb, rule.window, rule.sink_blocks, self.rewind)
        return {o for o in range(blocks(capacity, self.tpb)) if o not in gone and o not in shared}, shared

    def stale_of(self, c: Cache, lc: int) -> set[int]:
        return stale(c.history, self.tpb, self.lcs[lc].window, self.lcs[lc].sink_blocks)

    def holds_stale(self, c: Cache) -> bool:
        return self.keep_stale and c.commit_allowed

    def take(self, group: int) -> int:
        slot = min(self.free[group])
        self.free[group].discard(slot)
        return slot

    # commands
    def create(self, handle: int) -> None:
        self.caches[handle] = Cache(handle, scratch_on=self.rewind is not None)

    def owned(self, c: Cache) -> list[int]:
        counts = [0] * len(self.totals)
        for lc, _, _ in c.pages:
            counts[self.group_of[lc]] += 1
        for lc, _ in c.state:
            counts[self.group_of[lc]] += 1
        for lc, slots in c.scratch.items():
            counts[self.group_of[lc]] += len(slots)
        return counts

    def resume(self, c: Cache) -> bool:
        own = self.owned(c)
        if any(o.status == ACTIVE for o in self.caches.values() if o is not c):
            for group, total in enumerate(self.totals):
                if all(lc.is_ssm for lc, g in zip(self.lcs, self.group_of, strict=True) if g == group):
                    continue
                others = total - len(self.free[group]) - own[group]
                if Fraction(others, total) > self.limit:
                    return False
        if not self.resize(c, None, None):
            return False
        c.opened = True
        c.status = ACTIVE
        return True

    def suspend(self, c: Cache) -> None:
        for lc, slots in c.scratch.items():
            self.free[self.group_of[lc]].update(slots)
        c.scratch.clear()
        c.status = SUSPENDED

    def resize(self, c: Cache, capacity: int | None, history: int | None) -> bool:
        """Also what resume does with unchanged lengths, and with the states of the first one."""
        capacity = c.capacity if capacity is None else capacity
        history = c.history if history is None else history
        release: list[tuple[int, int, int]] = []
        missing: list[tuple[int, int, int]] = []  # beam 0 and ordinal -1: a state
        surplus: dict[int, int] = {}
        deficit: dict[int, int] = {}
        after = [0] * len(self.totals)
        for lc, rule in enumerate(self.lcs):
            if rule.is_ssm:
                if not c.opened:
                    missing.append((lc, -1, 0))
                after[self.group_of[lc]] += max(1, len([k for k in c.state if k[0] == lc]))
                continue
            own, shared = self.wanted(c, lc, capacity, history)
            gone = stale(history, self.tpb, rule.window, rule.sink_blocks)
            count = blocks(capacity, self.tpb)
            for key in sorted(k for k in c.pages if k[0] == lc):
                ordinal = key[1]
                if ordinal >= count or ordinal in shared or (ordinal in gone and not self.holds_stale(c)):
                    release.append(key)
            for ordinal in sorted(own):
                for beam in range(c.beams):
                    if (lc, ordinal, beam) not in c.pages and (beam == 0 or (lc, ordinal, 0) not in c.pages):
                        missing.append((lc, ordinal, beam))
            need = ceil_fraction(len(shared) * rule.fraction)
            have = len(c.scratch.get(lc, []))
            surplus[lc], deficit[lc] = max(0, have - need), max(0, need - have)
            kept = [k for k in c.pages if k[0] == lc and k not in release and k[1] not in gone]
            after[self.group_of[lc]] += len(kept) + need + len([m for m in missing if m[0] == lc])
        for group, total in enumerate(self.totals):
            if after[group] > total:
                raise Never
        for group in range(len(self.totals)):
            freed = sum(1 for k in release if self.group_of[k[0]] == group)
            freed += sum(n for lc, n in surplus.items() if self.group_of[lc] == group)
            want = sum(1 for k in missing if self.group_of[k[0]] == group)
            want += sum(n for lc, n in deficit.items() if self.group_of[lc] == group)
            if want > len(self.free[group]) + freed:
                return False
        for key in release:
            self.free[self.group_of[key[0]]].add(c.pages.pop(key))
        for lc, n in surplus.items():
            for _ in range(n):
                self.free[self.group_of[lc]].add(c.scratch[lc].pop())
        for lc in range(len(self.lcs)):
            for _ in range(deficit.get(lc, 0)):
                c.scratch.setdefault(lc, []).append(self.take(self.group_of[lc]))
            for key in missing:
                if key[0] != lc:
                    continue
                slot = self.take(self.group_of[lc])
                if key[1] < 0:
                    c.state[lc, 0] = slot
                else:
                    c.pages[key] = slot
        c.capacity, c.history = capacity, history
        return True

    def set_beams(self, c: Cache, width: int) -> None:
        if width < c.beams:
            for key in [k for k in c.pages if k[2] >= width]:
                self.free[self.group_of[key[0]]].add(c.pages.pop(key))
            for state in [k for k in c.state if k[1] >= width]:
                self.free[self.group_of[state[0]]].add(c.state.pop(state))
            c.beams = width
            return
        if width > c.beams and any(c.scratch.values()):
            raise Misuse
        want: list[tuple[int, int, int]] = []
        for lc, rule in enumerate(self.lcs):
            if rule.is_ssm:
                want += [(lc, -1, beam) for beam in range(c.beams, width)]
                continue
            gone = self.stale_of(c, lc)
            for ordinal in range(c.history // self.tpb, blocks(c.capacity, self.tpb)):
                if ordinal not in gone and (lc, ordinal, 0) in c.pages:
                    want += [(lc, ordinal, beam) for beam in range(c.beams, width)]
        own = self.owned(c)
        per_group = [sum(1 for k in want if self.group_of[k[0]] == g) for g in range(len(self.totals))]
        for group, total in enumerate(self.totals):
            if own[group] + per_group[group] > total:
                raise Never
        for group in range(len(self.totals)):
            if per_group[group] > len(self.free[group]):
                raise Shortage
        for lc, ordinal, beam in want:
            slot = self.take(self.group_of[lc])
            if ordinal < 0:
                c.state[lc, beam] = slot
            else:
                c.pages[lc, ordinal, beam] = slot
        c.beams = width

    def stop_committing(self, c: Cache) -> None:
        if not c.commit_allowed:
            return
        c.commit_allowed = False
        for lc in range(len(self.lcs)):
            gone = self.stale_of(c, lc)
            for key in [k for k in c.pages if k[0] == lc and k[1] in gone]:
                self.free[self.group_of[lc]].add(c.pages.pop(key))

    def close(self, c: Cache) -> None:
        for (lc, _, _), slot in c.pages.items():
            self.free[self.group_of[lc]].add(slot)
        for (lc, _), slot in c.state.items():
            self.free[self.group_of[lc]].add(slot)
        for lc, slots in c.scratch.items():
            self.free[self.group_of[lc]].update(slots)
        del self.caches[c.handle]

    # what the product should show
    def snapshot(self) -> dict[str, Any]:
        groups = []
        for group, total in enumerate(self.totals):
            taken = sorted(set(range(total)) - self.free[group])
            groups.append({"total": total, "free": len(self.free[group]), "used": taken})
        return {"pool_groups": groups, "caches": [self._cache(self.caches[h]) for h in sorted(self.caches)]}

    def _cache(self, c: Cache) -> dict[str, Any]:
        count = blocks(c.capacity, self.tpb)
        return {
            "handle": c.handle,
            "status": c.status,
            "committed": 0,
            "history": c.history,
            "capacity": c.capacity,
            "beam_width": c.beams,
            "commit_allowed": c.commit_allowed,
            "slots": [
                []
                if self.lcs[lc].is_ssm
                else [[c.pages.get((lc, o, b), -1) for o in range(count)] for b in range(c.beams)]
                for lc in range(len(self.lcs))
            ],
            "ssm": [
                [c.state.get((lc, b), -1) for b in range(c.beams)] for lc, rule in enumerate(self.lcs) if rule.is_ssm
            ],
            "scratch": [c.scratch.get(lc, []) for lc in range(len(self.lcs))],
        }

    def exposed(self, c: Cache, lc: int, beam: int = 0) -> list[int]:
        gone = self.stale_of(c, lc)
        return [
            c.pages.get((lc, o, beam), -1) if c.status == ACTIVE and o not in gone else -1
            for o in range(blocks(c.capacity, self.tpb))
        ]


def answer_of(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What a driver would report of a call on a model."""
    try:
        return ("ok", call(*arguments))
    except Never:
        return ("error", "NeverFitsError")
    except Shortage:
        return ("error", "OutOfPagesError")
    except Misuse as error:
        return ("error", str(error))
