"""Who is evicted, how much, and what never is: trials of reference counts and eviction on the prefix cache.

Pools have few slots of a known number; ``full(n)`` is n slots of one full-attention layer, 32 tokens each.
"""

from __future__ import annotations

import pytest

from kvpool.errors import CuError, CuOOMError, NeverFitsError
from kvpool.v2 import PRIORITY_DEFAULT, AttnLifeCycle
from kvpool.v2 import _introspection as introspection
from tests.support.configs import MIB, attention, config, full, full_and_window, slots, windowed
from tests.support.reuse import Lab, ids, tokens


def tight(slot_count: int, **fields):
    return full(slot_count, max_util_for_resume=1.0, **fields)


def priorities(lab: Lab) -> list[int]:
    """Of the pages of group 0, from the root outwards (one branch)."""
    return [node[4][0][3] for node in lab.manager.snapshot()["tree"] if node[2] and node[4][0] is not None]


# order
@pytest.mark.parametrize(("blocks", "left"), [(1, 32), (2, 0)])
def test_least_recently_used_first_and_leaves_before_stems(make, blocks, left) -> None:
    lab = Lab(make, tight(6))
    for seed in range(3):
        lab.run(ids(64, seed))
    lab.create(ids(64, 0)).close()  # a hit without any work counts as use
    lab.run(ids(32 * blocks, 9))
    assert [lab.probe(ids(64, seed)) for seed in range(3)] == [64, left, 64]
    assert lab.reused(ids(64, 0)) == 64


def test_the_lowest_priority_first_whatever_its_age(make) -> None:
    lab = Lab(make, tight(8))
    for seed, priority in ((0, 50), (1, 10), (2, 35), (3, 90)):
        lab.run(ids(64, seed), custom_priority_callback=lambda ordinal, group, p=priority: p)
    lab.run(ids(64, 4))
    assert [lab.probe(ids(64, seed)) for seed in range(5)] == [64, 0, 64, 64, 64]
    lab.run(ids(64, 5))
    assert [lab.probe(ids(64, seed)) for seed in range(6)] == [64, 0, 0, 64, 64, 64]
    lab.run(ids(64, 6), custom_priority_callback=lambda ordinal, group: 60)
    assert [lab.probe(ids(64, seed)) for seed in range(7)] == [64, 0, 0, 64, 0, 64, 64]


def test_a_user_of_higher_priority_raises_what_it_shares(make) -> None:
    lab = Lab(make, full(16))
    lab.run(ids(64), custom_priority_callback=lambda ordinal, group: 20)
    assert priorities(lab) == [20, 20]
    lab.create(ids(64), custom_priority_callback=lambda ordinal, group: 70 - ordinal).close()
    assert priorities(lab) == [70, 69]
    lab.create(ids(64), custom_priority_callback=lambda ordinal, group: 5).close()
    assert priorities(lab) == [70, 69]


def test_the_callback_gets_ordinal_and_life_cycle(make) -> None:
    lab = Lab(make, full_and_window(20, 20, 64, sinks=32), "virtual")
    asked: list[tuple[int, object]] = []

    def priority(ordinal: int, life_cycle: AttnLifeCycle) -> int:
        asked.append((ordinal, life_cycle))
        return 40 + ordinal if life_cycle.window_size is None else 60 + ordinal

    lab.run(ids(90), custom_priority_callback=priority)
    assert {(ordinal, cycle.window_size, cycle.num_sink_blocks) for ordinal, cycle in asked} == {
        (ordinal, *cycle) for ordinal in range(3) for cycle in ((None, 0), (64, 1))
    }
    assert len(asked) == 6  # once each
    nodes = [node for node in lab.manager.snapshot()["tree"] if node[2]]
    assert [[page[3] for page in node[4]] for node in nodes] == [[40, 60], [41, 61], [42, 62]]


def test_B106_no_priority_is_the_default(make) -> None:
    lab = Lab(make, full(16))
    lab.run(ids(64), custom_priority_callback=lambda ordinal, group: 90)
    lab.run(ids(64, 1), custom_priority_callback=None)
    lab.run(ids(64, 2))
    assert PRIORITY_DEFAULT == 35
    assert sorted(priorities(lab)) == [35, 35, 35, 35, 90, 90]
    lab.create(ids(64), custom_priority_callback=None).close()
    assert sorted(priorities(lab)) == [35, 35, 35, 35, 90, 90]  # absent is no change


@pytest.mark.parametrize("own_request", [True, False])
def test_B202_a_system_prompt_of_high_priority_stays(make, own_request) -> None:
    """8 pages at priority 100, then a flood of 10,000 pages."""
    lab = Lab(make, full(40, max_util_for_resume=1.0), "virtual")
    system = ids(256)
    if own_request:
        lab.run(system, custom_priority_callback=lambda ordinal, group: 100)
    else:
        first = system + ids(320, 7)
        lab.run(first, custom_priority_callback=lambda ordinal, group: 100 if ordinal < 8 else 35)
    for seed in range(10, 10 + 10_000 // 20):
        lab.run(ids(640, seed))
    assert lab.reused(system + ids(32, 5)) == 256
    ordinary = ids(256, 3)
    lab.run(ordinary)
    for seed in range(600, 603):
        lab.run(ids(640, seed))
    assert lab.probe(ordinary) == 0  # without a priority the flood takes it


def test_a_page_that_no_match_can_do_without_takes_its_subtree_along(make) -> None:
    """Evicting a full-attention page frees what lies behind it: nothing there could be matched any more."""
    lab = Lab(make, tight(8))
    lab.run(ids(128), custom_priority_callback=lambda ordinal, group: 10 if ordinal == 1 else 80)
    lab.run(ids(128, 1), custom_priority_callback=lambda ordinal, group: 90)
    lab.run(ids(32, 2))
    assert lab.probe(ids(128)) == 32
    assert lab.free() == [2]
    assert lab.cached() == [6]
    assert lab.reused(ids(128, 1)) == 128


def test_pages_that_serve_no_end_any_more_go_together(make) -> None:
    """A window of four blocks that loses one of them can not be matched: the others are freed too, not left to linger."""
    lab = Lab(make, config([attention(0, 512), attention(1, 512, 128)], 8 * MIB, commit_min_snapshot=True))
    lab.run(ids(512))
    assert sum(lab.cached()) == 16 + 4
    introspection.set_test_coverage(lab.manager, None, ids(14 * 32), 1, 0)
    assert lab.cached() == [0]
    assert lab.nodes() == 0
    lab.run(ids(512), 256, 512)
    assert sum(lab.cached()) == 16 + 8
    introspection.set_test_coverage(lab.manager, None, ids(14 * 32), 1, 0)
    assert sum(lab.cached()) == 8 + 4
    assert lab.reused(ids(512)) == 256


# how much
@pytest.mark.parametrize("used_tokens", [32, 5, 33, 320])
def test_B099_and_B062_exactly_what_is_needed_is_evicted(make, used_tokens) -> None:
    """A pool of 1,000 cached pages; a request of n tokens takes ceil(n / 32) of them, not a step's worth."""
    lab = Lab(make, full(1000, max_util_for_resume=1.0), "virtual")
    for seed in range(20):
        lab.run(ids(1600, seed))
    assert (lab.free(), lab.cached()) == ([0], [1000])
    turn = lab.open(ids(used_tokens, 99))
    turn.compute(used_tokens)
    need = -(-used_tokens // 32)
    assert (lab.free(), lab.cached(), lab.held()) == ([0], [1000 - need], [need])
    assert lab.probe(ids(1600)) == 1600 - 32 * need
    assert all(lab.probe(ids(1600, seed)) == 1600 for seed in range(1, 20))


def test_free_slots_are_taken_before_anything_is_evicted(make) -> None:
    lab = Lab(make, tight(10))
    lab.run(ids(160))
    turn = lab.open(ids(160, 1))
    turn.compute(160)
    assert lab.probe(ids(160)) == 160
    turn.close()
    assert (lab.free(), lab.cached()) == ([5], [5])  # nothing was committed: its pages are free, not cached


def test_B056_a_request_does_not_evict_its_own_hits(make) -> None:
    lab = Lab(make, tight(5))
    lab.run(ids(64))
    other = lab.open(ids(32, 9))
    other.compute(32)
    turn = lab.open(ids(160))
    assert turn.reused == 64
    before = lab.manager.snapshot()
    assert turn.cache.resize(160, None) is False  # 2 hits + 3 new, 2 free
    assert lab.manager.snapshot() == before
    turn.check()
    turn.compute(128)
    assert len(set(turn.cache.get_base_page_indices(0))) == 4
    turn.close()
    assert lab.probe(ids(64)) == 64


def test_B056_what_never_fits_is_said_at_once(make) -> None:
    lab = Lab(make, tight(4))
    lab.run(ids(64))
    turn = lab.open(ids(160))
    before = lab.manager.snapshot()
    with pytest.raises(NeverFitsError):
        turn.cache.resize(160, None)
    assert lab.manager.snapshot() == before
    turn.compute(128)
    assert len(set(turn.cache.get_base_page_indices(0))) == 4


def test_B094_what_a_suspended_request_holds_is_not_there(make) -> None:
    """5 of 8 could be had, 3 belong to a match that has not run yet; 6 are denied by the check, not by the allocator."""
    lab = Lab(make, tight(8))
    lab.run(ids(96))
    waiting = lab.create(ids(96))
    assert waiting.reused == 96
    turn = lab.open(ids(256, 1))
    before = lab.manager.snapshot()
    assert turn.cache.resize(6 * 32, None) is False
    assert lab.manager.snapshot() == before
    assert turn.cache.resize(5 * 32, None) is True
    waiting.close()
    assert turn.cache.resize(6 * 32, None) is True
    assert lab.probe(ids(96)) == 64


def test_B089_freeing_one_of_two_sharers(make) -> None:
    """Each owns a block of its own beside the shared one: closing one gives back one."""
    lab = Lab(make, tight(16))
    a, b = lab.open(ids(64)), lab.open(ids(64))
    a.advance(32)
    b.advance(32)
    a.compute(64)
    b.compute(64)
    assert (lab.free(), lab.held()) == ([13], [3])
    a.close()
    assert (lab.free(), lab.held()) == ([14], [2])
    b.check()
    b.close()
    assert (lab.free(), lab.cached()) == ([15], [1])


@pytest.mark.parametrize("sharers", [2, 5])
def test_a_shared_page_is_held_until_the_last_lets_go(make, sharers) -> None:
    lab = Lab(make, tight(16))
    lab.run(ids(128))
    turns = [lab.open(ids(128)) for _ in range(sharers)]
    assert lab.held() == [4]
    counts = [node[4][0][2] for node in lab.manager.snapshot()["tree"] if node[2]]
    assert counts == [sharers] * 4
    for left, turn in enumerate(turns):
        assert not introspection.all_tree_pages_droppable(lab.manager)
        assert (lab.held(), lab.cached()) == ([4], [0])
        turns[-1].check()
        turn.close()
        assert left == sharers - 1 or lab.held() == [4]
    assert (lab.held(), lab.cached()) == ([0], [4])


# what never is
def test_B092_a_parents_page_may_go_while_the_child_is_held(make) -> None:
    """Window: the first blocks of an open request are stale, cached and evicted; it goes on, and its node chain stays."""
    lab = Lab(make, windowed(8, 64, max_util_for_resume=1.0))
    long = lab.open(ids(400))
    for end in (64, 128, 192):
        long.advance(end)
    other = lab.open(ids(150, 1))
    other.advance(150)
    assert lab.pages(ids(192), 0)[0] is None
    other.close()
    for end in (256, 320, 400):
        long.advance(end)
    long.close()
    assert lab.reused(ids(400)) == 400


def test_B092_a_held_chain_is_never_evicted(make) -> None:
    lab = Lab(make, tight(8))
    lab.run(ids(192))
    holder = lab.create(ids(192), 128)
    assert holder.reused == 128
    turn = lab.open(ids(128, 1))
    turn.advance(128)  # takes the two free slots and the two blocks beyond the holder's
    assert lab.probe(ids(192)) == 128
    assert lab.held() == [8]
    assert holder.cache.resume()
    holder.check()


@pytest.mark.parametrize("minimal", [True, False])
def test_B052_commit_in_a_full_pool(make, minimal) -> None:
    """Every slot is the request's own: a commit succeeds, with its snapshot of the tail left out if need be."""
    lab = Lab(make, tight(4, commit_min_snapshot=minimal))
    turn = lab.open(ids(128))
    turn.advance(40)
    assert turn.cache.resize(128, None)
    assert lab.free() == [0]
    turn.advance(70)
    turn.advance(110)
    turn.advance(128)
    assert lab.held() == [4]
    turn.close()
    assert lab.reused(ids(128)) == 128


def test_B052_only_an_ancestor_could_give_the_page(make) -> None:
    """The snapshot of a tail takes a stale page of the request's own chain; the chain itself stays attached."""
    lab = Lab(make, windowed(5, 33, commit_min_snapshot=True, max_util_for_resume=1.0))
    turn = lab.open(ids(300))
    for end in range(20, 301, 20):
        turn.advance(end)
        assert sum(lab.held()) <= 3
        lab.manager.audit()
    turn.close()
    assert lab.reused(ids(300)) == 300


def test_B051_a_recycled_block_has_no_memory_of_its_parent(make) -> None:
    """Chain a-b-c; c is evicted and its slot serves x under y; evicting b then has no effect on y-x."""
    lab = Lab(make, tight(4))
    lab.run(ids(96))  # a b c
    lab.run(ids(64, 1))  # y x: takes the free slot and c's
    assert lab.probe(ids(96)) == 64
    taken = {page[0] for page in introspection.reuse_match_pages(lab.manager, None, ids(64, 1), 0)[1]}
    assert taken == {2, 3}
    lab.run(ids(32, 2))  # takes b's
    assert lab.probe(ids(96)) == 32
    assert lab.reused(ids(64, 1)) == 64
    lab.run(ids(32, 3))  # takes a's
    assert lab.probe(ids(96)) == 0
    assert lab.reused(ids(64, 1)) == 64


def test_B104_cleared_and_stored_again_in_another_size(make) -> None:
    lab = Lab(make, tight(8))
    lab.run(ids(96))
    lab.manager.clear_reusable_blocks()
    lab.run(ids(64))
    assert lab.reused(ids(96)) == 64
    assert lab.cached() == [2]


def test_B114_the_only_evictable_pages_are_its_own(make) -> None:
    """A request is given up in a full pool and comes back: it hits its own pages, or they are evicted; it gets on."""
    lab = Lab(make, tight(4))
    first = lab.open(ids(128))
    first.advance(96)
    first.close()
    again = lab.open(ids(128))
    assert again.reused == 96
    again.advance(128)
    again.close()
    other = lab.open(ids(128, 1))
    other.advance(128)
    assert lab.probe(ids(128)) == 0


def test_B149_one_page(make) -> None:
    """The page of a is b's once b is stored, and a is gone before: never both, never a with b's bytes."""
    lab = Lab(make, tight(1))
    lab.run(ids(32))
    assert (lab.probe(ids(32)), lab.probe(ids(32, 1))) == (32, 0)
    turn = lab.open(ids(32, 1))
    turn.compute(32)
    assert (lab.probe(ids(32)), lab.probe(ids(32, 1))) == (0, 0)
    turn.commit(32)
    turn.close()
    assert (lab.reused(ids(32)), lab.reused(ids(32, 1))) == (0, 32)


@pytest.mark.parametrize("error", [("oom", CuOOMError), ("cu", CuError)])
def test_B102_a_reader_that_fails_midway_leaves_no_reference(make, error) -> None:
    """Whatever device call of the first resume fails, the match is as before, and the next try succeeds."""
    kind, raised = error
    lab = Lab(make, config([attention(0, 512), attention(1, 512, 64)], 4 * MIB), "sim")
    device = lab.manager.device_handle
    lab.run(ids(80))
    n = 0
    while True:
        n += 1
        reader = lab.create(ids(80))
        before = lab.manager.snapshot()
        device.fail_call(n, kind)
        try:
            assert reader.cache.resume(device.create_stream()) is True
        except raised:
            assert lab.manager.snapshot() == before
            device.fail_call(None)
            reader.close()
            continue
        device.fail_call(None)
        reader.close()
        break
    assert n > 1  # at least the copy could fail
    assert lab.held() == [0] * len(slots(lab.manager))
    assert lab.probe(ids(80)) == 80


def test_a_refused_request_leaves_the_order_of_eviction(make) -> None:
    lab = Lab(make, tight(6))
    for seed in range(3):
        lab.run(ids(64, seed))
    hold = lab.create(ids(64, 1))
    turn = lab.open(ids(192, 9))
    before = lab.manager.snapshot()
    assert turn.cache.resize(5 * 32, None) is False
    assert lab.manager.snapshot() == before
    hold.close()
    turn.compute(64)
    assert [lab.probe(ids(64, seed)) for seed in range(3)] == [0, 64, 64]


def test_tokens_and_digests_are_evicted_alike(make) -> None:
    """Digest records come and go with their blocks."""
    lab = Lab(make, tight(8))
    for seed in range(60):
        assert lab.run(tokens(220, seed)) == 0
        assert lab.reused(tokens(220, seed)) == 220
    lab.manager.audit()
