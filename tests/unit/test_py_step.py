"""The batch step: its checks, its table, its dirty list, and that it decides as single resizes do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool._py.manager.manager import Manager
from kvpool.errors import ArgumentError, LogicError, NeverFitsError
from tests.unit.py_cases import (
    MIB,
    Stepper,
    active,
    attention,
    batch,
    config,
    i32,
    i64,
    one_full,
    pages,
    slots_config,
    ssm,
)


def test_first_step_writes_whole_rows_then_only_changes() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB // 2), attention(1, None, MIB // 2)], 24, tpb=4), "virtual")
    first, second = active(manager, (4, 0), (4, 0))
    step = Stepper(manager, 4, 8)
    ok, dirty, event = step([first, second], [2, 0], [5, 4], [4, 3])
    assert (ok, event) == ([True, True], 0)
    assert dirty == [(0, 2, 0, 8), (1, 2, 0, 8), (0, 0, 0, 8), (1, 0, 0, 8)]
    assert step.row(0, 2) == [0, 4, *[-1] * 6]
    assert step.row(1, 0) == [3, *[-1] * 7]
    assert step.row(0, 1) == [-7] * 8
    assert step([first, second], [2, 0], [6, 4], [5, 3]) == ([True, True], [], 0)
    assert step([second], [0], [5], [4]) == ([True], [(0, 0, 1, 2), (1, 0, 1, 2)], 0)
    ok, dirty, _ = step([first], [2], [12], [11])
    assert dirty == [(0, 2, 0, 1), (0, 2, 2, 3), (1, 2, 2, 3)]  # stale, and new
    assert step.row(0, 2)[:4] == [-1, 4, 0, -1]
    ok, dirty, _ = step([first], [2], [16], [15])
    assert dirty == [(0, 2, 1, 2), (0, 2, 3, 4), (1, 2, 3, 4)]
    ok, dirty, _ = step([first], [2], [28], [19])
    assert dirty == [(0, 2, 2, 3), (0, 2, 4, 7), (1, 2, 4, 7)]
    manager.audit()


def test_touching_intervals_merge_and_shrinks_are_written() -> None:
    manager = Manager(slots_config([attention(0, 4, MIB)], 24, tpb=4), "virtual")
    (handle,) = active(manager, (4, 0))
    step = Stepper(manager, 1, 8)
    step([handle], [0], [4], [0])
    _, dirty, _ = step([handle], [0], [12], [8])  # block 0 stale, 1 and 2 new
    assert dirty == [(0, 0, 0, 3)]
    assert step.row(0, 0)[:4] == [-1, 0, 1, -1]
    step([handle], [0], [24], [8])
    _, dirty, _ = step([handle], [0], [13], [8])
    assert dirty == [(0, 0, 4, 6)]
    assert step.row(0, 0)[4:] == [-1] * 4


def test_what_makes_a_row_be_written_again() -> None:
    manager = Manager(one_full(24, tpb=4), "virtual")
    first, second = active(manager, (4, 0), (4, 0))
    step = Stepper(manager, 3, 4)
    whole = [(0, 0, 0, 4)]

    def again(row: int = 0) -> list[tuple[int, ...]]:
        return step([first], [row], [4], [0])[1]

    assert again() == whole
    assert again() == []
    assert manager.resize(first, 4, 0)
    assert again() == whole
    manager.suspend(first)
    assert manager.resume(first, None)
    assert again() == whole
    manager.set_beam_width(first, 2)
    manager.set_beam_width(first, 1)
    assert again() == whole
    assert again(1) == [(0, 1, 0, 4)]
    assert again() == whole
    step([second], [0], [4], [0])
    assert again() == whole
    old, step.table = step.table, step.table.copy()
    assert again() == whole
    step.table = old
    assert again() == whole
    assert again() == []
    # What changes nothing that is exposed keeps the row.
    manager.stop_committing(first)
    manager.set_stream(first, 3)
    assert not active_fails(manager, first)
    assert again() == []


def active_fails(manager: Manager, handle: int) -> bool:
    """A resize that does not fit changes nothing, so the row stays valid."""
    (big,) = active(manager, (20 * 4, 0))
    answer = manager.resize(handle, 16, 0)
    manager.close(big)
    return answer


def test_requests_are_served_in_list_order_and_failures_change_nothing() -> None:
    manager = Manager(one_full(4, tpb=4), "virtual")
    handles = active(manager, (4, 0), (4, 0), (4, 0))
    step = Stepper(manager, 3, 4)
    ok, dirty, _ = step(handles, [0, 1, 2], [8, 8, 4], [4, 4, 3])
    assert ok == [True, False, True]
    assert [row for _, row, _, _ in dirty] == [0, 2]
    assert step.row(0, 1) == [-7] * 4  # not even bound
    assert manager.lengths(handles[1]) == (0, 0, 4, 1)
    assert step(handles[::-1], [2, 1, 0], [4, 8, 8], [3, 4, 4])[0] == [True, False, True]
    manager.close(handles[0])
    ok, dirty, _ = step(handles[1:], [1, 2], [8, 8], [4, 4])
    assert (ok, dirty) == ([True, True], [(0, 1, 0, 4), (0, 2, 1, 2)])
    manager.audit()


def test_state_groups_have_no_blocks() -> None:
    manager = Manager(config([ssm(0), attention(1)]), "virtual")
    handle = manager.create()
    assert manager.resume(handle, None)
    step = Stepper(manager, 1, 3)
    assert step([handle], [0], [40], [0])[1] == [(0, 0, 0, 3), (1, 0, 0, 3)]
    assert step.row(0, 0) == [-1] * 3
    assert step([handle], [0], [70], [0])[1] == [(1, 0, 2, 3)]


def test_empty_batch() -> None:
    step = Stepper(Manager(one_full(4), "virtual"), 0, 0)
    assert step([], [], [], []) == ([], [], 0)


Change = Callable[[dict[str, Any]], None]


def setting(name: str, value: Any) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = value(arguments[name]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (setting("tokens", (1, 2)), TypeError, "tokens values"),
        (setting("handles", lambda a: a.tolist()), TypeError, "handles"),
        (setting("table", None), TypeError, "table"),
        (setting("stream", 1.5), TypeError, "stream"),
        (setting("rows", lambda a: a.astype(np.int64)), ArgumentError, "rows"),
        (setting("handles", lambda a: a.astype(np.uint64)), ArgumentError, "handles"),
        (setting("capacities", lambda a: np.repeat(a, 2)[::2]), ArgumentError, "capacities"),
        (setting("histories", lambda a: a.reshape(2, 1)), ArgumentError, "histories"),
        (setting("histories", lambda a: a[:1]), ArgumentError, "histories"),
        (setting("table", lambda a: a[0]), ArgumentError, "table"),
        (setting("table", lambda a: a[:, :, ::2]), ArgumentError, "table"),
        (setting("table", lambda a: np.broadcast_to(a, a.shape)), ArgumentError, "writable"),
        (setting("table", lambda a: np.repeat(a, 2, axis=0)), ArgumentError, "layer groups"),
        (setting("handles", lambda a: a + i64(0, 1 << 32)), LogicError, "request 1.*closed or unknown"),
        (setting("handles", lambda a: a[[0, 0]]), ArgumentError, "request 1.*twice"),
        (setting("rows", i32(0, 3)), ArgumentError, "request 1.*rows"),
        (setting("rows", i32(-1, 0)), ArgumentError, "request 0.*rows"),
        (setting("rows", i32(2, 2)), ArgumentError, "request 1.*rows"),
        (setting("histories", i32(3, 1)), ArgumentError, "request 1.*decreased: 1 is below 2"),
        (setting("capacities", i32(8, 3)), ArgumentError, "request 1.*capacity 3"),
        (setting("capacities", i32(8, 33)), ArgumentError, "request 1.*9 blocks"),
        (setting("capacities", i32(8, 32)), NeverFitsError, "request 1"),
    ],
)
def test_a_wrong_argument_fails_the_whole_call(change: Change, error: type[Exception], message: str) -> None:
    manager = Manager(one_full(7, tpb=4), "virtual")
    handles = active(manager, (4, 2), (4, 2))
    arguments: dict[str, Any] = {
        "handles": i64(*handles),
        "rows": i32(0, 1),
        "capacities": i32(8, 8),
        "histories": i32(4, 4),
        "table": np.full((1, 3, 8), -7, np.int32),
    }
    table = arguments["table"]
    change(arguments)
    before = manager.snapshot()
    with pytest.raises(error, match=message):
        manager.step(**arguments)
    assert manager.snapshot() == before
    assert (table == -7).all()
    assert manager.resize(handles[0], 4, 2)  # nobody is left inside
    manager.audit()


def test_states_that_a_step_refuses() -> None:
    manager = Manager(one_full(8, tpb=4), "virtual")
    first, second = active(manager, (4, 0), (4, 0))
    step = Stepper(manager, 2, 8)
    manager.suspend(second)
    with pytest.raises(LogicError, match="request 1"):
        step([first, second], [0, 1], [5, 5], [4, 4])
    assert manager.resume(second, None)
    manager.set_beam_width(second, 2)
    with pytest.raises(LogicError, match=r"request 1.*beam_width"):
        step([first, second], [0, 1], [4, 4], [0, 0])
    manager.set_beam_width(second, 1)
    row = np.zeros(1, np.int32)
    manager.attach_buffer(second, 0, 0, row)
    with pytest.raises(ArgumentError, match=r"request 1.*attached"):
        step([first, second], [0, 1], [4, 5], [0, 4])
    assert step([first, second], [0, 1], [4, 4], [0, 3])[0] == [True, True]


def test_buffers_other_than_arrays_are_taken() -> None:
    manager = Manager(one_full(8, tpb=4), "virtual")
    (handle,) = active(manager, (4, 0))
    table = np.zeros((1, 1, 4), np.int32)
    result = manager.step(
        memoryview(i64(handle)),  # type: ignore[arg-type]
        memoryview(i32(0)),  # type: ignore[arg-type]
        memoryview(i32(8)),  # type: ignore[arg-type]
        memoryview(i32(0)),  # type: ignore[arg-type]
        memoryview(table),  # type: ignore[arg-type]
    )
    assert result.ok.tolist() == [True]
    assert table.tolist() == [[[0, 1, -1, -1]]]


SIX = batch(*[(60, 50)] * 6)
LAYOUTS = [
    [attention(0, None, MIB)],
    [attention(0, 9, MIB // 2), attention(1, None, MIB // 2)],
    [attention(0, 5, MIB // 2, 3), attention(1, 17, MIB), attention(2, None, MIB // 4), ssm(3)],
]


@pytest.mark.parametrize("layers", LAYOUTS)
@pytest.mark.parametrize("rewind", [None, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_a_step_decides_as_single_resizes_do(layers: list[Any], rewind: int | None, keep: bool) -> None:
    cfg = config(layers, 110 * MIB, tpb=4, rewind=rewind, typical_step=SIX)
    whole, single = Manager(cfg, "virtual"), Manager(cfg, "virtual")
    rng = random.Random(3)
    step = Stepper(whole, 6, 40)
    handles = active(whole, *[(0, 0)] * 6, keep=keep)
    assert active(single, *[(0, 0)] * 6, keep=keep) == handles
    lengths = [(0, 0)] * 6
    answers: set[bool] = set()
    for _ in range(120):
        chosen = rng.sample(range(6), rng.randint(1, 6))
        wanted = []
        for i in chosen:
            capacity, history = lengths[i]
            history = rng.randint(history, min(capacity, 119))
            wanted.append((min(history + rng.choice((1, 1, 1, 5, 20)), 120), history))
        expected = [single.resize(handles[i], c, h) for i, (c, h) in zip(chosen, wanted, strict=True)]
        answers.update(expected)
        capacities, histories = [c for c, _ in wanted], [h for _, h in wanted]
        ok, _, _ = step([handles[i] for i in chosen], chosen, capacities, histories)
        assert ok == expected
        for i, done, length in zip(chosen, ok, wanted, strict=True):
            if done:
                lengths[i] = length
        assert whole.snapshot() == single.snapshot()
        whole.audit()
        check_table(whole, step, {i: handles[i] for i, done in zip(chosen, ok, strict=True) if done})
        if rng.random() < 0.1:
            i = rng.randrange(6)
            for manager in (whole, single):
                manager.close(handles[i])
            (handles[i],) = active(whole, (0, 0), keep=keep)
            assert active(single, (0, 0), keep=keep) == [handles[i]]
            lengths[i] = (0, 0)
    assert answers == {True, False}


def check_table(manager: Manager, step: Stepper, rows: dict[int, int]) -> None:
    for row, handle in rows.items():
        for group in range(step.table.shape[0]):
            indices = pages(manager, handle, group)
            assert step.row(group, row) == indices + [-1] * (step.table.shape[2] - len(indices))


def test_dirty_covers_every_change_and_nothing_else() -> None:
    manager = Manager(config(LAYOUTS[2], 110 * MIB, tpb=4, typical_step=SIX), "virtual")
    handles = active(manager, *[(0, 0)] * 4)
    step = Stepper(manager, 4, 40)
    step(handles, [0, 1, 2, 3], [1] * 4, [0] * 4)
    for length in range(2, 90):
        before = step.table.copy()
        ok, dirty, _ = step(handles, [0, 1, 2, 3], [length] * 4, [length - 1] * 4)
        if not all(ok):
            break
        covered = np.zeros(before.shape, bool)
        for group, row, begin, end in dirty:
            covered[group, row, begin:end] = True
        assert (covered == (before != step.table)).all()
    assert length > 30
