"""Probes, keys, planned drops, hooks, the snapshot and the audit of what is in the tree."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from kvpool._py.manager.manager import Manager
from kvpool.errors import ArgumentError, CorruptedError, LogicError, OutOfPagesError, UnknownBufferError
from tests.unit.py_cases import MIB, attention, config, i32, one_full, slots_config, ssm
from tests.unit.test_py_commit import DIGESTS, opened, run, text

NO_SCOPE = (None, None)


def key_of(above: bytes, ids: Any) -> bytes:
    return hashlib.sha256(above + np.array(ids, np.int32).tobytes()).digest()


ROOT = hashlib.sha256(b"\0").digest()


def finished(manager: Manager, ids: Any) -> int:
    """A closed turn and the plan to drop its end."""
    handle = opened(manager, ids, len(ids))
    manager.commit(handle, ids[manager.lengths(handle)[0] :], (), False)
    manager.stop_committing(handle)
    plan = manager.plan_drop(handle)
    manager.close(handle)
    manager.audit()
    assert plan is not None
    return plan


def test_keys() -> None:  # golden values
    manager = Manager(one_full(8, tpb=4), "virtual")
    first = key_of(ROOT, range(4))
    assert first.hex() == "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2"
    assert manager.probe_first_new_block_key(NO_SCOPE, text(4), ()) == first
    assert manager.probe_first_new_block_key(NO_SCOPE, text(3), ()) is None
    mixed = manager.probe_first_new_block_key(NO_SCOPE, i32(0, -1, 1001, 1002), [bytes(range(32))])
    assert mixed is not None
    assert mixed.hex() == "0a1bfd6dcecbe284b01933df8f0e6600aa220ad7dea7c26ac4519ffc274417aa"
    handle = opened(manager, None, 8)
    assert manager.block_keys(handle).shape == (0, 32)
    manager.commit(handle, text(6), (), False)
    assert [bytes(key) for key in manager.block_keys(handle)] == [first]
    manager.commit(handle, text(2) + 6, (), False)
    assert [bytes(key) for key in manager.block_keys(handle)] == [first, key_of(first, range(4, 8))]
    for length, known in ((8, None), (11, None), (12, key_of(key_of(first, range(4, 8)), range(8, 12)))):
        assert manager.probe_first_new_block_key(NO_SCOPE, text(length), ()) == known
    assert manager.probe_first_new_block_key((7, 11), text(4), ()) != first


def test_the_key_of_a_block_that_is_there_without_its_page() -> None:  # scenario 140
    manager = Manager(slots_config([attention(0, 4, MIB), attention(1, None, MIB)], 24, tpb=4), "virtual")
    run(manager, text(8))
    second = key_of(key_of(ROOT, range(4)), range(4, 8))
    manager.debug_set_coverage(NO_SCOPE, text(8), (), 0, 0)
    assert manager.probe_reuse(NO_SCOPE, text(8), ()) in (0, 4)
    run(manager, text(4))
    assert manager.probe_reuse(NO_SCOPE, text(8), ()) == 4
    assert manager.probe_first_new_block_key(NO_SCOPE, text(8), ()) == second


def test_back_off_shortens_every_match() -> None:  # scenario 136
    for backoff in (0, 1, 4, 5, 15):
        manager = Manager(one_full(8, tpb=4, reuse_match_backoff=backoff), "virtual")
        run(manager, text(16))
        assert manager.probe_reuse(NO_SCOPE, text(16), ()) == 16 - backoff
        handle = manager.create(ids=text(16))
        assert manager.match_depths(handle) == (16, 16 - backoff)


@pytest.mark.parametrize("backoff", [0, 1])
def test_planned_drops(backoff: int) -> None:  # scenario 13
    layers = [attention(0, 8, MIB), attention(1, None, MIB)]
    manager = Manager(config(layers, 64 * MIB, tpb=8, reuse_match_backoff=backoff), "virtual")
    short, long = finished(manager, text(8)), finished(manager, text(24))
    assert (short, long) == (1, 2)
    assert manager.probe_reuse(NO_SCOPE, text(8), ()) == 8 - backoff
    assert manager.drop_planned(short)
    assert manager.probe_reuse(NO_SCOPE, text(8), ()) == 0
    assert manager.probe_reuse(NO_SCOPE, text(24), ()) == 24 - backoff
    assert manager.drop_planned(long)
    assert manager.probe_reuse(NO_SCOPE, text(24), ()) == 16
    assert not manager.drop_planned(long)
    assert not manager.drop_planned(77)
    manager.audit()


def test_when_nothing_can_be_planned() -> None:  # scenarios 14, 52
    manager = Manager(config([attention(0, 8, MIB), attention(1, None, MIB)], 64 * MIB, tpb=8), "virtual")
    handle = opened(manager, None, 24)
    with pytest.raises(LogicError, match=r"^plan_committed_block_drop\(\): committing has not stopped$"):
        manager.plan_drop(handle)
    manager.commit(handle, text(24), (), False)
    manager.stop_committing(handle)
    manager.debug_set_coverage(NO_SCOPE, text(24), (), 0, 7)
    assert manager.plan_drop(handle) is None
    manager.debug_set_coverage(NO_SCOPE, text(24), (), 0, 8)
    plan = manager.plan_drop(handle)
    assert plan == 1
    assert manager.drop_planned(plan)  # owned pages are only counted
    assert manager.page_is_linked(handle, 2, 0)
    manager.close(handle)
    assert manager.probe_reuse(NO_SCOPE, text(24), ()) == 24
    empty = manager.create()
    manager.stop_committing(empty)
    assert manager.plan_drop(empty) is None
    manager.close(empty)
    manager.clear_reusable_blocks()
    assert not manager.drop_planned(plan)


def test_plans_of_states_and_of_pages_that_are_gone() -> None:  # scenarios 52, 53
    manager = Manager(config([attention(0, 32, MIB), ssm(1, MIB)], 256 * MIB), "virtual")
    handle = opened(manager, None, 48)
    manager.commit(handle, text(48), (), True)
    plan = manager.plan_drop(handle)
    manager.close(handle)
    planned = [[page and page[4] for page in node[4]] for node in manager.snapshot()["tree"][1:]]
    assert planned == [[1, None], [1, 1]]
    assert plan is not None
    manager.audit()
    assert manager.drop_planned(plan)
    assert manager.probe_reuse(NO_SCOPE, text(48), ()) == 0
    plan = finished(manager, text(64, 1))
    manager.clear_reusable_blocks()
    run(manager, text(64, 2))
    assert not manager.drop_planned(plan)
    assert manager.probe_reuse(NO_SCOPE, text(64, 2), ()) == 64
    manager.audit()


def test_the_walk_and_its_pages() -> None:  # scenario 85
    manager = Manager(slots_config([attention(0, 64, MIB)], 24), "virtual")
    handle = opened(manager, None, 127)
    manager.commit(handle, text(127), (), False)
    manager.close(handle)
    depth, found = manager.match_pages(NO_SCOPE, text(200), (), 0, True)
    assert (depth, [page and page[1] for page in found]) == (127, [32, 32, 32, 31])
    assert manager.match_pages(NO_SCOPE, text(200), (), 0, False)[0] == 96
    assert manager.match_pages(NO_SCOPE, text(9, 1), (), 0, True) == (0, [])
    assert manager.match_pages((1, 1), text(9), (), 0, True) == (0, [])
    for call in (lambda: manager.match_pages(NO_SCOPE, text(9), (), 1, True), lambda: manager.page_is_linked(0, 0, 0)):
        with pytest.raises((UnknownBufferError, LogicError)):
            call()


def test_hooks_make_blocks() -> None:
    manager = Manager(slots_config([attention(0, None, MIB), attention(1, 8, MIB)], 6, tpb=4), "virtual")
    with pytest.raises(ArgumentError, match="the blocks before are not in the tree"):
        manager.debug_insert_block(NO_SCOPE, text(8), (), [4, 4])
    assert manager.snapshot()["tree"] == []
    manager.debug_insert_block(NO_SCOPE, text(4), (), [4, 0])
    manager.debug_insert_block(NO_SCOPE, np.append(text(4), i32(-1, 9)), DIGESTS[:1], [2, 1])
    tree = manager.snapshot()["tree"]
    assert [node[2] for node in tree] == [[], [0, 1, 2, 3], [DIGESTS[0].hex(), 9]]
    assert tree[2][4] == [[1, 2, 0, 35, 0], [2, 1, 0, 35, 0]]
    manager.audit()
    handle = opened(manager, None, 12)
    with pytest.raises(OutOfPagesError):
        manager.debug_insert_block(NO_SCOPE, text(4, 1), (), [4, 4])
    manager.audit()
    with pytest.raises(ArgumentError, match="the block is not in the tree"):
        manager.debug_set_coverage(NO_SCOPE, text(8), (), 0, 1)
    manager.close(handle)


def test_statistics_count_cached_pages() -> None:
    manager = Manager(config([attention(0, None, MIB), attention(1, 8, MIB // 4)], 64 * MIB, tpb=4), "virtual")
    run(manager, text(16))
    totals = manager.slot_counts()
    assert manager.statistics() == [(totals[0], totals[0] - 4, 4), (totals[1], totals[1] - 4, 4)]
    handle = manager.create(ids=text(16))  # owns what is live: all of the first group, two of the second
    assert manager.statistics() == [(totals[0], totals[0] - 4, 0), (totals[1], totals[1] - 4, 2)]
    assert not manager.all_tree_pages_droppable()
    manager.close(handle)
    assert manager.all_tree_pages_droppable()


def test_the_audit_finds_what_is_wrong() -> None:
    def fresh() -> tuple[Manager, Any]:
        manager = Manager(one_full(12, tpb=4), "virtual")
        handle = opened(manager, None, 10)
        manager.commit(handle, text(10), (), False)
        manager.audit()
        (cache,) = manager._registry.all()
        return manager, cache

    def wrong_tail(cache: Any) -> None:
        cache.tail = cache.tail[:4]

    def wrong_node(cache: Any) -> None:
        cache.last_node = cache.last_node.parent

    def wrong_page(cache: Any) -> None:
        slots = cache.slots[0][0]
        slots[0], slots[1] = slots[1], slots[0]

    def no_owner(cache: Any) -> None:
        cache.slots[0][0][2] = cache.slots[0][0][1]

    for spoil in (wrong_tail, wrong_node, wrong_page, no_owner):
        manager, cache = fresh()
        spoil(cache)
        with pytest.raises(CorruptedError, match="invariant broken"):
            manager.audit()
