"""Marks and the window pages they keep."""

from __future__ import annotations

import random

import pytest

from kvpool._py.page.eviction_queue import CLASS_A, CLASS_B
from kvpool._py.reuse.retention import FORK, PROMPT, SEQUENCE
from tests.unit.py_reuse_cases import STATE, World, full, window


def classes(world: World, lc: int) -> dict[int, int]:
    """Ordinal to class of the cached pages of a life cycle."""
    pages = [page for queue in world.cache.pages.queues for page in queue if page.lc == lc]
    return {page.node.ordinal: page.queue_key[1] for page in pages if page.node and page.queue_key}


def tails(path, lc: int) -> list[int]:
    return [node.tails[lc] for node in path]


def test_a_mark_keeps_the_window_before_it() -> None:
    world = World([full(), window(9)], tpb=4, window_tail_slack=8)
    path = world.insert(list(range(32)))
    assert set(classes(world, 0).values()) == {CLASS_B}
    assert set(classes(world, 1).values()) == {CLASS_A}
    with world.journal.call():
        world.cache.mark(path[5], SEQUENCE)
    assert tails(path, 1) == [0, 0, 0, 0, 1, 1, 0, 0]
    assert classes(world, 1) == {n: CLASS_B if n in (4, 5) else CLASS_A for n in range(8)}
    with world.journal.call():
        world.cache.mark(path[5], SEQUENCE)  # set already
        world.cache.mark(path[5], PROMPT)  # slack: 8 tokens more
    assert tails(path, 1) == [0, 0, 1, 1, 2, 2, 0, 0]
    with world.journal.call():
        world.cache.unmark(path[5], SEQUENCE)
        world.cache.unmark(path[4], SEQUENCE)  # not set
    assert tails(path, 1) == [0, 0, 1, 1, 1, 1, 0, 0]
    with world.journal.call():
        world.cache.unmark(path[5], PROMPT)
    assert tails(path, 1) == [0] * 8
    assert classes(world, 1) == dict.fromkeys(range(8), CLASS_A)
    world.audit()


def test_order_of_requeues() -> None:
    world = World([window(9), window(5), STATE], tpb=4)
    path = world.insert(list(range(16)), lambda node, lc: 4)
    with world.journal.call():
        world.cache.mark(path[3], SEQUENCE)
    newest = [(page.lc, page.node.ordinal) for page in world.cache.pages.queues[0] if page.node][-3:]
    assert newest == [(0, 3), (0, 2), (1, 3)]


def test_sinks_are_kept_anyway() -> None:
    world = World([window(5, sinks=6)], tpb=4)
    path = world.insert(list(range(20)))
    with world.journal.call():
        world.cache.mark(path[1], SEQUENCE)
    assert tails(path, 0) == [0] * 5
    with world.journal.call():
        world.cache.mark(path[4], SEQUENCE)
    assert tails(path, 0) == [0, 0, 0, 0, 1]
    assert classes(world, 0) == {0: CLASS_B, 1: CLASS_B, 2: CLASS_A, 3: CLASS_A, 4: CLASS_B}


def test_states_and_optional_groups() -> None:
    world = World([window(5, sinks=4, optional=True), full(optional=True), STATE], tpb=4)
    path = world.insert(list(range(8)), lambda node, lc: 4)
    assert classes(world, 0) == {0: CLASS_A, 1: CLASS_A}
    assert classes(world, 1) == {0: CLASS_B, 1: CLASS_B}
    assert classes(world, 2) == {0: CLASS_B, 1: CLASS_B}
    with world.journal.call():
        world.cache.mark(path[1], SEQUENCE)
    assert classes(world, 0) == {0: CLASS_A, 1: CLASS_B}


def test_victims_go_in_order() -> None:
    world = World([full(), window(5)], tpb=4)
    world.insert(list(range(16)), priority=50)
    world.insert(list(range(100, 116)))
    queue = world.cache.dump_queues()[0]
    assert [place[:2] for place in queue] == [[35, 0]] * 4 + [[35, 1]] * 4 + [[50, 0]] * 4 + [[50, 1]] * 4
    with world.journal.call():
        world.cache.make_room(0, world.tier.num_free(0) + 3)
    assert world.match(list(range(100, 116))).end == 16
    assert world.match(list(range(100, 115))).end == 0
    with world.journal.call():
        world.cache.make_room(0, world.tier.num_free(0) + 1)
    assert world.match(list(range(100, 116))).divergence == 0  # no end is left: all of it went
    world.audit()


def test_off_means_priority_and_age_alone() -> None:
    world = World([full(), window(5)], tpb=4, retain_window_tails=False)
    path = world.insert(list(range(16)))
    before = world.cache.dump_queues()
    assert {place[1] for place in before[0]} == {CLASS_B}
    with world.journal.call():
        world.cache.mark(path[3], SEQUENCE)
        world.cache.touch(path[3], 1)
    world.insert([0, 1, 2, 3, 9])
    assert path[0].marks == 0
    assert tails(path, 1) == [0] * 4
    assert world.cache.dump_queues()[0][:8] == before[0]


@pytest.mark.parametrize(("interval", "kept"), [(16, {2, 3, 6, 7}), (13, {2, 3, 6, 7}), (0, set()), (4, set(range(8)))])
def test_grid_of_tails(interval: int, kept: set[int]) -> None:
    world = World([full(), window(9)], tpb=4, window_tail_interval=interval)
    world.insert(list(range(32)))
    assert {ordinal for ordinal, kind in classes(world, 1).items() if kind == CLASS_B} == kept


def test_default_grid() -> None:
    world = World([window(9), window(5), window(100, optional=True)], tpb=4, slots=200)
    assert world.rules.grid_blocks == 36
    world.insert(list(range(4 * 40)))
    assert {ordinal for ordinal, kind in classes(world, 0).items() if kind == CLASS_B} == {34, 35}
    assert World([full()]).rules.grid_blocks == 0
    assert World([window(9)], retain_window_tails=False).rules.grid_blocks == 0


def test_touch() -> None:
    world = World([full(), window(9)], tpb=4)
    path = world.insert(list(range(16)))
    with world.journal.call():
        world.cache.mark(path[3], SEQUENCE)
        world.cache.touch(path[2], 1)
        world.cache.touch(path[1], 1)  # nothing needs it
    order = [(page.lc, page.node.ordinal) for page in world.cache.pages.queues[0] if page.node]
    assert order[:2] == [(1, 0), (1, 1)]
    assert order[-1] == (1, 2)


def test_marks_go_with_their_node() -> None:
    world = World([full(), window(9)], tpb=4)
    path = world.insert([*range(8), 20])
    with world.journal.call():
        world.cache.mark(path[2], SEQUENCE)
    assert tails(path, 1) == [1, 1, 1]
    world.insert([*range(8), 20, 21])  # takes the place of the tail
    assert tails(path[:2], 1) == [0, 0]
    other = world.insert([*range(8), 30])
    assert path[1].marks == FORK
    with world.journal.call():
        world.cache.mark(other[2], PROMPT)
        world.cache.remove_page(other[2], 0)
    assert path[1].marks == 0
    assert tails(path[:2], 1) == [0, 0]
    world.audit()


def test_random_marks_and_undo() -> None:
    rng = random.Random(2)
    for _ in range(15):
        world = World([full(), window(5), window(9, sinks=3), STATE], tpb=3, slots=300)
        for _ in range(6):
            world.insert([rng.choice([0, 1]) for _ in range(rng.randint(1, 18))], lambda node, lc: node.num_tokens)
        nodes = list(world.cache.tree.all_nodes())
        for _ in range(20):
            before = world.state()
            with world.journal.call():
                for _ in range(rng.randint(1, 4)):
                    change = rng.choice([world.cache.mark, world.cache.unmark])
                    change(rng.choice(nodes), rng.choice([SEQUENCE, PROMPT]))
                world.audit()
                if rng.random() < 0.5:
                    world.journal.undo_to(0)
                    assert world.state() == before
            world.audit()
