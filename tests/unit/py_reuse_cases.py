"""A prefix cache without a manager, and short hands to fill it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvpool._py.core.journal import Journal
from kvpool._py.core.tokens import Query
from kvpool._py.device.sim_device import SimDevice
from kvpool._py.page.prefix_cache import PrefixCache
from kvpool._py.reuse.match import MatchResult
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.reuse.rules import ReuseRules
from kvpool._py.storage.layout import build_layout
from kvpool._py.storage.tier import Tier
from kvpool.v2.config import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManagerConfig,
    SsmLayerConfig,
)
from kvpool.v2.types import ReusePolicy

MIB = 1 << 20
NO_SCOPE = (None, None)

Token = int | bytes


def full(optional: bool = False) -> dict[str, Any]:
    return {"optional": optional}


def window(size: int, sinks: int = 0, optional: bool = False) -> dict[str, Any]:
    return {"window": size, "sinks": sinks, "optional": optional}


STATE: dict[str, Any] = {"ssm": True}


def make_config(layers: Sequence[dict[str, Any]], tpb: int, **more: Any) -> KVCacheManagerConfig:
    """Layers of equal sizes: all life cycles share a pool group."""
    made: list[Any] = []
    for layer_id, layer in enumerate(layers):
        buffers = [BufferConfig(role="x", size=4096 * tpb)]
        if layer.get("ssm"):
            made.append(SsmLayerConfig(layer_id=layer_id, buffers=buffers))
            continue
        policy = ReusePolicy.OPTIONAL if layer.get("optional") else ReusePolicy.REQUIRED
        made.append(
            AttentionLayerConfig(
                layer_id=layer_id,
                buffers=buffers,
                sliding_window_size=layer.get("window"),
                num_sink_tokens=layer.get("sinks") or None,
                reuse_policy=policy,
            )
        )
    return KVCacheManagerConfig(
        tokens_per_block=tpb,
        cache_tiers=[GpuCacheTierConfig(quota=64 * MIB)],
        layers=made,
        commit_min_snapshot=any(layer.get("ssm") for layer in layers),
        **more,
    )


class World:
    """A cache over a tier, both with one journal; every method is one call."""

    def __init__(self, layers: Sequence[dict[str, Any]], tpb: int = 4, slots: int = 64, **more: Any) -> None:
        self.config = make_config(layers, tpb, **more)
        self.layout = build_layout(self.config)
        self.rules = ReuseRules.make(self.layout, self.config)
        self.journal = Journal()
        self.device = SimDevice()
        counts = [slots] * len(self.layout.pool_groups)
        self.tier = Tier(self.device, self.layout, counts, 2 * MIB, self.journal)
        self.cache = PrefixCache(self.layout, self.rules, self.tier, self.journal)
        self.tpb = tpb
        self.owners: dict[tuple[int, int], int] = {}
        self.held: list[Node] = []

    # tokens

    def query(self, tokens: Iterable[Token]) -> Query:
        return self.cache.query(*encoded(tokens))

    def match(self, tokens: Iterable[Token], scope: Any = NO_SCOPE, **more: Any) -> MatchResult:
        return self.cache.match(scope, self.query(tokens), **more)

    def find(self, tokens: Sequence[Token], scope: Any = NO_SCOPE) -> Node:
        """The node that ends exactly with these tokens."""
        node = self.cache.root(scope)
        for begin in range(0, len(tokens), self.tpb):
            assert node is not None
            node = node.children.get(self.query(tokens[begin : begin + self.tpb]).tokens)
        assert node is not None
        return node

    # pages

    def take(self, lc: int, node: Node, coverage: int, priority: int = 35) -> int:
        """A new owned page, linked; -1 when the node's own covers as much."""
        group = self.layout.life_cycles[lc].pool_group
        if not self.cache.can_install(node, lc, coverage):
            return -1
        (slot,) = self.cache.allocate(group, 1)
        self.cache.new_page(lc, slot, priority)
        assert self.cache.install(node, lc, slot, coverage)
        self.owners[lc, slot] = 1
        return slot

    def let_page_go(self, lc: int, slot: int) -> None:
        self.cache.release(lc, slot)
        del self.owners[lc, slot]

    def own(self, node: Node, lc: int, priority: int = 0) -> int:
        slot = self.cache.page(node, lc)
        self.cache.adopt(lc, slot, priority)
        self.owners[lc, slot] = self.owners.get((lc, slot), 0) + 1
        return slot

    def hold(self, node: Node) -> None:
        self.cache.hold_node(node)
        self.held.append(node)

    def let_node_go(self, node: Node) -> None:
        self.held.remove(node)
        self.cache.let_go(node)

    def commit(
        self, tokens: Sequence[Token], coverage: Any = None, scope: Any = NO_SCOPE, priority: int = 35
    ) -> list[Node]:
        """Commit a sequence block by block, as one request would: cached pages at the end.

        ``coverage(node, lc)``: tokens; None: all of the block, no state.  Pruning is left out.
        """
        node = self.cache.root(scope, create=True)
        assert node is not None
        path = []
        for begin in range(0, len(tokens), self.tpb):
            ids, digests = encoded(tokens[begin : begin + self.tpb])
            block = self.cache.encode(ids, digests)
            insert = self.cache.insert_full if len(ids) == self.tpb else self.cache.insert_tail
            node, _ = insert(node, block)
            self.cache.release_tokens(block)
            path.append(node)
            for lc in self.layout.life_cycles:
                covered = len(ids) * (not lc.is_ssm) if coverage is None else coverage(node, lc.index)
                if covered and self.cache.can_install(node, lc.index, covered):
                    slot = self.take(lc.index, node, covered, priority)
                    self.let_page_go(lc.index, slot)
        return path

    def insert(self, tokens: Sequence[Token], coverage: Any = None, **more: Any) -> list[Node]:
        """``commit`` as a call of its own."""
        with self.journal.call():
            path = self.commit(tokens, coverage, **more)
            self.tier.settle(0, 0)
        return path

    # checks

    def audit(self) -> None:
        self.cache.audit(self.owners, self.held)

    def state(self) -> Any:
        """All that an undo must bring back."""
        return (
            self.cache.dump_tree(),
            self.cache.dump_queues(),
            [(allocator.num_free, allocator.active, allocator.occupied_ids()) for allocator in self.tier.allocators],
            [(node.ordinal, node.tokens, node.holders, node.tails[:]) for node in self.cache.tree.all_nodes()],
            self.cache.digests.references(),
            [
                (page.lc, page.slot, page.refs, page.plans, page.priority, page.queue_key and page.stamp)
                for page in self.cache.pages
            ],
            list(self.tier._notes),
        )


class _Undone(Exception):
    pass


@contextlib.contextmanager
def undone(journal: Journal) -> Iterator[None]:
    """A call that fails at its very end."""
    with contextlib.suppress(_Undone), journal.call():
        yield
        raise _Undone


def encoded(tokens: Iterable[Token]) -> tuple[Any, list[bytes]]:
    """Ids and digests as the facade hands them over."""
    digests: list[bytes] = []
    ids = []
    for token in tokens:
        if isinstance(token, bytes):
            digests.append(token)
            ids.append(-len(digests))
        else:
            ids.append(token)
    return np.array(ids, np.int32), digests


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def pages_of(node: Node) -> list[bool]:
    return [slot >= 0 for slot in node.pages]
