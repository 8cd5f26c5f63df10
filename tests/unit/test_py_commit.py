"""Committing and reuse, seen by one request: matched pages, private copies, blocks that become shared, the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvpool._py.manager.manager import Manager
from kvpool.errors import ArgumentError, LogicError, NeverFitsError, OutOfPagesError
from kvpool.v2.config import AttentionLayerConfig
from kvpool.v2.types import ReusePolicy
from tests.unit.py_cases import (
    MIB,
    Stepper,
    attention,
    batch,
    config,
    free,
    i32,
    i64,
    one_full,
    pages,
    slots_config,
    ssm,
)

DIGESTS = [bytes([k]) * 32 for k in range(4)]


def text(length: int, seed: int = 0) -> Any:
    return np.arange(length, dtype=np.int32) + 1000 * seed


def opened(manager: Manager, ids: Any = None, capacity: int | None = None, **more: Any) -> int:
    """A resumed cache that looked ``ids`` up; with so much capacity."""
    handle = manager.create(ids=ids, **more)
    assert manager.resume(handle, None)
    if capacity is not None:
        assert manager.resize(handle, capacity, None)
    return handle


def commit(manager: Manager, handle: int, ids: Any, digests: Sequence[bytes] = (), is_end: bool = False) -> None:
    manager.commit(handle, ids, digests, is_end)
    manager.audit()


def run(manager: Manager, ids: Any, is_end: bool = False, **more: Any) -> int:
    """A whole turn: match, compute the rest, commit it, close.  The answer is what was reused."""
    handle = opened(manager, ids, len(ids), **more)
    reused: int = manager.lengths(handle)[0]
    commit(manager, handle, ids[reused:], is_end=is_end)
    manager.close(handle)
    manager.audit()
    return reused


def held(manager: Manager, handle: int, group: int = 0) -> list[int]:
    found: list[int] = manager.held_page_indices(handle, group, 0).tolist()
    return found


def memory(manager: Manager, group: int = 0) -> Any:
    """Bytes by slot of the first pool."""
    return manager.pool_memory(group, 0).reshape(manager.slot_counts()[group], -1)


# ---------------------------------------------------------------------------------------------------------- reuse


def test_a_prefix_is_shared_and_its_unfinished_block_copied() -> None:
    manager = Manager(one_full(12, tpb=4), "host")
    first = opened(manager, None, 10)
    memory(manager)[:3] = [[1], [2], [3]]
    commit(manager, first, text(10))
    assert manager.lengths(first) == (10, 10, 10, 3)
    ids, digests = manager.committed_tokens(first)
    assert (ids.tolist(), digests) == (list(range(10)), [])
    assert manager.probe_reuse((None, None), text(10), ()) == 8  # the tail is not in the tree yet
    manager.stop_committing(first)
    assert manager.probe_reuse((None, None), text(10), ()) == 10
    manager.audit()

    second = manager.create(ids=text(9))
    assert manager.lengths(second) == (9, 9, 9, 3)
    assert manager.match_depths(second) == (9, 9)
    assert held(manager, second) == [0, 1, 2]
    assert pages(manager, second) == [-1] * 3
    manager.audit()
    assert manager.resume(second, None)
    assert pages(manager, second) == [0, 1, 3]
    assert (memory(manager)[3] == 3).all()
    manager.audit()
    manager.close(first)
    manager.close(second)
    assert manager.statistics() == [(12, 9, 3)]
    assert manager.all_tree_pages_droppable()
    manager.clear_reusable_blocks()
    assert free(manager) == [12]
    assert manager.snapshot()["tree"] == []
    manager.audit()


def test_scopes_do_not_mix() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    run(manager, text(8), scope=(7, 11))
    scopes: list[Any] = [(7, 11), (7, 12), (7, None), (None, 11), (None, None), (0, 0)]
    assert [manager.probe_reuse(scope, text(8), ()) for scope in scopes] == [8, 0, 0, 0, 0, 0]


def test_digests_are_tokens_too() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    ids = i32(-1, 5, -2, 6, -1, 7)
    handle = opened(manager, None, 6)
    commit(manager, handle, ids, DIGESTS[:2])
    assert manager.snapshot()["caches"][0]["tail"] == [DIGESTS[0].hex(), 7]
    found, digests = manager.committed_tokens(handle)
    assert (found.tolist(), digests) == (ids.tolist(), DIGESTS[:2])
    manager.close(handle)
    manager.audit()
    assert manager.probe_reuse((None, None), ids, DIGESTS[:2]) == 6
    assert manager.probe_reuse((None, None), ids, DIGESTS[1:3]) == 0
    assert manager.probe_reuse((None, None), ids, [DIGESTS[0], DIGESTS[2]]) == 2


def test_equal_blocks_of_two_requests_become_one() -> None:
    manager = Manager(slots_config([attention(0, None, MIB), attention(1, 8, MIB)], 24, tpb=4), "virtual")
    first, second = (opened(manager, text(13), 13) for _ in range(2))
    row = np.full(5, 7, np.int32)
    manager.attach_buffer(second, 0, 0, row)
    step = Stepper(manager, 1, 5)
    step([second], [0], [13], [0])
    before = [pages(manager, first, group) for group in range(2)]
    commit(manager, first, text(12))
    left = free(manager)
    commit(manager, second, text(12))
    assert pages(manager, second)[:3] == before[0][:3] != pages(manager, first)[3:]
    assert pages(manager, second, 1)[2:3] == before[1][2:3]
    assert row.tolist() == [*held(manager, second), -1]
    assert free(manager)[0] > left[0]
    assert step([second], [0], [13], [12])[1] == [(0, 0, 0, 5), (1, 0, 0, 5)]  # the row is written again
    assert step.row(0, 0) == row.tolist()
    assert step([second], [0], [13], [12])[1] == []
    commit(manager, second, text(1, 1))  # nothing that is exposed changes
    assert step([second], [0], [13], [13])[1] == []


def test_a_better_covered_block_takes_over() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    run(manager, text(8))
    manager.debug_set_coverage((None, None), text(8), (), 0, 2)
    handle = opened(manager, None, 8)
    own = pages(manager, handle)
    commit(manager, handle, text(8))
    assert pages(manager, handle) == [manager.match_pages((None, None), text(8), (), 0, False)[1][0][0], own[1]]  # type: ignore[index]
    assert manager.page_is_linked(handle, 1, 0)
    assert manager.match_pages((None, None), text(8), (), 0, False) == (
        8,
        [(pages(manager, handle)[0], 4), (own[1], 4)],
    )


def test_committed_stale_pages_leave_and_others_are_held() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB)], 12, tpb=4), "virtual")
    handle = opened(manager, None, 24)
    commit(manager, handle, text(8))
    assert manager.resize(handle, None, 20)  # blocks 0, 1, 2 are stale; 2 may still be committed
    assert held(manager, handle) == [-1, -1, 2, 3, 4, 5]
    assert manager.statistics() == [(12, 6, 2)]
    manager.audit()
    commit(manager, handle, text(12) + 8)
    assert held(manager, handle) == [-1, -1, -1, 3, 4, 5]
    assert manager.statistics() == [(12, 6, 3)]
    assert pages(manager, handle) == [-1, -1, -1, 3, 4, 5]


def test_commit_moves_the_history() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB)], 12, tpb=4), "virtual")
    handle = opened(manager, None, 24)
    row = np.full(6, 7, np.int32)
    manager.attach_buffer(handle, 0, 0, row)
    commit(manager, handle, text(14))
    assert manager.lengths(handle) == (14, 14, 24, 6)
    assert row.tolist() == [-1, 1, 2, 3, 4, 5]
    assert held(manager, handle) == row.tolist()
    assert manager.statistics() == [(12, 6, 1)]


def test_scratch_blocks_are_not_committed() -> None:  # scenario 82
    layers = [attention(k, 8, MIB // 4) for k in range(2)]
    manager = Manager(slots_config(layers, 24, tpb=4, rewind=0), "virtual")
    handle = opened(manager, None, 40)
    begin, end, slots = manager.scratch_desc(handle, 0) or (0, 0, [])
    assert (begin, end, len(slots)) == (0, 8, 4)
    commit(manager, handle, text(20))  # not what was announced: most of it has no content
    assert manager.scratch_desc(handle, 0) == (3, 8, slots[:3])
    assert [page is None for page in manager.match_pages((None, None), text(20), (), 0, False)[1]] == [True] * 5
    commit(manager, handle, text(20) + 20)
    assert manager.scratch_desc(handle, 0) is None
    assert [page is None for page in manager.match_pages((None, None), text(40), (), 0, False)[1]] == [True] * 8 + [
        False,
        False,
    ]
    manager.close(handle)
    assert manager.probe_reuse((None, None), text(40), ()) == 40
    assert manager.probe_reuse((None, None), text(36), ()) == 0


# -------------------------------------------------------------------------------------------------------- refusals


def test_what_a_commit_refuses_in_order() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    handle = manager.create(text_only=True)
    with pytest.raises(LogicError, match=r"^commit\(\) needs an ACTIVE KV cache; this one is SUSPENDED$"):
        manager.commit(handle, i32(), (), False)
    assert manager.resume(handle, None)
    assert manager.resize(handle, 6, 0)
    before = manager.snapshot()
    manager.commit(handle, i32(), (), False)
    manager.set_beam_width(handle, 2)
    with pytest.raises(LogicError, match=r"^commit\(\): beam_width is 2; only one beam can be committed$"):
        manager.commit(handle, i32(-1), (), False)
    manager.set_beam_width(handle, 1)
    with pytest.raises(ArgumentError, match=r"^commit\(\): a digest, but text_only was promised$"):
        manager.commit(handle, i32(-5, *[0] * 8), DIGESTS[:1], False)
    with pytest.raises(ArgumentError, match=r"^tokens\[1\]: token ids must be from 0 to 2147483647, not -5$"):
        manager.commit(handle, i32(0, -5, *[0] * 8), (), False)
    with pytest.raises(ArgumentError, match=r"^commit\(\): 7 tokens after 0 exceed the capacity 6$"):
        manager.commit(handle, text(7), (), False)
    assert manager.snapshot() == before
    manager.commit(handle, i32(), (), True)
    assert not manager.commit_allowed(handle)
    with pytest.raises(LogicError, match=r"^Cannot commit tokens after stop_committing\(\)$"):
        manager.commit(handle, i32(-5), (), False)
    for call in (manager.probe_reuse, manager.probe_first_new_block_key):
        with pytest.raises(ArgumentError, match=r"^input_tokens\[1\].*not -2$"):
            call((None, None), i32(0, -2), DIGESTS[:1])
    with pytest.raises(ArgumentError, match=r"^input_tokens\[0\]"):
        manager.create(ids=i32(-1))
    assert manager.num_open() == 1


def test_min_snapshot_wants_history_at_an_end() -> None:  # scenario 59
    manager = Manager(config([attention(0), ssm(1)]), "virtual")
    handle = opened(manager, None, 96)
    assert manager.resize(handle, None, 48)
    message = r"^commit\(\): commit_min_snapshot needs a history of 0 or 32 tokens, not 48$"
    with pytest.raises(ArgumentError, match=message):
        manager.commit(handle, text(32), (), False)
    commit(manager, handle, text(48))
    commit(manager, handle, text(16) + 48)
    assert manager.lengths(handle)[:2] == (64, 64)


def test_clear_needs_closed_caches() -> None:
    manager = Manager(one_full(4), "virtual")
    handle = manager.create()
    with pytest.raises(LogicError, match=r"^clear_reusable_blocks\(\): 1 KV cache\(s\) still open$"):
        manager.clear_reusable_blocks()
    manager.close(handle)
    manager.clear_reusable_blocks()


# ------------------------------------------------------------------------------------------------------------ tail


def test_the_tail_goes_into_the_tree_when_committing_stops() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    first = opened(manager, None, 8)
    commit(manager, first, text(6))
    assert manager.snapshot()["caches"][0]["tail"] == [4, 5]
    assert manager.page_is_linked(first, 1, 0) is False
    assert manager.page_is_linked(first, 2, 0) is None
    manager.suspend(first)
    manager.stop_committing(first)
    assert manager.page_is_linked(first, 1, 0) is True
    assert manager.match_pages((None, None), text(6), (), 0, False) == (6, [(0, 4), (1, 2)])
    manager.audit()
    second = opened(manager, text(6), 8)  # a copy, while the first still owns the page
    assert pages(manager, second) == [0, 2]
    commit(manager, second, text(2) + 6)  # the longer block takes the place; the first page covers less
    assert manager.match_pages((None, None), text(8), (), 0, False) == (8, [(0, 4), (2, 4)])
    assert manager.page_is_linked(first, 1, 0) is False
    third = opened(manager, text(4), 8)
    commit(manager, third, text(1) + 4, is_end=True)  # a longer block covers it as well
    assert manager.page_is_linked(third, 1, 0) is False
    manager.close(first)
    assert manager.statistics() == [(12, 9, 0)]
    for handle in (second, third):
        manager.close(handle)
    assert manager.statistics() == [(12, 10, 2)]
    manager.audit()


def test_no_root_without_a_block() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    handle = opened(manager, None, 4)
    commit(manager, handle, text(3))
    assert manager.snapshot()["tree"] == []
    manager.suspend(handle)
    manager.close(handle)
    assert [node[1:3] for node in manager.snapshot()["tree"]] == [[-1, []], [0, [0, 1, 2]]]
    manager.audit()


def test_beams_keep_the_tail_out() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    handle = opened(manager, None, 8)
    commit(manager, handle, text(6))
    manager.set_beam_width(handle, 2)
    manager.close(handle)
    manager.audit()
    assert manager.probe_reuse((None, None), text(6), ()) == 4


# ------------------------------------------------------------------------------------------------- states, snapshots


def test_a_snapshot_is_a_copy_and_the_last_one_is_moved() -> None:
    manager = Manager(config([attention(0, None, MIB), ssm(1, MIB)], tpb=4), "host")
    group = manager.layout().life_cycles[1].pool_group
    first = opened(manager, None, 6)
    state = manager.ssm_slot(first, 1, 0)
    memory(manager, group)[state] = 7
    commit(manager, first, text(6))
    depth, found = manager.match_pages((None, None), text(6), (), 1, False)
    assert (depth, found[0]) == (6, None)
    assert found[1] is not None
    assert found[1][0] != state
    assert found[1][1] == 2
    assert (memory(manager, group)[found[1][0]] == 7).all()
    assert not manager.page_is_linked(first, 1, 0)
    assert manager.resize(first, 8, 6)
    commit(manager, first, text(2) + 6, is_end=True)
    assert manager.ssm_slot(first, 1, 0) == -1
    assert manager.match_pages((None, None), text(8), (), 1, False)[1] == [None, (state, 4)]
    manager.suspend(first)
    assert manager.resume(first, None)  # takes no new state
    manager.set_beam_width(first, 2)
    assert manager.ssm_slot(first, 1, 1) == -1
    manager.audit()
    manager.close(first)
    second = opened(manager, text(8))
    assert manager.lengths(second)[0] == 8
    assert (memory(manager, group)[manager.ssm_slot(second, 1, 0)] == 7).all()
    assert manager.ssm_slot(second, 1, 0) != state
    manager.audit()


def test_a_state_that_is_there_already_stays_with_the_request() -> None:
    manager = Manager(config([attention(0, None, MIB), ssm(1, MIB)], tpb=4), "virtual")
    run(manager, text(8))
    handle = opened(manager, None, 8)
    state = manager.ssm_slot(handle, 1, 0)
    commit(manager, handle, text(8), is_end=True)
    assert manager.ssm_slot(handle, 1, 0) == state
    manager.close(handle)
    manager.audit()


def test_snapshots_are_left_out_without_room() -> None:
    manager = Manager(slots_config([attention(0, None, MIB), ssm(1, 2 * MIB)], 4, tpb=4), "virtual")
    assert manager.slot_counts() == [4]
    handle = opened(manager, None, 10)  # three pages and a state
    commit(manager, handle, text(10))
    assert manager.statistics() == [(4, 0, 0)]
    assert manager.probe_reuse((None, None), text(10), ()) == 0
    assert [node[1] for node in manager.snapshot()["tree"]] == [-1, 0, 1]
    manager.close(handle)
    handle = opened(manager, None, 4)
    commit(manager, handle, text(4, 1))  # the snapshot takes a slot that was free
    assert manager.resize(handle, 6, 4)
    commit(manager, handle, text(2, 2))  # and these take the place of older ones
    manager.close(handle)
    manager.audit()


# --------------------------------------------------------------------------------------------------- first resume


def test_a_source_is_taken_over_when_nothing_else_is_left() -> None:
    manager = Manager(one_full(3, tpb=4), "host")
    run(manager, text(10))
    memory(manager)[:] = [[1], [2], [3]]
    handle = manager.create(ids=text(10))
    assert manager.resume(handle, None)
    assert sorted(pages(manager, handle)) == [0, 1, 2]
    assert [int(memory(manager)[slot][0]) for slot in pages(manager, handle)] == [1, 2, 3]
    manager.audit()
    assert manager.page_is_linked(handle, 2, 0) is False
    assert manager.probe_reuse((None, None), text(10), ()) == 8
    manager.close(handle)
    assert manager.probe_reuse((None, None), text(10), ()) == 10


def test_a_shared_source_is_not_taken_over() -> None:
    manager = Manager(one_full(3, tpb=4), "virtual")
    run(manager, text(10))
    first, second = manager.create(ids=text(10)), manager.create(ids=text(10))
    before = manager.snapshot()
    assert not manager.resume(first, None)
    assert manager.snapshot() == before
    manager.audit()
    manager.close(second)
    assert manager.resume(first, None)
    manager.audit()


def test_states_are_taken_over_too() -> None:
    manager = Manager(slots_config([attention(0, None, MIB), ssm(1, 2 * MIB)], 4, tpb=4), "host")
    run(manager, text(6), is_end=True)
    memory(manager)[:] = [[k] for k in range(4)]
    source = manager.match_pages((None, None), text(6), (), 1, False)[1][1]
    assert source is not None
    other = opened(manager, None, 0)
    assert manager.statistics()[0][1:] == (0, 3)
    handle = manager.create(ids=text(6))
    assert manager.resume(handle, None)
    assert manager.ssm_slot(handle, 1, 0) == source[0]
    manager.audit()
    for each in (handle, other):
        manager.close(each)
    manager.audit()


def test_closing_or_stopping_before_the_first_resume() -> None:
    manager = Manager(config([attention(0, None, MIB), attention(1, 8, MIB)], tpb=4), "sim")
    run(manager, text(10))
    device = manager.device_handle()
    assert device is not None
    handle = manager.create(ids=text(9))
    manager.set_stream(handle, device.create_stream())
    before = device.calls()
    manager.stop_committing(handle)
    manager.audit()
    manager.close(handle)
    assert device.calls() == before  # no stream has touched these pages
    manager.audit()
    assert manager.all_tree_pages_droppable()


def test_gate_counts_shared_pages_as_others() -> None:
    manager = Manager(one_full(20, tpb=4, max_util_for_resume=0.5), "virtual")
    first = opened(manager, None, 44)
    commit(manager, first, text(44))
    second = manager.create(ids=text(44))
    assert not manager.resume(second, None)  # the first holds 11 of 20
    manager.suspend(first)
    assert manager.resume(second, None)
    assert not manager.resume(first, None)
    manager.close(second)
    assert manager.resume(first, None)
    manager.close(first)
    third = opened(manager, None, 4)
    assert manager.resume(manager.create(ids=text(44)), None)  # cached pages count for nobody
    assert manager.lengths(third)[2] == 4


OPTIONAL = [
    attention(0, None, MIB),
    AttentionLayerConfig(1, attention(1, None, MIB).buffers, 4, None, ReusePolicy.OPTIONAL),
    AttentionLayerConfig(2, attention(2, None, MIB).buffers, 2, None, ReusePolicy.OPTIONAL),
]


def test_optional_groups() -> None:  # scenario 130
    manager = Manager(slots_config(OPTIONAL, 40, tpb=4), "virtual")
    source = opened(manager, None, 8)
    commit(manager, source, text(8))
    reader = manager.create(ids=text(8))
    status = manager.reuse_status(reader)
    assert [tuple(entry) for entry in status] == [
        (0, False, True, 8, [(0, 8)]),
        (1, True, True, 8, [(4, 8)]),
        (2, True, True, 8, [(4, 8)]),
    ]
    for groups in ([0], [3], [-1], [1, 0]):
        with pytest.raises(ArgumentError, match=r"optional_reuse_groups: -?\d is not an optional layer group"):
            manager.resume(reader, None, groups)
    assert manager.resume(reader, None, [1])
    manager.audit()
    assert pages(manager, reader, 1)[1] == pages(manager, source, 1)[1]
    assert pages(manager, reader, 2)[1] != pages(manager, source, 2)[1]
    chosen = [pages(manager, reader, group) for group in range(3)]
    manager.suspend(reader)
    with pytest.raises(ArgumentError, match="chosen at the first resume already"):
        manager.resume(reader, None, [])
    assert manager.resume(reader, None, [1])
    assert [pages(manager, reader, group) for group in range(3)] == chosen
    manager.suspend(reader)
    assert manager.resume(reader, None)
    commit(manager, reader, i32())
    manager.audit()


def test_optional_groups_that_are_not_complete() -> None:
    manager = Manager(slots_config(OPTIONAL, 40, tpb=4), "virtual")
    run(manager, text(10))
    manager.debug_set_coverage((None, None), text(10), (), 1, 1)
    manager.debug_set_coverage((None, None), text(8), (), 2, 0)
    reader = manager.create(ids=text(10))
    assert [tuple(entry)[2:] for entry in manager.reuse_status(reader)] == [
        (True, 10, [(0, 10)]),
        (False, 10, [(4, 9)]),
        (True, 10, [(8, 10)]),
    ]
    with pytest.raises(ArgumentError, match="layer group 1 is not complete"):
        manager.resume(reader, None, [2, 1])
    before = [page for group in range(3) for page in held(manager, reader, group)]
    assert manager.resume(reader, None)
    manager.audit()
    live = [pages(manager, reader, group) for group in range(3)]
    assert [[page >= 0 for page in row] for row in live] == [[True] * 3, [False, True, True], [False, False, True]]
    assert not set(live[1]) & (set(before) - {-1})
    nothing = manager.create()
    assert [tuple(entry) for entry in manager.reuse_status(nothing)][1] == (1, True, True, 0, [])
    assert manager.resume(nothing, None, [1, 2])
    manager.close(nothing)
    manager.close(reader)
    manager.audit()


# ------------------------------------------------------------------------------------------------ room, priorities


def test_cached_pages_make_room() -> None:
    manager = Manager(one_full(8, tpb=4), "virtual")
    run(manager, text(12))
    run(manager, text(12, 1))
    assert manager.statistics() == [(8, 2, 6)]
    handle = opened(manager, None, 24)  # 6 of 8: four victims, the older prompt from its end, then the other one's end
    assert manager.probe_reuse((None, None), text(12), ()) == 0
    assert manager.probe_reuse((None, None), text(12, 1), ()) == 8
    manager.audit()
    before = manager.snapshot()
    with pytest.raises(NeverFitsError):
        manager.resize(handle, 36, None)
    matched = manager.create(ids=text(12, 1))
    held_back = manager.snapshot()
    assert not manager.resize(handle, 28, None)  # both are owned now
    assert manager.snapshot() == held_back
    with pytest.raises(OutOfPagesError):
        manager.set_beam_width(handle, 3)
    assert manager.snapshot() == held_back
    manager.close(matched)
    assert manager.snapshot()["pool_groups"] == before["pool_groups"]
    assert manager.resize(handle, 28, None)
    manager.audit()


def test_pages_that_the_call_itself_gives_up_make_room() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB)], 5, tpb=4), "virtual")
    handle = opened(manager, None, 16)
    commit(manager, handle, text(12))  # block 0 is cached already
    assert manager.statistics() == [(5, 1, 1)]
    assert manager.resize(handle, 28, 16)  # wants three: one free, one cached, and what block 1 leaves
    assert held(manager, handle)[:2] == [-1, -1]
    manager.audit()


def test_priorities_decide_who_goes_first() -> None:
    manager = Manager(one_full(6, tpb=4), "virtual")
    run(manager, text(8), priorities=[[80, 20]])
    run(manager, text(8, 1), priorities=[[50]])
    assert manager.snapshot()["queues"] == [[[20, 1, 1], [50, 1, 3], [50, 1, 2], [80, 1, 0]]]
    handle = manager.create(ids=text(8), priorities=[[10, 60]])
    manager.extend_priorities(handle, [[5]])
    manager.close(handle)
    assert manager.snapshot()["queues"] == [[[50, 1, 3], [50, 1, 2], [60, 1, 1], [80, 1, 0]]]
    plain = manager.create()
    manager.extend_priorities(plain, [[3]])
    assert manager.resume(plain, None)
    assert manager.resize(plain, 12, None)
    commit(manager, plain, text(12, 2))
    manager.close(plain)
    assert [entry[0] for entry in manager.snapshot()["queues"][0]][:3] == [3, 3, 3]
    manager.audit()


def test_the_end_of_a_sequence_is_marked() -> None:
    def marks() -> list[tuple[int, int]]:
        return [(node[1], node[3]) for node in manager.snapshot()["tree"]]

    layers = [attention(0, None, MIB), attention(1, 8, MIB)]
    manager = Manager(config(layers, 256 * MIB, tpb=4, window_tail_interval=0, window_tail_slack=4), "virtual")
    run(manager, text(16), prompt_length=9)
    assert marks() == [(-1, 0), (0, 0), (1, 2), (2, 0), (3, 1)]
    run(manager, text(24))  # the same line goes on: its older end is not needed any more
    assert marks() == [(-1, 0), (0, 0), (1, 2), (2, 0), (3, 0), (4, 0), (5, 1)]
    run(manager, np.concatenate([text(20), text(6, 1)]), prompt_length=17)  # a fork behind block 4
    assert dict(marks()[:6]) == {-1: 0, 0: 0, 1: 0, 2: 0, 3: 0, 4: 4}
    manager.audit()


def test_a_request_that_is_never_resumed_marks_its_end_too() -> None:
    manager = Manager(config([attention(0, None, MIB), attention(1, 8, MIB)], tpb=4), "virtual")
    run(manager, text(16))
    handle = manager.create(ids=text(12))
    manager.close(handle)
    assert [node[3] for node in manager.snapshot()["tree"]] == [0, 0, 0, 1, 1]
    manager.audit()


# ------------------------------------------------------------------------------------------------- steps and commits


LAYOUTS: list[tuple[list[Any], int, dict[str, Any]]] = [
    ([attention(0, None, MIB)], 90, {}),
    ([attention(0, 9, MIB // 2), attention(1, None, MIB // 2)], 60, {}),
    ([attention(0, 9, MIB // 2), attention(1, None, MIB // 2)], 60, {"commit_min_snapshot": True}),
    ([attention(0, 5, MIB // 2, 3), attention(1, 17, MIB), attention(2, None, MIB // 4), ssm(3)], 130, {}),
]


@pytest.mark.parametrize(("layers", "quota", "fields"), LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_decides_as_single_calls_do(layers: list[Any], quota: int, fields: dict[str, Any], seed: int) -> None:
    cfg = config(layers, quota * MIB, tpb=4, typical_step=batch(*[(90, 80)] * 3), **fields)
    whole, single = Manager(cfg, "virtual"), Manager(cfg, "virtual")
    rng = random.Random(seed)
    step = Stepper(whole, 5, 40)
    stories = [text(160, seed=rng.randrange(2)).tolist() for _ in range(5)]
    handles = [0] * 5
    answers: set[bool] = set()

    def restart(i: int) -> None:
        if handles[i]:
            for manager in (whole, single):
                manager.close(handles[i])
        ids = np.array(stories[i][: rng.randrange(60)], np.int32)
        created = [manager.create(ids=ids, prompt_length=len(ids)) for manager in (whole, single)]
        resumed = [manager.resume(created[0], None) for manager in (whole, single)]
        assert (created[0], resumed[0]) == (created[1], resumed[1])
        handles[i] = created[0]
        if not resumed[0]:
            for manager in (whole, single):
                manager.close(created[0])
            handles[i] = 0

    for i in range(5):
        restart(i)
    for _ in range(150):
        chosen = [i for i in rng.sample(range(5), rng.randint(1, 5)) if handles[i]]
        counts, capacities, histories = [], [], []
        for i in chosen:
            committed, history, capacity, _ = whole.lengths(handles[i])
            most = min(capacity, 150) - committed
            count = rng.choice((0, 1, 1, most, rng.randint(0, most))) if most > 0 else 0
            if whole._rules.commit_min_snapshot and history not in (committed, committed + count):
                count = 0
            low = max(history, committed + count)
            histories.append(rng.choice((low, low, rng.randint(low, max(low, min(capacity, 150))))))
            capacities.append(min(152, histories[-1] + rng.choice((0, 1, 1, 7, 20))))
            counts.append(count)
        values = [stories[i][whole.lengths(handles[i])[0] :][:n] for i, n in zip(chosen, counts, strict=True)]
        ok, _, _ = step([handles[i] for i in chosen], chosen, capacities, histories, texts=values)
        answers.update(ok)
        for i, done, ids, capacity, history in zip(chosen, ok, values, capacities, histories, strict=True):
            if done:
                single.commit(handles[i], np.array(ids, np.int32), (), False)
                assert single.resize(handles[i], capacity, history)
        assert whole.snapshot() == single.snapshot()
        whole.audit()
        for i, done in zip(chosen, ok, strict=True):
            if done:
                for group in range(step.table.shape[0]):
                    indices = pages(whole, handles[i], group)
                    assert step.row(group, i) == indices + [-1] * (40 - len(indices))
        if rng.random() < 0.2:
            restart(rng.randrange(5))
    assert answers == {True, False}


def test_a_request_that_lacks_room_commits_nothing() -> None:
    manager = Manager(one_full(6, tpb=4), "virtual")
    first, second = opened(manager, None, 8), opened(manager, None, 8)
    step = Stepper(manager, 2, 8)
    before = manager.snapshot()["caches"][1]
    ok, dirty, _ = step([first, second], [0, 1], [16, 12], [8, 8], texts=[text(8), text(8, 1)])
    assert (ok, [row for _, row, _, _ in dirty]) == ([True, False], [0])
    assert manager.snapshot()["caches"][1] == before
    assert [node[2] for node in manager.snapshot()["tree"]] == [[], [0, 1, 2, 3], [4, 5, 6, 7]]
    manager.audit()


def test_a_step_shows_rebased_entries() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    first, second = opened(manager, None, 8), opened(manager, None, 8)
    step = Stepper(manager, 2, 8)
    step([first, second], [0, 1], [8, 8], [0, 0])
    _, dirty, _ = step([first, second], [0, 1], [9, 9], [8, 8], texts=[text(8), text(8)])
    assert dirty == [(0, 0, 2, 3), (0, 1, 0, 3)]  # the second one's blocks are the first one's now
    assert step.row(0, 1) == [0, 1, 2, *[-1] * 5]  # and its third page took a slot that came free
    manager.audit()


def test_what_a_step_refuses() -> None:
    manager = Manager(one_full(12, tpb=4), "virtual")
    first, second = opened(manager, None, 8), opened(manager, None, 8)
    step = Stepper(manager, 2, 8)
    before = manager.snapshot()

    def refused(error: type[Exception], message: str, **more: Any) -> None:
        arguments = {"handles": [first, second], "rows": [0, 1], "capacities": [9, 9], "histories": [8, 8], **more}
        with pytest.raises(error, match=message):
            step(**arguments)
        assert manager.snapshot() == before
        manager.audit()

    refused(TypeError, r"^step\(\): tokens must be \(values, offsets\)$", tokens=i32(1, 2))
    refused(TypeError, "tokens values must be an array", tokens=([1], i32(0, 1)))
    refused(ArgumentError, "tokens offsets must have dtype int32", tokens=(i32(1), i64(0, 1)))
    refused(ArgumentError, "offsets has 2 entries, 3 are needed", tokens=(i32(1), i32(0, 1)))
    for offsets in (i32(1, 1, 2), i32(0, 2, 1), i32(0, 1, 3), i32(0, 3, 2), i32(0, -1, 2)):
        refused(ArgumentError, "offsets must begin with 0, never decrease and end with 2$", tokens=[i32(1, 2), offsets])
    refused(
        ArgumentError, r"^step\(\): request 1: tokens\[2\]: token ids .* not -9$", tokens=(i32(1, 2, -9), i32(0, 1, 3))
    )
    refused(ArgumentError, r"request 1: 9 tokens after 0 exceed the capacity 8$", texts=[[], text(9)])
    refused(
        ArgumentError,
        r"request 0: history 4: must be at least the 5 committed tokens$",
        texts=[text(5), []],
        histories=[4, 8],
    )
    manager.stop_committing(second)
    before = manager.snapshot()
    refused(
        LogicError, r"^step\(\): request 1: Cannot commit tokens after stop_committing\(\)$", texts=[text(1), text(1)]
    )
    assert step([first, second], [0, 1], [9, 9], [8, 8], texts=[text(1), []])[0] == [True, True]
    assert manager.lengths(first)[0] == 1


def test_copies_of_one_call_that_touch_each_other_come_in_turn() -> None:
    class Device:
        def __init__(self) -> None:
            self.batches: list[Any] = []

        def wait(self, stream: int, event: int) -> None: ...

        def record(self, stream: int) -> int:
            return 0

        def copy(self, stream: int, tasks: Any) -> None:
            self.batches.append([(d, s) for d, s, _ in tasks])

    manager = Manager(one_full(8, tpb=4), "virtual")
    ground = manager._ground
    device = Device()
    ground.device = device  # type: ignore[assignment]
    ground.tier.copy_tasks = lambda group, d, s: [(d, s, 1)]  # type: ignore[method-assign, assignment]
    ground.order(0, [(0, 1, 2), (0, 3, 2), (0, 2, 4), (0, 5, 6), (0, 5, 7), (0, 7, 5)])
    assert device.batches == [[(1, 2), (3, 2)], [(2, 4), (5, 6)], [(5, 7)], [(7, 5)]]
