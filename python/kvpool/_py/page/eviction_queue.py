"""Pages, and the order in which the cached ones of a pool group give way.

Lowest priority first; at equal priority class A (window pages that no likely end point needs) before class B; then the
page that has waited longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvpool._py.core.journal import Journal
from kvpool._py.reuse.radix_tree import Node

CLASS_A, CLASS_B = 0, 1

QueueKey = tuple[int, int]
"""Priority and class; lower ones give way first."""


class Page:
    """The record of an occupied slot.

    Owned: ``refs`` > 0.  Linked: ``node`` is set, and ``node.pages[lc] == slot``.  Cached: linked and not owned; then, and
    only then, ``queue_key`` is set and it waits in the eviction queue.
    """

    __slots__ = ("group", "lc", "node", "plans", "priority", "queue_key", "refs", "serial", "slot", "stamp")

    def __init__(self, group: int, slot: int, lc: int, priority: int, serial: int) -> None:
        self.group = group  # pool group
        self.slot = slot
        self.lc = lc  # life cycle
        self.priority = priority
        self.serial = serial  # tells it from other pages that had the slot before
        self.node: Node | None = None
        self.refs = 1  # requests that own it
        self.plans = 0  # planned drops
        self.queue_key: QueueKey | None = None
        self.stamp = 0  # since when it waits


class EvictionQueue:
    """Cached pages of one pool group in victim order."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._buckets: dict[QueueKey, OrderedDict[int, Page]] = {}  # by stamp; none is empty
        self._unsorted: set[QueueKey] = set()  # an undo puts a page back at the end; the next look sorts
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Page]:
        """All of them, the next victim first."""
        for key in sorted(self._buckets):
            yield from self._in_order(key).values()

    def push(self, page: Page, key: QueueKey, stamp: int) -> None:
        """The page waits from now on; ``stamp`` is larger than any before."""
        self._put_in(page, key, stamp)
        self._journal.on_undo(self._take_out, page)

    def remove(self, page: Page) -> None:
        """The page waits no longer."""
        assert page.queue_key is not None
        self._journal.on_undo(self._put_back, page, page.queue_key, page.stamp)
        self._take_out(page)

    def first(self) -> Page | None:
        """The next victim."""
        return next(iter(self._in_order(min(self._buckets)).values())) if self._size else None

    def _in_order(self, key: QueueKey) -> OrderedDict[int, Page]:
        if key in self._unsorted:
            self._unsorted.discard(key)
            self._buckets[key] = OrderedDict(sorted(self._buckets[key].items()))
        return self._buckets[key]

    def _put_in(self, page: Page, key: QueueKey, stamp: int) -> None:
        page.queue_key, page.stamp = key, stamp
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = OrderedDict()
        bucket[stamp] = page
        self._size += 1

    def _put_back(self, page: Page, key: QueueKey, stamp: int) -> None:
        self._put_in(page, key, stamp)
        self._unsorted.add(key)

    def _take_out(self, page: Page) -> None:
        key = page.queue_key
        assert key is not None
        bucket = self._buckets[key]
        del bucket[page.stamp]
        if not bucket:
            del self._buckets[key]
            self._unsorted.discard(key)
        page.queue_key = None
        self._size -= 1
