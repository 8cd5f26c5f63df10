"""Committing: a request's tokens become blocks of the tree, its pages become pages that others may share.

Nothing here calls the device; the copies that a snapshot needs are noted for :meth:`Ground.order`.  The record changes
under the journal too, so that a batch step can take back one request alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.tokens import Ids, check_ids
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.reuse.retention import PROMPT
from kvpool._py.sequence.block_table import write_buffers
from kvpool._py.sequence.ground import Ground, SlotCopy, stream_of
from kvpool._py.sequence.kv_cache import ACTIVE, KVCache, SequenceRules
from kvpool._py.sequence.resize_plan import hull, newly_stale
from kvpool._py.sequence.transitions import require
from kvpool._py.storage.layout import LifeCycle
from kvpool._py.storage.live_ranges import Range, scratch_slots, stale_range
from kvpool.errors import ArgumentError, LogicError

Hulls = dict[int, Range]
"""Life cycle to the smallest range over the blocks whose exposed entries changed; none is empty."""


def commit(ground: Ground, cache: KVCache, ids: Ids, digests: Sequence[bytes], is_end: bool) -> None:
    """The call: all checks, then :func:`commit_tokens`, then the device.  No tokens: only what ``is_end`` says.

    Raises LogicError unless ACTIVE, with more than one beam and after committing has stopped; ArgumentError for tokens
    that may not be committed.
    """
    require(cache, "commit", ACTIVE)
    if not len(ids):
        if is_end:
            stop_committing(ground, cache)
        return
    if cache.beam_width != 1:
        raise LogicError(f"commit(): beam_width is {cache.beam_width}; only one beam can be committed")
    check_allowed(cache, "")
    if cache.text_only and digests:
        raise ArgumentError("commit(): a digest, but text_only was promised")
    check_ids(ids, len(digests), "tokens")
    check_lengths(ground.rules, cache, len(ids), "commit(): ")
    copies: list[SlotCopy] = []
    with ground.journal.call():
        tokens = ground.pages.encode(ids, digests)
        hulls = commit_tokens(ground, cache, tokens, is_end, copies)
        ground.pages.release_tokens(tokens)
        ground.order(cache.stream, copies)
    if hulls:
        write_buffers(cache, hulls.items())
        cache.drop_binding()


def stop_committing(ground: Ground, cache: KVCache) -> None:
    """The call: legal in every state but CLOSED; idempotent."""
    if cache.commit_allowed:
        with ground.journal.call():
            stop(ground, cache)
            ground.order(stream_of(cache))


def check_allowed(cache: KVCache, prefix: str) -> None:
    """Refuse to commit once committing has stopped."""
    if not cache.commit_allowed:
        raise LogicError(f"{prefix}Cannot commit tokens after stop_committing()")


def check_lengths(rules: SequenceRules, cache: KVCache, count: int, prefix: str) -> None:
    """Refuse to commit ``count`` tokens that the lengths do not allow."""
    committed = cache.committed + count
    if committed > cache.capacity:
        raise ArgumentError(f"{prefix}{count} tokens after {cache.committed} exceed the capacity {cache.capacity}")
    if rules.commit_min_snapshot and cache.history not in (cache.committed, committed):
        raise ArgumentError(
            f"{prefix}commit_min_snapshot needs a history of {cache.committed} or {committed} tokens, not {cache.history}"
        )


def commit_tokens(ground: Ground, cache: KVCache, tokens: bytes, is_end: bool, copies: list[SlotCopy]) -> Hulls:
    """Commit checked, encoded tokens.  Copies for snapshots are added to ``copies``."""
    rules, pages = ground.rules, ground.pages
    block_bytes = 4 * rules.tokens_per_block
    before = cache.committed
    after = before + len(tokens) // 4
    ground.journal.on_undo(cache.restore, cache.save())
    hulls = _advance_history(ground, cache, max(cache.history, after))
    cache.committed = after

    data = cache.tail + tokens
    full = len(data) // block_bytes
    first = before // rules.tokens_per_block
    if full:
        node = _parent(ground, cache)
        rebased: dict[int, list[int]] = {}
        for i in range(full):
            node = _commit_block(ground, cache, node, first + i, data[i * block_bytes : (i + 1) * block_bytes], rebased)
        _move_last_node(ground, cache, node)
        for index, ordinals in rebased.items():
            hulls[index] = hull(ordinals, hulls.get(index, (0, 0)))
    tail = data[full * block_bytes :]
    pages.retain_tokens(tail)
    pages.release_tokens(cache.tail)
    cache.tail = tail
    _mark_prompt(ground, cache, before)
    if rules.commit_min_snapshot:
        if is_end:
            _move_snapshot(ground, cache)
        else:
            _copy_snapshot(ground, cache, copies)
    if is_end:
        stop(ground, cache, tail_done=rules.commit_min_snapshot)
    return hulls


def stop(ground: Ground, cache: KVCache, tail_done: bool = False) -> None:
    """Nothing will be committed any more: the tail is, if it can be, and held stale pages go."""
    if not tail_done and cache.tail and cache.opened and cache.beam_width == 1:
        node, _ = ground.pages.insert_tail(_parent(ground, cache), cache.tail)
        _link_tail(ground, cache, node)
        ground.pages.prune(node)
    ground.journal.on_undo(cache.restore, cache.save())
    cache.commit_allowed = False
    for life_cycle in ground.rules.windowed:
        index = life_cycle.index
        for ordinal in range(*cache.stale[index]):
            for slots in cache.slots[index]:
                if slots[ordinal] != BAD_PAGE_INDEX:
                    _let_go_of(ground, cache, index, slots, ordinal)


# ------------------------------------------------------------------------------------------------------ history


def _advance_history(ground: Ground, cache: KVCache, history: int) -> Hulls:
    """A longer history with the same capacity.  It needs no slots: what was scratch has no content and stays without."""
    rules = ground.rules
    if history < cache.next_history and cache.capacity_high >= 0:
        cache.history = history
        return {}
    hulls: Hulls = {}
    for life_cycle in rules.windowed:
        index = life_cycle.index
        stale = stale_range(history, rules.tokens_per_block, life_cycle.window, life_cycle.sink_blocks)
        gone, held = newly_stale(rules, cache, index, stale)
        slots = cache.slots[index][0]
        for ordinal in gone:
            _let_go_of(ground, cache, index, slots, ordinal)
        changed = hull(gone, held)
        if changed[0] < changed[1]:
            hulls[index] = changed
        cache.stale[index] = stale
        _cut_scratch(ground, cache, life_cycle, stale[1])
    cache.history = history
    cache.refresh_limits(rules)
    return hulls


def _cut_scratch(ground: Ground, cache: KVCache, life_cycle: LifeCycle, stale_end: int) -> None:
    index = life_cycle.index
    begin, end = max(cache.scratch_ranges[index][0], stale_end), cache.scratch_ranges[index][1]
    cache.scratch_ranges[index] = (begin, end) if begin < end else (0, 0)
    kept = scratch_slots(max(0, end - begin), life_cycle.scratch_fraction)
    scratch = cache.scratch[index]
    for slot in scratch[kept:]:
        ground.pages.release(index, slot)
    cache.owned[life_cycle.pool_group] -= len(scratch[kept:])
    del scratch[kept:]


def _let_go_of(ground: Ground, cache: KVCache, index: int, slots: list[int], ordinal: int) -> None:
    ground.pages.release(index, slots[ordinal])
    ground.journal.set_item(slots, ordinal, BAD_PAGE_INDEX)
    cache.owned[ground.rules.pool_group_of[index]] -= 1


# ------------------------------------------------------------------------------------------------------- blocks


def _parent(ground: Ground, cache: KVCache) -> Node:
    """The node that the next block goes under; the request's last node from now on."""
    if cache.last_node is not None:
        return cache.last_node
    root = ground.pages.root(cache.scope, create=True)
    assert root is not None, "just made"
    _move_last_node(ground, cache, root)
    return root


def _move_last_node(ground: Ground, cache: KVCache, node: Node) -> None:
    old = cache.last_node
    ground.pages.hold_node(node)
    ground.journal.set(cache, "last_node", node)
    if old is not None:
        ground.pages.let_go(old)


def _commit_block(
    ground: Ground, cache: KVCache, parent: Node, ordinal: int, tokens: bytes, rebased: dict[int, list[int]]
) -> Node:
    """One full block; ``rebased`` collects the entries that another request's page took."""
    rules, pages = ground.rules, ground.pages
    node, existed = pages.insert_full(parent, tokens)
    stale: list[int] = []
    for life_cycle in rules.attention:
        index = life_cycle.index
        slots = cache.slots[index][0]
        slot = slots[ordinal]
        if slot == BAD_PAGE_INDEX:
            continue
        is_stale = cache.stale[index][0] <= ordinal < cache.stale[index][1]
        if not existed or pages.coverage(node, index) < rules.tokens_per_block:
            pages.install(node, index, slot, rules.tokens_per_block)
            if is_stale:
                stale.append(index)
        elif is_stale:
            _let_go_of(ground, cache, index, slots, ordinal)
        else:
            other = pages.page(node, index)
            pages.release(index, slot)
            pages.adopt(index, other, cache.priority(index, ordinal))
            ground.tier.borrow(life_cycle.pool_group, other)
            ground.journal.set_item(slots, ordinal, other)
            rebased.setdefault(index, []).append(ordinal)
    for index in stale:
        _let_go_of(ground, cache, index, cache.slots[index][0], ordinal)
    return node


def _mark_prompt(ground: Ground, cache: KVCache, before: int) -> None:
    tpb = ground.rules.tokens_per_block
    if before < cache.prompt_length // tpb * tpb <= cache.committed:
        node = prompt_node(ground.rules, cache)
        assert node is not None, "its last block has just been committed"
        ground.pages.mark(node, PROMPT)


def prompt_node(rules: SequenceRules, cache: KVCache) -> Node | None:
    """The node of the last full block of the announced prompt; None before it is committed."""
    ordinal = cache.prompt_length // rules.tokens_per_block - 1
    node = cache.last_node
    if ordinal < 0 or node is None or node.ordinal < ordinal:
        return None
    while node.ordinal > ordinal:
        assert node.parent is not None, "the ordinal is not below 0"
        node = node.parent
    return node


# ---------------------------------------------------------------------------------------------------- snapshots


def _link_tail(ground: Ground, cache: KVCache, node: Node) -> None:
    """The request's own pages of the tail block become pages of ``node`` where they cover more; they stay its own."""
    ordinal, length = cache.committed // ground.rules.tokens_per_block, len(cache.tail) // 4
    for life_cycle in ground.rules.attention:
        slot = cache.slots[life_cycle.index][0][ordinal]
        if slot != BAD_PAGE_INDEX and ground.pages.can_install(node, life_cycle.index, length):
            ground.pages.install(node, life_cycle.index, slot, length)


def _move_snapshot(ground: Ground, cache: KVCache) -> None:
    """The last commit of a request that keeps snapshots only: the tail's pages and the states go into the tree."""
    rules, pages = ground.rules, ground.pages
    if cache.tail:
        node, _ = pages.insert_tail(_parent(ground, cache), cache.tail)
        _link_tail(ground, cache, node)
    else:
        assert cache.last_node is not None, "something was committed"
        node = cache.last_node
    coverage = len(cache.tail) // 4 or rules.tokens_per_block
    for position, life_cycle in enumerate(rules.ssm):
        slot = cache.ssm[position][0]
        if slot != BAD_PAGE_INDEX and pages.can_install(node, life_cycle.index, coverage):
            pages.install(node, life_cycle.index, slot, coverage)
            pages.release(life_cycle.index, slot)
            cache.ssm[position][0] = BAD_PAGE_INDEX
            cache.owned[life_cycle.pool_group] -= 1
    pages.prune(node)


def _copy_snapshot(ground: Ground, cache: KVCache, copies: list[SlotCopy]) -> None:
    """Copies of the tail's pages and of the states go into the tree, as far as there is room.

    All slots are taken first: making room may remove a page of the very node that the copies are for, or all of it.
    """
    rules, pages = ground.rules, ground.pages
    ordinal = cache.committed // rules.tokens_per_block
    sources: list[tuple[int, int]] = []
    if cache.tail:
        sources = [(lc.index, cache.slots[lc.index][0][ordinal]) for lc in rules.attention]
    sources += [(lc.index, states[0]) for lc, states in zip(rules.ssm, cache.ssm, strict=True)]
    if not sources:
        return
    parent = _parent(ground, cache)
    coverage = len(cache.tail) // 4 or rules.tokens_per_block
    taken: list[tuple[int, int]] = []
    for index, source in sources:
        target = pages.covering_child(parent, cache.tail) if cache.tail else parent
        if source == BAD_PAGE_INDEX or (target is not None and not pages.can_install(target, index, coverage)):
            continue
        slot = ground.take_one(index, cache.priority(index, ordinal))
        if slot is not None:
            copies.append((rules.pool_group_of[index], slot, source))
            taken.append((index, slot))
    if not taken:
        return
    node = pages.insert_tail(parent, cache.tail)[0] if cache.tail else parent
    for index, slot in taken:
        pages.install(node, index, slot, coverage)
        pages.release(index, slot)
    pages.prune(node)
