"""The prefix cache: the tree of committed blocks, the pages it knows, and the order in which they give way.

The one class through which requests touch pages and the tree.  Words: a *page* is the record of an occupied slot;
``refs`` is the number of its owners (requests).  A page is *linked* while a node of the tree names it, *cached* while it
is linked and nobody owns it: then, and only then, it waits in the eviction queue of its pool group and may be taken.  A page
that is neither owned nor linked does not exist: its slot is free.

Every change goes through the manager's :class:`Journal`.  Nothing here calls the device; which slots the call's event
concerns is noted in the tier.  A *node* is an opaque record to callers: they may read ``parent`` (None above a root),
``ordinal`` (root: -1), ``tokens`` (encoded), ``num_tokens`` and ``attached``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpool._py.core.digest_pool import DigestPool
from kvpool._py.core.journal import Journal
from kvpool._py.core.tokens import Ids, Query, codes_of
from kvpool._py.page import cache_audit
from kvpool._py.page.page_store import PageStore
from kvpool._py.page.reclaim import Reclaim
from kvpool._py.reuse.keys import Scope, block_key, root_key
from kvpool._py.reuse.match import Matcher, MatchResult, Walk
from kvpool._py.reuse.radix_tree import Node, RadixTree
from kvpool._py.reuse.retention import FORK, Retention
from kvpool._py.reuse.rules import ReuseRules
from kvpool._py.storage.layout import StorageLayout
from kvpool._py.storage.tier import Tier

PlannedPage = tuple[int, int, int]
"""Life cycle, slot, and the serial number that tells the page from others that have had the slot."""


class PrefixCache:
    """Tree, pages, queues and retention marks of one manager."""

    def __init__(self, layout: StorageLayout, rules: ReuseRules, tier: Tier, journal: Journal) -> None:
        self.rules = rules
        self._tier = tier
        self._journal = journal
        self.digests = DigestPool(journal)
        self.tree = RadixTree(rules.tokens_per_block, rules.full_like_below, self.digests, journal)
        self.pages = PageStore(layout, rules, self.tree, tier, journal)
        self._retention = Retention(rules, journal, self.pages.tail_changed)
        self._matcher = Matcher(rules, self.tree)
        self._reclaim = Reclaim(rules, self.tree, self._matcher, self.pages, self._retention, tier)

    # ------------------------------------------------------------------------------------------------ tokens

    def query(self, ids: Ids, digests: Sequence[bytes]) -> Query:
        """Tokens to look up; changes nothing.  A digest that the manager does not know equals nothing."""
        return self.digests.query(ids, digests)

    def encode(self, ids: Ids, digests: Sequence[bytes]) -> bytes:
        """Tokens to commit, 4 bytes each; the caller owns one reference per digest in them (``release_tokens``)."""
        return self.digests.encode(ids, digests)

    def retain_tokens(self, tokens: bytes) -> None:
        """One more owner (a request's tail) of the digests in ``tokens``.  Nodes retain theirs by themselves."""
        self.digests.retain(tokens)

    def release_tokens(self, tokens: bytes) -> None:
        """One owner less."""
        self.digests.release(tokens)

    def decode(self, tokens: bytes) -> tuple[Ids, list[bytes]]:
        """Back to ids and digests, these numbered by first use; fresh."""
        numbers: dict[int, int] = {}  # code -> -1 - number
        ids = np.frombuffer(tokens, np.int32).copy()
        for position in np.flatnonzero(ids < 0).tolist():
            code = int(ids[position])
            ids[position] = numbers.setdefault(code, -1 - len(numbers))
        return ids, [self.digests.digest_of(code) for code in numbers]

    # ------------------------------------------------------------------------------------------------ look-up

    def match(
        self, scope: Scope, query: Query, *, backoff: int | None = None, partial: bool | None = None
    ) -> MatchResult:
        """The legal prefix that ``match_policy`` chooses; None: as configured.  Pure."""
        return self._matcher.match(scope, query, backoff, partial)

    def walk(self, scope: Scope, query: Query, partial: bool) -> Walk | None:
        """The walk alone, without legality; None without a root.  Pure."""
        return self._matcher.walk(scope, query, partial)

    def root(self, scope: Scope, create: bool = False) -> Node | None:
        """Root of a scope."""
        return self.tree.root(scope, create)

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child with exactly these tokens."""
        return parent.children.get(tokens)

    def covering_child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child with exactly these tokens, or the first longer one that begins with them: where a tail would go."""
        return self.tree.covering_child(parent, tokens)

    def key(self, node: Node) -> bytes:
        """Chain key, 32 bytes."""
        return self.tree.key(node)

    def key_on_top(self, scope: Scope, parent: Node | None, query: Query, ordinal: int) -> bytes:
        """Key of the query's full block ``ordinal`` on top of ``parent`` (None: the scope's root, which may not exist)."""
        above = root_key(scope) if parent is None else self.tree.key(parent)
        return block_key(above, query.block(ordinal, self.rules.tokens_per_block), self.digests.resolver(query))

    # ------------------------------------------------------------------------------------------------ nodes

    def insert_full(self, parent: Node, tokens: bytes) -> tuple[Node, bool]:
        """The child of ``parent`` with these ``tokens_per_block`` tokens, and whether it existed."""
        child = parent.children.get(tokens)
        return (self._insert(parent, tokens), False) if child is None else (child, True)

    def insert_tail(self, parent: Node, tokens: bytes) -> tuple[Node, bool]:
        """The node that holds a partial block, and whether it existed (equal, or longer: it *covers* the block)."""
        child = self.tree.covering_child(parent, tokens)
        return (self._insert(parent, tokens), False) if child is None else (child, True)

    def _insert(self, parent: Node, tokens: bytes) -> Node:
        """A new child; one that it begins with makes way for it and hands its pages over."""
        shorter = self.tree.covered_child(parent, tokens) if parent.children else None
        if shorter is None:
            node = self.tree.add(parent, tokens)
            if len(parent.children) == 2:
                self._retention.mark(parent, FORK)
            return node
        self._retention.clear(shorter)
        self.tree.remove(shorter)
        node = self.tree.add(parent, tokens)
        self.pages.hand_over(shorter, node)
        return node

    def hold_node(self, node: Node) -> None:
        """A request's last node: it and its ancestors stay.  Let go of the old one afterwards."""
        self._journal.set(node, "holders", node.holders + 1)

    def let_go(self, node: Node) -> None:
        """The opposite; prunes from here up.  At close: after the pages have been released."""
        self._journal.set(node, "holders", node.holders - 1)
        self._reclaim.prune(node)

    def prune(self, node: Node) -> None:
        """Remove ``node`` and then its ancestors as far as they serve nobody; nothing when it is gone already."""
        self._reclaim.prune(node)

    # ------------------------------------------------------------------------------------------------ pages

    def new_page(self, lc: int, slot: int, priority: int) -> None:
        """Record of a slot just allocated: one owner, no node."""
        self.pages.add(lc, slot, priority)

    def adopt(self, lc: int, slot: int, priority: int) -> None:
        """One more owner of a linked page; it leaves the queue, and its priority rises to ``priority`` if lower."""
        self.pages.own(self.pages.get(lc, slot), priority)

    def release(self, lc: int, slot: int) -> None:
        """One owner less.  The last one: a linked page is cached from now on (newest), another one's slot is free.

        In every case the call's event will be a ready event of the slot.
        """
        page = self.pages.get(lc, slot)
        self._tier.finish(page.group, slot)
        self.pages.disown(page)

    def refs(self, lc: int, slot: int) -> int:
        """Number of owners."""
        return self.pages.get(lc, slot).refs

    def node_of(self, lc: int, slot: int) -> Node | None:
        """Node that names the page."""
        return self.pages.get(lc, slot).node

    def priority_of(self, lc: int, slot: int) -> int:
        """Its priority."""
        return self.pages.get(lc, slot).priority

    def page(self, node: Node, lc: int) -> int:
        """Slot, or -1."""
        return node.pages[lc]

    def coverage(self, node: Node, lc: int) -> int:
        """Leading tokens of the block that the page holds (a state: after exactly so many); 0 without a page."""
        return node.coverage[lc]

    def can_install(self, node: Node, lc: int, coverage: int) -> bool:
        """Whether ``install`` would link: the node has no page there, or one that covers less."""
        return node.coverage[lc] < coverage

    def install(self, node: Node, lc: int, slot: int, coverage: int) -> bool:
        """Link an owned page that has no node; False, and nothing done, when the node's own covers as much.

        The call's event will be a ready event of the slot.  A replaced page loses its node (a cached one: its slot is free).
        """
        covered = node.coverage[lc]
        if covered >= coverage:
            return False
        if covered:
            self.pages.unlink(self.pages.get(lc, node.pages[lc]))
        page = self.pages.get(lc, slot)
        self._tier.finish(page.group, slot)
        self.pages.link(page, node, coverage)
        return True

    def remove_page(self, node: Node, lc: int) -> None:
        """Take a cached page away for good, and what is useless without it; nothing without a page."""
        page = self.pages.of_node(node, lc)
        if page is not None:
            self._reclaim.remove_page(page)

    def take_over(self, lc: int, slot: int) -> None:
        """The only owner of a page takes it out of the tree, with what is useless without it, and keeps it.

        Nothing when the tree does not name it any more: taking over the page of another life cycle may have removed the node.
        """
        page = self.pages.get(lc, slot)
        if page.node is not None:
            self._reclaim.remove_page(page)

    def set_coverage(self, node: Node, lc: int, coverage: int) -> None:
        """Test hook: what the node's page covers from now on, at least 1."""
        self.tree.set_page(node, lc, node.pages[lc], coverage)

    # ------------------------------------------------------------------------------------------------ room

    def evictable(self, group: int) -> int:
        """Number of cached pages of a pool group."""
        return len(self.pages.queues[group])

    def num_free(self, group: int) -> int:
        """Slots free without evicting."""
        return self._tier.num_free(group)

    def make_room(self, group: int, wanted: int) -> None:
        """Evict until ``wanted`` slots are free; the caller has checked that free + evictable suffice."""
        self._reclaim.make_room(group, wanted)

    def allocate(self, group: int, count: int) -> list[int]:
        """The ``count`` lowest free slots (``make_room`` first), handed out to this call; without records yet."""
        return self._tier.allocate(group, count)

    # ------------------------------------------------------------------------------------------------ retention

    def mark(self, node: Node, bit: int) -> None:
        """Set SEQUENCE or PROMPT (FORK is kept by the tree): the window tail of an end in this node gives way late.

        No-op when set, on a root, and with ``retain_window_tails`` off.  The slack follows from the bit.
        """
        self._retention.mark(node, bit)

    def unmark(self, node: Node, bit: int) -> None:
        """Clear it; no-op when not set."""
        self._retention.unmark(node, bit)

    def touch(self, node: Node, lc: int) -> None:
        """At close: a cached page that the node's marks need becomes the newest of its queue; else nothing."""
        if node.tails[lc]:
            self.pages.requeue(node, lc)

    # ------------------------------------------------------------------------------------------------ plans

    def plan_page(self, node: Node, lc: int) -> PlannedPage:
        """Count one planned drop on the node's page; the answer names that very page."""
        page = self.pages.get(lc, node.pages[lc])
        self._journal.set(page, "plans", page.plans + 1)
        return lc, page.slot, page.serial

    def drop_page(self, planned: PlannedPage) -> None:
        """One planned drop is due: at the last one a cached page is removed.  Nothing when the page is gone already."""
        lc, slot, serial = planned
        page = self.pages.find(lc, slot)
        if page is None or page.serial != serial:
            return
        self._journal.set(page, "plans", page.plans - 1)
        if page.plans == 0 and page.queue_key is not None:
            self._reclaim.remove_page(page)

    # ------------------------------------------------------------------------------------------------ whole

    def clear(self) -> None:
        """Remove every tree; no request is open."""
        for root in list(self.tree.roots.values()):
            self._reclaim.remove_subtree(root)

    def all_cached(self) -> bool:
        """Whether nobody owns a page of the tree."""
        return not any(page.refs and page.node is not None for page in self.pages)

    def dump_tree(self) -> list[Any]:
        """For ``snapshot``: depth first, children in token order, scopes sorted, None first.

        Per node ``[scope, ordinal, tokens, marks, pages, tails]``; a digest is a hex string; a page, one per life cycle, is
        ``[slot, coverage, refs, priority, plans]`` or None.
        """
        return [
            [
                list(node.scope),
                node.ordinal,
                self.readable(node.tokens),
                node.marks,
                self._dump_pages(node),
                list(node.tails),
            ]
            for node in self.tree.all_nodes()
        ]

    def readable(self, tokens: bytes) -> list[int | str]:
        """Ids, and digests as hex strings."""
        return [code if code >= 0 else self.digests.digest_of(code).hex() for code in codes_of(tokens)]

    def _dump_pages(self, node: Node) -> list[list[int] | None]:
        pages = (self.pages.of_node(node, lc) for lc in range(self.rules.num_life_cycles))
        return [
            None if page is None else [page.slot, node.coverage[page.lc], page.refs, page.priority, page.plans]
            for page in pages
        ]

    def dump_queues(self) -> list[list[list[int]]]:
        """For ``snapshot``: per pool group [priority, class, slot] in victim order."""
        return [[[*(page.queue_key or ()), page.slot] for page in queue] for queue in self.pages.queues]

    def audit(
        self, owners: Mapping[tuple[int, int], int], last_nodes: Sequence[Node], tails: Sequence[bytes] = ()
    ) -> None:
        """CorruptedError unless everything here fits together and fits the requests.

        ``owners[lc, slot]`` is how many requests own the page (scratch and states too), ``last_nodes`` the last node of
        every open request that has one, ``tails`` what they retain in the digest pool.
        """
        cache_audit.audit(self, self._tier, owners, last_nodes, tails)
