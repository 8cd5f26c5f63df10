"""Helpers for the batch step: build its arrays, keep a shadow table that only dirty ranges update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BAD = -1


def token_arrays(tokens: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets, as ``step`` takes them. A digest becomes an id that no step accepts."""
    values = [-1 if isinstance(token, bytes) else token for request in tokens for token in request]
    offsets = np.cumsum([0, *(len(request) for request in tokens)])
    return np.array(values, np.int32), offsets.astype(np.int32)


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
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[bool]:
        """``tokens``: what each request commits first."""
        handles = np.array([c if isinstance(c, int) else c.handle for c in caches], np.int64)
        result = self.manager.step(
            handles,
            np.array(rows, np.int32),
            np.array(capacities, np.int32),
            np.array(histories, np.int32),
            self.table,
            None if tokens is None else token_arrays(tokens),
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
