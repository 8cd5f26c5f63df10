"""Field trials that no other file here is the better place for. (``grep -rn "test_B[0-9]" tests`` finds them all.)"""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.errors import NeverFitsError, OutOfPagesError
from tests.support import oracle
from tests.support.configs import MIB, attention, config, full, full_and_window, slots, used, windowed
from tests.support.engine import Engine


def exposed(cache, group: int = 0) -> list[int]:
    return [int(i) for i in cache.get_base_page_indices(group)]


def test_B009_no_growth_without_a_call(make) -> None:
    """50 rounds in which the request is not scheduled, while others are: capacity stays 100."""
    manager = make(full(64))
    idle, busy = make.open(manager), make.open(manager)
    assert idle.resize(100, 40)
    pages = exposed(idle)
    handles = np.array([busy.handle], np.int64)
    table = np.full((1, 2, 64), -1, np.int32)
    row, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    for n in range(1, 51):
        assert manager.step(handles, row, one * n, one * (n - 1), table).ok.all()
        assert (idle.capacity, idle.history_length, exposed(idle)) == (100, 40, pages)


def test_B022_growth_is_exact(make) -> None:
    manager = make(full(64))
    cache = make.open(manager)
    for tokens in range(1, 1001):
        assert cache.resize(tokens, tokens - 1)
        assert cache.capacity == tokens
        assert used(manager)[0] == -(-tokens // 32) <= 32
    assert cache.num_blocks * 32 == 1024


@pytest.mark.parametrize("chunks", [[1] * 12, [3, 2, 5, 2], [12], [4, 4, 4]])
def test_B034_visible_tokens_at_the_window_edge(make, chunks) -> None:
    """w=4: when the n-th token is the newest, exactly tokens max(0, n-4) … n-1 are there, in order."""
    manager = make(config([attention(i, 64, window=4) for i in range(2)], 2 * MIB, tpb=1), "host")
    engine = Engine(manager)
    cache = make.open(manager)
    n = 0
    for chunk in chunks:
        assert cache.resize(n + chunk, n)
        engine.write(cache, 3, n, n + chunk)
        n += chunk
        assert cache.resize(n, n - 1)
        visible = [o for o, i in enumerate(exposed(cache)) if i >= 0]
        assert visible == list(range(max(0, n - 4), n))
        for order, buffer, _ in engine.buffers:
            positions = np.array(visible)
            view, where = engine._records(engine.addresses(cache, buffer.layer_id, buffer.role, positions))
            assert (view[where] == engine.record(3, buffer.layer_id, order, 0, positions)).all()
    assert n == 12


def test_B036_tables_are_absolute(make) -> None:
    """w=64, B=16, h=640: the table is indexed by block ordinal, so token 639 is in column 639 // 16 = 39, not 39 - 36."""
    manager = make(windowed(64, 64, tpb=16))
    cache = make.open(manager)
    assert cache.resize(641, 0)
    before = exposed(cache)
    assert cache.resize(641, 640)
    after = exposed(cache)
    assert len(after) == 41
    assert after[:36] == [-1] * 36
    assert after[36:] == before[36:]
    assert all(i >= 0 for i in after[36:])
    assert after[639 // 16] == before[39]


def test_B042_a_full_window_pool_is_a_retryable_no(make) -> None:
    """F 100 pages, S 9 pages; two sequences of 300 tokens, w=128, B=32: five live S blocks each."""
    manager = make(full_and_window(100, 9, 128))
    assert slots(manager) == [100, 9]
    first, second = make.open(manager), make.open(manager)
    assert first.resize(300, 299) is True
    before = manager.snapshot()
    assert second.resize(300, 299) is False
    assert manager.snapshot() == before
    first.close()
    assert second.resize(300, 299) is True


@pytest.mark.parametrize("history", [7, 8, 9])
def test_B046_a_window_keeps_at_least_what_a_chunk_needs(make, history) -> None:
    """Chunks of 8, B=4: h=7 needs 0..7; h=8 only token 8. A trailing window of 8 may keep more, never less."""
    manager = make(windowed(8, 8, tpb=4))
    cache = make.open(manager)
    assert cache.resize(history + 1, 0)
    assert cache.resize(history + 1, history)
    first = history // 8 * 8
    need = {p // 4 for p in range(first, history + 1)}
    have = {o for o, i in enumerate(exposed(cache)) if i >= 0}
    assert need <= have
    assert have == {p // 4 for p in range(max(0, history + 1 - 8), history + 1)}


def test_B111_prompt_fits_but_prompt_and_one_do_not(make) -> None:
    """Pool 4 blocks of 16, prompt 64: the 65th token is a permanent no at once, never a silent wait."""
    manager = make(full(4, tpb=16))
    cache = make.open(manager)
    assert cache.resize(64, 0) is True
    assert manager.clamp_max_seq_len_for_mem(1, 65) == 64
    before = manager.snapshot()
    with pytest.raises(NeverFitsError):
        cache.resize(65, 64)
    assert manager.snapshot() == before


def test_B119_suspending_everything_frees_nothing(make) -> None:
    """GPU only, two requests that both need more: suspended pages stay, and cancelling one lets the other go on."""
    manager = make(full(8))
    a, b = make.open(manager), make.open(manager)
    assert a.resize(4 * 32)
    assert b.resize(4 * 32)
    assert a.resize(5 * 32) is False
    a.suspend()
    assert b.resize(5 * 32) is False
    b.suspend()
    assert used(manager) == [8]
    assert b.resume() is True  # nobody is active: the gate is open, so this is no dead-lock
    a.close()
    assert b.resize(5 * 32) is True


def test_B121_the_whole_prompt_never_fits(make) -> None:
    manager = make(full(10))
    cache = make.open(manager)
    assert manager.clamp_max_seq_len_for_mem(1, 20 * 32) == 10 * 32
    with pytest.raises(NeverFitsError):
        cache.resize(20 * 32, 0)
    assert cache.resize(2 * 32, 0) is True


def test_B122_exhausted_then_freed(make, device) -> None:
    manager = make(full(4), device)
    a, b = make.open(manager), make.open(manager)
    assert a.resize(4 * 32)
    for _ in range(3):
        assert b.resize(32) is False
        with pytest.raises(OutOfPagesError) as caught:
            b.capacity = 32
        assert not isinstance(caught.value, NeverFitsError)
    a.close()
    assert b.resize(32) is True


@pytest.mark.parametrize("block", [16, 32])
def test_B196_edge_lengths(make, block) -> None:
    most = 8 * block
    manager = make(full(8, tpb=block))
    cache = make.open(manager)
    for tokens, count in ((1, 1), (block, 1), (block + 1, 2), (block - 1, 1), (most, 8)):
        assert cache.resize(tokens) is True
        assert cache.num_blocks == count == used(manager)[0]
    with pytest.raises(NeverFitsError):
        cache.resize(most + 1)
    assert cache.capacity == most


def test_B212_one_function_admits_and_allocates(make) -> None:
    """w=48, B=16, pool 4, prompt 80: as one chunk refused for good, in chunks of 16 it succeeds."""
    manager = make(windowed(4, 48, tpb=16))
    cache = make.open(manager)
    before = manager.snapshot()
    with pytest.raises(NeverFitsError):
        cache.resize(80, 0)
    assert manager.snapshot() == before
    for end in range(16, 81, 16):
        assert cache.resize(end, end - 16) is True
    assert used(manager) == [4]
    assert cache.resize(81, 80) is True


@pytest.mark.parametrize("merged", [True, False])
def test_B216_far_positions(make, merged) -> None:
    """131,072 tokens with stamps, B=32: right at 65,535, 65,536 and 131,071, in full and windowed layers."""
    layers = [attention(0, 32 * 16), attention(1, 32 * 16, window=128)]
    manager = make(config(layers, 64 * MIB, merge_equal_pools=merged), "host")
    engine = Engine(manager)
    cache = make.open(manager)
    length = 131_072
    for begin in range(0, length, 8192):
        assert cache.resize(begin + 8192, begin)
        engine.write(cache, 8, begin, begin + 8192)
        if begin == 57_344:
            assert cache.resize(None, 65_535)
            positions = np.array([65_535 - 127, 65_535])
            for order, buffer, _ in engine.buffers:
                address = engine.addresses(cache, buffer.layer_id, buffer.role, positions)
                view, where = engine._records(address)
                assert (view[where] == engine.record(8, buffer.layer_id, order, 0, positions)).all()
    assert cache.resize(length, length)
    assert engine.check(cache, 8, length) == 2 * (length + 127)


@pytest.mark.parametrize("window", [None, 100])
def test_B217_reserved_at_once_or_step_by_step(make, window) -> None:
    layers = [attention(i, 32 * 16, window=window if i else None) for i in range(2)]
    cfg = config(layers, 4 * MIB)
    at_once, lazily = make(cfg, "host"), make(cfg, "host")
    reserved, grown = make.open(at_once), make.open(lazily)
    left, right = Engine(at_once), Engine(lazily)
    assert reserved.resize(1000, 0)
    for n in range(1000):
        assert grown.resize(n + 1, n)
        right.write(grown, 6, n, n + 1)
        left.write(reserved, 6, n, n + 1)
        assert reserved.resize(None, n)
    assert used(at_once) == used(lazily)
    assert at_once.snapshot()["caches"][0]["history"] == lazily.snapshot()["caches"][0]["history"] == 999
    for group in range(len(at_once.layer_grouping)):
        assert [i >= 0 for i in exposed(reserved, group)] == [i >= 0 for i in exposed(grown, group)]
    assert reserved.resize(None, 1000)
    assert grown.resize(None, 1000)
    assert left.check(reserved, 6, 1000) == right.check(grown, 6, 1000)


def test_oracle_says_the_same_about_b046() -> None:
    assert oracle.stale(8, 4, 8) == set()
    assert oracle.stale(12, 4, 8) == {0}
