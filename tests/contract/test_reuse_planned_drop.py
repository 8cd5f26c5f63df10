"""Planned drops (v2_request §5.2): numbers 13, 14, 52, 53, and the life of a handle."""

from __future__ import annotations

import pytest

from kvpool.errors import LogicError
from kvpool.v2 import _introspection as introspection
from tests.support.configs import KIB, MIB, alternating, attention, config, ssm
from tests.support.reuse import Lab, ids, tokens


def finished(lab: Lab, sequence, *ends: int):
    """The plan of a request that has committed ``sequence`` (at ``ends``) and is closed; and what it reused."""
    turn = lab.open(sequence)
    for end in ends or (len(sequence),):
        turn.advance(end)
    turn.cache.stop_committing()
    plan = turn.cache.plan_committed_block_drop()
    turn.close()
    return plan, turn.reused


def plans(lab: Lab, group: int) -> list[int]:
    """The plan counts of the group's pages in the tree, from the root outwards (one branch)."""
    return [node[4][group][4] for node in lab.manager.snapshot()["tree"] if node[2] and node[4][group] is not None]


@pytest.mark.parametrize("backoff", [0, 1, 3])
@pytest.mark.parametrize(("tpb", "window", "m", "n"), [(8, 8, 1, 3), (8, 16, 1, 5), (4, 8, 2, 7), (16, 16, 2, 5)])
def test_scenario_13_planned_drop(make, backoff, tpb, window, m, n) -> None:
    """The drop of a turn takes its window: a match then ends a window earlier, where the turn before left its own."""
    lab = Lab(make, alternating(2, window, None, 16 * tpb, 16 * MIB, tpb=tpb, reuse_match_backoff=backoff))
    long = ids(n * tpb)
    short = long[: m * tpb]
    first, reused = finished(lab, short)
    assert reused == 0
    second, reused = finished(lab, long)
    assert reused == lab.reused(short) == len(short) - backoff
    first.drop()
    assert lab.reused(short) == max(0, len(short) - window)
    assert lab.reused(long) == len(long) - backoff
    second.drop()
    assert lab.reused(long) == len(long) - window
    with pytest.raises(LogicError, match="already been dropped"):
        second.drop()
    with pytest.raises(LogicError, match="already been dropped"):
        first.drop()


def test_two_turns_a_window_apart(make) -> None:
    """A window before the later end the earlier turn has dropped its own: nothing is left."""
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    plans = [finished(lab, ids(length))[0] for length in (8, 16)]
    plans[0].drop()
    assert lab.reused(ids(16)) == 16
    plans[1].drop()
    assert lab.reused(ids(16)) == 0
    assert lab.nodes() == 0


@pytest.mark.parametrize("coverage", [0, 1, 7])
def test_scenario_14_a_page_that_covers_less(make, coverage) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    turn = lab.open(ids(24))
    turn.advance(24)
    turn.cache.stop_committing()
    assert turn.cache.plan_committed_block_drop() is not None
    introspection.set_test_coverage(lab.manager, None, ids(24), 0, coverage)
    assert turn.cache.plan_committed_block_drop() is None


def test_a_full_attention_page_that_is_missing(make) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    turn = lab.open(ids(24))
    turn.advance(24)
    turn.cache.stop_committing()
    introspection.set_test_coverage(lab.manager, None, ids(24), 1, 5)
    assert turn.cache.plan_committed_block_drop() is None


def hybrid(window: int | None = None, **fields):
    layers = [attention(0, 512, window), ssm(1, 4 * KIB), attention(2, 512), ssm(3, 4 * KIB)]
    fields.setdefault("enable_partial_reuse", False)
    return config(layers, 16 * MIB, **fields)


@pytest.mark.parametrize(("first", "second"), [(32, 64), (32, 96), (64, 128)])
def test_scenario_52_snapshots_of_two_turns(make, first, second) -> None:
    lab = Lab(make, hybrid())
    sequence = tokens(second)
    one, _ = finished(lab, sequence, first, second)
    two, reused = finished(lab, sequence)
    assert reused == second
    one.drop()
    assert lab.reused(sequence) == second  # the other plan still covers the snapshot
    two.drop()
    assert lab.reused(sequence) == first
    empty = lab.open(sequence, 0)
    empty.cache.stop_committing()
    assert empty.cache.plan_committed_block_drop() is None


@pytest.mark.parametrize(
    ("length", "window", "blocks"), [(48, 32, 2), (96, 32, 1), (112, 64, 3), (128, 65, 2), (129, 65, 3)]
)
def test_scenario_53_window_and_snapshot(make, length, window, blocks) -> None:
    """Every page of the window is planned exactly once, and the last snapshot; nothing of full attention."""
    lab = Lab(make, hybrid(window))
    groups = [lab.manager.get_layer_group_id(layer) for layer in (0, 1, 2)]
    plan, _ = finished(lab, tokens(length))
    assert plans(lab, groups[0])[-blocks:] == [1] * blocks
    assert sum(plans(lab, groups[0])) == blocks
    assert plans(lab, groups[1]) == [1]
    assert set(plans(lab, groups[2])) == {0}
    counts = introspection.reuse_match_planned_drop_counts(lab.manager, None, tokens(length), groups[1])
    assert counts == [None] * ((length - 1) // 32) + [1]
    assert lab.probe(tokens(length)) == length
    plan.drop()
    assert lab.reused(tokens(length)) == 0


def test_committing_must_have_stopped(make) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    turn = lab.open(ids(24))
    turn.advance(24)
    with pytest.raises(LogicError, match="committing has not stopped"):
        turn.cache.plan_committed_block_drop()
    turn.commit(24, is_end=True)
    assert turn.cache.plan_committed_block_drop() is not None


def test_nothing_committed_nothing_planned(make) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    turn = lab.open(ids(24))
    turn.compute(24)
    turn.cache.stop_committing()
    assert turn.cache.plan_committed_block_drop() is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_page_of_several_plans_goes_with_the_last(make, order) -> None:
    lab = Lab(make, alternating(2, 16, None, 8 * 16, 4 * MIB, tpb=8))
    made = [finished(lab, ids(40))[0] for _ in range(3)]
    for number, which in enumerate(order, 1):
        assert lab.reused(ids(40)) == 40
        assert plans(lab, 0)[-2:] == [4 - number] * 2
        made[which].drop()
    assert lab.reused(ids(40)) == 24


def test_a_page_in_use_is_only_uncounted(make) -> None:
    lab = Lab(make, alternating(2, 16, None, 8 * 16, 4 * MIB, tpb=8))
    plan, _ = finished(lab, ids(40))
    user = lab.open(ids(40))
    assert user.reused == 40
    plan.drop()
    user.check()
    assert plans(lab, 0)[-2:] == [0, 0]
    assert lab.reused(ids(40)) == 40
    user.close()
    assert lab.reused(ids(40)) == 40


def test_a_plan_skips_what_was_evicted_meanwhile(make) -> None:
    """The slots of the plan hold other pages by now: these must stay."""
    lab = Lab(make, config([attention(0, 2 * MIB // 2, 8)], 6 * 2 * MIB, tpb=8, max_util_for_resume=1.0))
    plan, _ = finished(lab, ids(24))
    for seed in range(1, 6):
        lab.run(ids(24, seed))
    assert lab.probe(ids(24)) == 0
    before = lab.manager.snapshot()["tree"]
    plan.drop()
    assert lab.manager.snapshot()["tree"] == before
    assert lab.reused(ids(24, 5)) == 24
    with pytest.raises(LogicError, match="already been dropped"):
        plan.drop()


def test_a_discarded_handle_applies_at_the_next_change(make) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    plan, _ = finished(lab, ids(24))
    assert lab.probe(ids(24)) == 24
    del plan
    cache = lab.create(ids(24, seed=2)).cache
    cache.close()
    assert lab.probe(ids(24)) == 16


def test_a_with_block_drops_at_its_end(make) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    plan, _ = finished(lab, ids(24))
    with plan:
        assert lab.probe(ids(24)) == 24
    assert lab.probe(ids(24)) == 16
    plan, _ = finished(lab, ids(24))
    with plan:
        plan.drop()  # early; the end of the block has nothing left to do
        assert lab.probe(ids(24)) == 16


@pytest.mark.parametrize("discard", [False, True])
def test_after_a_clear_there_is_nothing_to_drop(make, discard) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    plan, _ = finished(lab, ids(24))
    lab.manager.clear_reusable_blocks()
    lab.run(ids(24))
    if discard:
        del plan
    else:
        plan.drop()
    lab.create(ids(8, seed=3)).cache.close()
    assert lab.reused(ids(24)) == 24


def test_a_handle_outlives_the_manager(make) -> None:
    lab = Lab(make, alternating(2, 8, None, 8 * 16, 4 * MIB, tpb=8))
    plan, _ = finished(lab, ids(24))
    other, _ = finished(lab, ids(24))
    lab.make.forget(lab.manager)
    lab.manager.shutdown()
    plan.drop()
    del other


def test_the_window_of_the_next_turn_is_left(make) -> None:
    """Turn k's window is dropped when turn k + 1 has ended: the conversation goes on at full reuse, forks do not."""
    lab = Lab(make, alternating(2, 16, None, 8 * 16, 4 * MIB, tpb=8))
    conversation, previous = ids(240), None
    for turn in range(1, 9):
        plan, reused = finished(lab, conversation[: 30 * turn])
        assert reused == 30 * (turn - 1)
        if previous is not None:
            previous.drop()
        previous = plan
        assert lab.reused(conversation[: 30 * turn]) == 30 * turn
    window = lab.pages(conversation, 0)
    assert window[-2:] == [8, 8]
