"""One call for a whole batch: check everything, then serve requests in list order, then write the table.

Nothing is changed by a call that raises.  Between calls the table that was passed last is remembered, and which request
wrote each of its rows, so that a request whose row is intact writes changed entries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import BAD_PAGE_INDEX, NO_EVENT
from kvpool._py.core.math import div_up
from kvpool._py.sequence.block_table import exposed_slots
from kvpool._py.sequence.kv_cache import ACTIVE, KVCache
from kvpool._py.sequence.resize_plan import ResizePlan
from kvpool._py.sequence.transitions import Transitions
from kvpool._py.storage.live_ranges import Range
from kvpool._py.storage.tier import Reservation, Shortage
from kvpool.errors import ArgumentError, LogicError
from kvpool.v2._backend import StepResult

Interval = tuple[int, Range]
"""Layer group and changed blocks."""


class _BatchTable:
    """The caller's table ``[layer_group, row, block]`` and who wrote its rows."""

    def __init__(self) -> None:
        self.epoch = 0  # counts tables; a request's row is valid for one of them
        self._identity: tuple[int, tuple[int, ...]] | None = None
        self._export: memoryview | None = None  # keeps the memory, so that no other array can get its address
        self._owners: list[int] = []  # row -> handle
        self._table: npt.NDArray[np.int32] = np.empty((0, 0, 0), np.int32)

    def remember(self, table: npt.NDArray[np.int32]) -> None:
        """Another address or shape is another table, whose rows nobody has written."""
        identity = int(table.ctypes.data), table.shape
        if identity != self._identity:
            self._identity = identity
            self._export = table.data
            self._owners = [-1] * table.shape[1]
            self.epoch += 1
        self._table = table

    def is_intact(self, cache: KVCache, row: int) -> bool:
        """Whether the row holds what this cache wrote last."""
        return cache.row == row and cache.table_epoch == self.epoch and self._owners[row] == cache.handle

    def bind(self, cache: KVCache, row: int) -> None:
        """The row is this cache's from now on."""
        self._owners[row] = cache.handle
        cache.row = row
        cache.table_epoch = self.epoch

    def write(self, cache: KVCache, row: int, interval: Interval) -> None:
        """Write changed blocks; those beyond the end become -1."""
        group, (begin, end) = interval
        target = self._table[group, row]
        inside = min(end, cache.num_blocks)
        if begin < inside:
            target[begin:inside] = exposed_slots(cache, group, 0, begin, inside)
        if inside < end:
            target[max(begin, inside) : end] = BAD_PAGE_INDEX


class BatchStep:
    """The batch step of one manager and what it remembers between calls."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._table = _BatchTable()
        self._ok = np.empty(0, np.bool_)
        self._dirty = np.empty((0, 4), np.int32)

    def held_table(self) -> tuple[Any, ...]:
        """What keeps the table of the last step; its end may run the caller's code, so not under the lock."""
        return self._table._table, self._table._export

    def run(
        self,
        caches: Sequence[KVCache],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        table: npt.NDArray[np.int32],
        stream: int,
    ) -> StepResult:
        """Serve the batch; the caches are known to be distinct.  Device calls in this order: one hand-over per foreign
        stream, one wait per distinct event behind the allocated slots, one event behind all of it.
        """
        plans = self._check(caches, rows, capacities, histories, table.shape)
        reservations: dict[int, Reservation] = {}
        short: list[int] = []
        try:
            self._reserve(plans, reservations, short)
            event = self._order_streams(caches, short, stream, list(reservations.values()))
        except BaseException:
            for reservation in reversed(reservations.values()):
                self._transitions.tier.undo(reservation)
            raise
        self._transitions.tier.settle(reservations.values(), event)
        self._table.remember(table)
        dirty = self._apply(caches, rows, capacities, histories, plans, reservations, stream)
        return self._result(len(caches), short, dirty, event)

    # ------------------------------------------------------------------------------------------------- checking

    def _check(
        self,
        caches: Sequence[KVCache],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        shape: tuple[int, ...],
    ) -> dict[int, ResizePlan]:
        """Refuse the whole call for the first request that no state of the pools could serve.

        The answer has plans only for requests of which more than the lengths changes.
        """
        plans: dict[int, ResizePlan] = {}
        _, num_rows, max_blocks = shape
        taken = bytearray(num_rows)
        requests = zip(caches, rows, capacities, histories, strict=True)
        for position, (cache, row, capacity, history) in enumerate(requests):
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
            ):
                plans[position] = self._plan(position, cache, capacity, history, max_blocks)
        return plans

    def _plan(self, position: int, cache: KVCache, capacity: int, history: int, max_blocks: int) -> ResizePlan:
        where = f"step(): request {position}"
        if cache.status != ACTIVE:
            raise LogicError(f"{where}: the KV cache is not ACTIVE")
        if cache.beam_width != 1:
            raise LogicError(f"{where}: beam_width is {cache.beam_width}, the table has room for 1")
        self._transitions.check_lengths(cache, capacity, history, where)
        num_blocks = div_up(capacity, self._transitions.rules.tokens_per_block)
        if num_blocks > max_blocks:
            raise ArgumentError(f"{where}: capacity {capacity} needs {num_blocks} blocks, the table has {max_blocks}")
        return self._transitions.plan(cache, capacity, history, where)

    @staticmethod
    def _refuse_row(position: int, row: int, num_rows: int) -> None:
        if not 0 <= row < num_rows:
            raise ArgumentError(f"step(): request {position}: rows: {row} is not within 0..{num_rows - 1}")
        raise ArgumentError(f"step(): request {position}: rows: {row} is given twice")

    # -------------------------------------------------------------------------------------------------- serving

    def _reserve(self, plans: dict[int, ResizePlan], reservations: dict[int, Reservation], short: list[int]) -> None:
        """In list order: slots, or the position into ``short``."""
        tier = self._transitions.tier
        for position, plan in plans.items():
            reservation = tier.reserve(plan.released, plan.wanted)
            if isinstance(reservation, Shortage):
                short.append(position)
            else:
                reservations[position] = reservation

    def _order_streams(
        self, caches: Sequence[KVCache], short: Sequence[int], stream: int, reservations: Sequence[Reservation]
    ) -> int:
        device, tier = self._transitions.device, self._transitions.tier
        failed = set(short)
        foreign = {
            cache.stream: None
            for position, cache in enumerate(caches)
            if cache.stream != stream and position not in failed
        }
        for other in foreign:  # in order of first appearance
            if other is not None:
                device.wait(stream, device.record(other))
        for event in tier.events_to_wait_for(reservations):
            device.wait(stream, event)
        if any(any(r.released.values()) or any(r.allocated.values()) for r in reservations):
            return device.record(stream)
        return NO_EVENT

    def _apply(
        self,
        caches: Sequence[KVCache],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        plans: dict[int, ResizePlan],
        reservations: dict[int, Reservation],
        stream: int,
    ) -> list[tuple[int, int, int, int]]:
        """Change the records and the table; can not fail.  The answer is the dirty list."""
        dirty: list[tuple[int, int, int, int]] = []
        table = self._table
        requests = zip(caches, rows, capacities, histories, strict=True)
        for position, (cache, row, capacity, history) in enumerate(requests):
            intervals: list[Interval] = []
            plan = plans.get(position)
            if plan is None:
                cache.history = history
                cache.capacity = capacity
            elif position in reservations:
                intervals = self._apply_plan(cache, plan, reservations[position])
            else:
                continue
            cache.stream = stream
            if not table.is_intact(cache, row):
                intervals = self._whole_row()
                table.bind(cache, row)
            for interval in intervals:
                table.write(cache, row, interval)
                dirty.append((interval[0], row, *interval[1]))
        return dirty

    def _apply_plan(self, cache: KVCache, plan: ResizePlan, reservation: Reservation) -> list[Interval]:
        old_blocks = cache.num_blocks
        self._transitions.apply(cache, plan, reservation.allocated)
        return [(part.life_cycle, r) for part in plan.parts for r in plan.intervals(part, old_blocks)]

    def _whole_row(self) -> list[Interval]:
        num_groups, _, max_blocks = self._table._table.shape
        return [(group, (0, max_blocks)) for group in range(num_groups)]

    def _result(
        self, num_requests: int, short: Sequence[int], dirty: list[tuple[int, int, int, int]], event: int
    ) -> StepResult:
        if len(self._ok) < num_requests:
            self._ok = np.empty(max(num_requests, 2 * len(self._ok)), np.bool_)
        ok = self._ok[:num_requests]
        ok[:] = True
        for position in short:
            ok[position] = False
        if len(self._dirty) < len(dirty):
            self._dirty = np.empty((max(len(dirty), 2 * len(self._dirty)), 4), np.int32)
        changed = self._dirty[: len(dirty)]
        if dirty:
            changed[:] = dirty
        return StepResult(ok, changed, event)


def require_array(value: Any, name: str, dtype: type[np.generic], ndim: int, writable: bool = False) -> Any:
    """``value`` as an array without a copy.

    TypeError for what is no buffer; ArgumentError naming the argument for another dtype, number of dimensions, for
    strides that are not C-contiguous, and for read-only memory where it will be written.
    """
    if not isinstance(value, np.ndarray):
        try:
            value = np.asarray(memoryview(value))
        except TypeError as error:
            raise TypeError(
                f"step(): {name} must be an array of {np.dtype(dtype)}, not {type(value).__name__}"
            ) from error
    if value.dtype != dtype:
        raise ArgumentError(f"step(): {name} must have dtype {np.dtype(dtype)}, not {value.dtype}")
    if value.ndim != ndim:
        raise ArgumentError(f"step(): {name} must have {ndim} dimension(s), not {value.ndim}")
    if not value.flags.c_contiguous:
        raise ArgumentError(f"step(): {name} must be C-contiguous")
    if not value.flags.aligned:
        raise ArgumentError(f"step(): {name} must be aligned")
    if writable and not value.flags.writeable:
        raise ArgumentError(f"step(): {name} must be writable")
    if type(value) is not np.ndarray:
        return value.view(np.ndarray)  # no code of the caller's class under the lock
    return value
