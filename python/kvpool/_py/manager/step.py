"""One call for a whole batch: check everything, then serve requests in list order, then write the table.

Nothing is changed by a call that raises.  Between calls the table that was passed last is remembered, and which request
wrote each of its rows, so that a request whose row is intact writes changed entries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import NO_EVENT
from kvpool._py.core.math import div_up
from kvpool._py.manager.page_table import Interval, PageTable
from kvpool._py.manager.step_arguments import StepTokens
from kvpool._py.sequence.commit import Hulls, check_allowed, check_lengths, commit_tokens
from kvpool._py.sequence.ground import SlotCopy
from kvpool._py.sequence.kv_cache import ACTIVE, KVCache
from kvpool._py.sequence.resize_plan import Grants, ResizePlan, add_pages, count_resize, hull
from kvpool._py.sequence.transitions import Transitions
from kvpool._py.storage.tier import Shortage
from kvpool.errors import ArgumentError, LogicError
from kvpool.v2._backend import StepResult

NO_TOKENS = b""


@dataclass(slots=True)
class _Work:
    """A request of which more than the lengths changes."""

    plan: ResizePlan
    tokens: bytes
    granted: Grants | None = None  # None: it was not served
    hulls: Hulls = field(default_factory=dict)  # changes that the commit made


class BatchStep:
    """The batch step of one manager and what it remembers between calls."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._ground = transitions.ground
        self._table = PageTable()
        self._ok = np.empty(0, np.bool_)
        self._dirty = np.empty((0, 4), np.int32)

    def held_table(self) -> tuple[Any, ...]:
        """What keeps the table of the last step; its end may run the caller's code, so not under the lock."""
        return self._table.held()

    def run(
        self,
        caches: Sequence[KVCache],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        table: npt.NDArray[np.int32],
        tokens: StepTokens | None,
        stream: int,
    ) -> StepResult:
        """Serve the batch; the caches are known to be distinct.  Device calls in this order: one hand-over per foreign
        stream, one wait per event behind the slots used from now on, copies, one event behind all of it.
        """
        works = self._check(caches, rows, capacities, histories, table.shape, tokens)
        with self._ground.journal.call():
            copies = self._serve(caches, works)
            event = self._order_streams(caches, works, stream, copies)
        self._table.remember(table)
        if tokens is not None:
            _append_tails(caches, works, tokens)
        dirty = self._apply(caches, rows, capacities, histories, works, stream)
        return self._result(len(caches), works, dirty, event)

    # ------------------------------------------------------------------------------------------------- checking

    def _check(
        self,
        caches: Sequence[KVCache],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        shape: tuple[int, ...],
        tokens: StepTokens | None,
    ) -> dict[int, _Work]:
        """Refuse the whole call for the first request that no state of the pools could serve.

        The answer is only about requests of which more than the lengths and the tail of the tokens changes.
        """
        works: dict[int, _Work] = {}
        _, num_rows, max_blocks = shape
        taken = bytearray(num_rows)
        counts = [0] * len(caches) if tokens is None else tokens.counts
        block_bytes = 4 * self._ground.rules.tokens_per_block
        may_append = not self._ground.rules.commit_min_snapshot
        requests = zip(caches, rows, capacities, histories, counts, strict=True)
        for position, (cache, row, capacity, history, count) in enumerate(requests):
            if not 0 <= row < num_rows or taken[row]:
                self._refuse_row(position, row, num_rows)
            taken[row] = 1
            if not (
                cache.capacity_low < capacity <= cache.capacity_high
                and cache.history <= history < cache.next_history
                and 0 <= capacity - history < cache.scratch_free_span
                and cache.status == ACTIVE
                and cache.beam_width == 1
                and cache.num_blocks <= max_blocks
                and (
                    not count  # else: committing is allowed, and fills no block
                    or (
                        len(cache.tail) + 4 * count < block_bytes
                        and cache.committed + count <= history
                        and cache.committed + count <= cache.capacity
                        and cache.commit_allowed
                        and may_append
                    )
                )
            ):
                chosen = NO_TOKENS if tokens is None else tokens.of(position)
                works[position] = self._plan(position, cache, capacity, history, max_blocks, count, chosen)
        return works

    def _plan(
        self, position: int, cache: KVCache, capacity: int, history: int, max_blocks: int, count: int, tokens: bytes
    ) -> _Work:
        where = f"step(): request {position}"
        rules = self._transitions.rules
        if cache.status != ACTIVE:
            raise LogicError(f"{where}: the KV cache is not ACTIVE")
        if cache.beam_width != 1:
            raise LogicError(f"{where}: beam_width is {cache.beam_width}, the table has room for 1")
        if count:
            check_allowed(cache, f"{where}: ")
            check_lengths(rules, cache, count, f"{where}: ")
        self._transitions.check_lengths(cache, capacity, history, where, cache.committed + count if count else 0)
        num_blocks = div_up(capacity, rules.tokens_per_block)
        if num_blocks > max_blocks:
            raise ArgumentError(f"{where}: capacity {capacity} needs {num_blocks} blocks, the table has {max_blocks}")
        plan = count_resize(rules, cache, history, capacity)
        self._transitions.check_fits(plan, where)
        return _Work(plan, tokens)

    @staticmethod
    def _refuse_row(position: int, row: int, num_rows: int) -> None:
        if not 0 <= row < num_rows:
            raise ArgumentError(f"step(): request {position}: rows: {row} is not within 0..{num_rows - 1}")
        raise ArgumentError(f"step(): request {position}: rows: {row} is given twice")

    # -------------------------------------------------------------------------------------------------- serving

    def _serve(self, caches: Sequence[KVCache], works: dict[int, _Work]) -> list[SlotCopy]:
        """In list order: commit, then slots for the new lengths; or nothing for a request that they lack for.

        The answer are the copies that the commits want.
        """
        ground, copies = self._ground, list[SlotCopy]()
        for position, work in works.items():
            cache = caches[position]
            savepoint, num_copies = ground.journal.savepoint(), len(copies)
            if work.tokens:
                work.hulls = commit_tokens(ground, cache, work.tokens, False, copies)
            add_pages(ground.rules, cache, work.plan)
            granted = ground.exchange(work.plan.released, work.plan.wanted)
            if isinstance(granted, Shortage):
                ground.journal.undo_to(savepoint)
                del copies[num_copies:]
            else:
                work.granted = granted
        return copies

    def _order_streams(
        self, caches: Sequence[KVCache], works: dict[int, _Work], stream: int, copies: Sequence[SlotCopy]
    ) -> int:
        failed = {position for position, work in works.items() if work.granted is None}
        foreign = {
            cache.stream: None
            for position, cache in enumerate(caches)
            if cache.stream != stream and position not in failed
        }
        for other in foreign:  # in order of first appearance
            self._ground.hand_over(other, stream)
        return self._ground.order(stream, copies, handed_out_too=True) if works else NO_EVENT

    def _apply(
        self,
        caches: Sequence[KVCache],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        works: dict[int, _Work],
        stream: int,
    ) -> list[tuple[int, int, int, int]]:
        """Change the records and the table; can not fail.  The answer is the dirty list."""
        dirty: list[tuple[int, int, int, int]] = []
        table = self._table
        requests = zip(caches, rows, capacities, histories, strict=True)
        for position, (cache, row, capacity, history) in enumerate(requests):
            intervals: list[Interval] = []
            work = works.get(position)
            if work is None:
                cache.history = history
                cache.capacity = capacity
            elif work.granted is not None:
                intervals = self._apply_work(cache, work, work.granted)
            else:
                continue
            cache.stream = stream
            if not table.is_intact(cache, row):
                intervals = table.whole_row()
                table.bind(cache, row)
            for interval in intervals:
                table.write(cache, row, interval)
                dirty.append((interval[0], row, *interval[1]))
        return dirty

    def _apply_work(self, cache: KVCache, work: _Work, granted: Grants) -> list[Interval]:
        old_blocks, plan = cache.num_blocks, work.plan
        for part in plan.parts:
            if part.life_cycle in work.hulls:
                part.changed = hull((), part.changed, work.hulls[part.life_cycle])
        self._transitions.apply(cache, plan, granted)
        return [(part.life_cycle, r) for part in plan.parts for r in plan.intervals(part, old_blocks)]

    def _result(
        self, num_requests: int, works: dict[int, _Work], dirty: list[tuple[int, int, int, int]], event: int
    ) -> StepResult:
        if len(self._ok) < num_requests:
            self._ok = np.empty(max(num_requests, 2 * len(self._ok)), np.bool_)
        ok = self._ok[:num_requests]
        ok[:] = True
        for position, work in works.items():
            if work.granted is None:
                ok[position] = False
        if len(self._dirty) < len(dirty):
            self._dirty = np.empty((max(len(dirty), 2 * len(self._dirty)), 4), np.int32)
        changed = self._dirty[: len(dirty)]
        if dirty:
            changed[:] = dirty
        return StepResult(ok, changed, event)


def _append_tails(caches: Sequence[KVCache], works: dict[int, _Work], tokens: StepTokens) -> None:
    """Commit the tokens of the requests that fill no block."""
    data, end = tokens.data, 0
    for position, (cache, count) in enumerate(zip(caches, tokens.counts, strict=True)):
        begin, end = end, end + count
        if count and position not in works:
            cache.tail += data[4 * begin : 4 * end]
            cache.committed += count
