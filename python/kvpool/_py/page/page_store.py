"""Records of occupied slots, and the queues in which cached ones wait."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.journal import Journal
from kvpool._py.page.eviction_queue import CLASS_A, CLASS_B, EvictionQueue, Page, QueueKey
from kvpool._py.reuse.radix_tree import Node, RadixTree
from kvpool._py.reuse.rules import ALWAYS, ReuseRules
from kvpool._py.storage.layout import LifeCycle, StorageLayout
from kvpool._py.storage.tier import Tier
from kvpool.errors import CorruptedError


class PageStore:
    """One record per occupied slot; a record whose page nobody owns or names is gone, and its slot free."""

    def __init__(self, layout: StorageLayout, rules: ReuseRules, tree: RadixTree, tier: Tier, journal: Journal) -> None:
        self._tree = tree
        self._tier = tier
        self._journal = journal
        self._group_of = [lc.pool_group for lc in layout.life_cycles]
        self._pages: list[list[Page | None]] = [[None] * count for count in tier.slot_counts]  # [pool group][slot]
        self.queues = [EvictionQueue(journal) for _ in tier.slot_counts]
        self._next_serial = 1
        self._next_stamp = 1
        self._rules = rules
        self._class_b_below = [_class_b_below(rules, lc) for lc in layout.life_cycles]
        self._sinks = [lc.sink_blocks for lc in layout.life_cycles]

    def __iter__(self) -> Iterator[Page]:
        """All records: pool groups ascending, then slots."""
        return (page for pages in self._pages for page in pages if page is not None)

    def get(self, lc: int, slot: int) -> Page:
        """The record of an occupied slot."""
        pages = self._pages[self._group_of[lc]]
        page = pages[slot] if 0 <= slot < len(pages) else None
        if page is None:  # a record named a slot that it does not own
            raise CorruptedError(f"slot {slot} of layer group {lc} has no page")
        return page

    def find(self, lc: int, slot: int) -> Page | None:
        """The record, if the slot is occupied."""
        pages = self._pages[self._group_of[lc]]
        return pages[slot] if 0 <= slot < len(pages) else None

    def of_node(self, node: Node, lc: int) -> Page | None:
        """The page that a node names."""
        slot = node.pages[lc]
        return None if slot == BAD_PAGE_INDEX else self.get(lc, slot)

    # ------------------------------------------------------------------------------------------------ owners

    def add(self, lc: int, slot: int, priority: int) -> Page:
        """A record of a slot just allocated, with one owner."""
        group = self._group_of[lc]
        pages = self._pages[group]
        assert pages[slot] is None, f"slot {slot} of pool group {group} has a page"
        page = Page(group, slot, lc, priority, self._next_serial)
        self._next_serial += 1
        self._journal.set_item(pages, slot, page)
        return page

    def own(self, page: Page, priority: int) -> None:
        """One more owner of a linked page."""
        if page.queue_key is not None:
            self.queues[page.group].remove(page)
        self._journal.set(page, "refs", page.refs + 1)
        if priority > page.priority:
            self._journal.set(page, "priority", priority)

    def disown(self, page: Page) -> None:
        """One owner less; without any a linked page waits in the queue and another one is gone."""
        self._journal.set(page, "refs", page.refs - 1)
        if page.refs:
            return
        if page.node is None:
            self._free(page)
        else:
            self._wait(page, page.node)

    # ------------------------------------------------------------------------------------------------ links

    def link(self, page: Page, node: Node, coverage: int) -> None:
        """The node names this page from now on; it had none."""
        self._journal.set(page, "node", node)
        self._tree.set_page(node, page.lc, page.slot, coverage)

    def unlink(self, page: Page) -> None:
        """The node names it no longer; a cached page is gone."""
        node = page.node
        assert node is not None
        self._tree.set_page(node, page.lc, BAD_PAGE_INDEX, 0)
        self._journal.set(page, "node", None)
        if page.queue_key is not None:
            self.queues[page.group].remove(page)
            self._free(page)

    def hand_over(self, old: Node, new: Node) -> None:
        """All pages of ``old``, which has left the tree, go to ``new``, which has none; their places in the queues stay."""
        for lc, slot in enumerate(old.pages):
            if slot != BAD_PAGE_INDEX:
                coverage = old.coverage[lc]
                self._tree.set_page(old, lc, BAD_PAGE_INDEX, 0)
                self.link(self.get(lc, slot), new, coverage)

    # ------------------------------------------------------------------------------------------------ queues

    def requeue(self, node: Node, lc: int) -> None:
        """If the node's page waits, let it wait as the newest of its class."""
        page = self.of_node(node, lc)
        if page is not None and page.queue_key is not None:
            self.queues[page.group].remove(page)
            self._wait(page, node)

    def tail_changed(self, node: Node, lc: int) -> None:
        """Marks have come or gone: a waiting page moves if it waits in the wrong class now."""
        page = self.of_node(node, lc)
        if page is not None and page.queue_key is not None and page.queue_key != self.queue_key(page, node):
            self.requeue(node, lc)

    def queue_key(self, page: Page, node: Node) -> QueueKey:
        """Where a cached page of ``node`` belongs."""
        return page.priority, CLASS_B if self._is_class_b(node, page.lc) else CLASS_A

    def _wait(self, page: Page, node: Node) -> None:
        self.queues[page.group].push(page, self.queue_key(page, node), self._next_stamp)
        self._next_stamp += 1

    def _is_class_b(self, node: Node, lc: int) -> bool:
        """Whether the page is more than a window page that no likely end point needs."""
        ordinal = node.ordinal
        if ordinal < self._class_b_below[lc] or node.tails[lc]:
            return True
        grid = self._rules.grid_blocks
        return grid > 0 and ordinal >= self._sinks[lc] and ordinal % grid >= grid - self._rules.tail_blocks[lc]

    def _free(self, page: Page) -> None:
        self._journal.set_item(self._pages[page.group], page.slot, None)
        self._tier.free(page.group, page.slot)


def _class_b_below(rules: ReuseRules, life_cycle: LifeCycle) -> int:
    """Blocks of lower ordinals are class B whatever the marks say."""
    if not rules.retain_window_tails or life_cycle.window is None:
        return ALWAYS
    return rules.full_like_below[life_cycle.index]
