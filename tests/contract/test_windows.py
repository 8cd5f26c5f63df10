"""Windows, sinks, and pages held behind the window (v2_request §2.1–2.2)."""

from __future__ import annotations

import pytest

from kvpool.v2 import AttnLifeCycle
from tests.support import oracle
from tests.support.configs import attention, config, full_and_window, ssm, used, windowed

# (history, tokens per block, window, sink tokens) → stale block range
CHECKS = [
    ((1024, 32, 128, 0), (0, 28)),
    ((256, 32, 32, 0), (0, 7)),
    ((127, 32, 64, 0), (0, 2)),
    ((128, 32, 64, 0), (0, 2)),
    ((96, 32, 64, 0), (0, 1)),
    ((512, 32, 128, 32), (1, 12)),
    ((512, 32, 128, 48), (2, 12)),
    ((15, 4, 8, 0), (0, 2)),
    ((24, 8, 8, 0), (0, 2)),
    ((95, 32, 33, 0), (0, 1)),
    ((96, 32, 33, 0), (0, 2)),
    ((48, 32, 33, 0), (0, 0)),
    ((96, 32, 1, 0), (0, 3)),
]


@pytest.mark.parametrize(("case", "span"), CHECKS)
def test_oracle_agrees_with_the_check_values(case, span) -> None:
    history, tpb, window, sinks = case
    assert oracle.stale(history, tpb, window, oracle.blocks(sinks, tpb)) == set(range(*span))


@pytest.mark.parametrize(("case", "span"), CHECKS)
def test_life_cycle_object(case, span) -> None:
    history, tpb, window, sinks = case
    life_cycle = AttnLifeCycle.make(window, sinks, tpb)
    assert life_cycle.window_size == window
    assert life_cycle.num_sink_blocks == -(-sinks // tpb)
    found = life_cycle.get_stale_range(history, tpb)
    assert (found.beg, found.end) == span or (not found and span[0] == span[1])
    assert len(found) == span[1] - span[0]


def test_full_attention_never_goes_stale() -> None:
    life_cycle = AttnLifeCycle.make(None, None, 32)
    assert life_cycle.window_size is None
    for history in (0, 1, 31, 32, 100_000):
        assert not life_cycle.get_stale_range(history, 32)


@pytest.mark.parametrize(("case", "span"), CHECKS)
@pytest.mark.parametrize("stop", [True, False])
def test_exposed_indices_follow_the_window(make, case, span, stop) -> None:
    history, tpb, window, sinks = case
    manager = make(windowed(80, window, tpb, sinks or None))
    cache = make.open(manager, stop=stop)
    assert cache.resize(history + 1, 0)
    assert cache.resize(None, history)
    exposed = [int(i) for i in cache.get_base_page_indices(0)]
    held = list(cache.get_aggregated_page_indices(0))
    for ordinal, index in enumerate(exposed):
        if span[0] <= ordinal < span[1]:
            assert index == -1
            assert held[ordinal] == (-1 if stop else ordinal)
        else:
            assert index == held[ordinal] >= 0
    assert list(cache.get_aggregated_page_indices(0, 0, True)) == [i for i in held if i >= 0]
    assert list(cache.get_aggregated_page_indices(0, valid_only=True)) == [i for i in held if i >= 0]


def test_held_until_committing_stops(make, device) -> None:
    manager = make(windowed(8, 64), device)
    cache = make.open(manager, stop=False)
    assert cache.resize(256, 0)
    assert cache.resize(256, 256)
    assert used(manager) == [8]
    assert [int(i) for i in cache.get_base_page_indices(0)] == [-1] * 6 + [6, 7]
    assert list(cache.get_aggregated_page_indices(0)) == list(range(8))
    cache.suspend()
    assert used(manager) == [8]
    assert cache.resume()
    cache.stop_committing()
    assert used(manager) == [2]
    assert list(cache.get_aggregated_page_indices(0)) == [-1] * 6 + [6, 7]


def test_commit_min_snapshot_keeps_no_stale_page(make) -> None:
    manager = make(windowed(8, 64, commit_min_snapshot=True))
    cache = make.open(manager, stop=False)
    assert manager.commit_min_snapshot is True
    assert cache.resize(256, 0)
    assert cache.resize(256, 256)
    assert used(manager) == [2]


def test_held_pages_stay_across_growth(make) -> None:
    manager = make(windowed(8, 32))
    cache = make.open(manager, stop=False)
    for history in range(200):
        assert cache.resize(history + 1, history)
    assert used(manager) == [7]
    cache.stop_committing()
    assert used(manager) == [2]  # token 199 is not yet in history: tokens 168..199 = blocks 5 and 6


def test_sinks_stay(make) -> None:
    manager = make(windowed(24, 128, sinks=48))
    cache = make.open(manager)
    for history in range(704):
        assert cache.resize(history + 1, history)
    exposed = [int(i) for i in cache.get_base_page_indices(0)]
    assert [o for o, i in enumerate(exposed) if i >= 0] == [0, 1, 18, 19, 20, 21]
    assert used(manager) == [6]


def test_groups_and_life_cycles(make) -> None:
    layers = [
        attention(3, window=64),
        attention(1),
        attention(7, window=64, sinks=1),
        attention(2, window=64, sinks=32),
    ]
    manager = make(config([*layers, ssm(9, 4096)], 64 << 20))
    assert [list(group) for group in manager.layer_grouping] == [[3], [1], [7, 2], [9]]
    assert [manager.get_layer_group_id(layer) for layer in (3, 1, 7, 2, 9)] == [0, 1, 2, 2, 3]
    assert manager.num_layers == 5
    assert list(manager.layer_ids) == [3, 1, 7, 2, 9]


def test_window_slides_over_two_groups(make) -> None:
    manager = make(full_and_window(40, 6, 128))
    cache = make.open(manager)
    most = 0
    for history in range(40 * 32):
        assert cache.resize(history + 1, history)
        most = max(most, used(manager)[1])
    assert used(manager)[0] == 40
    assert most == 5  # ceil(127 / 32) + 1
