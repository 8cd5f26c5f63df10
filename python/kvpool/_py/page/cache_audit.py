"""Every invariant of the prefix cache, checked; O(n)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.tokens import codes_of
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.reuse.retention import FORK, bits, tail_of
from kvpool._py.storage.tier import Tier
from kvpool.errors import CorruptedError

if TYPE_CHECKING:
    from kvpool._py.page.prefix_cache import PrefixCache


def audit(
    cache: PrefixCache,
    tier: Tier,
    owners: Mapping[tuple[int, int], int],
    last_nodes: Sequence[Node],
    tails: Sequence[bytes],
) -> None:
    """CorruptedError unless everything fits together; see :meth:`PrefixCache.audit`."""
    nodes = list(cache.tree.all_nodes())
    holders = Counter(map(id, last_nodes))
    for node in nodes:
        _audit_node(cache, node)
        _audit_children(cache, node)
        _expect(node.holders == holders.pop(id(node), 0), f"{_name(node)}: holders")
    _expect(not holders, "the last node of a request is not in the tree")
    _audit_marks(cache, nodes)
    _audit_pages(cache, tier, owners)
    _audit_digests(cache, [node.tokens for node in nodes] + list(tails))


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise CorruptedError(what)


def _name(node: Node) -> str:
    return f"node {node.ordinal} of scope {node.scope}, tokens {codes_of(node.tokens).tolist()[:8]}"


def _audit_node(cache: PrefixCache, node: Node) -> None:
    name = _name(node)
    _expect(node.attached, f"{name}: not attached")
    if node.parent is None:
        _expect(node.ordinal == -1 and not node.tokens, f"{name}: root")
        _expect(bool(node.children or node.holders), f"{name}: a root that leads nowhere")
    else:
        _expect(node.ordinal == node.parent.ordinal + 1, f"{name}: ordinal")
        _expect(0 < node.num_tokens <= cache.rules.tokens_per_block, f"{name}: length")
    if node.children or node.holders:
        _expect(
            node.parent is None or node.num_tokens == cache.rules.tokens_per_block, f"{name}: a short block goes on"
        )
    for lc, (slot, coverage) in enumerate(zip(node.pages, node.coverage, strict=True)):
        if slot == BAD_PAGE_INDEX:
            _expect(coverage == 0, f"{name}: coverage without a page of group {lc}")
            continue
        _expect(0 < coverage <= node.num_tokens, f"{name}: coverage {coverage} of group {lc}")
        page = cache.pages.find(lc, slot)
        _expect(page is not None and page.node is node and page.lc == lc, f"{name}: page {slot} of group {lc}")


def _audit_children(cache: PrefixCache, node: Node) -> None:
    name = _name(node)
    children = cache.tree.children_in_order(node)
    _expect((node.ordered is not None) == (len(children) > 1), f"{name}: order of children")
    _expect(len(children) == len(node.children), f"{name}: number of children")
    has_fork = len(children) > 1 and node.parent is not None and cache.rules.retain_window_tails
    _expect(bool(node.marks & FORK) == has_fork, f"{name}: fork mark")
    for child in children:
        _expect(node.children.get(child.tokens) is child and child.parent is node, f"{name}: child")
    for left, right in zip(node.ordered or (), (node.ordered or ())[1:], strict=False):
        _expect(left[0] < right[0] and not right[1].tokens.startswith(left[1].tokens), f"{name}: order of children")


def _audit_marks(cache: PrefixCache, nodes: Sequence[Node]) -> None:
    tails: Counter[tuple[int, int]] = Counter()
    for node in nodes:
        for bit in bits(node.marks):
            tails.update((id(upper), lc) for lc, upper in tail_of(cache.rules, node, bit))
    for node in nodes:
        expected = [tails[id(node), lc] for lc in range(cache.rules.num_life_cycles)]
        _expect(node.tails == expected, f"{_name(node)}: tails {node.tails} are not {expected}")


def _audit_pages(cache: PrefixCache, tier: Tier, owners: Mapping[tuple[int, int], int]) -> None:
    waiting = {id(page) for queue in cache.pages.queues for page in queue}
    unseen = dict(owners)
    occupied = [0] * len(tier.slot_counts)
    for page in cache.pages:
        name = f"page {page.slot} of group {page.lc}"
        occupied[page.group] += 1
        _expect(tier.allocators[page.group].is_occupied(page.slot), f"{name}: its slot is free")
        _expect(page.refs == unseen.pop((page.lc, page.slot), 0), f"{name}: {page.refs} owners")
        _expect(page.refs > 0 or page.node is not None, f"{name}: nobody needs it")
        if page.node is not None:
            _expect(page.node.attached and page.node.pages[page.lc] == page.slot, f"{name}: its node")
        _expect((id(page) in waiting) == (page.refs == 0), f"{name}: eviction queue")
        if page.node is not None and page.refs == 0:
            _expect(page.queue_key == cache.pages.queue_key(page, page.node), f"{name}: place in the queue")
    _expect(not unseen, f"owned pages without a record: {sorted(unseen)[:8]}")
    for group, allocator in enumerate(tier.allocators):
        _expect(occupied[group] == allocator.num_occupied, f"pool group {group}: occupied slots without a record")
    for queue in cache.pages.queues:
        order = [(page.queue_key or (-1, -1), page.stamp) for page in queue]
        _expect(order == sorted(order) and len(order) == len(queue), "order of an eviction queue")


def _audit_digests(cache: PrefixCache, tokens: Sequence[bytes]) -> None:
    used = Counter(cache.digests.digest_of(code) for part in tokens for code in codes_of(part) if code < 0)
    _expect(cache.digests.references() == dict(used), "references to digests")
