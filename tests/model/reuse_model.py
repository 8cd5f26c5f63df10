"""What lengths, live blocks and answers must be when requests commit and share pages.

It does not remember pages: before each command it reads from the snapshot who owns which slot and what the tree holds,
and predicts from the rules the answer and, for every request, the lengths and which blocks have a page. Which slot that
is, is left to the differential suite; whether it is the right page, to the byte oracle.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tests.support import oracle
from tests.support.commands import TABLE_BLOCKS, Driver
from tests.support.reuse_oracle import Rules, Tree
from tests.support.texts import SCOPES

SUSPENDED, ACTIVE = 0, 1
Key = tuple[int, int, int]  # life cycle, ordinal, beam


@dataclass
class Request:
    handle: int
    text: list[Any]
    scope: Any
    status: int = SUSPENDED
    committed: int = 0
    history: int = 0
    capacity: int = 0
    beams: int = 1
    allowed: bool = True
    scratch_on: bool = False
    opened: bool = False
    shared: dict[int, set[int]] = field(default_factory=dict)  # life cycle → scratch ordinals
    pages: dict[Key, Any] = field(default_factory=dict)  # → slot, or a new object for one taken in this command
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    sources: dict[int, Any] = field(default_factory=dict)  # matched states, until the first resume
    scratch: dict[int, list[Any]] = field(default_factory=dict)
    ended: bool = False  # is_end may have moved the states into the tree


class ReuseModel:
    """The rules of one manager; OPTIONAL groups and scratch with beams are left out."""

    def __init__(self, driver: Driver, model: oracle.Model) -> None:
        self.driver = driver
        self.rules = Rules.of(driver.manager.init_config)
        self.lcs, self.group_of, self.totals, self.tpb = model.lcs, model.group_of, model.totals, model.tpb
        self.limit, self.rewind, self.keep_stale = model.limit, model.rewind, model.keep_stale
        self.min_snapshot = driver.manager.init_config.commit_min_snapshot
        self.text_only = driver.manager.init_config.text_only
        self.requests: dict[int, Request] = {}
        self.linked: dict[Any, Any] = {}

    # the state before a command
    def load(self, snapshot: dict[str, Any]) -> None:
        tree = Tree(snapshot["tree"], self.rules)
        self.linked = {}
        for node in tree.nodes:
            path = tuple(token for above in node.path() for token in above.tokens)
            for index, page in enumerate(node.pages):
                if page is not None and page.coverage == self.tpb:
                    self.linked[tuple(node.scope), path, index] = page.slot
        states = [i for i, lc in enumerate(self.lcs) if lc.is_ssm]
        for shown in snapshot["caches"]:
            r = self.requests[shown["handle"]]
            r.pages = {
                (index, ordinal, beam): slot
                for index, beams in enumerate(shown["slots"])
                for beam, slots in enumerate(beams)
                for ordinal, slot in enumerate(slots)
                if slot >= 0
            }
            r.states = {
                (index, beam): slot
                for index, slots in zip(states, shown["ssm"], strict=True)
                for beam, slot in enumerate(slots)
                if slot >= 0
            }
            r.sources = {i: slot for i, slot in zip(states, shown["ssm_source"], strict=True) if slot >= 0}
            r.scratch = {index: list(slots) for index, slots in enumerate(shown["scratch"]) if slots}

    def held(self) -> collections.Counter[Any]:
        """(pool group, slot) → owners"""
        found: collections.Counter[Any] = collections.Counter()
        for r in self.requests.values():
            found.update((self.group_of[key[0]], slot) for key, slot in r.pages.items())
            found.update((self.group_of[key[0]], slot) for key, slot in r.states.items())
            for lc, slots in r.scratch.items():
                found.update((self.group_of[lc], slot) for slot in slots)
            found.update((self.group_of[lc], slot) for lc, slot in r.sources.items())
        return found

    def room(self, group: int, held: collections.Counter[Any]) -> int:
        """Free or cached slots."""
        return self.totals[group] - sum(1 for key, n in held.items() if key[0] == group and n > 0)

    # rules
    def wanted(self, r: Request, lc: int, capacity: int, history: int) -> tuple[set[int], set[int]]:
        rule = self.lcs[lc]
        if rule.is_ssm:
            return set(), set()
        gone = oracle.stale(history, self.tpb, rule.window, rule.sink_blocks)
        shared: set[int] = set()
        if r.scratch_on and self.rewind is not None:
            shared = oracle.scratch(capacity, history, self.tpb, rule.window, rule.sink_blocks, self.rewind)
        return {o for o in range(oracle.blocks(capacity, self.tpb)) if o not in gone and o not in shared}, shared

    def gone(self, r: Request, lc: int, history: int) -> set[int]:
        return oracle.stale(history, self.tpb, self.lcs[lc].window, self.lcs[lc].sink_blocks)

    def leaves(self, r: Request, ordinal: int) -> bool:
        """Is a stale block released, rather than held until it is committed?"""
        return (ordinal + 1) * self.tpb <= r.committed or not r.allowed or not self.keep_stale

    def resize(self, r: Request, capacity: int, history: int, *, first: bool = False) -> bool:
        """Also a resume (with the present lengths; ``first``: with private copies and states)."""
        release: list[Key] = []
        missing: list[Any] = []
        surplus, deficit = {}, {}
        shared_now: dict[int, set[int]] = {}
        after = [0] * len(self.totals)
        copies: list[Any] = []
        for lc, rule in enumerate(self.lcs):
            group = self.group_of[lc]
            if rule.is_ssm:
                if first:
                    missing += [(lc, -1, beam) for beam in range(r.beams)]
                    if lc in r.sources:
                        copies.append((lc, None))
                after[group] += r.beams if first else max(1, sum(1 for key in r.states if key[0] == lc))
                continue
            own, shared_now[lc] = self.wanted(r, lc, capacity, history)
            gone = self.gone(r, lc, history)
            count = oracle.blocks(capacity, self.tpb)
            for key in sorted(key for key in r.pages if key[0] == lc):
                ordinal = key[1]
                if ordinal >= count or ordinal in shared_now[lc] or (ordinal in gone and self.leaves(r, ordinal)):
                    release.append(key)
            mine = []
            for ordinal in sorted(own):
                for beam in range(r.beams):
                    if (lc, ordinal, beam) not in r.pages and (beam == 0 or (lc, ordinal, 0) not in r.pages):
                        mine.append((lc, ordinal, beam))
            last = (lc, r.committed // self.tpb, 0)
            if first and r.committed % self.tpb and last in r.pages:
                mine.append((lc, -2, 0))
                copies.append((lc, last))
            missing += mine
            need = oracle.ceil_fraction(len(shared_now[lc]) * rule.fraction)
            have = len(r.scratch.get(lc, []))
            surplus[lc], deficit[lc] = max(0, have - need), max(0, need - have)
            kept = [key for key in r.pages if key[0] == lc and key not in release and key[1] not in gone]
            after[group] += len(kept) + need + sum(1 for key in mine if key[1] >= 0)
        if any(n > total for n, total in zip(after, self.totals, strict=True)):
            raise oracle.Never
        held = self.held()
        for key in release:
            held[self.group_of[key[0]], r.pages[key]] -= 1
        for lc, n in surplus.items():
            for slot in r.scratch.get(lc, [])[len(r.scratch.get(lc, [])) - n :]:
                held[self.group_of[lc], slot] -= 1
        taken_over = set()
        for group in range(len(self.totals)):
            want = sum(1 for key in missing if self.group_of[key[0]] == group)
            want += sum(n for lc, n in deficit.items() if self.group_of[lc] == group)
            for lc, key in copies:
                if want > self.room(group, held) and self.group_of[lc] == group:
                    slot = r.sources[lc] if key is None else r.pages[key]
                    if held[group, slot] == 1:
                        taken_over.add(lc)
                        want -= 1
            if want > self.room(group, held):
                return False
        for key in release:
            del r.pages[key]
        for lc, n in surplus.items():
            r.scratch[lc] = r.scratch.get(lc, [])[: len(r.scratch.get(lc, [])) - n]
        for lc, n in deficit.items():
            r.scratch.setdefault(lc, []).extend(object() for _ in range(n))
        for lc, ordinal, beam in missing:
            if ordinal == -1:
                r.states[lc, beam] = object()
            elif ordinal >= 0:
                r.pages[lc, ordinal, beam] = object()
        for lc, key in copies:
            if key is not None and lc not in taken_over:
                r.pages[key] = object()
        if first:
            r.sources.clear()
        r.shared = shared_now
        r.capacity, r.history = capacity, history
        return True

    def predict(self, command: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The answer, and the state changed accordingly. None: no rule of lengths says."""
        name, *arguments = command
        method = getattr(self, f"do_{name}", None)
        if method is None:
            return None
        return oracle.answer_of(method, *arguments)

    def follow(self, command: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
        if command[0] == "create" and answer[0] == "ok":
            self.created(command, answer[1])

    # commands; the name is the driver's
    def active(self, k: int, request: Request | None = None) -> Request:
        r = request or self.request(k)
        if r.status != ACTIVE:
            raise oracle.Misuse("LogicError")
        return r

    def request(self, k: int) -> Request:
        return self.requests[self.driver.caches[k].handle]

    def created(self, command: tuple[Any, ...], answer: tuple[int, int]) -> None:
        """Whatever was matched; the oracle of matches judges that."""
        handle, reused = answer
        k = next(i for i, c in enumerate(self.driver.caches) if c is not None and c.handle == handle)
        r = Request(handle, self.driver.texts[k], tuple(SCOPES[command[2] if len(command) > 2 else 0]))
        r.committed = r.history = r.capacity = reused
        r.allowed = not command[1]
        r.scratch_on = self.rewind is not None
        for lc, rule in enumerate(self.lcs):
            if rule.is_ssm:
                continue
            for ordinal in set(range(oracle.blocks(reused, self.tpb))) - self.gone(r, lc, reused):
                r.pages[lc, ordinal, 0] = object()
        self.requests[handle] = r

    def do_resume(self, k: int, stream: int | None, optional: Any = None) -> bool:
        r = self.request(k)
        if r.status != SUSPENDED:
            raise oracle.Misuse("LogicError")
        self.never(r, r.capacity, r.history, first=not r.opened)
        if any(o.status == ACTIVE for o in self.requests.values()):
            held = self.held()
            own: collections.Counter[Any] = collections.Counter()
            own.update((self.group_of[key[0]], slot) for key, slot in [*r.pages.items(), *r.states.items()])
            own.update((self.group_of[lc], slot) for lc, slot in r.sources.items())
            for group, total in enumerate(self.totals):
                if all(lc.is_ssm for lc, g in zip(self.lcs, self.group_of, strict=True) if g == group):
                    continue
                others = sum(1 for key, n in held.items() if key[0] == group and n > own[key])
                if Fraction(others, total) > self.limit:
                    return False
        if not self.resize(r, r.capacity, r.history, first=not r.opened):
            return False
        r.opened, r.status = True, ACTIVE
        return True

    def never(self, r: Request, capacity: int, history: int, *, first: bool = False) -> None:
        """Would it never fit, alone in the pools?"""
        after = [0] * len(self.totals)
        for lc, rule in enumerate(self.lcs):
            if rule.is_ssm:
                after[self.group_of[lc]] += r.beams if first else max(1, sum(1 for key in r.states if key[0] == lc))
                continue
            own, shared = self.wanted(r, lc, capacity, history)
            pages = sum(
                sum(1 for beam in range(r.beams) if (lc, o, beam) in r.pages) or r.beams for o in own
            )  # a block that is there keeps its beams
            after[self.group_of[lc]] += pages + oracle.ceil_fraction(len(shared) * rule.fraction)
        if any(n > total for n, total in zip(after, self.totals, strict=True)):
            raise oracle.Never

    def do_suspend(self, k: int) -> None:
        r = self.active(k)
        r.scratch.clear()
        r.shared = {}
        r.status = SUSPENDED

    def check(self, r: Request, capacity: int | None, history: int | None, floor: int = 0) -> tuple[int, int]:
        new_history = r.history if history is None else history
        new_capacity = r.capacity if capacity is None else capacity
        if new_history < max(floor, r.history) or new_capacity < new_history:
            raise oracle.Misuse("ArgumentError")
        return new_capacity, new_history

    def do_resize(self, k: int, capacity: int | None, history: int | None) -> bool:
        if (capacity is not None and capacity < 0) or (history is not None and history < 0):
            raise oracle.Misuse("ArgumentError")
        r = self.active(k)
        return self.resize(r, *self.check(r, capacity, history))

    def do_history(self, k: int, history: int) -> None:
        if not self.do_resize(k, None, history):
            raise oracle.Shortage

    def do_capacity(self, k: int, capacity: int) -> None:
        if self.request(k).scratch_on:
            raise oracle.Misuse("ArgumentError")
        if not self.do_resize(k, capacity, None):
            raise oracle.Shortage

    def do_beam(self, k: int, width: int) -> None:
        if width < 1:
            raise oracle.Misuse("ArgumentError")
        r = self.active(k)
        if width <= r.beams:
            for key in [key for key in r.pages if key[2] >= width]:
                del r.pages[key]
            for state in [key for key in r.states if key[1] >= width]:
                del r.states[state]
            r.beams = width
            return
        want: list[Any] = []
        for lc, rule in enumerate(self.lcs):
            if rule.is_ssm:
                want += [(lc, -1, beam) for beam in range(r.beams, width)] if not r.ended else []
                continue
            gone = self.gone(r, lc, r.history)
            for ordinal in range(r.history // self.tpb, oracle.blocks(r.capacity, self.tpb)):
                if ordinal not in gone and (lc, ordinal, 0) in r.pages:
                    want += [(lc, ordinal, beam) for beam in range(r.beams, width)]
        own = [0] * len(self.totals)
        for key in [*r.pages, *r.states]:
            own[self.group_of[key[0]]] += 1
        per_group = [sum(1 for key in want if self.group_of[key[0]] == g) for g in range(len(self.totals))]
        if any(a + b > total for a, b, total in zip(own, per_group, self.totals, strict=True)):
            raise oracle.Never
        held = self.held()
        if any(n > self.room(group, held) for group, n in enumerate(per_group)):
            raise oracle.Shortage
        for lc, ordinal, beam in want:
            if ordinal < 0:
                r.states[lc, beam] = object()
            else:
                r.pages[lc, ordinal, beam] = object()
        r.beams = width

    def do_stop(self, k: int) -> None:
        self.stop(self.request(k))

    def stop(self, r: Request) -> None:
        if not r.allowed:
            return
        r.allowed = False
        for key in [key for key in r.pages if key[1] in self.gone(r, key[0], r.history)]:
            del r.pages[key]

    def do_close(self, k: int) -> None:
        del self.requests[self.driver.caches[k].handle]

    def do_scratch(self, k: int, value: bool) -> None:
        r = self.request(k)
        if not value:
            if any(r.scratch.values()):
                raise oracle.Misuse("any")
            r.scratch_on = False
            return
        if self.rewind is None:
            raise oracle.Misuse("any")
        if not r.scratch_on:
            r.scratch_on = True
            if any(self.wanted(r, lc, r.capacity, r.history)[1] for lc in range(len(self.lcs))):
                r.scratch_on = False
                raise oracle.Misuse("any")

    def do_commit(self, k: int, count: int, is_end: bool) -> int:
        r = self.request(k)
        tokens = r.text[r.committed : r.committed + count]
        if self.driver.caches[k].text_only and any(isinstance(token, bytes) for token in tokens):
            raise oracle.Misuse("ArgumentError")  # a wrong argument, whatever the state
        self.active(k)
        if tokens:
            self.check_commit(r, tokens)
            self.commit(r, len(tokens))
            r.ended = r.ended or (is_end and self.min_snapshot)
        if is_end:
            self.stop(r)
        return r.committed

    def check_commit(self, r: Request, tokens: list[Any]) -> None:
        if r.beams != 1 or not r.allowed:
            raise oracle.Misuse("LogicError")
        if r.committed + len(tokens) > r.capacity:
            raise oracle.Misuse("ArgumentError")
        if self.min_snapshot and r.history not in (r.committed, r.committed + len(tokens)):
            raise oracle.Misuse("ArgumentError")

    def commit(self, r: Request, count: int) -> None:
        before = r.committed // self.tpb
        history = max(r.history, r.committed + count)
        for lc, rule in enumerate(self.lcs):
            if rule.is_ssm:
                continue
            gone = self.gone(r, lc, history)
            for key in [key for key in r.pages if key[0] == lc and key[1] in gone and self.leaves(r, key[1])]:
                del r.pages[key]
            r.shared[lc] = {o for o in r.shared.get(lc, set()) if o not in gone}
            need = oracle.ceil_fraction(len(r.shared[lc]) * rule.fraction)
            r.scratch[lc] = r.scratch.get(lc, [])[:need]
        r.history, r.committed = history, r.committed + count
        for ordinal in range(before, r.committed // self.tpb):
            path = tuple(r.text[: (ordinal + 1) * self.tpb])
            for lc, rule in enumerate(self.lcs):
                key = (lc, ordinal, 0)
                if rule.is_ssm or key not in r.pages:
                    continue
                r.pages[key] = self.linked.setdefault((r.scope, path, lc), r.pages[key])
                if ordinal in self.gone(r, lc, history):
                    del r.pages[key]

    def do_step(
        self, second: bool, chosen: Any, rows: Any, capacities: Any, histories: Any, stream: Any, counts: Any = None
    ) -> list[bool]:
        requests = [self.request(k) for k in chosen]
        counts = counts or [0] * len(requests)
        for r, capacity, history, count in zip(requests, capacities, histories, counts, strict=True):
            if r.status != ACTIVE or r.beams != 1:
                raise oracle.Misuse("any")
            if capacity < 0 or history < 0 or oracle.blocks(capacity, self.tpb) > TABLE_BLOCKS:
                raise oracle.Misuse("any")
            tokens = r.text[r.committed : r.committed + count]
            try:
                if any(isinstance(token, bytes) for token in tokens):
                    raise oracle.Misuse("any")
                if tokens:
                    self.check_commit(r, tokens)
                self.check(r, capacity, history, r.committed + len(tokens) if tokens else 0)
            except oracle.Misuse:
                raise oracle.Misuse("any") from None
        for r, capacity, history in zip(requests, capacities, histories, strict=True):
            self.never(r, capacity, history)
        return [
            self.one(r, capacity, history, len(r.text[r.committed : r.committed + count]))
            for r, capacity, history, count in zip(requests, capacities, histories, counts, strict=True)
        ]

    def one(self, r: Request, capacity: int, history: int, count: int) -> bool:
        saved = (
            r.committed, r.history, r.capacity, dict(r.pages), {lc: list(s) for lc, s in r.scratch.items()},
            {lc: set(s) for lc, s in r.shared.items()}, dict(self.linked),
        )  # fmt: skip
        if count:
            self.commit(r, count)
        if self.resize(r, capacity, history):
            return True
        r.committed, r.history, r.capacity, r.pages, r.scratch, r.shared, self.linked = saved
        return False

    # what the product must show
    def expected(self, r: Request) -> dict[str, Any]:
        count = oracle.blocks(r.capacity, self.tpb)
        return {
            "handle": r.handle,
            "status": r.status,
            "committed": r.committed,
            "history": r.history,
            "capacity": r.capacity,
            "beam_width": r.beams,
            "commit_allowed": r.allowed,
            "slots": [
                [] if rule.is_ssm else [[(lc, o, b) in r.pages for o in range(count)] for b in range(r.beams)]
                for lc, rule in enumerate(self.lcs)
            ],
            "ssm": [[(lc, b) in r.states for b in range(r.beams)] for lc, rule in enumerate(self.lcs) if rule.is_ssm],
            "scratch": [len(r.scratch.get(lc, [])) for lc in range(len(self.lcs))],
        }

    @staticmethod
    def shown(cache: dict[str, Any]) -> dict[str, Any]:
        """The same of a snapshot."""
        found = {key: value for key, value in cache.items() if key not in ("tail", "scope", "match", "ssm_source")}
        found["slots"] = [[[slot >= 0 for slot in beam] for beam in beams] for beams in cache["slots"]]
        found["ssm"] = [[slot >= 0 for slot in slots] for slots in cache["ssm"]]
        found["scratch"] = [len(slots) for slots in cache["scratch"]]
        return found
