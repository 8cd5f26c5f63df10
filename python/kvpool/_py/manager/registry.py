"""Handles: which cache a handle names, and whether it still does."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvpool._py.core.ids import handle_index, make_handle
from kvpool._py.sequence.kv_cache import KVCache


class CacheRegistry:
    """Open caches by handle.  Indices are reused last in, first out; generations count creations at an index."""

    def __init__(self) -> None:
        self._caches: dict[int, KVCache] = {}
        self._generations: list[int] = []  # by index
        self._free: list[int] = []  # indices

    def __len__(self) -> int:
        return len(self._caches)

    def add(self, make: Callable[[int], KVCache]) -> int:
        """Create a cache by calling ``make`` with its handle."""
        if not self._free:
            self._generations.append(0)
            self._free.append(len(self._generations) - 1)
        index = self._free[-1]
        handle = make_handle(self._generations[index] + 1, index)
        self._caches[handle] = make(handle)
        self._free.pop()
        self._generations[index] += 1
        return handle

    def find(self, handle: int) -> KVCache | None:
        """The open cache of a handle."""
        return self._caches.get(handle)

    def remove(self, handle: int) -> None:
        """The cache was closed; its handle is stale from now on."""
        del self._caches[handle]
        self._free.append(handle_index(handle))

    def all(self) -> Collection[KVCache]:
        """All open caches."""
        return self._caches.values()
