"""Calls about prefixes rather than about the progress of a request: probes, plans, what is in the tree, test hooks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.math import div_up
from kvpool._py.core.tokens import Ids, Query, check_ids
from kvpool._py.page.prefix_cache import PlannedPage
from kvpool._py.reuse.match import MatchResult
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.sequence.ground import Ground
from kvpool._py.sequence.kv_cache import DEFAULT_PRIORITY, KVCache, Scope
from kvpool._py.storage.live_ranges import stale_range
from kvpool.errors import ArgumentError, LogicError, OutOfPagesError
from kvpool.v2._backend import ReuseStatus


class ReuseCalls:
    """The calls, and the plans to drop pages that are not carried out yet."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._rules = ground.rules
        self._pages = ground.pages
        self._plans: dict[int, list[PlannedPage]] = {}
        self._last_plan = 0

    # ------------------------------------------------------------------------------------------------ look-up

    def probe(self, scope: Scope, ids: Ids, digests: Sequence[bytes]) -> int:
        """Tokens that a cache created now would reuse."""
        return self._pages.match(scope, self._query(ids, digests)).end

    def first_new_block_key(self, scope: Scope, ids: Ids, digests: Sequence[bytes]) -> bytes | None:
        """Key of the query's own block behind the whole blocks that would be reused."""
        query = self._query(ids, digests)
        match = self._pages.match(scope, query)
        ordinal = match.end // self._rules.tokens_per_block
        if query.num_tokens < (ordinal + 1) * self._rules.tokens_per_block:
            return None
        return self._pages.key_on_top(scope, match.chain[ordinal - 1] if ordinal else None, query, ordinal)

    def match_pages(
        self, scope: Scope, ids: Ids, digests: Sequence[bytes], life_cycle: int, partial: bool
    ) -> tuple[int, list[tuple[int, int] | None]]:
        """Tokens matched by the walk alone, and per block (slot, coverage) of the life cycle's page."""
        walk = self._pages.walk(scope, self._query(ids, digests), partial)
        if walk is None:
            return 0, []
        nodes = walk.chain if walk.partial is None else [*walk.chain, walk.partial]
        return walk.depth, [self._page_of(node, life_cycle) for node in nodes]

    def _page_of(self, node: Node, life_cycle: int) -> tuple[int, int] | None:
        slot = self._pages.page(node, life_cycle)
        return None if slot == BAD_PAGE_INDEX else (slot, self._pages.coverage(node, life_cycle))

    def _query(self, ids: Ids, digests: Sequence[bytes]) -> Query:
        check_ids(ids, len(digests), "input_tokens")
        return self._pages.query(ids, digests)

    # -------------------------------------------------------------------------------------------- of a request

    def status(self, cache: KVCache) -> list[ReuseStatus]:
        """Per attention life cycle; nothing is missing of nothing matched."""
        coverage = cache.coverage or [(True, [])] * len(self._rules.attention)
        return [
            ReuseStatus(life_cycle.index, life_cycle.optional, complete, cache.matched, list(covered))
            for life_cycle, (complete, covered) in zip(self._rules.attention, coverage, strict=True)
        ]

    def committed_tokens(self, cache: KVCache) -> tuple[Ids, list[bytes]]:
        """Ids and digests, these numbered by first use."""
        return self._pages.decode(self._tokens_of(cache))

    def block_keys(self, cache: KVCache) -> npt.NDArray[np.uint8]:
        """Chain keys of the full committed blocks."""
        joined = b"".join(self._pages.key(node) for node in _path(cache))
        keys: npt.NDArray[np.uint8] = np.frombuffer(joined, np.uint8).reshape(-1, 32).copy()
        return keys

    def page_is_linked(self, cache: KVCache, ordinal: int, life_cycle: int) -> bool | None:
        """Whether a node names the page of beam 0; a state has no ordinal."""
        beams = cache.slots[life_cycle]
        slots = beams[0] if beams else [self._state_of(cache, life_cycle)] * cache.num_blocks
        if not 0 <= ordinal < len(slots) or slots[ordinal] == BAD_PAGE_INDEX:
            return None
        return self._pages.node_of(life_cycle, slots[ordinal]) is not None

    def _state_of(self, cache: KVCache, life_cycle: int) -> int:
        position = next(i for i, lc in enumerate(self._rules.ssm) if lc.index == life_cycle)
        return cache.ssm[position][0] if cache.opened else cache.ssm_source[position]

    @staticmethod
    def _tokens_of(cache: KVCache) -> bytes:
        return b"".join(node.tokens for node in _path(cache)) + cache.tail

    # ------------------------------------------------------------------------------------------- planned drops

    def plan_drop(self, cache: KVCache) -> int | None:
        """Plan to drop what the next turn of this conversation will not need any more: the window tail and the state.

        None when nothing is committed, or when the committed prefix can not be reused whole.
        """
        if cache.commit_allowed:
            raise LogicError("plan_committed_block_drop(): committing has not stopped")
        if not cache.committed:
            return None
        match = self._pages.match(cache.scope, Query(self._tokens_of(cache)), backoff=0, partial=False)
        needed = self._needed_at_end(match) if match.end == cache.committed else None
        if needed is None:
            return None
        with self._ground.journal.call():
            planned = [self._pages.plan_page(node, life_cycle) for life_cycle, node in needed]
        self._last_plan += 1
        self._plans[self._last_plan] = planned
        return self._last_plan

    def _needed_at_end(self, match: MatchResult) -> list[tuple[int, Node]] | None:
        """Window pages, but for sinks, and states that the end point needs: (life cycle, node); None when one lacks."""
        tpb = self._rules.tokens_per_block
        nodes = match.chain if match.source is None else [*match.chain, match.source]
        needed: list[tuple[int, Node]] = []
        for lc in self._rules.windowed:
            for ordinal in range(stale_range(match.end, tpb, lc.window, lc.sink_blocks)[1], len(nodes)):
                node = nodes[ordinal]
                covered = self._pages.coverage(node, lc.index)
                if covered >= min(tpb, match.end - ordinal * tpb):
                    needed.append((lc.index, node))
                elif not lc.optional:
                    return None
        for lc in self._rules.ssm:
            if self._pages.coverage(nodes[-1], lc.index) != match.end - (len(nodes) - 1) * tpb:
                return None
            needed.append((lc.index, nodes[-1]))
        return needed

    def drop(self, plan: int) -> bool:
        """Carry a plan out; False for one that is not known (any more)."""
        planned = self._plans.pop(plan, None)
        if planned is None:
            return False
        with self._ground.journal.call():
            for page in planned:
                self._pages.drop_page(page)
        return True

    def clear(self) -> None:
        """Forget every prefix and every plan; no request is open."""
        with self._ground.journal.call():
            self._pages.clear()
        self._plans.clear()

    # ---------------------------------------------------------------------------------------------- test hooks

    def insert_block(self, scope: Scope, ids: Ids, digests: Sequence[bytes], coverage: Sequence[int]) -> None:
        """The last block of ``ids`` goes into the tree with cached pages; those before are there."""
        query, tpb = self._query(ids, digests), self._rules.tokens_per_block
        ordinal = div_up(query.num_tokens, tpb) - 1
        parent = self._find(scope, query, ordinal)
        if ordinal < 0 or (ordinal and parent is None):
            raise ArgumentError("debug_insert_block(): the blocks before are not in the tree")
        target = None if parent is None else self._pages.covering_child(parent, query.block(ordinal, tpb))
        with self._ground.journal.call():
            taken: list[tuple[int, int, int]] = []
            for life_cycle, covered in enumerate(coverage):
                if not covered or (target is not None and not self._pages.can_install(target, life_cycle, covered)):
                    continue
                slot = self._ground.take_one(life_cycle, DEFAULT_PRIORITY)
                if slot is None:
                    raise OutOfPagesError("debug_insert_block(): there is no slot left")
                taken.append((life_cycle, slot, covered))
            parent = self._pages.root(scope, create=True) if parent is None else parent
            assert parent is not None, "just made"
            tokens = self._pages.encode(ids[ordinal * tpb :], digests)
            insert = self._pages.insert_full if len(tokens) == 4 * tpb else self._pages.insert_tail
            node = insert(parent, tokens)[0]
            self._pages.release_tokens(tokens)
            for life_cycle, slot, covered in taken:
                self._pages.install(node, life_cycle, slot, covered)
                self._pages.release(life_cycle, slot)
            self._ground.order(self._ground.device.own_stream())

    def set_coverage(self, scope: Scope, ids: Ids, digests: Sequence[bytes], life_cycle: int, coverage: int) -> None:
        """What the page of the last block of ``ids`` covers from now on; 0 removes it."""
        query = self._query(ids, digests)
        node = self._find(scope, query, div_up(query.num_tokens, self._rules.tokens_per_block))
        if node is None or node.parent is None or self._pages.page(node, life_cycle) == BAD_PAGE_INDEX:
            raise ArgumentError("debug_set_coverage(): the block is not in the tree")
        with self._ground.journal.call():
            if coverage:
                self._pages.set_coverage(node, life_cycle, coverage)
            else:
                self._pages.remove_page(node, life_cycle)

    def _find(self, scope: Scope, query: Query, count: int) -> Node | None:
        """The node of the first ``count`` blocks of the query; the root for none."""
        node = self._pages.root(scope)
        for ordinal in range(count):
            if node is None:
                return None
            node = self._pages.child(node, query.block(ordinal, self._rules.tokens_per_block))
        return node


def _path(cache: KVCache) -> list[Node]:
    """Nodes of the full committed blocks, first to last."""
    nodes: list[Node] = []
    node = cache.last_node
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
