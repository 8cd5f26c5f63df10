"""The tree of committed blocks.

A node is one block; the path from its root spells the tokens before it.  Invariants: only full blocks have children; no
child's tokens are a prefix of another's, so a shorter one is a leaf; a node record lives exactly while it is attached.
A node names its pages by slot ids; whose slots they are is not the tree's business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from kvpool._py.core.digest_pool import DigestPool
from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.core.journal import Journal
from kvpool._py.core.tokens import TOKEN_BYTES, DigestOf, common_prefix, order_key
from kvpool._py.reuse.keys import Scope, block_key, root_key


class Node:
    """One committed block, or the root of a scope (no tokens, no pages)."""

    __slots__ = (
        "attached",
        "checked_epoch",
        "children",
        "complete_above",
        "coverage",
        "holders",
        "key",
        "marks",
        "ordered",
        "ordinal",
        "pages",
        "parent",
        "scope",
        "tails",
        "tokens",
    )

    def __init__(self, scope: Scope, parent: Node | None, tokens: bytes, num_life_cycles: int) -> None:
        self.scope = scope
        self.parent = parent
        self.ordinal: int = -1 if parent is None else parent.ordinal + 1
        self.tokens = tokens
        self.children: dict[bytes, Node] = {}  # tokens -> child
        self.ordered: list[tuple[bytes, Node]] | None = None  # by order key; from the second child on
        self.pages = [BAD_PAGE_INDEX] * num_life_cycles  # slots
        self.coverage = [0] * num_life_cycles  # leading tokens that the page holds; 0 without one
        self.tails = [0] * num_life_cycles  # marks that need the page
        self.marks = 0  # bits of kvpool._py.reuse.retention
        self.holders = 0  # requests whose last node this is
        self.attached = True
        self.key = b""  # chain key, once somebody has asked
        self.checked_epoch = -1  # when complete_above was worked out
        self.complete_above = False

    @property
    def num_tokens(self) -> int:
        """Tokens in the block."""
        return len(self.tokens) // TOKEN_BYTES


class RadixTree:
    """One root per scope.

    ``full_like_below[lc]``: in blocks of lower ordinals every prefix that goes on needs the life cycle's page.
    """

    def __init__(
        self, tokens_per_block: int, full_like_below: Sequence[int], digests: DigestPool, journal: Journal
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.digests = digests
        self.roots: dict[Scope, Node] = {}
        self._full_like_below = full_like_below
        self._full_like = [(lc, below) for lc, below in enumerate(full_like_below) if below]
        self._journal = journal
        self._epoch = 0  # counts changes that may concern complete_above of many nodes

    # ------------------------------------------------------------------------------------------------ look-up

    def root(self, scope: Scope, create: bool = False) -> Node | None:
        """Root of a scope."""
        root = self.roots.get(scope)
        if root is None and create:
            root = Node(scope, None, b"", len(self._full_like_below))
            self._journal.put(self.roots, scope, root)
        return root

    def nearest(self, parent: Node, tokens: bytes, digest_of: DigestOf) -> Iterator[tuple[Node, int]]:
        """Children that share leading tokens with ``tokens``, and how many: outward from their place in token order.

        Most shared first; at equal numbers the side of smaller tokens first, and the nearer before the farther.
        """
        ordered = parent.ordered
        if ordered is None:
            for child in parent.children.values():
                shared = common_prefix(child.tokens, tokens)
                if shared:
                    yield child, shared
            return
        right = bisect_left(ordered, (order_key(tokens, digest_of),))
        left = right - 1
        on_left, on_right = _shared(ordered, left, tokens), _shared(ordered, right, tokens)
        while on_left or on_right:
            if on_left >= on_right:
                yield ordered[left][1], on_left
                left -= 1
                on_left = _shared(ordered, left, tokens)
            else:
                yield ordered[right][1], on_right
                right += 1
                on_right = _shared(ordered, right, tokens)

    def covering_child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child with exactly these tokens, else the first in token order that begins with them."""
        exact = parent.children.get(tokens)
        if exact is not None or len(tokens) == self.tokens_per_block * TOKEN_BYTES:
            return exact
        if parent.ordered is None:
            candidates = list(parent.children.values())
        else:
            place = bisect_left(parent.ordered, (order_key(tokens, self.digests.digest_of),))
            candidates = [child for _, child in parent.ordered[place : place + 1]]
        return next((child for child in candidates if child.tokens.startswith(tokens)), None)

    def covered_child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child whose tokens are a strict prefix: at most one, and it is a leaf."""
        if parent.ordered is None:
            candidates = list(parent.children.values())
        else:
            place = bisect_left(parent.ordered, (order_key(tokens, self.digests.digest_of),))
            candidates = [child for _, child in parent.ordered[max(0, place - 1) : place]]
        is_shorter = (child for child in candidates if len(child.tokens) < len(tokens))
        return next((child for child in is_shorter if tokens.startswith(child.tokens)), None)

    def children_in_order(self, node: Node) -> list[Node]:
        """Children in token order."""
        return list(node.children.values()) if node.ordered is None else [child for _, child in node.ordered]

    def all_nodes(self) -> Iterator[Node]:
        """Depth first: scopes in order (None before 0), parents before children, these in token order."""
        waiting = [self.roots[scope] for scope in sorted(self.roots, key=_scope_order, reverse=True)]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(self.children_in_order(node)))

    def key(self, node: Node) -> bytes:
        """Chain key; worked out when first asked for."""
        missing = []
        upper: Node | None = node
        while upper is not None and not upper.key:
            missing.append(upper)
            upper = upper.parent
        for lower in reversed(missing):
            if lower.parent is None:
                lower.key = root_key(lower.scope)
            else:
                lower.key = block_key(lower.parent.key, lower.tokens, self.digests.digest_of)
        return node.key

    # ------------------------------------------------------------------------------------------------ nodes

    def add(self, parent: Node, tokens: bytes) -> Node:
        """A new child; the caller has looked for one that it may not stand beside."""
        node = Node(parent.scope, parent, tokens, len(self._full_like_below))
        self.digests.retain(tokens)
        self._link(node)
        self._journal.on_undo(self._unlink, node)
        return node

    def remove(self, node: Node) -> None:
        """Detach a node that has no children, pages or holders any more; a root without children and holders too."""
        if node.parent is None:
            self._journal.remove(self.roots, node.scope)
            self._journal.set(node, "attached", False)
            return
        self._unlink(node)
        self._journal.on_undo(self._link, node)
        self.digests.release(node.tokens)

    def set_page(self, node: Node, lc: int, slot: int, coverage: int) -> None:
        """The node's page of a life cycle; slot -1 and coverage 0: none."""
        self._journal.on_undo(self._put_page, node, lc, node.pages[lc], node.coverage[lc])
        self._put_page(node, lc, slot, coverage)

    def _link(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.attached = True
        parent.children[node.tokens] = node
        if parent.ordered is not None:
            insort(parent.ordered, (order_key(node.tokens, self.digests.digest_of), node))
        elif len(parent.children) > 1:
            digest_of = self.digests.digest_of
            parent.ordered = sorted((order_key(child.tokens, digest_of), child) for child in parent.children.values())

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.attached = False
        del parent.children[node.tokens]
        if parent.ordered is None:
            return
        if len(parent.children) == 1:
            parent.ordered = None
        else:
            del parent.ordered[bisect_left(parent.ordered, (order_key(node.tokens, self.digests.digest_of),))]

    def _put_page(self, node: Node, lc: int, slot: int, coverage: int) -> None:
        node.pages[lc] = slot
        node.coverage[lc] = coverage
        if node.children and node.ordinal < self._full_like_below[lc]:
            self._epoch += 1

    # ------------------------------------------------------------------------------------------------ completeness

    def is_complete(self, node: Node) -> bool:
        """Whether a prefix can go on behind this block: every page that it will always need covers all of it."""
        ordinal, coverage, size = node.ordinal, node.coverage, self.tokens_per_block
        return not any(0 <= ordinal < below and coverage[lc] != size for lc, below in self._full_like)

    def is_complete_above(self, node: Node) -> bool:
        """Whether that holds for every strict ancestor; remembered, so that asking costs O(1) in the long run."""
        missing: list[Node] = []
        upper = node
        while upper.checked_epoch != self._epoch and upper.parent is not None:
            missing.append(upper)
            upper = upper.parent
        complete = upper.parent is None or upper.complete_above
        for lower in reversed(missing):
            assert lower.parent is not None
            complete = complete and self.is_complete(lower.parent)
            lower.complete_above = complete
            lower.checked_epoch = self._epoch
        return complete


def _shared(ordered: list[tuple[bytes, Node]], index: int, tokens: bytes) -> int:
    """Leading tokens that child ``index`` shares; 0 beyond either end."""
    return common_prefix(ordered[index][1].tokens, tokens) if 0 <= index < len(ordered) else 0


def _scope_order(scope: Scope) -> list[tuple[bool, int]]:
    return [(part is not None, part or 0) for part in scope]
