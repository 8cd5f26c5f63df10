"""The match against an oracle that tries every end point in every node, and the scenarios of the rules."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from kvpool._py.reuse.radix_tree import Node
from tests.unit.py_reuse_cases import NO_SCOPE, STATE, World, digest, full, window

LAYERS = {
    "full": [full()],
    "window": [window(5)],
    "mixed": [full(), window(6)],
    "two windows": [window(3), full(), window(9)],
    "sinks": [window(4, sinks=3), window(7, sinks=6), full()],
    "one": [window(1), full()],
    "only one": [window(1)],
    "one and sinks": [window(1, sinks=3), window(5)],
    "state": [STATE],
    "hybrid": [full(), window(5), STATE],
    "optional": [full(optional=True), window(5), window(7, optional=True)],
    "only optional": [full(optional=True)],
}


class Oracle:
    """Straight from the words of the rules: slow, and without the code under test."""

    def __init__(self, world: World, tokens: list[Any], backoff: int, partial: bool, ssm: bool) -> None:
        self.world = world
        self.tokens = tokens
        self.backoff = backoff
        self.partial = partial
        self.tpb = world.tpb
        self.attention = [lc for lc in world.layout.life_cycles if not lc.is_ssm and not lc.optional]
        self.states = [lc.index for lc in world.layout.life_cycles if lc.is_ssm] if ssm else []
        self.text: dict[int, list[Any]] = {}
        root = world.cache.root(NO_SCOPE)
        self.nodes = [] if root is None else list(world.cache.tree.all_nodes())[1:]
        for node in self.nodes:
            self.text[id(node)] = self._text_of(node)
        self.chain = self._chain()
        self.partial_child, shared = self._partial_child()
        self.depth = len(self.chain) * self.tpb + shared

    def _text_of(self, node: Node) -> list[Any]:
        ids, digests = self.world.cache.decode(node.tokens)
        return [digests[-1 - i] if i < 0 else i for i in ids.tolist()]

    def _chain(self) -> list[Node]:
        chain: list[Node] = []
        while True:
            block = self.block(len(chain))
            parent = chain[-1] if chain else None
            found = [n for n in self.children(parent) if self.text[id(n)] == block and len(block) == self.tpb]
            if not found:
                return chain
            chain.append(found[0])

    def block(self, ordinal: int) -> list[Any]:
        return self.tokens[ordinal * self.tpb : (ordinal + 1) * self.tpb]

    def children(self, parent: Node | None) -> list[Node]:
        above = [n for n in self.nodes if (n.parent is parent if parent is not None else n.ordinal == 0)]
        return sorted(above, key=lambda n: value(self.text[id(n)]))

    def shared(self, node: Node, block: list[Any]) -> int:
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.text[id(node)], block, strict=False))
        return len(list(pairs))

    def outward(self, ordinal: int) -> list[tuple[Node, int]]:
        """Children that share tokens, in the order in which they are tried."""
        block = self.block(ordinal)
        children = self.children(self.chain[ordinal - 1] if ordinal else None)
        place = sum(value(self.text[id(n)]) < value(block) for n in children)
        ranked = []
        for index, node in enumerate(children):
            shared = self.shared(node, block)
            side, distance = (0, place - index) if index < place else (1, index - place)
            if shared:
                ranked.append((-shared, side, distance, node))
        return [(entry[3], -entry[0]) for entry in sorted(ranked, key=lambda entry: entry[:3])]

    def _partial_child(self) -> tuple[Node | None, int]:
        last = len(self.chain)
        if not self.partial:
            block = self.block(last)
            found = [node for node, shared in self.outward(last) if self.text[id(node)] == block]
            return (found[0], len(block)) if found else (None, 0)
        return next(iter(self.outward(last)), (None, 0))

    # legality, from the definition

    def is_legal(self, nodes: list[Node], end: int) -> bool:
        """Every page that is live at ``end`` covers its block's tokens below it; the state is the one at ``end``."""
        for lc in self.attention:
            for ordinal, node in enumerate(nodes):
                if self.is_stale(lc, ordinal, end):
                    continue
                if node.coverage[lc.index] < min(self.tpb, end - ordinal * self.tpb):
                    return False
        return all(nodes[-1].coverage[lc] == end - (len(nodes) - 1) * self.tpb for lc in self.states)

    def is_stale(self, lc: Any, ordinal: int, end: int) -> bool:
        if lc.window is None or ordinal < lc.sink_blocks:
            return False
        return (ordinal + 1) * self.tpb <= end + 1 - lc.window

    def longest(self) -> tuple[int, Node | None]:
        best: tuple[int, Node | None] = 0, None
        for ordinal in range(len(self.chain) + 1):
            for node, length in self.candidates(ordinal):
                end = ordinal * self.tpb + length
                if end > best[0] and self.is_legal([*self.chain[:ordinal], node], end):
                    best = end, node
        return best

    def candidates(self, ordinal: int) -> list[tuple[Node, int]]:
        """Nodes and lengths in the order of preference among equal lengths."""
        limits = []
        if ordinal < len(self.chain):
            limits.append((self.chain[ordinal], min(self.tpb, self.depth - self.backoff - ordinal * self.tpb)))
        if self.partial:
            others = [(n, s - self.backoff) for n, s in self.outward(ordinal) if n not in self.chain]
            limits += others
        elif ordinal == len(self.chain) and self.partial_child is not None:
            limits.append((self.partial_child, len(self.block(ordinal)) - self.backoff))
        return [(node, length) for node, limit in limits for length in range(1, limit + 1)]

    def reference(self) -> int:
        """Cut what lacks, in the order of the words."""
        nodes = list(self.chain) + ([self.partial_child] if self.partial_child is not None else [])
        end = max(0, self.depth - self.backoff)
        lengths = [min(self.tpb, end - begin) for begin in range(0, end, self.tpb)]
        while lengths:
            before = list(lengths)
            if self.states:
                lengths = self._cut_at_state(nodes, lengths)
            if lengths:
                lengths = self._cut_at_page(nodes, lengths)
            if lengths == before:
                break
        return sum(lengths)

    def _cut_at_state(self, nodes: list[Node], lengths: list[int]) -> list[int]:
        for i in range(len(lengths) - 1, -1, -1):
            saved = nodes[i].coverage[self.states[0]]
            if 0 < saved <= lengths[i]:
                return [*lengths[:i], saved]
        return []

    def _cut_at_page(self, nodes: list[Node], lengths: list[int]) -> list[int]:
        end = sum(lengths)
        for lc in self.attention:
            for i, length in enumerate(lengths):
                covered = nodes[i].coverage[lc.index]
                if not self.is_stale(lc, i, end) and covered < length:
                    return [*lengths[:i], covered] if covered else lengths[:i]
        return lengths


def value(tokens: list[Any]) -> list[tuple[int, Any]]:
    return [(1, token) if isinstance(token, bytes) else (0, token) for token in tokens]


def random_world(rng: random.Random, layers: list[Any], **more: Any) -> tuple[World, list[list[Any]]]:
    """A tree of random sequences over few tokens; most pages are whole, some are short or lack."""
    world = World(layers, tpb=rng.choice([2, 3, 4]), slots=400, **more)
    alphabet: list[Any] = [0, 1, digest(1)] if rng.random() < 0.3 else [0, 1]
    sequences: list[list[Any]] = []
    gaps = rng.choice([0.0, 0.1, 0.5])

    def coverage(node: Node, lc: int) -> int:
        if rng.random() < gaps:
            return rng.randint(0, node.num_tokens)
        return node.num_tokens

    for _ in range(rng.randint(1, 8)):
        base = rng.choice(sequences)[: rng.randint(0, 20)] if sequences and rng.random() < 0.7 else []
        tokens = base + [rng.choice(alphabet) for _ in range(rng.randint(1, 12))]
        sequences.append(tokens)
        world.insert(tokens, coverage)
    return world, sequences


def random_query(rng: random.Random, sequences: list[list[Any]]) -> list[Any]:
    tokens = list(rng.choice(sequences))[: rng.randint(0, 30)]
    return tokens + [rng.choice([0, 1, 2, digest(1), digest(7)]) for _ in range(rng.randint(0, 5))]


@pytest.mark.parametrize("name", LAYERS)
def test_against_the_oracle(name: str) -> None:
    rng = random.Random(name)
    found = 0
    for _ in range(30):
        policy = rng.choice(["longest", "reference"])
        backoff = rng.choice([0, 0, 0, 1, 2, 5])
        world, sequences = random_world(rng, LAYERS[name], match_policy=policy)
        for _ in range(12):
            tokens, partial = random_query(rng, sequences), rng.random() < 0.7
            result = world.match(tokens, backoff=backoff, partial=partial)
            oracle = Oracle(world, tokens, backoff, partial, ssm=True)
            without_state = Oracle(world, tokens, backoff, partial, ssm=False)
            longest, source = oracle.longest()
            reference = oracle.reference()
            assert reference <= longest
            if policy == "reference":
                assert result.end == reference
                assert result.hybrid == without_state.reference()
                source = oracle.partial_child
                if result.end <= len(oracle.chain) * world.tpb:
                    source = oracle.chain[(result.end - 1) // world.tpb] if result.end else None
            else:
                assert result.end == longest
                assert result.hybrid == without_state.longest()[0]
            assert result.divergence == oracle.depth
            assert result.end <= result.hybrid <= result.divergence <= len(tokens)
            assert result.chain == oracle.chain[: result.end // world.tpb]
            assert result.source is (source if result.end % world.tpb else None)
            found += result.end > 0
    assert found > 20


def test_the_index_of_complete_nodes_follows_every_change() -> None:
    """What is remembered about ancestors must not survive a change of theirs, nor an undo."""
    rng = random.Random(4)
    for _ in range(40):
        world, sequences = random_world(rng, LAYERS["sinks"])
        nodes = [node for node in world.cache.tree.all_nodes() if node.ordinal >= 0]
        for _ in range(15):
            with world.journal.call():
                savepoint = world.journal.savepoint()
                node, lc = rng.choice(nodes), rng.randrange(world.rules.num_life_cycles)
                if node.pages[lc] >= 0:
                    world.cache.set_coverage(node, lc, rng.choice([1, node.num_tokens]))
                for _ in range(3):
                    tokens = random_query(rng, sequences)
                    assert world.match(tokens).end == Oracle(world, tokens, 0, True, True).longest()[0]
                if rng.random() < 0.5:
                    world.journal.undo_to(savepoint)


def path_of(node: Node) -> list[Node]:
    path = [node]
    while path[0].parent is not None and path[0].parent.parent is not None:
        path.insert(0, path[0].parent)
    return path


def all_ends(world: World, victim: Node, lc: int) -> dict[tuple[Any, ...], int]:
    """For every prompt that ends with a node: the best end point on its path that does not need the victim's page.

    A prompt can end ``backoff`` tokens short of what the tree knows, so it also needs the nodes that far behind its end:
    those below a page that all prefixes need go with it in any case.
    """
    oracle = Oracle(world, [], 0, True, ssm=True)
    life_cycle = world.layout.life_cycles[lc]
    ends = {}
    for leaf in oracle.nodes:
        path = path_of(leaf)
        if world.rules.backoff and victim in path and victim.ordinal < world.rules.full_like_below[lc]:
            continue
        text = tuple(token for node in path for token in oracle.text[id(node)])
        ends[text] = 0
        for end in range(1, len(text) - world.rules.backoff + 1):
            above = path[: (end - 1) // world.tpb + 1]
            if life_cycle.is_ssm:
                needs_it = above[-1] is victim
            else:
                needs_it = victim in above and not oracle.is_stale(life_cycle, victim.ordinal, end)
            if not needs_it and oracle.is_legal(above, end):
                ends[text] = end
    return ends


@pytest.mark.parametrize("name", ["full", "mixed", "two windows", "sinks", "one and sinks", "hybrid", "optional"])
def test_removing_a_page_spoils_no_other_end(name: str) -> None:
    rng = random.Random(name)
    checked = 0
    for _ in range(50):
        world, _ = random_world(rng, LAYERS[name], reuse_match_backoff=rng.choice([0, 0, 1, 4]))
        for _ in range(5):
            pages = [page for page in world.cache.pages if page.node is not None]
            if not pages:
                break
            page = rng.choice(pages)
            assert page.node is not None
            ends = all_ends(world, page.node, page.lc)
            with world.journal.call():
                world.cache.remove_page(page.node, page.lc)
            world.audit()
            for tokens, end in ends.items():
                assert world.match(tokens).end >= end
            checked += sum(end > 0 for end in ends.values())
    assert checked > 300


def blocks(*numbers: int, tpb: int = 8) -> list[int]:
    return [1000 * number + i for number in numbers for i in range(tpb)]


def test_walk_and_depths() -> None:
    world = World([full()], tpb=8)
    world.insert(blocks(1, 2, 3))
    assert world.match(blocks(1, 2, 4)).divergence == 16
    assert world.match([*blocks(1, 2), 3000, 3001, 9]).divergence == 18
    assert world.match([*blocks(1, 2), 3000, 3001, 9], partial=False).divergence == 16
    assert world.match([]).divergence == 0
    assert world.match(blocks(7)).end == 0
    walk = world.cache.walk(NO_SCOPE, world.query([*blocks(1), 2000]), partial=True)
    assert walk is not None
    assert (walk.depth, len(walk.chain), walk.partial) == (9, 1, world.find(blocks(1, 2)))
    assert world.cache.walk((0, 0), world.query(blocks(1)), partial=True) is None


def test_exact_short_block_without_partial_reuse() -> None:
    world = World([full()], tpb=8, enable_partial_reuse=False)
    world.insert([*blocks(1), 2000, 2001])
    assert world.match([*blocks(1), 2000, 2001]).end == 10
    assert world.match([*blocks(1), 2000, 2001, 2002]).end == 8
    assert world.match([*blocks(1), 2000]).end == 8


def test_stale_blocks_need_no_page() -> None:
    world = World([full(), window(8)], tpb=4)
    path = world.insert(list(range(16)))
    with world.journal.call():
        world.cache.remove_page(path[1], 1)
    assert world.match(list(range(16))).end == 16
    assert world.match(list(range(11))).end == 4  # 5 to 11 need the page of block 1
    assert [node.attached for node in path] == [True] * 4


def test_a_longer_end_in_another_branch_wins() -> None:
    """The walk's own child lost its window; a sibling that shares fewer tokens is whole."""
    for policy, end in (("longest", 6), ("reference", 4)):
        world = World([full(), window(4)], tpb=4, match_policy=policy)
        world.insert([0, 1, 2, 3, 10, 11, 12, 13], lambda node, lc: 4 if lc == 0 or node.ordinal == 0 else 0)
        world.insert([0, 1, 2, 3, 10, 11, 20, 21])
        result = world.match([0, 1, 2, 3, 10, 11, 12, 99])
        assert result.end == end
        assert result.divergence == 7


@pytest.mark.parametrize(("backoff", "end"), [(0, 16), (1, 15), (4, 12), (5, 11), (16, 0), (17, 0)])
def test_backoff(backoff: int, end: int) -> None:
    world = World([full()], tpb=4, reuse_match_backoff=backoff)
    world.insert(list(range(16)))
    assert world.match(list(range(16))).end == end
    assert world.match(list(range(16)), backoff=0).end == 16


def test_window_of_one_and_covered_tails() -> None:
    """Scenarios 91 and 92."""
    world = World([full(), window(1)], tpb=32)
    world.insert(list(range(96)), lambda node, lc: 16 if lc and node.ordinal == 2 else 32)
    assert world.match(list(range(96))).end == 96
    assert world.match(list(range(90))).end == 80
    world = World([full(), window(33)], tpb=32, reuse_match_backoff=1)
    world.insert(list(range(48)))
    world.insert(list(range(96)), lambda node, lc: 0 if lc and node.ordinal < 2 else 32)
    assert world.match(list(range(96))).end == 48


def test_states_are_exact() -> None:
    world = World([full(), STATE], tpb=4)
    world.insert(list(range(12)), lambda node, lc: 4 if lc == 0 else {0: 0, 1: 3, 2: 4}[node.ordinal])
    result = world.match(list(range(11)))
    assert (result.end, result.hybrid, result.divergence) == (7, 11, 11)
    assert result.source is world.find(list(range(8)))
    assert world.match(list(range(12))).end == 12
    assert world.match(list(range(6))).end == 0


def test_optional_groups_never_shorten() -> None:
    world = World([full(), window(4, optional=True), full(optional=True)], tpb=4)
    world.insert(list(range(12)), lambda node, lc: 4 if lc == 0 else 0)
    assert world.match(list(range(12))).end == 12
    assert world.rules.full_like_below[1:] == (0, 0)
