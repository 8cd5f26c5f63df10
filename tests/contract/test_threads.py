"""One mutex per manager, one thread at a time per cache (v2_request §5.5, v2_storage §8)."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvpool.errors import LogicError
from tests.support.configs import full, full_and_window, used
from tests.support.threads import run_all


def test_two_threads_in_one_cache(make, fast_switching) -> None:
    """The second gets LogicError, never a mixed state; which of the two it is depends on the moment."""
    manager = make(full_and_window(200, 40, 128))
    cache = make.open(manager)
    deadline = time.monotonic() + 1.0
    refused = [0, 0]
    done = [0, 0]

    def hammer(who: int):
        def loop() -> None:
            turn = 0
            while time.monotonic() < deadline:
                turn += 1
                try:
                    if not cache.resize(32 * (1 + turn % 40)):
                        raise AssertionError("there is room")
                    done[who] += 1
                except LogicError as error:
                    assert "thread" in str(error).lower()  # noqa: PT017
                    refused[who] += 1

        return loop

    assert run_all(hammer(0), hammer(1)) == []
    assert min(done) > 0
    manager.audit()
    assert used(manager)[0] == cache.num_blocks
    assert cache.resize(64)  # nobody is left inside


def test_four_threads_in_one_cache_end(make) -> None:
    """Each loop stops at its first refusal: no hang, no other error, no mixed state."""
    manager = make(full(64))
    cache = make.open(manager)
    errors = run_all(*[lambda: [cache.resize(32 * (1 + i % 60)) for i in range(2000)] for _ in range(4)])
    assert all(isinstance(e, LogicError) for e in errors)
    manager.audit()
    assert used(manager) == [cache.num_blocks]


def test_many_threads_each_with_its_caches(make, fast_switching) -> None:
    manager = make(full_and_window(256, 64, 64))

    def worker(seed: int):
        def loop() -> None:
            rng = np.random.default_rng(seed)
            for _ in range(60):
                cache = manager.create_kv_cache()
                cache.stop_committing()
                while not cache.resume():
                    time.sleep(0)
                capacity = 0
                for _ in range(int(rng.integers(1, 12))):
                    target = capacity + int(rng.integers(0, 50))
                    if cache.resize(target, capacity):
                        capacity = target
                if rng.integers(2):
                    cache.suspend()
                cache.close()

        return loop

    assert run_all(*[worker(i) for i in range(6)]) == []
    manager.audit()
    assert used(manager) == [0, 0]
    assert manager.snapshot()["caches"] == []


def test_B194_close_on_another_thread(make) -> None:
    """Open here, close there, 10,000 times: no hang, nothing left (I5)."""
    manager = make(full(16))
    pairs = 10_000
    box: list = []
    ready = threading.Semaphore(0)
    room = threading.Semaphore(4)

    def opener() -> None:
        for _ in range(pairs):
            assert room.acquire(timeout=60)
            cache = manager.create_kv_cache()
            cache.stop_committing()
            while not cache.resume():
                time.sleep(0)
            assert cache.resize(64)
            box.append(cache)
            ready.release()

    def closer() -> None:
        for _ in range(pairs):
            assert ready.acquire(timeout=60)
            box.pop().close()
            room.release()

    assert run_all(opener, closer) == []
    assert used(manager) == [0]
    assert manager.snapshot()["caches"] == []


def test_steps_beside_other_calls(make, fast_switching) -> None:
    """One thread steps its batch, others resize and poll: tables stay right."""
    manager = make(full(512))
    caches = [make.open(manager) for _ in range(8)]
    handles = np.array([c.handle for c in caches], np.int64)
    rows = np.arange(8, dtype=np.int32)
    table = np.full((1, 8, 64), -7, np.int32)
    stop = threading.Event()

    def stepper() -> None:
        for n in range(1, 400):
            lengths = np.full(8, n, np.int32)
            result = manager.step(handles, rows, lengths, lengths - 1, table)
            assert result.ok.all()
        stop.set()

    def churner() -> None:
        while not stop.is_set():
            cache = manager.create_kv_cache()
            cache.stop_committing()
            if cache.resume():
                cache.resize(96)
            cache.close()

    def poller() -> None:
        while not stop.is_set():
            manager.get_storage_statistics()
            manager.snapshot()

    assert run_all(stepper, churner, poller) == []
    manager.audit()
    for row, cache in enumerate(caches):
        want = [int(i) for i in cache.get_base_page_indices(0)]
        assert table[0, row].tolist() == want + [-1] * (64 - len(want))


@pytest.mark.parametrize("call", ["resize", "suspend", "close", "indices", "stream"])
def test_a_second_call_while_the_first_waits_is_refused(make, call) -> None:
    """One thread holds the manager, a second waits inside the cache: the third gets LogicError at once, not a hang."""
    manager = make(full(64))
    cache, other = make.open(manager), make.open(manager)
    assert cache.resize(64)
    calls = {
        "resize": lambda: cache.resize(96),
        "suspend": cache.suspend,
        "close": cache.close,
        "stop_committing": cache.stop_committing,
        "indices": lambda: cache.get_base_page_indices(0),
        "stream": lambda: setattr(cache, "cuda_stream", 1),
        "beam": lambda: setattr(cache, "beam_width", 2),
    }
    holding = threading.Thread(target=manager._core._hold_lock, args=(0.45,))
    holding.start()
    time.sleep(0.1)
    waiting_result: list = []
    waiting = threading.Thread(target=lambda: waiting_result.append(cache.resize(33)))
    waiting.start()
    time.sleep(0.1)
    started = time.monotonic()
    with pytest.raises(LogicError, match="(?i)thread"):
        calls[call]()
    assert time.monotonic() - started < 0.2
    waiting.join(10)
    holding.join(10)
    assert waiting_result == [True]
    assert cache.resize(64) is True  # nobody is inside any more
    assert other.resize(32) is True
    manager.audit()


def test_a_step_sees_a_busy_cache_too(make) -> None:
    manager = make(full(64))
    a, b = make.open(manager), make.open(manager)
    handles = np.array([a.handle, b.handle], np.int64)
    zeros = np.zeros(2, np.int32)
    table = np.full((1, 2, 8), -4, np.int32)
    holding = threading.Thread(target=manager._core._hold_lock, args=(0.45,))
    holding.start()
    time.sleep(0.1)
    waiting = threading.Thread(target=b.resize, args=(33,))
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(LogicError, match="(?i)thread"):
        manager.step(handles, np.arange(2, dtype=np.int32), zeros + 40, zeros, table)
    waiting.join(10)
    holding.join(10)
    assert (table == -4).all()
    assert (a.capacity, b.capacity) == (0, 33)
    assert manager.step(handles, np.arange(2, dtype=np.int32), zeros + 40, zeros, table).ok.tolist() == [True, True]
