"""The batch step (D9): the same as per-request calls, one table, exact dirty ranges, all-or-nothing on misuse."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpool.errors import ArgumentError, LogicError, NeverFitsError
from kvpool.v2 import SwaScratchReuseConfig
from tests.support.configs import MIB, attention, config, full, full_and_window, one, ssm, used, windowed
from tests.support.stepping import Stepper


def i32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def three_groups(quota: int = 96 * MIB, **fields):
    """Full, windowed with a sink, and state layers; full and windowed share nothing in size."""
    return config([one(0, MIB), one(1, 512 * 1024, 64, 16), ssm(2, 256 * 1024)], quota, **fields)


def test_one_step_of_a_batch(make, device) -> None:
    manager = make(three_groups(), device)
    caches = [make.open(manager) for _ in range(3)]
    stepper = Stepper(manager, 4, 16)
    assert stepper.step(caches, [2, 0, 3], [40, 100, 1], [0, 50, 0]) == [True] * 3
    for cache, row in zip(caches, [2, 0, 3], strict=True):
        stepper.check_row(cache, row)
        assert cache.is_active
    assert [c.capacity for c in caches] == [40, 100, 1]
    assert [c.history_length for c in caches] == [0, 50, 0]
    assert (stepper.table[:, 1] == -1).all()
    # first bindings: whole rows, requests in list order, groups ascending
    assert stepper.last_dirty == [(g, row, 0, 16) for row in (2, 0, 3) for g in range(3)]
    assert (stepper.table[2] == -1).all()  # a state group's rows stay BAD


def test_result_types_and_lifetime(make) -> None:
    manager = make(full(16))
    cache = make.open(manager)
    table = np.zeros((1, 1, 16), np.int32)
    first = manager.step(np.array([cache.handle], np.int64), i32(0), i32(33), i32(0), table)
    assert first.ok.dtype == np.bool_
    assert first.ok.shape == (1,)
    assert first.dirty.dtype == np.int32
    assert first.dirty.shape == (1, 4)
    assert isinstance(int(first.event), int)
    ok, dirty, event = first  # a tuple too
    assert ok is first.ok or (ok == first.ok).all()
    del dirty, event
    second = manager.step(np.array([cache.handle], np.int64), i32(0), i32(34), i32(33), table)
    assert second.dirty.shape == (0, 4)
    assert second.ok.tolist() == [True]


def test_decode_steps_touch_only_what_changes(make) -> None:
    manager = make(full_and_window(64, 12, 64))
    cache = make.open(manager)
    stepper = Stepper(manager, 2, 64)
    assert stepper.step([cache], [1], [1], [0]) == [True]
    for history in range(1, 1000):
        assert stepper.step([cache], [1], [history + 1], [history]) == [True]
        stepper.check_row(cache, 1)
        block = history // 32
        want = []
        if history % 32 == 0:
            want.append((0, 1, block, block + 1))
        newly_stale = (history + 1 - 64) // 32 if (history + 1 - 64) % 32 == 0 and history + 1 > 64 else None
        if newly_stale is not None:
            want.append((1, 1, newly_stale - 1, newly_stale))
        if history % 32 == 0:
            want.append((1, 1, block, block + 1))
        assert stepper.last_dirty == want


def test_touching_ranges_are_one(make) -> None:
    """w=1: the block that leaves and the block that comes are neighbours."""
    manager = make(windowed(4, 1))
    cache = make.open(manager)
    stepper = Stepper(manager, 1, 8)
    assert stepper.step([cache], [0], [32], [31]) == [True]
    assert stepper.step([cache], [0], [33], [32]) == [True]
    assert stepper.last_dirty == [(0, 0, 0, 2)]
    assert stepper.step([cache], [0], [96], [33]) == [True]
    assert stepper.last_dirty == [(0, 0, 2, 3)]


def test_shrink_is_dirty(make) -> None:
    manager = make(full(16))
    cache = make.open(manager)
    stepper = Stepper(manager, 1, 16)
    assert stepper.step([cache], [0], [300], [20]) == [True]
    assert stepper.step([cache], [0], [40], [20]) == [True]
    assert stepper.last_dirty == [(0, 0, 2, 10)]
    stepper.check_row(cache, 0)
    assert used(manager) == [2]


def test_each_request_is_a_resize(make) -> None:
    """The list is served in order; one that does not fit changes nothing and the rest go on."""
    manager = make(full(10))
    a, b, c, d = (make.open(manager) for _ in range(4))
    stepper = Stepper(manager, 4, 16, fill=-5)
    assert stepper.step([a, b, c, d], [0, 1, 2, 3], [4 * 32, 5 * 32, 2 * 32, 32], [0] * 4) == [True, True, False, True]
    assert used(manager) == [10]
    assert (c.capacity, c.num_blocks) == (0, 0)
    assert (stepper.table[:, 2] == -5).all()  # a failed request's row is not even bound
    assert stepper.last_dirty == [(0, 0, 0, 16), (0, 1, 0, 16), (0, 3, 0, 16)]
    before = manager.snapshot()["caches"][2]
    # order matters: a shrinks first, so c fits in the same call
    assert stepper.step([a, c], [0, 2], [32, 3 * 32], [0, 0]) == [True, True]
    assert manager.snapshot()["caches"][2] != before
    # and not the other way round
    assert stepper.step([c, a], [2, 0], [4 * 32, 0], [0, 0]) == [False, True]


def test_retry_after_a_failure(make) -> None:
    manager = make(full(4))
    a, b = make.open(manager), make.open(manager)
    stepper = Stepper(manager, 2, 8)
    assert stepper.step([a, b], [0, 1], [96, 64], [0, 0]) == [True, False]
    assert stepper.step([a, b], [0, 1], [96, 32], [10, 0]) == [True, True]
    stepper.check_row(b, 1)
    assert stepper.step([b], [1], [64], [0]) == [False]
    stepper.check_row(b, 1)
    assert stepper.last_dirty == []
    assert stepper.last_event == 0
    a.close()
    assert stepper.step([b], [1], [64], [0]) == [True]
    stepper.check_row(b, 1)


def test_a_cache_keeps_its_row_until_another_takes_it(make) -> None:
    manager = make(full(32))
    a, b = make.open(manager), make.open(manager)
    stepper = Stepper(manager, 2, 8)
    assert stepper.step([a, b], [0, 1], [40, 70], [0, 0]) == [True, True]
    assert stepper.step([a], [1], [41], [40]) == [True]  # a steals b's row
    assert stepper.last_dirty == [(0, 1, 0, 8)]
    stepper.check_row(a, 1)
    assert stepper.step([b], [0], [71], [70]) == [True]  # b has to be written anew, in a's old row
    assert stepper.last_dirty == [(0, 0, 0, 8)]
    stepper.check_row(b, 0)
    assert stepper.step([a, b], [1, 0], [42, 72], [41, 71]) == [True, True]
    assert stepper.last_dirty == []
    stepper.check_row(a, 1)


def test_swap_rows_in_one_call(make) -> None:
    manager = make(full(32))
    a, b = make.open(manager), make.open(manager)
    stepper = Stepper(manager, 2, 8)
    assert stepper.step([a, b], [0, 1], [40, 70], [0, 0]) == [True, True]
    assert stepper.step([a, b], [1, 0], [40, 70], [0, 0]) == [True, True]
    stepper.check_row(a, 1)
    stepper.check_row(b, 0)
    assert stepper.step([a, b], [1, 0], [40, 70], [0, 0]) == [True, True]
    assert stepper.last_dirty == []


def test_another_table_is_written_whole(make) -> None:
    manager = make(full(32))
    cache = make.open(manager)
    first, second = Stepper(manager, 2, 8), Stepper(manager, 2, 8, fill=77)
    assert first.step([cache], [0], [40], [0]) == [True]
    assert second.step([cache], [0], [40], [0]) == [True]
    assert second.last_dirty == [(0, 0, 0, 8)]
    second.check_row(cache, 0)
    assert (second.table[0, 1] == 77).all()
    assert first.step([cache], [0], [40], [0]) == [True]
    assert first.last_dirty == [(0, 0, 0, 8)]
    smaller = np.full((1, 2, 4), 3, np.int32)
    result = manager.step(np.array([cache.handle], np.int64), i32(1), i32(40), i32(0), smaller)
    assert result.dirty.tolist() == [[0, 1, 0, 4]]
    assert smaller[0, 1].tolist() == [0, 1, -1, -1]


def test_the_table_is_held(make) -> None:
    """The manager holds the export of the last table, so its memory can not come back as another one unnoticed."""
    manager = make(full(64))
    caches = [make.open(manager) for _ in range(2)]
    handles = np.array([c.handle for c in caches], np.int64)
    lengths = i32(32, 64)
    for turn in range(50):
        table = np.full((1, 2, 64), -9 - turn, np.int32)
        result = manager.step(handles, i32(0, 1), lengths, i32(0, 0), table)
        assert result.dirty.tolist() == [[0, 0, 0, 64], [0, 1, 0, 64]]
        assert table[0, 0].tolist() == [int(caches[0].get_base_page_indices(0)[0])] + [-1] * 63
        del table, result


@pytest.mark.parametrize("between", ["resize", "suspend", "resume on another stream", "close and reopen", "beam"])
def test_changes_outside_step_drop_the_binding(make, between) -> None:
    manager = make(full(32))
    cache = make.open(manager)
    stepper = Stepper(manager, 2, 8)
    assert stepper.step([cache], [0], [40], [0]) == [True]
    if between == "resize":
        assert cache.resize(100, 10)
    elif between == "suspend":
        cache.suspend()
        assert cache.resume()
    elif between == "resume on another stream":
        cache.suspend()
        cache.cuda_stream = 5
        assert cache.resume()
    elif between == "close and reopen":
        cache.close()
        cache = make.open(manager)
    else:
        cache.beam_width = 3
        cache.beam_width = 1
    assert stepper.step([cache], [0], [101], [20]) == [True]
    assert stepper.last_dirty == [(0, 0, 0, 8)]
    stepper.check_row(cache, 0)


def test_external_buffers_follow_steps(make) -> None:
    manager = make(full_and_window(32, 8, 64))
    cache = make.open(manager)
    stepper = Stepper(manager, 1, 32)
    rows = np.full((2, 12), 50, np.int32)
    for group in range(2):
        cache.set_base_page_index_buf(0, group, memoryview(rows[group]))
    for history in range(12 * 32):
        assert stepper.step([cache], [0], [history + 1], [history]) == [True]
        assert (rows == stepper.table[:, 0, :12]).all()
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="(?i)buf"):
        stepper.step([cache], [0], [12 * 32 + 1], [12 * 32])
    assert manager.snapshot() == before


def test_scratch_is_bad_in_the_table(make) -> None:
    manager = make(windowed(32, 64, swa_scratch_reuse=SwaScratchReuseConfig()))
    cache = make.open(manager)
    stepper = Stepper(manager, 1, 40)
    assert stepper.step([cache], [0], [512], [0]) == [True]
    stepper.check_row(cache, 0)
    assert stepper.table[0, 0, :14].tolist() == [-1] * 14
    assert cache.has_scratch_slots
    assert stepper.step([cache], [0], [513], [512]) == [True]
    assert not cache.has_scratch_slots
    stepper.check_row(cache, 0)


def test_committing_caches_hold_their_stale_pages(make) -> None:
    manager = make(windowed(16, 64))
    cache = make.open(manager, stop=False)
    stepper = Stepper(manager, 1, 16)
    for history in range(300):
        assert stepper.step([cache], [0], [history + 1], [history]) == [True]
        stepper.check_row(cache, 0)
    assert used(manager) == [10]
    cache.stop_committing()
    assert used(manager) == [3]
    assert stepper.step([cache], [0], [302], [301]) == [True]
    stepper.check_row(cache, 0)


def test_nothing_to_do(make, device) -> None:
    manager = make(full(8), device)
    stepper = Stepper(manager, 1, 4)
    assert stepper.step([], [], [], []) == []
    assert stepper.last_dirty == []
    assert stepper.last_event == 0


def test_no_layers(make) -> None:
    manager = make(config([], 32 * MIB))
    cache = make.open(manager)
    stepper = Stepper(manager, 1, 4)
    assert stepper.table.shape == (0, 1, 4)
    assert stepper.step([cache], [0], [100], [50]) == [True]
    assert (cache.capacity, cache.history_length) == (100, 50)
    with pytest.raises(ArgumentError, match="(?i)block"):
        stepper.step([cache], [0], [4 * 32 + 1], [50])


def bad_calls(manager, a, b, stale_handle, suspended, beamed):
    """name → (arguments, error, words of the message)"""
    table = np.full((1, 4, 8), -3, np.int32)
    handles = np.array([a.handle, b.handle], np.int64)
    good = [handles, i32(0, 1), i32(40, 40), i32(3, 0), table]

    def but(**changes):
        names = ["handles", "rows", "capacities", "histories", "table"]
        return [changes.get(n, v) for n, v in zip(names, good, strict=True)]

    read_only = table.copy()
    read_only.flags.writeable = False
    second = np.array([a.handle, stale_handle], np.int64)
    wide = np.full((1, 4, 16), -3, np.int32)
    return {
        "stale handle": (but(handles=second), LogicError, "(?i)closed|unknown"),
        "unknown handle": (but(handles=np.array([a.handle, 2**40 + 77], np.int64)), LogicError, "(?i)closed|unknown"),
        "zero handle": (but(handles=np.array([a.handle, 0], np.int64)), LogicError, "(?i)closed|unknown"),
        "negative handle": (but(handles=np.array([a.handle, -1], np.int64)), LogicError, "(?i)closed|unknown"),
        "duplicate handle": (
            but(handles=np.array([a.handle] * 2, np.int64)),
            (ArgumentError, LogicError),
            "(?i)handle|twice|dupl",
        ),
        "row too high": (but(rows=i32(0, 4)), ArgumentError, "(?i)row"),
        "row negative": (but(rows=i32(-1, 1)), ArgumentError, "(?i)row"),
        "duplicate row": (but(rows=i32(1, 1)), ArgumentError, "(?i)row"),
        "suspended": (
            but(handles=np.array([a.handle, suspended.handle], np.int64)),
            LogicError,
            "(?i)active|suspend|1",
        ),
        "beams": (but(handles=np.array([a.handle, beamed.handle], np.int64)), (LogicError, ArgumentError), "(?i)beam"),
        "history back": (but(histories=i32(2, 0)), ArgumentError, "(?i)histor"),
        "capacity below history": (but(capacities=i32(40, 20), histories=i32(3, 30)), ArgumentError, "(?i)capacit"),
        "negative capacity": (but(capacities=i32(40, -1)), ArgumentError, "(?i)capacit"),
        "beyond the table": (but(capacities=i32(40, 8 * 32 + 1)), ArgumentError, "(?i)block|capacit|table"),
        "never fits": (but(table=wide, capacities=i32(40, 13 * 32)), NeverFitsError, "1"),
        "short rows": (but(rows=i32(0)), ArgumentError, "rows"),
        "short capacities": (but(capacities=i32(40)), ArgumentError, "capacities"),
        "long histories": (but(histories=i32(0, 0, 0)), ArgumentError, "histories"),
        "handles int32": (but(handles=handles.astype(np.int32)), ArgumentError, "handles"),
        "handles uint64": (but(handles=handles.astype(np.uint64)), ArgumentError, "handles"),
        "rows int64": (but(rows=np.array([0, 1])), ArgumentError, "rows"),
        "capacities float": (but(capacities=np.array([40.0, 40.0])), ArgumentError, "capacities"),
        "histories uint32": (but(histories=np.zeros(2, np.uint32)), ArgumentError, "histories"),
        "strided capacities": (but(capacities=np.full(4, 40, np.int32)[::2]), ArgumentError, "capacities"),
        "two-dimensional rows": (but(rows=np.zeros((2, 1), np.int32)), ArgumentError, "rows"),
        "byte-swapped": (but(capacities=i32(40, 40).astype(">i4")), ArgumentError, "capacities"),
        "table int64": (but(table=table.astype(np.int64)), ArgumentError, "table"),
        "table uint32": (but(table=table.astype(np.uint32)), ArgumentError, "table"),
        "table 2-D": (but(table=table[0]), ArgumentError, "table"),
        "table of other groups": (but(table=np.zeros((2, 4, 8), np.int32)), ArgumentError, "table"),
        "table strided": (but(table=np.zeros((1, 4, 16), np.int32)[:, :, ::2]), ArgumentError, "table"),
        "table Fortran": (but(table=np.asfortranarray(np.zeros((1, 4, 8), np.int32))), ArgumentError, "table"),
        "table read-only": (but(table=read_only), ArgumentError, "table"),
        "list for handles": (but(handles=[a.handle, b.handle]), TypeError, "handles"),
        "list for rows": (but(rows=[0, 1]), TypeError, "rows"),
        "None for table": (but(table=None), TypeError, "table"),
        "int for capacities": (but(capacities=40), TypeError, "capacities"),
    }, table


BAD_NAMES = [
    "stale handle", "unknown handle", "zero handle", "negative handle", "duplicate handle", "row too high",
    "row negative", "duplicate row", "suspended", "beams", "history back", "capacity below history",
    "negative capacity", "beyond the table", "never fits", "short rows", "short capacities", "long histories",
    "handles int32", "handles uint64", "rows int64", "capacities float", "histories uint32", "strided capacities",
    "two-dimensional rows", "byte-swapped", "table int64", "table uint32", "table 2-D", "table of other groups",
    "table strided", "table Fortran", "table read-only", "list for handles", "list for rows", "None for table",
    "int for capacities",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_calls_change_nothing(make, device, name) -> None:
    manager = make(full(12), device)
    a, b = make.open(manager), make.open(manager)
    closed = make.open(manager)
    stale_handle = closed.handle
    closed.close()
    suspended = make.open(manager)
    assert suspended.resize(10)
    suspended.suspend()
    beamed = make.open(manager)
    beamed.beam_width = 2
    assert b.resize(35, 0)
    assert a.resize(5, 3)
    cases, table = bad_calls(manager, a, b, stale_handle, suspended, beamed)
    assert list(cases) == BAD_NAMES
    arguments, error, words = cases[name]
    before = manager.snapshot()
    with pytest.raises(error, match=words):
        manager.step(*arguments)
    assert manager.snapshot() == before
    assert (table == -3).all()
    manager.audit()
    result = manager.step(np.array([a.handle, b.handle], np.int64), i32(0, 1), i32(40, 40), i32(3, 10), table)
    assert result.ok.tolist() == [True, True]


def test_bad_call_keeps_bindings(make) -> None:
    manager = make(full(12))
    a, b = make.open(manager), make.open(manager)
    stepper = Stepper(manager, 2, 8)
    assert stepper.step([a, b], [0, 1], [40, 40], [5, 5]) == [True, True]
    with pytest.raises(ArgumentError):
        stepper.step([a, b], [0, 1], [70, 70], [6, 4])
    assert stepper.step([a, b], [0, 1], [41, 41], [6, 6]) == [True, True]
    assert stepper.last_dirty == []


def test_error_names_the_position(make) -> None:
    manager = make(full(12))
    caches = [make.open(manager) for _ in range(5)]
    stepper = Stepper(manager, 5, 8)
    caches[3].suspend()
    with pytest.raises(LogicError, match=r"\b3\b"):
        stepper.step(caches, range(5), [1] * 5, [0] * 5)
    wide = Stepper(manager, 5, 16)
    with pytest.raises(NeverFitsError, match=r"\b2\b"):
        wide.step(caches[:3], range(3), [1, 1, 13 * 32], [0] * 3)


def test_tokens_are_committed_before_the_lengths_change(make) -> None:
    manager = make(full(12))
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(3)
    table = np.zeros((1, 1, 8), np.int32)
    answer = manager.step(
        np.array([cache.handle], np.int64), i32(0), i32(4), i32(3), table,
        tokens=(i32(1, 2, 3), i32(0, 3)),
    )  # fmt: skip
    assert answer.ok.tolist() == [True]
    assert (cache.num_committed_tokens, cache.history_length, cache.capacity) == (3, 3, 4)
    assert cache.committed_tokens == [1, 2, 3]
    cache.close()


def test_positional_and_keyword_forms(make) -> None:
    manager = make(full(12))
    cache = make.open(manager)
    table = np.zeros((1, 1, 8), np.int32)
    handles = np.array([cache.handle], np.int64)
    assert manager.step(handles, i32(0), i32(4), i32(0), table, None, None).ok.tolist() == [True]
    result = manager.step(
        handles=handles, rows=i32(0), capacities=i32(5), histories=i32(1), table=table, tokens=None, stream=None
    )
    assert result.ok.tolist() == [True]
    with pytest.raises(TypeError):
        manager.step(handles, i32(0), i32(4), i32(0), table, stream="x")


@pytest.mark.parametrize("seed", range(8))
def test_same_as_per_request_calls(make, seed: int) -> None:
    """Random batches on one manager, single resizes on a second: same answers, slots, tables, snapshots."""
    rng = random.Random(seed)
    layers = [one(0, MIB), one(1, 512 * 1024, rng.choice([16, 64, 100]), rng.choice([None, 20])), ssm(2, 256 * 1024)]
    fields = {"swa_scratch_reuse": SwaScratchReuseConfig(rng.choice([0, 40]))} if seed % 2 else {}
    cfg = config(layers, 24 * MIB, merge_equal_pools=bool(seed % 3), max_util_for_resume=1.0, **fields)
    batched, single = make(cfg), make(cfg)
    stepper = Stepper(batched, 8, 12)
    left, right = [], []
    rows: dict[int, int] = {}
    for _ in range(150):
        action = rng.random()
        if len(left) < 8 and action < 0.15:
            for manager, side in ((batched, left), (single, right)):
                cache = manager.create_kv_cache()
                make.track(cache)
                if seed % 4:
                    cache.stop_committing()
                side.append(cache)
            assert left[-1].resume() == right[-1].resume()
            rows[len(left) - 1] = len(left) - 1
        elif left and action < 0.2:
            k = rng.randrange(len(left))
            for side in (left, right):
                if side[k].is_active:
                    side[k].suspend()
                else:
                    side[k].resume()
        if not left:
            continue
        chosen = [k for k in range(len(left)) if left[k].is_active and rng.random() < 0.7]
        rng.shuffle(chosen)
        if rng.random() < 0.2 and len(chosen) > 1:  # someone takes another's row
            rows[chosen[0]], rows[chosen[1]] = rows[chosen[1]], rows[chosen[0]]
        capacities, histories = [], []
        for k in chosen:
            history = left[k].history_length
            if rng.random() < 0.6:
                history = min(left[k].capacity, history + rng.choice([1, 1, 5, 32, 40]))
            capacity = max(history, min(12 * 32, left[k].capacity + rng.choice([-40, -3, 0, 1, 1, 1, 33, 90])))
            histories.append(history)
            capacities.append(capacity)
        try:
            got = stepper.step([left[k] for k in chosen], [rows[k] for k in chosen], capacities, histories)
        except NeverFitsError:
            failed = False
            for k, capacity, history in zip(chosen, capacities, histories, strict=True):
                probe = single.snapshot()
                try:
                    single_ok = right[k].resize(capacity, history)
                except NeverFitsError:
                    failed = True
                    assert single.snapshot() == probe
                else:
                    del single_ok
            assert failed
            return
        want = [right[k].resize(c, h) for k, c, h in zip(chosen, capacities, histories, strict=True)]
        assert got == want
        assert batched.snapshot() == single.snapshot()
        for k in chosen:
            if got[chosen.index(k)]:
                stepper.check_row(left[k], rows[k])
                for group in range(3):
                    assert [int(i) for i in left[k].get_base_page_indices(group)] == [
                        int(i) for i in right[k].get_base_page_indices(group)
                    ]
        batched.audit()


def test_table_is_right_whatever_was_stolen(make) -> None:
    """Random row moves among live caches: after each step every served cache's row is exactly its indices."""
    rng = random.Random(5)
    manager = make(config([attention(0, 65536), attention(1, 65536, 48)], 64 * MIB))
    caches = [make.open(manager) for _ in range(6)]
    stepper = Stepper(manager, 9, 32, fill=-8)
    for _ in range(200):
        chosen = rng.sample(range(6), rng.randint(1, 6))
        rows = rng.sample(range(9), len(chosen))
        lengths = [min(31 * 32, caches[k].capacity + rng.choice([0, 1, 7, 40])) for k in chosen]
        histories = [max(caches[k].history_length, n - 1) if n else 0 for k, n in zip(chosen, lengths, strict=True)]
        assert all(stepper.step([caches[k] for k in chosen], rows, lengths, histories))
        for k, row in zip(chosen, rows, strict=True):
            stepper.check_row(caches[k], row)


def test_event_only_when_something_moved(make) -> None:
    manager = make(full(16), "sim")
    cache = make.open(manager)
    stepper = Stepper(manager, 1, 8)
    assert stepper.step([cache], [0], [1], [0]) == [True]
    assert stepper.last_event > 0
    assert stepper.step([cache], [0], [2], [1]) == [True]
    assert stepper.last_event == 0
    assert stepper.step([cache], [0], [33], [32]) == [True]
    assert stepper.last_event > 0
    host = make(full(16), "host")
    other = make.open(host)
    plain = Stepper(host, 1, 8)
    assert plain.step([other], [0], [40], [0]) == [True]
    assert plain.last_event == 0


def test_step_moves_requests_to_its_stream(make) -> None:
    manager = make(full(16), "sim")
    device = manager.device_handle
    first, second = device.create_stream(), device.create_stream()
    cache = make.open(manager, stream=first)
    stepper = Stepper(manager, 1, 8)
    assert stepper.step([cache], [0], [40], [0], stream=second) == [True]
    assert cache.cuda_stream == second
    assert stepper.step([cache], [0], [41], [40]) == [True]
    assert cache.cuda_stream == 0  # None is the device's own stream
