from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from kvpool._py.device.factory import make_device
from kvpool._py.device.host_device import HostDevice
from kvpool._py.device.sim_device import SimArena, SimDevice
from kvpool._py.device.virtual_device import VirtualDevice
from kvpool.errors import (
    ArgumentError,
    ConfigError,
    CorruptedError,
    CuError,
    CuOOMError,
    HostOOMError,
    LogicError,
    UnsupportedError,
)
from tests.unit.py_cases import MIB

PAGE = 2 * MIB


def test_factory() -> None:
    assert [make_device(name).name for name in ("auto", "host", "virtual", "sim")] == ["host", "host", "virtual", "sim"]
    with pytest.raises(UnsupportedError, match="not built yet"):
        make_device("cuda")
    with pytest.raises(ConfigError, match="auto, host, virtual, sim, cuda"):
        make_device("gpu")


def test_host_arena() -> None:
    arena = HostDevice().reserve(3 * MIB)
    assert (arena.size, arena.address % PAGE, arena.committed_bytes) == (4 * MIB, 0, 0)
    arena.commit(0, 4 * MIB)
    view = arena.view(PAGE, 16)
    assert view.ctypes.data == arena.address + PAGE
    view[:] = 7
    assert arena.view(PAGE + 15, 2).tolist() == [7, 0]
    arena.decommit(PAGE, PAGE)
    assert arena.committed_bytes == PAGE
    assert view.tolist() == [0] * 16
    for wrong in ((1, PAGE), (0, 1), (0, 3 * PAGE), (-PAGE, PAGE)):
        with pytest.raises(LogicError):
            arena.commit(*wrong)


def test_a_view_outlives_its_arena() -> None:
    arena = HostDevice().reserve(PAGE)
    view = arena.view(0, PAGE)
    arena.release()
    del arena
    gc.collect()
    view[:] = 3
    assert int(view.sum()) == 3 * PAGE


def test_host_memory_that_can_not_be_had() -> None:
    for size in (1 << 46, 1 << 62, 1 << 63):
        with pytest.raises(HostOOMError):
            HostDevice().reserve(size)


def test_host_copy_is_done_at_once() -> None:
    device = HostDevice()
    arena = device.reserve(PAGE)
    arena.view(0, 4)[:] = [1, 2, 3, 4]
    device.copy(0, [(arena.address + 100, arena.address, 4)])
    assert arena.view(100, 4).tolist() == [1, 2, 3, 4]
    assert (device.record(0), device.query(5)) == (0, True)


def test_virtual_addresses() -> None:
    device = VirtualDevice()
    first, second = device.reserve(1 << 45), device.reserve(1)
    assert first.address == 1 << 40
    assert second.address == (1 << 40) + (1 << 45)
    second.commit(0, PAGE)
    assert second.committed_bytes == PAGE
    with pytest.raises(UnsupportedError):
        first.view(0, 1)


@pytest.fixture
def sim() -> SimDevice:
    return SimDevice()


@pytest.fixture
def arena(sim: SimDevice) -> SimArena:
    arena = sim.reserve(2 * PAGE)
    arena.commit(0, 2 * PAGE)
    return arena


def test_nothing_runs_until_it_must(sim: SimDevice, arena: SimArena) -> None:
    stream = sim.create_stream()
    sim.enqueue_write(stream, arena.address, b"abc")
    assert (stream, sim.pending(), sim.clock()) == (1, 1, 0)
    assert arena.view(0, 3).tobytes() == b"\0\0\0"
    ticket = sim.enqueue_read(stream, arena.address, 3)
    assert sim.read_result(ticket) == b"abc"
    assert (sim.pending(), sim.clock()) == (0, 2)
    with pytest.raises(ArgumentError):
        sim.read_result(ticket)


def write_then_read(sim: SimDevice, arena: SimArena, wait: bool) -> int:
    """Old stream writes, young stream reads, with or without a wait."""
    old, young = sim.create_stream(), sim.create_stream()
    sim.enqueue_write(old, arena.address, b"new")
    event = sim.record(old)
    if wait:
        sim.wait(young, event)
    return sim.enqueue_read(young, arena.address, 3)


@pytest.mark.parametrize(
    "run",
    [
        lambda sim: sim.run_all("adverse"),
        lambda sim: sim.run_all("fifo"),
        lambda sim: sim.run_all("adverse", seed=9),
        lambda sim: sim.synchronize(),
        lambda sim: None,
    ],
)
def test_events_order_streams(sim: SimDevice, arena: SimArena, run: Callable[[SimDevice], None]) -> None:
    ticket = write_then_read(sim, arena, wait=True)
    run(sim)
    assert sim.read_result(ticket) == b"new"


def test_a_missing_wait_shows(sim: SimDevice, arena: SimArena) -> None:
    ticket = write_then_read(sim, arena, wait=False)
    sim.run_all("adverse")
    assert sim.read_result(ticket) == b"\0\0\0"
    assert sim.pending() == 0


def test_synchronize_runs_exactly_what_the_event_needs(sim: SimDevice, arena: SimArena) -> None:
    a, b, c = (sim.create_stream() for _ in range(3))
    sim.enqueue_write(a, arena.address, b"1")
    first = sim.record(a)
    sim.enqueue_write(a, arena.address, b"2")
    sim.wait(b, first)
    second = sim.record(b)
    sim.enqueue_write(c, arena.address + 1, b"3")
    assert not sim.query(second)
    sim.synchronize_event(second)
    assert sim.query(first)
    assert sim.query(second)
    assert arena.view(0, 2).tobytes() == b"1\0"
    assert sim.pending() == 2


def test_calls_are_counted_and_fail_once(sim: SimDevice, arena: SimArena) -> None:
    assert sim.calls() == 2  # reserve, commit
    sim.fail_call(2)
    event = sim.record(0)
    with pytest.raises(CuOOMError):
        sim.wait(0, event)
    sim.wait(0, event)
    sim.wait(0, 0)  # complete already: no call
    assert sim.calls() == 5
    sim.fail_call(1, "cu")
    with pytest.raises(CuError) as caught:
        sim.copy(0, [])
    assert caught.value.error_code == 999
    sim.fail_call(1)
    sim.fail_call(None)
    sim.copy(0, [(arena.address, arena.address + 8, 8)])
    sim.enqueue_copy(0, arena.address, arena.address + 8, 8)
    assert sim.calls() == 7
    sim.fail_call(1)
    with pytest.raises(CuOOMError):
        sim.reserve(1)
    with pytest.raises(ArgumentError):
        sim.fail_call(0)
    with pytest.raises(ArgumentError):
        sim.fail_call(1, "fire")
    with pytest.raises(ArgumentError):
        sim.run_all("random")
    with pytest.raises(LogicError):
        sim.wait(0, 99)


def test_access_without_memory_is_found_when_it_runs(sim: SimDevice, arena: SimArena) -> None:
    sim.enqueue_write(0, arena.address + 2 * PAGE - 1, b"xy")
    with pytest.raises(CorruptedError):
        sim.run_all()
    sim.enqueue_write(0, arena.address + PAGE, b"x")
    arena.decommit(PAGE, PAGE)
    with pytest.raises(CorruptedError):
        sim.synchronize()
    sim.enqueue_write(0, arena.address, b"x")
    arena.release()
    with pytest.raises(CorruptedError):
        sim.synchronize()


def test_batched_copy_runs_as_one_operation(sim: SimDevice, arena: SimArena) -> None:
    arena.view(0, 4)[:] = np.arange(4)
    sim.copy(0, [(arena.address + 10, arena.address, 2), (arena.address + 20, arena.address + 2, 2)])
    sim.synchronize()
    assert sim.clock() == 1
    assert arena.view(10, 12).tolist() == [0, 1, *[0] * 8, 2, 3]
