"""What prefix reuse can be at most: the longest common prefix with anything computed before, token by token, nothing forgotten.

Independent of kvpool: a compressed trie of token ids.  An edge names the sequence that it came from and a range in it, and
the tokens are asked for again when they are compared, so that a trace's prompts need not be held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


@dataclass(slots=True)
class Edge:
    """The tokens [begin, end) of a sequence, and the edges behind them by their first token."""

    owner: int
    begin: int
    end: int
    behind: dict[int, Edge] = field(default_factory=dict)


class PrefixOracle:
    """``tokens_of(number)`` gives the tokens of a sequence that was added under that number."""

    def __init__(self, tokens_of: Callable[[int], Ids]) -> None:
        self._tokens_of = tokens_of
        self._root: dict[int, Edge] = {}

    def longest(self, tokens: Ids) -> int:
        """How many leading tokens are those of a sequence added before."""
        depth, _, _ = self._walk(tokens)
        return depth

    def add(self, number: int, tokens: Ids) -> None:
        """From now on the sequence counts as computed."""
        depth, edge, edges = self._walk(tokens)
        if depth == len(tokens):
            return
        if edge is not None:  # ends inside of an edge: cut it
            edge.behind = {int(self._tokens_of(edge.owner)[depth]): Edge(edge.owner, depth, edge.end, edge.behind)}
            edge.end, edges = depth, edge.behind
        edges[int(tokens[depth])] = Edge(number, depth, len(tokens))

    def _walk(self, tokens: Ids) -> tuple[int, Edge | None, dict[int, Edge]]:
        """Where the way ends: depth, the edge that it ends inside of, else the edges to go on with."""
        depth, edges = 0, self._root
        while depth < len(tokens):
            edge = edges.get(int(tokens[depth]))
            if edge is None:
                break
            equal = _common(self._tokens_of(edge.owner)[edge.begin : edge.end], tokens[depth:])
            depth += equal
            if equal < edge.end - edge.begin:
                return depth, edge, edges
            edges = edge.behind
        return depth, None, edges


def _common(first: Ids, second: Ids) -> int:
    count = min(len(first), len(second))
    differing = np.flatnonzero(first[:count] != second[:count])
    return int(differing[0]) if len(differing) else count
