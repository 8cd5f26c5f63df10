"""Making room: which page goes next, and what goes with it because it serves nobody without it.

A page that every prefix through its block needs takes the whole subtree along.  A window page may leave a run of pages behind
that is too short for any end point: its *companions*.  A node that no prompt can end at and that leads nowhere is pruned.
"""

from __future__ import annotations

from kvpool._py.page.eviction_queue import Page
from kvpool._py.page.page_store import PageStore
from kvpool._py.reuse.match import Matcher
from kvpool._py.reuse.radix_tree import Node, RadixTree
from kvpool._py.reuse.retention import FORK, Retention
from kvpool._py.reuse.rules import ReuseRules
from kvpool._py.storage.tier import Tier
from kvpool.errors import CorruptedError


class Reclaim:
    """Removes pages and nodes; the nodes on the path of an open request (held, or with children) never go."""

    def __init__(
        self,
        rules: ReuseRules,
        tree: RadixTree,
        matcher: Matcher,
        pages: PageStore,
        retention: Retention,
        tier: Tier,
    ) -> None:
        self._rules = rules
        self._tree = tree
        self._matcher = matcher
        self._pages = pages
        self._retention = retention
        self._tier = tier
        self._windowed = {lc.index: lc for lc in rules.required_windowed}

    def make_room(self, group: int, wanted: int) -> None:
        """Evict until ``wanted`` slots of a pool group are free."""
        while self._tier.num_free(group) < wanted:
            victim = self._pages.queues[group].first()
            if victim is None:
                raise CorruptedError(f"pool group {group}: {wanted} slots wanted, nothing left to evict")
            self.remove_page(victim)

    # ------------------------------------------------------------------------------------------------ pages

    def remove_page(self, page: Page) -> None:
        """The page leaves the tree, with what is useless without it; a cached one's slot is free."""
        node, lc = page.node, page.lc
        assert node is not None
        if node.ordinal < self._rules.full_like_below[lc]:
            self.remove_subtree(node)
            return
        self._pages.unlink(page)
        lowest = self._remove_companions(node, lc)
        if not lowest.children:
            self.prune(lowest)
        self.prune(node)

    def _remove_companions(self, node: Node, lc: int) -> Node:
        """Remove window pages around ``node`` that no end point can use now; the lowest node that lost its page."""
        if lc not in self._windowed or self._rules.tail_blocks[lc] <= 1:
            return node
        above, below = self._useless_above(node, lc), self._useless_below(node, lc)
        for useless in (*above, *below):
            page = self._pages.of_node(useless, lc)
            assert page is not None
            self._pages.unlink(page)
        return below[-1] if below else node

    def _useless_above(self, node: Node, lc: int) -> list[Node]:
        """The run of pages that ends above ``node``, nearest first, if it is too short for any end point.

        Where the path forks, or a request has something there, the run may go on elsewhere: only the part below goes.
        """
        run: list[Node] = []
        upper = node.parent
        begin = self._windowed[lc].sink_blocks  # of every window that is not full yet
        while upper is not None and upper.coverage[lc] == self._rules.tokens_per_block and upper.ordinal >= begin:
            run.append(upper)
            if upper.ordinal == begin or len(run) == self._rules.tail_blocks[lc]:
                return []
            upper = upper.parent
        for length, useful in enumerate(run):
            if len(useful.children) > 1 or useful.holders or self._is_owned(useful, lc):
                return run[:length]
        return run

    def _useless_below(self, node: Node, lc: int) -> list[Node]:
        """The run of pages that begins below ``node``, nearest first, if it is too short for any end point."""
        run: list[Node] = []
        lower = node
        while len(lower.children) == 1:
            (lower,) = lower.children.values()
            if not lower.coverage[lc]:
                break
            if lower.holders or self._is_owned(lower, lc):
                return []
            run.append(lower)
            if len(run) == self._rules.tail_blocks[lc] or len(lower.children) > 1:
                return []
            if lower.coverage[lc] < self._rules.tokens_per_block:
                break  # only an end can lie here
        return run

    def _is_owned(self, node: Node, lc: int) -> bool:
        page = self._pages.of_node(node, lc)
        return page is not None and page.refs > 0

    # ------------------------------------------------------------------------------------------------ nodes

    def remove_subtree(self, top: Node) -> None:
        """Remove a node and all below it, children before parents; then prune from its parent upward."""
        nodes: list[Node] = []
        waiting = [top]
        while waiting:
            node = waiting.pop()
            nodes.append(node)
            waiting.extend(self._tree.children_in_order(node))
        parent = top.parent
        for node in reversed(nodes):
            self._remove_node(node)
        if parent is not None:
            self.prune(parent)

    def prune(self, node: Node) -> None:
        """Remove ``node`` and then its ancestors, as far as they lead nowhere and serve nobody."""
        while node.attached and not node.children and not node.holders:
            parent = node.parent
            if parent is None:
                self._tree.remove(node)
                return
            if self._has_owned_page(node) or self._matcher.serves_an_end(node):
                return
            self._remove_node(node)
            node = parent

    def _has_owned_page(self, node: Node) -> bool:
        return any(self._is_owned(node, lc) for lc in range(self._rules.num_life_cycles))

    def _remove_node(self, node: Node) -> None:
        """Remove a node without children; its cached pages are gone, those that requests own lose their node."""
        self._retention.clear(node)
        for lc in range(self._rules.num_life_cycles):
            page = self._pages.of_node(node, lc)
            if page is not None:
                self._pages.unlink(page)
        self._tree.remove(node)
        parent = node.parent
        if parent is not None and len(parent.children) == 1:
            self._retention.unmark(parent, FORK)
