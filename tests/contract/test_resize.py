"""Call forms of resize and the setters, shrinking, and slots that change hands inside one call."""

from __future__ import annotations

import pytest

from kvpool.errors import ArgumentError
from kvpool.v2 import SwaScratchReuseConfig
from tests.support.configs import full, full_and_window, slots, used, windowed


def test_c1_call_forms(make) -> None:
    manager = make(full(8))
    cache = make.open(manager)
    assert cache.resize(40) is True
    assert cache.resize(50, 10) is True
    assert cache.resize(60, history_length=None) is True
    assert cache.resize(None, 20) is True
    assert (cache.capacity, cache.history_length) == (60, 20)
    before = manager.snapshot()
    assert cache.resize(None, None) is True
    assert cache.resize(capacity=None) is True
    assert manager.snapshot() == before
    assert cache.resize(64, history_length=64) is True
    assert cache.resize(None, None) is True


def test_setters(make) -> None:
    manager = make(full(3))
    cache = make.open(manager)
    cache.capacity = 70
    assert (cache.capacity, cache.num_blocks) == (70, 3)
    cache.history_length = 70
    assert cache.history_length == 70
    with pytest.raises(ValueError, match="(?i)history"):
        cache.history_length = 69
    with pytest.raises(ValueError, match="(?i)capacity"):
        cache.history_length = 71
    cache.capacity = 80
    assert cache.history_length == 70


def test_capacity_setter_is_forbidden_with_scratch(make) -> None:
    manager = make(windowed(16, 64, swa_scratch_reuse=SwaScratchReuseConfig()))
    cache = make.open(manager)
    before = manager.snapshot()
    with pytest.raises(ValueError, match="(?i)scratch"):
        cache.capacity = 32
    assert manager.snapshot() == before
    cache.enable_swa_scratch_reuse = False
    cache.capacity = 32
    assert cache.capacity == 32


def test_c2_undo_of_a_context_resize(make) -> None:
    manager = make(full(8))
    cache = make.open(manager)
    assert cache.resize(64, 64)
    old_capacity, history = cache.capacity, cache.history_length
    assert cache.resize(200)
    assert cache.resize(old_capacity, min(history, old_capacity)) is True
    cache.suspend()
    assert used(manager) == [2]
    assert cache.resume()
    assert list(cache.get_aggregated_page_indices(0)) == [0, 1]


def test_c2_with_scratch_in_use(make) -> None:
    manager = make(windowed(20, 64, swa_scratch_reuse=SwaScratchReuseConfig()))
    cache = make.open(manager)
    assert cache.resize(32, 32)
    assert cache.resize(32 + 16 * 32)
    assert cache.has_scratch_slots
    assert cache.resize(32, 32) is True
    assert not cache.has_scratch_slots
    assert used(manager) == [1]
    manager.audit()
    cache.suspend()


def test_scenario_22_shrink_truncates_indices(make, device) -> None:
    manager = make(full(4, tpb=4), device)
    cache = make.open(manager)
    assert cache.resize(8, 0) is True
    assert cache.num_blocks == 2
    assert len(cache.get_base_page_indices(0)[: cache.num_blocks]) == 2
    assert cache.resize(4, 0) is True
    assert cache.num_blocks == 1
    assert len(list(cache.get_base_page_indices(0))) == 1
    assert len(list(cache.get_aggregated_page_indices(0))) == 1
    assert used(manager) == [1]
    with pytest.raises(ArgumentError):
        cache.resize(4, 5)


def test_slots_released_in_the_call_serve_the_call(make, device) -> None:
    """A window at its full width slides over an exactly full pool."""
    manager = make(windowed(2, 32), device)
    cache = make.open(manager)
    assert cache.resize(64, 0)
    assert used(manager) == [2]
    assert cache.resize(96, 64) is True  # block 0 leaves (65 - 32 = 33 // 32), block 2 takes its slot
    assert list(cache.get_aggregated_page_indices(0)) == [-1, 1, 0]
    for history in range(65, 1000):
        assert cache.resize(history + 1, history) is True
        assert used(manager)[0] <= 2


def test_failure_is_all_or_nothing_over_groups(make) -> None:
    """The full group has room, the windowed one has not: nothing moves, no history either."""
    manager = make(full_and_window(20, 6, 128))
    assert slots(manager) == [20, 6]
    a = make.open(manager)
    b = make.open(manager)
    assert a.resize(5 * 32)
    before = manager.snapshot()
    assert b.resize(3 * 32, 0) is False
    assert manager.snapshot() == before
    assert b.resize(32, 0) is True
    before = manager.snapshot()
    assert b.resize(3 * 32, 32) is False
    assert b.history_length == 0
    assert manager.snapshot() == before


def test_resize_len_len_allocates_no_page_behind_the_window(make) -> None:
    manager = make(windowed(40, 128))
    decode = make.open(manager)
    assert decode.resize(1024, 1024)
    assert used(manager) == [4]
    prefill = make.open(manager)
    assert prefill.resize(1024, 0)
    assert used(manager) == [4 + 32]


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (0, 0)])
def test_blocks_of_a_capacity(make, tokens: int, count: int) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    assert cache.resize(tokens)
    assert cache.num_blocks == count == used(manager)[0]
