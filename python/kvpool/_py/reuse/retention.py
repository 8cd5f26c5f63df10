"""Marks: end points that prompts are likely to come back to, and the window pages that those need.

A windowed life cycle serves an end point only while the pages of the window before it are there (its *tail*).  Every mark
counts in ``node.tails`` of the blocks of its tail; pages that some mark needs give way after those that none does.

SEQUENCE: a request was closed here.  PROMPT: a prompt ended here, give or take the slack: the next one may differ in its
last tokens.  FORK: the node has two children or more, so prompts are known to part here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool._py.core.journal import Journal
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.reuse.rules import ReuseRules
from kvpool._py.storage.live_ranges import stale_range

SEQUENCE, PROMPT, FORK = 1, 2, 4


def bits(marks: int) -> list[int]:
    """The marks that are set, ascending."""
    return [bit for bit in (SEQUENCE, PROMPT, FORK) if marks & bit]


def tail_of(rules: ReuseRules, node: Node, bit: int) -> Iterator[tuple[int, Node]]:
    """(Life cycle, node) that a mark at ``node`` needs: life cycles ascending, from ``node`` upward."""
    end = node.ordinal * rules.tokens_per_block + node.num_tokens
    if bit == PROMPT:
        end = max(0, end - rules.window_tail_slack)
    for lc in rules.windowed:
        first = max(stale_range(end, rules.tokens_per_block, lc.window, lc.sink_blocks)[1], lc.sink_blocks)
        upper = node
        while upper.ordinal >= first:
            yield lc.index, upper
            assert upper.parent is not None
            upper = upper.parent


class Retention:
    """Sets and clears marks; ``tail_changed(node, lc)`` is called where a page comes to be needed, or is needed no more.

    Without ``retain_window_tails`` there are no marks.
    """

    def __init__(self, rules: ReuseRules, journal: Journal, tail_changed: Callable[[Node, int], None]) -> None:
        self._rules = rules
        self._journal = journal
        self._tail_changed = tail_changed

    def mark(self, node: Node, bit: int) -> None:
        """Set a mark; nothing when it is set, and on a root."""
        if node.marks & bit or node.parent is None or not self._rules.retain_window_tails:
            return
        self._journal.set(node, "marks", node.marks | bit)
        for lc, upper in tail_of(self._rules, node, bit):
            self._journal.set_item(upper.tails, lc, upper.tails[lc] + 1)
            if upper.tails[lc] == 1:
                self._tail_changed(upper, lc)

    def unmark(self, node: Node, bit: int) -> None:
        """Clear a mark; nothing when it is not set."""
        if not node.marks & bit:
            return
        self._journal.set(node, "marks", node.marks & ~bit)
        for lc, upper in tail_of(self._rules, node, bit):
            self._journal.set_item(upper.tails, lc, upper.tails[lc] - 1)
            if upper.tails[lc] == 0:
                self._tail_changed(upper, lc)

    def clear(self, node: Node) -> None:
        """Clear all marks of a node."""
        for bit in bits(node.marks):
            self.unmark(node, bit)
