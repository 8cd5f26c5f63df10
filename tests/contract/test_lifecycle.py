"""The state machine of a cache, its gate, and what each state allows (v2_request §1.3–1.6)."""

from __future__ import annotations

import pytest

from kvpool.errors import ArgumentError, LogicError, NeverFitsError, OutOfMemoryError, OutOfPagesError
from tests.support.configs import MIB, config, full, one, used, windowed


def lengths(cache) -> tuple[int, int, int, int]:
    return cache.num_committed_tokens, cache.history_length, cache.capacity, cache.num_blocks


def test_states_and_lengths(make, device) -> None:
    manager = make(full(8), device)
    cache = manager.create_kv_cache()
    assert cache.status == cache.Status.SUSPENDED
    assert not cache.is_active
    assert lengths(cache) == (0, 0, 0, 0)
    assert cache.tokens_per_block == manager.tokens_per_block == 32
    assert cache.beam_width == 1
    assert cache.manager is manager
    assert cache.resume() is True
    assert cache.status == cache.Status.ACTIVE
    assert cache.is_active
    assert cache.resize(70, 33) is True
    assert lengths(cache) == (0, 33, 70, 3)
    cache.suspend()
    assert cache.status == cache.Status.SUSPENDED
    assert lengths(cache) == (0, 33, 70, 3)
    assert cache.resume() is True
    cache.close()
    assert cache.status == cache.Status.CLOSED
    assert not cache.is_active
    assert used(manager) == [0]
    manager.audit()


def test_close_is_idempotent_in_every_state(make) -> None:
    manager = make(full(4))
    never_resumed = manager.create_kv_cache()
    never_resumed.close()
    never_resumed.close()
    suspended = make.open(manager)
    assert suspended.resize(64)
    suspended.suspend()
    suspended.close()
    suspended.close()
    assert used(manager) == [0]


def test_calls_after_close(make) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    assert cache.resize(64)
    handle = cache.handle
    cache.close()
    other = make.open(manager)  # takes the freed record, so that an unchecked handle would reach it
    assert other.resize(32)
    before = manager.snapshot()
    for call in (
        lambda: cache.resume(),
        lambda: cache.suspend(),
        lambda: cache.resize(32),
        lambda: cache.resize(None, None),
        lambda: cache.stop_committing(),
        lambda: setattr(cache, "cuda_stream", 0),
        lambda: setattr(cache, "beam_width", 2),
        lambda: setattr(cache, "capacity", 64),
        lambda: setattr(cache, "history_length", 1),
        lambda: cache.set_base_page_index_buf(0, 0, None),
    ):
        with pytest.raises(LogicError):
            call()
        assert manager.snapshot() == before
    assert other.handle != handle
    manager.audit()


def test_only_active_caches_change(make) -> None:
    manager = make(full(4))
    cache = make.track(manager.create_kv_cache())
    before = manager.snapshot()
    for call in (
        lambda: cache.suspend(),
        lambda: cache.resize(32),
        lambda: setattr(cache, "beam_width", 2),
        lambda: setattr(cache, "capacity", 32),
        lambda: setattr(cache, "history_length", 0),
    ):
        with pytest.raises(LogicError):
            call()
        assert manager.snapshot() == before
    assert cache.resume()
    with pytest.raises(LogicError):
        cache.resume()


def test_stop_committing_in_every_state_but_closed(make) -> None:
    manager = make(full(4))
    cache = make.track(manager.create_kv_cache())
    cache.stop_committing()  # C3: fresh, suspended, and again
    cache.stop_committing()
    assert cache.resume()
    cache.stop_committing()
    cache.suspend()
    cache.stop_committing()
    assert manager.snapshot()["caches"][0]["commit_allowed"] is False
    cache.close()
    with pytest.raises(LogicError):
        cache.stop_committing()


def test_create_forms(make) -> None:
    manager = make(full(4))
    for cache in (
        manager.create_kv_cache(),
        manager.create_kv_cache(None, None),
        manager.create_kv_cache(None, []),
        manager.create_kv_cache(None, [1, 2, 3], id=7, expected_prompt_length=5),
    ):
        make.track(cache)
        assert lengths(cache) == (0, 0, 0, 0)
    assert cache.id == 7


def test_a_suspended_cache_keeps_its_pages(make, device) -> None:
    manager = make(full(6), device)
    cache = make.open(manager)
    assert cache.resize(96)
    first = [int(i) for i in cache.get_base_page_indices(0)][:3]
    assert first == [0, 1, 2]
    cache.suspend()
    assert [int(i) for i in cache.get_base_page_indices(0)][:3] == [-1, -1, -1]
    assert list(cache.get_aggregated_page_indices(0)) == [0, 1, 2]
    assert used(manager) == [3]
    other = make.open(manager)
    assert other.resize(96)
    assert [int(i) for i in other.get_base_page_indices(0)][:3] == [3, 4, 5]
    other.close()
    assert cache.resume()
    assert [int(i) for i in cache.get_base_page_indices(0)][:3] == first


def test_gate_counts_what_others_hold(make) -> None:
    manager = make(full(4, max_util_for_resume=0.5))
    holder = make.open(manager)
    assert holder.resize(3 * 32)
    waiting = make.track(manager.create_kv_cache())
    before = manager.snapshot()
    assert waiting.resume() is False  # 3/4 > 0.5
    assert manager.snapshot() == before
    assert holder.resize(2 * 32)
    assert waiting.resume() is True  # 2/4 is not above 0.5
    waiting.suspend()
    assert holder.resize(3 * 32)
    assert waiting.resume() is False


def test_gate_is_open_when_nobody_else_is_active(make) -> None:
    manager = make(full(4, max_util_for_resume=0.25))
    holder = make.open(manager)
    assert holder.resize(4 * 32)
    holder.suspend()
    waiting = make.track(manager.create_kv_cache())
    assert waiting.resume() is True
    waiting.suspend()
    assert holder.resume() is True  # its own pages do not count either
    assert waiting.resume() is False


def test_gate_does_not_count_own_pages(make) -> None:
    manager = make(full(4, max_util_for_resume=0.25))
    big = make.open(manager)
    assert big.resize(3 * 32)
    big.suspend()
    small = make.open(manager)
    assert small.resize(32)
    assert big.resume() is True  # others hold 1/4


@pytest.mark.parametrize(("limit", "total", "most"), [(0.29, 100, 29), (0.07, 100, 7), (0.97, 100, 97), (1.0, 10, 10)])
def test_gate_is_exact_on_the_decimal_limit(make, limit: float, total: int, most: int) -> None:
    """0.29 · 100 is 28.999… in binary: the limit is its decimal value, compared in integers."""
    manager = make(full(total, max_util_for_resume=limit))
    holder = make.open(manager)
    assert holder.resize(most * 32)
    waiting = make.track(manager.create_kv_cache())
    assert waiting.resume() is True
    waiting.suspend()
    if most < total:
        assert holder.resize((most + 1) * 32)
        assert waiting.resume() is False


def test_gate_looks_at_the_fullest_group(make) -> None:
    cfg = config(
        [one(0, 2 * MIB), one(1, 4 * MIB, 32)],
        8 * 6 * MIB,
        max_util_for_resume=0.5,
        typical_step=None,
        initial_pool_ratio=[2 / 6, 4 / 6],
    )
    manager = make(cfg)
    assert [g.num_slots for g in manager.pool_group_descs] == [8, 8]
    holder = make.open(manager)
    assert holder.resize(5 * 32, 5 * 32)  # 5 full pages, few windowed ones
    waiting = make.track(manager.create_kv_cache())
    assert waiting.resume() is False


def test_handles_are_generations(make) -> None:
    manager = make(full(2))
    seen = []
    for _ in range(3):
        cache = manager.create_kv_cache()
        seen.append(cache.handle)
        cache.close()
    first = make.track(manager.create_kv_cache())
    second = make.track(manager.create_kv_cache())
    assert seen == [1 << 32, 2 << 32, 3 << 32]
    assert (first.handle, second.handle) == (4 << 32, 1 << 32 | 1)


def test_lowest_free_slot_first(make) -> None:
    manager = make(full(8))
    a, b, c = (make.open(manager) for _ in range(3))
    assert a.resize(64)
    assert b.resize(64)
    assert c.resize(64)
    a.close()
    assert c.resize(4 * 32)
    assert list(c.get_aggregated_page_indices(0)) == [4, 5, 0, 1]
    b.close()
    d = make.open(manager)
    assert d.resize(3 * 32)
    assert list(d.get_aggregated_page_indices(0)) == [2, 3, 6]


def test_not_now_and_never(make) -> None:
    manager = make(full(4))
    a, b = make.open(manager), make.open(manager)
    assert a.resize(3 * 32)
    assert b.resize(32)
    before, stats = manager.snapshot(), [vars_of(s) for s in manager.get_storage_statistics()]
    assert b.resize(64) is False
    assert manager.snapshot() == before
    assert [vars_of(s) for s in manager.get_storage_statistics()] == stats
    with pytest.raises(NeverFitsError):
        b.resize(5 * 32)
    assert manager.snapshot() == before
    with pytest.raises(OutOfPagesError):
        b.capacity = 64
    with pytest.raises(OutOfMemoryError):
        b.capacity = 5 * 32
    with pytest.raises(MemoryError):
        b.capacity = 5 * 32
    assert manager.snapshot() == before
    manager.audit()
    a.close()
    assert b.resize(4 * 32) is True


def vars_of(s) -> tuple:
    return (list(s.slot_sizes), s.total, s.free, s.evictable, s.available, s.unavailable)


def test_storage_statistics(make) -> None:
    manager = make(windowed(6, 64))
    cache = make.open(manager)
    assert cache.resize(4 * 32)
    (s,) = manager.get_storage_statistics()
    assert vars_of(s) == ([2 * MIB], 6, 2, 0, 2, 4)
    (s,) = manager.get_storage_statistics(0)
    assert s.total == 6
    assert list(manager.get_life_cycle_pool_group_indices()) == [0]


def test_never_leaves_held_pages_out(make) -> None:
    """Held pages behind the window could go if committing stopped: more than the pool only with them is 'not now'."""
    manager = make(windowed(4, 32))
    cache = make.open(manager, stop=False)
    assert cache.resize(4 * 32)
    assert cache.resize(4 * 32, 4 * 32)
    assert used(manager) == [4]  # three held, one live
    assert cache.resize(5 * 32) is False
    cache.stop_committing()
    assert used(manager) == [1]
    assert cache.resize(5 * 32) is True


@pytest.mark.parametrize(
    ("args", "error", "name"),
    [
        ((40, 50), ArgumentError, "capacity"),
        ((None, 65), ArgumentError, "capacity|history"),
        ((64, 31), ArgumentError, "history"),
        ((31, None), ArgumentError, "capacity"),
        ((-1, None), ArgumentError, "capacity"),
        ((64, -1), ArgumentError, "history"),
        ((2**31, None), ArgumentError, "capacity"),
        ((2**70, None), ArgumentError, "capacity"),
        ((64, 2**70), ArgumentError, "history|capacity"),
        (("64",), TypeError, ""),
        ((64.0,), TypeError, ""),
    ],
)
def test_bad_lengths_change_nothing(make, args, error, name) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    assert cache.resize(64, 32)
    before = manager.snapshot()
    with pytest.raises(error, match=f"(?i){name}"):
        cache.resize(*args)
    assert manager.snapshot() == before
    manager.audit()


def test_bad_lengths_are_the_errors_callers_catch(make) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    assert cache.resize(64, 32)
    with pytest.raises(ValueError, match="(?i)history"):
        cache.resize(64, 31)
    with pytest.raises(AssertionError):
        cache.resize(16)
    with pytest.raises(RuntimeError):
        cache.resume()
    with pytest.raises(AssertionError):
        cache.resume()


def test_history_message(make) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    assert cache.resize(64, 32)
    with pytest.raises(ValueError, match="History length cannot be decreased"):
        cache.resize(64, 31)


def test_closed_caches_can_still_be_looked_at(make) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    assert cache.resize(64, 32)
    cache.close()
    assert cache.num_blocks == 0
    assert not cache.is_active
    assert cache.status == cache.Status.CLOSED
    assert repr(cache)


def test_page_levels(make) -> None:
    manager = make(windowed(8, 64))
    cache = make.open(manager, stop=False)
    assert cache.resize(200, 0)
    assert cache.resize(200, 200)
    assert list(cache.get_page_levels(0)) == [0] * 7
    cache.stop_committing()
    assert list(cache.get_page_levels(0)) == [-1] * 4 + [0] * 3
