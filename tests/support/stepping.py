"""Helpers for the batch step: build its arrays, keep a shadow table that only dirty ranges update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BAD = -1


class Stepper:
    """A caller of ``manager.step`` with its own table, and a shadow of it copied by the dirty ranges alone."""

    def __init__(self, manager: Any, rows: int, max_blocks: int, *, fill: int = BAD) -> None:
        self.manager = manager
        self.groups = len(manager.layer_grouping)
        self.table = np.full((self.groups, rows, max_blocks), fill, np.int32)
        self.shadow = self.table.copy()
        self.last_dirty: list[tuple[int, int, int, int]] = []
        self.last_event = 0

    def step(
        self,
        caches: Sequence[Any],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        stream: int | None = None,
    ) -> list[bool]:
        handles = np.array([c if isinstance(c, int) else c.handle for c in caches], np.int64)
        result = self.manager.step(
            handles,
            np.array(rows, np.int32),
            np.array(capacities, np.int32),
            np.array(histories, np.int32),
            self.table,
            stream=stream,
        )
        ok = [bool(x) for x in result.ok]
        self.last_dirty = [tuple(int(x) for x in line) for line in result.dirty]
        self.last_event = int(result.event)
        for group, row, first, end in self.last_dirty:
            assert 0 <= group < self.groups
            assert 0 <= row < self.table.shape[1]
            assert 0 <= first < end <= self.table.shape[2]
            self.shadow[group, row, first:end] = self.table[group, row, first:end]
        assert (self.shadow == self.table).all(), "an entry changed outside the dirty ranges"
        return ok

    def check_row(self, cache: Any, row: int) -> None:
        """The row shows exactly what the cache exposes, then BAD."""
        for group in range(self.groups):
            indices = [int(i) for i in cache.get_base_page_indices(group)][: cache.num_blocks]
            got = self.table[group, row].tolist()
            assert got == indices + [BAD] * (self.table.shape[2] - len(indices)), (group, row)
