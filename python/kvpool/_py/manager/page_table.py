"""The table that a batch step writes, and which request wrote each of its rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.sequence.block_table import exposed_slots
from kvpool._py.sequence.kv_cache import KVCache
from kvpool._py.storage.live_ranges import Range

Interval = tuple[int, Range]
"""Layer group and changed blocks."""


class PageTable:
    """The caller's table ``[layer_group, row, block]`` and who wrote its rows."""

    def __init__(self) -> None:
        self.epoch = 0  # counts tables; a request's row is valid for one of them
        self._identity: tuple[int, tuple[int, ...]] | None = None
        self._export: memoryview | None = None  # keeps the memory, so that no other array can get its address
        self._owners: list[int] = []  # row -> handle
        self._table: npt.NDArray[np.int32] = np.empty((0, 0, 0), np.int32)

    def held(self) -> tuple[object, ...]:
        """What keeps the last table; its end may run the caller's code, so not under the lock."""
        return self._table, self._export

    def whole_row(self) -> list[Interval]:
        """Every entry of a row."""
        num_groups, _, max_blocks = self._table.shape
        return [(group, (0, max_blocks)) for group in range(num_groups)]

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
