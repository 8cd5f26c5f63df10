"""Pages, owners, eviction and what goes along, undo; and the ready sets of the tier."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool._py.reuse.radix_tree import Node
from kvpool._py.reuse.retention import PROMPT, SEQUENCE
from kvpool.errors import CorruptedError
from tests.unit.py_reuse_cases import NO_SCOPE, STATE, World, digest, full, pages_of, undone, window

# ------------------------------------------------------------------------------------------------ owners


def test_life_of_a_page() -> None:
    world = World([full()], tpb=4, slots=8)
    cache, tier = world.cache, world.tier
    with world.journal.call():
        slots = cache.allocate(0, 2)
        for slot in slots:
            cache.new_page(0, slot, 40)
        cache.release(0, slots[1])
    assert slots == [0, 1]
    assert (tier.num_free(0), cache.evictable(0)) == (7, 0)
    assert (cache.refs(0, 0), cache.node_of(0, 0), cache.priority_of(0, 0)) == (1, None, 40)
    with world.journal.call():
        root = cache.root(NO_SCOPE, create=True)
        assert root is not None
        node, existed = cache.insert_full(root, world.query([1, 2, 3, 4]).tokens)
        assert not existed
        assert cache.install(node, 0, 0, 4)
        assert not cache.can_install(node, 0, 4)
        assert not cache.install(node, 0, 0, 3)
    assert (cache.page(node, 0), cache.coverage(node, 0), cache.node_of(0, 0)) == (0, 4, node)
    with world.journal.call():
        cache.release(0, 0)
    assert (tier.num_free(0), cache.evictable(0)) == (7, 1)
    assert cache.all_cached()
    with world.journal.call():
        cache.adopt(0, 0, 30)
        cache.adopt(0, 0, 60)
    assert (cache.refs(0, 0), cache.priority_of(0, 0), cache.evictable(0)) == (2, 60, 0)
    assert not cache.all_cached()
    with world.journal.call():
        cache.release(0, 0)
        cache.release(0, 0)
    assert cache.dump_queues() == [[[60, 1, 0]]]
    assert cache.dump_tree()[1] == [[None, None], 0, [1, 2, 3, 4], 0, [[0, 4, 0, 60, 0]], [0]]
    with world.journal.call():
        cache.make_room(0, 8)
    assert tier.num_free(0) == 8
    assert cache.dump_tree() == []  # the root went with its last node
    world.audit()
    with pytest.raises(CorruptedError, match="nothing left to evict"), world.journal.call():
        cache.make_room(0, 9)
    with pytest.raises(CorruptedError, match="slot 3"):
        cache.release(0, 3)


def test_install_replaces_what_covers_less() -> None:
    world = World([full(), STATE], tpb=4)
    (node,) = world.insert([1, 2, 3], lambda node, lc: [2, 1][lc])
    with world.journal.call():
        owned = world.own(node, 0)
        slot = world.take(0, node, 3)
        state = world.take(1, node, 3)
    assert slot != owned
    assert world.cache.node_of(0, owned) is None
    assert world.cache.refs(0, owned) == 1
    assert node.coverage == [3, 3]
    world.audit()
    with world.journal.call():
        for lc, one in ((0, owned), (0, slot), (1, state)):
            world.let_page_go(lc, one)
    assert world.tier.num_free(0) == 62
    world.audit()


def test_last_nodes_stay() -> None:
    world = World([full()], tpb=4)
    path = world.insert(list(range(12)))
    with world.journal.call():
        world.hold(path[1])
        slots = [world.own(node, 0) for node in path[:2]]
        world.cache.make_room(0, 62)
    assert [node.attached for node in path] == [True, True, False]
    with world.journal.call():
        for slot in reversed(slots):
            world.let_page_go(0, slot)
        world.let_node_go(path[1])
    assert [node.attached for node in path] == [True, True, False]
    world.audit()
    with world.journal.call():
        root = world.cache.root((1, None), create=True)
        assert root is not None
        world.hold(root)
    world.audit()
    with world.journal.call():
        world.let_node_go(root)
    assert world.cache.root((1, None)) is None


# ------------------------------------------------------------------------------------------------ what goes along


def evict(world: World, node: Node, lc: int) -> None:
    with world.journal.call():
        world.cache.remove_page(node, lc)
    world.audit()


def windows(path: list[Node], lc: int = 1) -> str:
    """One letter a node: F full page only, w both, - gone."""
    return "".join("-" if not n.attached else "w" if n.pages[lc] >= 0 else "F" for n in path)


def test_a_full_page_takes_the_subtree() -> None:
    world = World([full(), window(8)], tpb=4)
    path = world.insert(list(range(24)))
    side = world.insert([*range(12), 90, 91, 92, 93, 94])
    evict(world, path[2], 0)
    assert windows(path) == "ww----"
    assert windows(side) == "ww---"
    assert world.cache.evictable(0) == 4
    assert world.tier.num_free(0) == 60


def test_a_sink_page_takes_the_subtree() -> None:
    world = World([window(8, sinks=6)], tpb=4)
    path = world.insert(list(range(24)))
    evict(world, path[1], 0)
    assert [node.attached for node in path] == [True] + [False] * 5


def test_companions() -> None:
    """Window 13, tpb 4: an end point needs 3 blocks (or all from the beginning)."""

    def fresh(sinks: int = 0) -> tuple[World, list[Node]]:
        world = World([full(), window(13, sinks)], tpb=4)
        return world, world.insert(list(range(56)))

    world, path = fresh()
    evict(world, path[4], 1)
    assert windows(path) == "wwwwFwwwwwwwww"  # long runs on both sides
    evict(world, path[7], 1)
    assert windows(path) == "wwwwFFFFwwwwww"  # 5, 6 are too short
    evict(world, path[2], 1)
    assert windows(path) == "wwFFFFFFwwwwww"  # 3 is too short; 0, 1 are the beginning
    evict(world, path[11], 1)
    assert windows(path) == "wwFFFFFFwww---"  # 12, 13 were too short: no end there
    evict(world, path[9], 1)
    assert windows(path) == "ww------------"

    world, path = fresh(sinks=5)
    evict(world, path[4], 1)
    assert windows(path) == "wwwwFwwwwwwwww"  # 2, 3 stand behind the sinks, where every window begins
    evict(world, path[7], 1)
    assert windows(path) == "wwwwFFFFwwwwww"


def test_companions_stop_at_forks_holders_and_owned_pages() -> None:
    def fresh(*sides: int) -> tuple[World, list[Node]]:
        """14 blocks without the window page of block 3; more branches behind some of the blocks."""
        world = World([full(), window(13)], tpb=4)
        for side in sides:
            world.insert([*range(4 * side + 4), 90, 91, 92, 93])
        path = world.insert(list(range(56)))
        evict(world, path[3], 1)
        return world, path

    world, path = fresh()
    evict(world, path[6], 1)
    assert windows(path) == "wwwFFFFwwwwwww"

    world, path = fresh(5)
    evict(world, path[6], 1)
    assert windows(path) == "wwwFwwFwwwwwww"  # the branch behind 5 may need 4 and 5

    world, path = fresh(4)
    evict(world, path[6], 1)
    assert windows(path) == "wwwFwFFwwwwwww"  # 5 is below the fork

    world, path = fresh()
    with world.journal.call():
        slot = world.own(path[4], 1)
    evict(world, path[6], 1)
    assert windows(path) == "wwwFwFFwwwwwww"
    with world.journal.call():
        world.let_page_go(1, slot)

    world, path = fresh()
    evict(world, path[11], 1)
    assert windows(path) == "wwwFwwwwwww---"
    world, path = fresh()
    with world.journal.call():
        world.hold(path[13])
        for node in path:
            world.own(node, 0)
    evict(world, path[11], 1)
    assert windows(path) == "wwwFwwwwwwwFww"  # a request goes on there


def test_a_fork_above_does_not_shorten_a_run() -> None:
    """The run that reaches over the fork is long enough for ends below it."""
    world = World([full(), window(9)], tpb=4)
    world.insert([*range(16), 90, 91, 92, 93])
    path = world.insert(list(range(28)))
    evict(world, path[1], 1)
    assert windows(path) == "wFwwwww"
    evict(world, path[5], 1)
    assert windows(path) == "wFwww--"
    assert world.match(list(range(20))).end == 20


def test_a_short_end_of_a_run_counts() -> None:
    """Window 10, tpb 4: an end needs 3 blocks; two whole ones suffice for 1 token of the third."""
    world = World([full(), window(10)], tpb=4)
    path = world.insert([*range(20), 50])
    evict(world, path[1], 1)
    assert windows(path) == "wFwwww"
    path2 = world.insert(list(range(200, 213)), lambda node, lc: 4 if node.ordinal < 3 else 1)
    evict(world, path2[0], 1)
    assert windows(path2) == "Fwww"
    assert world.match(list(range(200, 213))).end == 13


def test_prune_keeps_what_a_back_off_needs() -> None:
    """Scenario 13: a node without an end of its own makes ends above it reachable."""
    for backoff in (0, 1):
        world = World([window(8), full()], tpb=8, reuse_match_backoff=backoff)
        path = world.insert(list(range(24)))
        evict(world, path[2], 0)
        assert path[2].attached == (backoff > 0)
        assert world.match(list(range(24))).end == 16


def test_states_go_alone_and_prune() -> None:
    world = World([full(), STATE], tpb=4)
    path = world.insert(list(range(16)), lambda node, lc: 4 if lc == 0 or node.ordinal in (0, 2, 3) else 0)
    evict(world, path[3], 1)
    assert [node.attached for node in path] == [True, True, True, False]
    evict(world, path[0], 1)
    assert [node.attached for node in path] == [True, True, True, False]
    evict(world, path[2], 1)
    assert world.cache.dump_tree() == []
    assert world.tier.num_free(0) == 64


def test_take_over() -> None:
    world = World([full(), window(8), STATE], tpb=4)
    path = world.insert(list(range(12)), lambda node, lc: 4)
    with world.journal.call():
        world.hold(path[1])
        slots = [(lc, world.own(node, lc)) for node in path[:2] for lc in (0, 1)]
        state = world.own(path[1], 2)
        world.cache.take_over(2, state)
    world.audit()
    assert (world.cache.node_of(2, state), world.cache.refs(2, state)) == (None, 1)
    with world.journal.call():
        full_page, window_page = world.own(path[2], 0), world.own(path[2], 1)
        world.cache.take_over(0, full_page)
        world.cache.take_over(1, window_page)  # its node is gone already
    assert not path[2].attached
    assert world.cache.refs(0, full_page) == world.cache.refs(1, window_page) == 1
    world.audit()
    with world.journal.call():
        for lc, slot in [*slots, (0, full_page), (1, window_page), (2, state)]:
            world.let_page_go(lc, slot)
        world.let_node_go(path[1])
    world.audit()


# ------------------------------------------------------------------------------------------------ plans, clear


def test_planned_drops() -> None:
    world = World([full(), window(5)], tpb=4)
    path = world.insert(list(range(16)))
    with world.journal.call():
        first = [world.cache.plan_page(node, 1) for node in path[2:]]
        second = [world.cache.plan_page(path[3], 1)]
    assert world.cache.dump_tree()[4][4][1][4] == 2
    with world.journal.call():
        for planned in first:
            world.cache.drop_page(planned)
    assert [pages_of(node)[1] for node in path] == [True, True, False, True]
    world.audit()
    with world.journal.call():
        slot = world.own(path[3], 1)
        world.cache.drop_page(second[0])
    assert world.cache.refs(1, slot) == 1  # only counted
    world.audit()
    with world.journal.call():
        third = world.cache.plan_page(path[3], 1)
        world.let_page_go(1, slot)
        world.cache.remove_page(path[3], 1)
        again = world.cache.allocate(0, world.tier.num_free(0))
        for slot in again:
            world.cache.new_page(1, slot, 35)
            world.owners[1, slot] = 1
        world.cache.drop_page(third)  # another page has the slot
    assert third[1] in again
    world.audit()


def test_clear() -> None:
    world = World([full(), window(5), STATE], tpb=3, slots=300)
    rng = random.Random(0)
    for scope in [(None, None), (1, 2)]:
        for _ in range(6):
            world.insert([rng.choice([0, digest(1)]) for _ in range(10)], lambda node, lc: 1, scope=scope)
    before = world.state()
    with undone(world.journal):
        world.cache.clear()
    assert world.state() == before
    with world.journal.call():
        world.cache.clear()
    assert world.cache.dump_tree() == []
    assert world.tier.num_free(0) == 300
    assert len(world.cache.digests) == 0
    world.audit()


# ------------------------------------------------------------------------------------------------ ready sets


def test_ready_sets() -> None:
    world = World([full()], tpb=4, slots=4)
    cache, tier, device = world.cache, world.tier, world.device
    events = [device.record(0) for _ in range(20)]
    with world.journal.call():
        slots = cache.allocate(0, 2)
        for slot in slots:
            cache.new_page(0, slot, 35)
        assert tier.events_to_wait_for(1) == []
        assert not tier.needs_event()
        assert tier.needs_event(handed_out_too=True)
        tier.settle(1, 0)
    root = None
    with world.journal.call():
        root = cache.root(NO_SCOPE, create=True)
        assert root is not None
        node, _ = cache.insert_full(root, world.query([1, 2, 3, 4]).tokens)
        cache.install(node, 0, 0, 4)
        cache.release(0, 1)
        assert tier.needs_event()
        tier.settle(1, events[0])
    assert tier.ready_set(0, 0) == tier.ready_set(0, 1) == {1: events[0]}
    with world.journal.call():
        cache.adopt(0, 0, 35)
        tier.borrow(0, 0)
        tier.borrow(0, 3)
        assert tier.events_to_wait_for(1) == []
        assert tier.events_to_wait_for(2) == [events[0]]
        savepoint = world.journal.savepoint()
        assert cache.allocate(0, 2) == [1, 2]
        assert tier.events_to_wait_for(2) == [events[0]]
        world.journal.undo_to(savepoint)
        cache.release(0, 0)
        tier.settle(2, events[1])
    assert tier.ready_set(0, 0) == {1: events[0], 2: events[1]}
    assert tier.ready_set(0, 1) == {1: events[0]}
    with world.journal.call():
        cache.release(0, 0)
        cache.make_room(0, 4)
        assert cache.allocate(0, 1) == [0]
        cache.new_page(0, 0, 35)
        assert tier.events_to_wait_for(3) == [events[0], events[1]]
        assert tier.events_to_wait_for(2) == [events[0]]
        tier.settle(3, events[2])
    assert tier.ready_set(0, 0) == {}  # handed out after it was released: same stream
    with world.journal.call():
        cache.release(0, 0)
        tier.settle(3, 0)
    assert tier.ready_set(0, 0) == {}


def test_many_events_lose_the_complete_ones() -> None:
    world = World([full()], tpb=4, slots=4)
    events = [world.device.record(0) for _ in range(12)]
    for stream in range(8):
        with world.journal.call():
            world.tier.finish(0, 0)
            world.tier.settle(stream, events[stream])
    assert len(world.tier.ready_set(0, 0)) == 8
    world.device.synchronize_event(events[5])
    with world.journal.call():
        world.tier.finish(0, 0)
        world.tier.settle(9, events[11])
    assert world.tier.ready_set(0, 0) == {6: events[6], 7: events[7], 9: events[11]}


# ------------------------------------------------------------------------------------------------ everything


@pytest.mark.parametrize(
    "layers",
    [
        [full()],
        [full(), window(7)],
        [window(9), window(4, sinks=3)],
        [full(), window(6), STATE],
        [window(8, optional=True), full(), window(5)],
    ],
)
def test_random_use(layers: list[Any]) -> None:
    """Audits after every change, and every undone call leaves all as it was."""
    rng = random.Random(repr(layers))
    for _ in range(12):
        use = RandomUse(layers, rng)
        world = use.world
        for _ in range(60):
            before = world.state(), dict(world.owners), list(world.held), list(use.requests)
            with world.journal.call():
                for _ in range(rng.randint(1, 3)):
                    use.change()
                    world.audit()
                if rng.random() < 0.3:
                    world.journal.undo_to(0)
                    state, world.owners, world.held, use.requests = before
                    assert world.state() == state
                    world.audit()
                else:
                    world.tier.settle(0, 0)


class RandomUse:
    """Requests as far as the cache sees them: a last node, owned pages; and everything else that can happen."""

    def __init__(self, layers: list[Any], rng: random.Random) -> None:
        self.rng = rng
        self.world = World(layers, tpb=3, slots=40, reuse_match_backoff=rng.choice([0, 0, 2]))
        self.requests: list[tuple[Node, tuple[tuple[int, int], ...]]] = []

    def change(self) -> None:
        changes = [self.commit, self.evict, self.open, self.close, self.mark, self.unmark, self.plan, self.leave_window]
        self.rng.choice(changes)()

    def nodes(self) -> list[Node]:
        return [node for node in self.world.cache.tree.all_nodes() if node.parent is not None]

    def commit(self) -> None:
        world, rng = self.world, self.rng
        num_groups = world.rules.num_life_cycles
        wanted = min(num_groups * 4, world.tier.num_free(0) + world.cache.evictable(0))
        world.cache.make_room(0, wanted)
        tokens = [rng.choice([0, 1, digest(1)]) for _ in range(min(rng.randint(1, 12), 3 * (wanted // num_groups)))]
        if tokens:
            world.commit(
                tokens, lambda node, lc: rng.choice([node.num_tokens] * 4 + [1]), priority=rng.choice([35, 50])
            )

    def evict(self) -> None:
        world = self.world
        free, evictable = world.tier.num_free(0), world.cache.evictable(0)
        world.cache.make_room(0, free + min(evictable, self.rng.randint(1, 4)))

    def open(self) -> None:
        """As a request that matched: it owns what every continuation needs."""
        world = self.world
        tokens = [self.rng.choice([0, 1]) for _ in range(12)]
        result = world.match(tokens)
        if not result.chain:
            return
        node = result.chain[-1]
        world.hold(node)
        owned = [
            (lc.index, world.own(path, lc.index, self.rng.choice([0, 60])))
            for path in result.chain
            for lc in world.rules.required
            if path.pages[lc.index] >= 0
        ]
        self.requests.append((node, tuple(owned)))

    def close(self) -> None:
        if self.requests:
            node, owned = self.requests.pop(self.rng.randrange(len(self.requests)))
            for lc, slot in reversed(owned):
                self._release(lc, slot)
            self.world.let_node_go(node)

    def leave_window(self) -> None:
        """One request gives up a window page."""
        below = self.world.rules.full_like_below
        for position, (node, owned) in enumerate(self.requests):
            for lc, slot in owned:
                page_node = self.world.cache.node_of(lc, slot)
                if page_node is not None and page_node.ordinal >= below[lc]:
                    self._release(lc, slot)
                    self.requests[position] = node, tuple(page for page in owned if page != (lc, slot))
                    return

    def _release(self, lc: int, slot: int) -> None:
        self.world.cache.release(lc, slot)
        self.world.owners[lc, slot] -= 1
        if not self.world.owners[lc, slot]:
            del self.world.owners[lc, slot]

    def mark(self) -> None:
        if self.nodes():
            self.world.cache.mark(self.rng.choice(self.nodes()), self.rng.choice([SEQUENCE, PROMPT]))

    def unmark(self) -> None:
        if self.nodes():
            self.world.cache.unmark(self.rng.choice(self.nodes()), self.rng.choice([SEQUENCE, PROMPT]))

    def plan(self) -> None:
        cache = self.world.cache
        pages = [(node, lc) for node in self.nodes() for lc, slot in enumerate(node.pages) if slot >= 0]
        free = [(node, lc) for node, lc in pages if cache.refs(lc, node.pages[lc]) == 0]
        if free:
            cache.drop_page(cache.plan_page(*self.rng.choice(free)))
