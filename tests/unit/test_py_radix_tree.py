"""The tree: order of children, look-up of neighbours, insert rules, undo."""

from __future__ import annotations

import random

from kvpool._py.core.tokens import common_prefix
from kvpool._py.reuse.retention import FORK
from tests.unit.py_reuse_cases import NO_SCOPE, STATE, World, digest, full, pages_of, undone, window


def sort_value(tokens) -> list[tuple[int, object]]:
    """Ids ascending, then digests by bytes."""
    return [(1, token) if isinstance(token, bytes) else (0, token) for token in tokens]


def test_insert_rules() -> None:
    world = World([full(), window(8)])
    (long,) = world.insert([1, 2, 3, 4])
    (short,) = world.insert([1, 2])
    assert short is long  # covered
    (tail,) = world.insert([1, 3])
    (equal,) = world.insert([1, 3])
    assert tail is equal
    assert not tail.children
    (longer,) = world.insert([1, 3, 4])
    assert not tail.attached
    assert longer.pages != tail.pages
    assert longer.coverage == [3, 3]
    (whole,) = world.insert([1, 3, 4, 5])
    assert not longer.attached
    assert whole.coverage == [4, 4]
    assert [node.ordinal for node in world.cache.tree.all_nodes()] == [-1, 0, 0]
    world.audit()
    assert world.tier.num_free(0) == 64 - 4


def test_shorter_sibling_hands_its_pages_over() -> None:
    world = World([full(), window(8), STATE])
    (short,) = world.insert([1, 2], lambda node, lc: [2, 1, 2][lc])
    slots = list(short.pages)
    order = world.cache.dump_queues()
    (long,) = world.insert([1, 2, 3, 4], lambda node, lc: [4, 0, 0][lc])
    assert long.coverage == [4, 1, 2]
    assert long.pages[1:] == slots[1:]
    assert long.pages[0] != slots[0]
    assert pages_of(short) == [False] * 3
    assert [place for place in order[0] if place[2] != slots[0]] == world.cache.dump_queues()[0][:2]  # places kept
    world.audit()


def test_covering_child_is_the_first_in_order() -> None:
    world = World([full()])
    for tokens in ([1, 5, 9, 9], [1, 5, 3, 4], [1, 6, 0, 0], [1, 4, 9, 9]):
        world.insert(tokens)
    root = world.cache.root(NO_SCOPE)
    assert root is not None
    found = world.cache.covering_child(root, world.query([1, 5]).tokens)
    assert found is not None
    assert found.tokens == world.query([1, 5, 3, 4]).tokens
    assert world.cache.covering_child(root, world.query([1, 7]).tokens) is None
    assert world.cache.covering_child(root, world.query([1, 5, 9, 9]).tokens) is world.find([1, 5, 9, 9])
    assert world.cache.covering_child(root, world.query([1, 5, 9, 8]).tokens) is None


def test_scopes_are_apart_and_sorted() -> None:
    world = World([full()])
    for scope in [(1, None), (None, 0), (None, None), (0, 0), (0, None)]:
        world.insert([1, 2, 3, 4], scope=scope)
    roots = [entry[0] for entry in world.cache.dump_tree() if entry[1] == -1]
    assert roots == [[None, None], [None, 0], [0, None], [0, 0], [1, None]]
    assert world.match([1, 2, 3, 4], (2, None)).end == 0
    assert world.match([1, 2, 3, 4], (0, 0)).end == 4
    world.audit()


def test_neighbours_come_outward() -> None:
    rng = random.Random(3)
    alphabet: list[int | bytes] = [0, 1, 256, digest(1), digest(2)]
    for round_ in range(60):
        world = World([full()], tpb=4, slots=200)
        blocks = {tuple(rng.choice(alphabet) for _ in range(rng.randint(1, 4))) for _ in range(round_ % 30)}
        for block in blocks:
            world.insert(list(block))
        root = world.cache.root(NO_SCOPE, create=True)
        assert root is not None
        world.journal.keep()
        children = world.cache.tree.children_in_order(root)
        tokens = [tuple(entry[2]) for entry in world.cache.dump_tree()[1:]]
        decoded = [tuple(bytes.fromhex(t) if isinstance(t, str) else t for t in part) for part in tokens]
        assert decoded == sorted(decoded, key=sort_value)
        wanted = [rng.choice([*alphabet, digest(9)]) for _ in range(rng.randint(0, 4))]
        query = world.query(wanted)
        found = list(world.cache.tree.nearest(root, query.tokens, world.cache.digests.resolver(query)))
        place = sum(sort_value(block) < sort_value(wanted) for block in decoded)
        candidates = []
        for index, (child, block) in enumerate(zip(children, decoded, strict=True)):
            shared = 0
            while shared < min(len(block), len(wanted)) and block[shared] == wanted[shared]:
                shared += 1
            distance = (0, place - index) if index < place else (1, index - place)
            if shared:
                candidates.append((-shared, *distance, child))
        expected = [(child, -shared) for shared, _, _, child in sorted(candidates, key=lambda entry: entry[:3])]
        assert found == expected
        assert all(common_prefix(child.tokens, query.tokens) == shared for child, shared in found)


def test_fork_marks() -> None:
    world = World([full(), window(8)])
    one, two = world.insert([*range(4), 4, 5, 6, 7])
    assert (one.marks, two.marks) == (0, 0)
    world.insert([*range(4), 9])
    assert one.marks == FORK
    assert one.tails == [0, 1]
    world.insert([*range(4), 9, 10])  # takes the place of the shorter one
    assert one.marks == FORK
    with world.journal.call():
        world.cache.remove_page(two, 0)
    assert not two.attached
    assert one.marks == 0
    assert one.tails == [0, 0]
    world.insert([7])
    root = one.parent
    assert root is not None
    assert root.marks == 0  # never on a root
    world.audit()


def test_prefix_freeness_at_random() -> None:
    rng = random.Random(8)
    for _ in range(15):
        world = World([full(), window(5), STATE], tpb=3, slots=300)
        for _ in range(25):
            tokens = [rng.choice([0, 1, digest(1)]) for _ in range(rng.randint(1, 9))]
            world.insert(tokens, lambda node, lc: rng.randint(0, node.num_tokens))
            world.audit()


def test_undo_of_inserts() -> None:
    rng = random.Random(9)
    for _ in range(20):
        world = World([full(), window(5), STATE], tpb=3, slots=300)
        for _ in range(12):
            before = world.state()
            with undone(world.journal):
                for _ in range(3):
                    world.commit(random_tokens(rng), lambda node, lc: rng.randint(0, node.num_tokens))
            world.owners.clear()
            assert world.state() == before
            world.audit()
            world.insert(random_tokens(rng), lambda node, lc: rng.randint(0, node.num_tokens))


def random_tokens(rng: random.Random) -> list[int | bytes]:
    return [rng.choice([0, 1, digest(1), digest(2)]) for _ in range(rng.randint(1, 9))]
