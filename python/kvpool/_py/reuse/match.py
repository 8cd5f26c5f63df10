"""Which prefix of a prompt the cache can serve: a pure function of the tree and the tokens.

First the *walk* finds how far the tree knows the tokens at all.  Then the *end point* is chosen: a length at which every
page that the next token needs is there.  Pages that are needed at end point e, which lies in block i: of block i itself at
least the tokens below e, of every earlier block that is not stale at e all tokens, for each attention life cycle whose layers
require reuse; and a state saved after exactly e tokens if there are state layers.

``longest`` looks for the largest legal e, in whichever branch it lies; ``reference`` shortens the walk's result until
it is legal, and so may end earlier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool._py.core.tokens import TOKEN_BYTES, DigestOf, Query
from kvpool._py.reuse.keys import Scope
from kvpool._py.reuse.radix_tree import Node, RadixTree
from kvpool._py.reuse.rules import ReuseRules
from kvpool._py.storage.live_ranges import stale_range


@dataclass(slots=True)
class Walk:
    """How far the tree knows a query's tokens, whatever pages there are."""

    root: Node
    chain: list[Node]  # full blocks, equal to the query's
    partial: Node | None  # child of the last one that shares most tokens with the query's next block
    depth: int  # tokens of all that
    query: Query
    tokens_per_block: int
    any_child: bool  # whether any child that shares tokens will do, or only one that is equal
    digest_of: DigestOf

    def block(self, ordinal: int) -> bytes:
        """The query's tokens there."""
        return self.query.block(ordinal, self.tokens_per_block)

    def parent_of(self, ordinal: int) -> Node:
        """The node that the query's block ``ordinal`` is, or would be, a child of."""
        return self.chain[ordinal - 1] if ordinal else self.root


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The end point and how to get there.

    ``reused ≤ hybrid ≤ divergence ≤ length of the query`` with reused = ``end``.
    """

    end: int = 0  # tokens
    chain: list[Node] = field(default_factory=list)  # nodes of the end // tokens_per_block full blocks
    source: Node | None = None  # node whose first end % tokens_per_block tokens are used, if that is not 0
    divergence: int = 0  # tokens of the walk
    hybrid: int = 0  # end point if state layers did not matter


class Matcher:
    """Match of queries against one tree, and what it means that an end point is legal."""

    def __init__(self, rules: ReuseRules, tree: RadixTree) -> None:
        self._rules = rules
        self._tree = tree

    def match(self, scope: Scope, query: Query, backoff: int | None = None, partial: bool | None = None) -> MatchResult:
        """The prefix that ``match_policy`` chooses; None: as configured."""
        rules = self._rules
        walk = self.walk(scope, query, rules.partial if partial is None else partial)
        if walk is None:
            return MatchResult()
        search = _Search(self, self._tree, rules, walk, rules.backoff if backoff is None else backoff)
        choose = search.reference if rules.match_policy == "reference" else search.longest
        end, source = choose(rules.ssm)
        hybrid = end if rules.ssm < 0 else choose(-1)[0]
        full_blocks, rest = divmod(end, rules.tokens_per_block)
        return MatchResult(end, walk.chain[:full_blocks], source if rest else None, walk.depth, hybrid)

    def walk(self, scope: Scope, query: Query, partial: bool) -> Walk | None:
        """Full blocks by exact equality, then at most one more child.

        That is the one with the longest common prefix, or without ``partial`` one that equals the query's short last
        block.  None without a root.
        """
        tree, tpb = self._tree, self._rules.tokens_per_block
        root = tree.root(scope)
        if root is None:
            return None
        chain: list[Node] = []
        node, tokens, size = root, query.tokens, tpb * TOKEN_BYTES
        for begin in range(0, len(tokens) // size * size, size):
            child = node.children.get(tokens[begin : begin + size])
            if child is None:
                break
            chain.append(child)
            node = child
        walk = Walk(root, chain, None, len(chain) * tpb, query, tpb, partial, tree.digests.resolver(query))
        if partial:
            walk.partial, shared = next(tree.nearest(node, walk.block(len(chain)), walk.digest_of), (None, 0))
        else:
            walk.partial = node.children.get(walk.block(len(chain)))  # only a short one can be there
            shared = 0 if walk.partial is None else walk.partial.num_tokens
        walk.depth += shared
        return walk

    # ------------------------------------------------------------------------------------------------ legality

    def is_legal_above(self, parent: Node, end: int) -> bool:
        """Whether the end point ``end``, which lies in a child of ``parent``, finds the pages of all blocks before it."""
        tree, tpb = self._tree, self._rules.tokens_per_block
        if not (tree.is_complete(parent) and tree.is_complete_above(parent)):
            return False
        for lc in self._rules.required_windowed:
            index = lc.index
            first = max(stale_range(end, tpb, lc.window, lc.sink_blocks)[1], lc.sink_blocks)
            node = parent
            while node.ordinal >= first:
                if node.coverage[index] != tpb:
                    return False
                assert node.parent is not None
                node = node.parent
        return True

    def end_in(self, node: Node, limit: int, ssm: int) -> int:
        """Most leading tokens of the block, up to ``limit``, that its own pages can serve; 0: none."""
        if ssm >= 0:  # a state is good for one length only
            saved = node.coverage[ssm]
            return saved if 0 < saved <= limit and self._covers(node, saved) else 0
        if limit == self._rules.tokens_per_block and self._covers(node, limit):
            return limit
        for lc in self._rules.required:
            limit = min(limit, node.coverage[lc.index])
        return limit

    def _covers(self, node: Node, length: int) -> bool:
        """Whether the block's pages hold its first ``length`` tokens; a window of 1 does not need a whole block."""
        whole = length == self._rules.tokens_per_block
        return all(
            node.coverage[lc.index] >= length or (whole and lc.window == 1 and node.ordinal >= lc.sink_blocks)
            for lc in self._rules.required
        )

    def is_usable(self, child: Node, ssm: int) -> bool:
        """Whether a prefix may end inside the block at all, as far as its own pages go."""
        coverage = child.coverage
        if ssm >= 0 and not coverage[ssm]:
            return False
        return all(coverage[lc.index] for lc in self._rules.required if lc.window != 1)

    def serves_an_end(self, node: Node) -> bool:
        """Whether prompts can end where they could not without this block: in it, or further up with a back-off.

        That is so when the longest legal end on the node's own path that is ``backoff`` tokens short of it lies behind what
        the parent alone would give.
        """
        rules, tpb = self._rules, self._rules.tokens_per_block
        top = node.ordinal * tpb + node.num_tokens - rules.backoff
        floor = max(0, node.ordinal * tpb - rules.backoff)
        while node.parent is not None and top > floor:
            begin = node.ordinal * tpb
            if top > begin:
                end = begin + self.end_in(node, min(node.num_tokens, top - begin), rules.ssm)
                if end > max(begin, floor) and self.is_legal_above(node.parent, end):
                    return True
            if begin <= floor:
                return False
            node = node.parent
        return False


class _Search:
    """The choice of an end point on one walk; ``ssm`` is the state life cycle, or -1 to leave it out."""

    def __init__(self, matcher: Matcher, tree: RadixTree, rules: ReuseRules, walk: Walk, backoff: int) -> None:
        self._matcher = matcher
        self._tree = tree
        self._tpb = rules.tokens_per_block
        self._rules = rules
        self._walk = walk
        self._backoff = backoff

    # ------------------------------------------------------------------------------------------------ longest

    def longest(self, ssm: int) -> tuple[int, Node | None]:
        """The largest legal end point and the node that it lies in.

        Going back block by block, the first end point found beats all in earlier blocks.
        """
        for ordinal in range(len(self._walk.chain), -1, -1):
            length, source = self._longest_in(ordinal, ssm)
            if length:
                return ordinal * self._tpb + length, source
        return 0, None

    def _longest_in(self, ordinal: int, ssm: int) -> tuple[int, Node | None]:
        """The most tokens of block ``ordinal`` that some node can serve; of equals, the first."""
        parent, begin = self._walk.parent_of(ordinal), ordinal * self._tpb
        best: tuple[int, Node | None] = 0, None
        for node, limit in self._sources(parent, ordinal, ssm):
            if limit <= best[0]:
                break
            length = self._matcher.end_in(node, limit, ssm)
            if length > best[0] and self._matcher.is_legal_above(parent, begin + length):
                best = length, node
        return best

    def _sources(self, parent: Node, ordinal: int, ssm: int) -> Iterator[tuple[Node, int]]:
        """Nodes that share tokens with block ``ordinal`` of the query, and how many of them may be used; most first."""
        walk, backoff = self._walk, self._backoff
        own = walk.chain[ordinal] if ordinal < len(walk.chain) else None
        if own is not None:
            yield own, min(self._tpb, walk.depth - backoff - ordinal * self._tpb)
        if not walk.any_child:
            if own is None and walk.partial is not None:
                yield walk.partial, walk.partial.num_tokens - backoff
            return
        if len(parent.children) == (own is not None) or not self._matcher.is_legal_above(
            parent, (ordinal + 1) * self._tpb
        ):
            return  # nobody else, or not even the longest end in this block is legal
        for child, shared in self._tree.nearest(parent, walk.block(ordinal), walk.digest_of):
            if child is not own and self._matcher.is_usable(child, ssm):
                yield child, shared - backoff

    # ------------------------------------------------------------------------------------------------ reference

    def reference(self, ssm: int) -> tuple[int, Node | None]:
        """The walk's result without its last ``backoff`` tokens, cut at what lacks until nothing does."""
        walk, tpb = self._walk, self._tpb
        nodes = walk.chain if walk.partial is None else [*walk.chain, walk.partial]
        end = max(0, walk.depth - self._backoff)
        while end:
            shorter = self._cut_at_state(nodes, end, ssm) if ssm >= 0 else end
            if shorter:
                shorter = self._cut_at_page(nodes, shorter)
            if shorter == end:
                return end, nodes[(end - 1) // tpb]
            end = shorter
        return 0, None

    def _cut_at_state(self, nodes: list[Node], end: int, ssm: int) -> int:
        """The last saved state at or before ``end``."""
        for ordinal in range((end - 1) // self._tpb, -1, -1):
            begin = ordinal * self._tpb
            if 0 < nodes[ordinal].coverage[ssm] <= end - begin:
                return begin + nodes[ordinal].coverage[ssm]
        return 0

    def _cut_at_page(self, nodes: list[Node], end: int) -> int:
        """``end``, or where the first page that lacks, or covers too little, ends."""
        tpb = self._tpb
        last = (end - 1) // tpb
        for lc in self._rules.required:
            stale_begin, stale_end = stale_range(end, tpb, lc.window, lc.sink_blocks)
            for ordinal in itertools.chain(range(stale_begin), range(stale_end, last + 1)):
                wanted = min(tpb, end - ordinal * tpb)
                covered = nodes[ordinal].coverage[lc.index]
                if covered < wanted:
                    return ordinal * tpb + covered
        return end
