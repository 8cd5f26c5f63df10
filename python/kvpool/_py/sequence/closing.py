"""The end of a request: what it had computed stays behind for later prompts, as far as there is room.

Order: committing stops; the end of the sequence is marked, and marks that it supersedes are cleared; pages go from the last
block to the first, so that the start of a prompt, which most prompts share, gives way last.
"""

from __future__ import annotations

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.reuse.retention import PROMPT, SEQUENCE
from kvpool._py.sequence.block_table import detach_buffers
from kvpool._py.sequence.commit import prompt_node, stop
from kvpool._py.sequence.ground import Ground, stream_of
from kvpool._py.sequence.kv_cache import ACTIVE, CLOSED, KVCache


def close(ground: Ground, cache: KVCache) -> None:
    """Give everything back; the record is dead."""
    with ground.journal.call():
        if cache.commit_allowed:
            stop(ground, cache)
        end = _end_node(ground, cache)
        if end is not None:
            _mark_end(ground, cache, end)
        _release_all(ground, cache, end)
        if end is not None and end is not cache.last_node:
            ground.pages.prune(end)
        if cache.last_node is not None:
            ground.pages.let_go(cache.last_node)
        ground.pages.release_tokens(cache.tail)
        ground.order(stream_of(cache))
    ground.num_active -= cache.status == ACTIVE
    cache.status = CLOSED
    detach_buffers(cache)


def _end_node(ground: Ground, cache: KVCache) -> Node | None:
    """The node that the committed tokens end in; None without any."""
    node = cache.last_node
    if node is None:
        return None
    tail = ground.pages.child(node, cache.tail) if cache.tail else None
    if tail is not None:
        return tail
    return None if node.parent is None else node


def _mark_end(ground: Ground, cache: KVCache, end: Node) -> None:
    """A likely end point; it supersedes those further up on the same line, but for forks."""
    ground.pages.mark(end, SEQUENCE)
    prompt = prompt_node(ground.rules, cache)
    node = end.parent
    while node is not None and node.parent is not None:
        ground.pages.unmark(node, SEQUENCE)
        if prompt is not None and node.ordinal < prompt.ordinal:
            ground.pages.unmark(node, PROMPT)
        node = node.parent


def _release_all(ground: Ground, cache: KVCache, end: Node | None) -> None:
    rules, pages = ground.rules, ground.pages
    order = sorted(rules.attention, key=lambda lc: (lc.window is not None or lc.optional, lc.index))
    node = end
    for ordinal in reversed(range(cache.num_blocks)):
        while node is not None and node.ordinal > ordinal:
            node = node.parent
        for life_cycle in order:
            index = life_cycle.index
            beams = cache.slots[index]
            if beams[0][ordinal] == BAD_PAGE_INDEX and node is not None and node.ordinal == ordinal:
                pages.touch(node, index)
            for slots in beams:
                if slots[ordinal] != BAD_PAGE_INDEX:
                    pages.release(index, slots[ordinal])
    for life_cycle in rules.windowed:
        for slot in cache.scratch[life_cycle.index]:
            pages.release(life_cycle.index, slot)
    for position, life_cycle in enumerate(rules.ssm):
        for slot in (cache.ssm_source[position], *cache.ssm[position]):
            if slot != BAD_PAGE_INDEX:
                pages.release(life_cycle.index, slot)
