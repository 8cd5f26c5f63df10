"""The sim device: no stream overtakes another at a slot, and a device call that fails changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool._py.device.sim_device import SimDevice
from kvpool._py.manager.manager import Manager
from kvpool.errors import CuError, CuOOMError, LogicError, OutOfMemoryError, OutOfPagesError
from tests.unit.py_cases import MIB, Stepper, active, attention, batch, config, i32, i64, one_full, pages, ssm


def device_of(manager: Manager) -> SimDevice:
    device = manager.device_handle()
    assert device is not None
    return device


def address(manager: Manager, slot: int) -> int:
    return manager.pool_addresses()[0][0] + slot * 2 * MIB


def test_a_reused_slot_waits_for_its_last_user() -> None:
    manager = Manager(one_full(4), "sim")
    device = device_of(manager)
    old, young = device.create_stream(), device.create_stream()
    (first,) = active(manager, (32, 0), stream=old)
    device.enqueue_write(old, address(manager, 0), b"late write of the first user")
    manager.close(first)
    (second,) = active(manager, (32, 0), stream=young)
    assert pages(manager, second) == [0]
    device.enqueue_write(young, address(manager, 0), b"mine")
    device.run_all("adverse")
    assert device.read_result(device.enqueue_read(young, address(manager, 0), 4)) == b"mine"


def test_excess_scratch_slots_wait_too() -> None:  # scenario 80
    manager = Manager(config([attention(i, 32, 65536) for i in range(16)], 16 * MIB, rewind=0), "sim")
    device = device_of(manager)
    producer, consumer, other = (device.create_stream() for _ in range(3))
    (handle,) = active(manager, (256, 0), stream=producer)
    begin, end, slots = manager.scratch_desc(handle, 0) or (0, 0, [])
    assert (begin, end, slots) == (0, 7, [0])
    device.enqueue_write(producer, address(manager, 0), b"scratch")
    manager.set_stream(handle, consumer)
    assert manager.resize(handle, 288, 256)
    assert manager.scratch_desc(handle, 0) is None
    (later,) = active(manager, (32, 0), stream=other)
    (slot,) = pages(manager, later)
    device.enqueue_write(other, address(manager, slot), b"page")
    device.run_all("adverse")
    assert device.read_result(device.enqueue_read(other, address(manager, slot), 4)) == b"page"


def test_another_stream_waits_at_resume_at_hand_over_and_in_a_step() -> None:
    for hand_over in ("resume", "set_stream", "step"):
        manager = Manager(one_full(4), "sim")
        device = device_of(manager)
        old, young = device.create_stream(), device.create_stream()
        (handle,) = active(manager, (32, 0), stream=old)
        device.enqueue_write(old, address(manager, 0), b"data")
        if hand_over == "resume":
            manager.suspend(handle)
            assert manager.resume(handle, young)
        elif hand_over == "set_stream":
            manager.set_stream(handle, young)
        else:
            assert Stepper(manager, 1, 2)([handle], [0], [32], [0], young) == ([True], [(0, 0, 0, 2)], 0)
        assert manager.stream(handle) == young
        ticket = device.enqueue_read(young, address(manager, 0), 4)
        device.run_all("adverse")
        assert device.read_result(ticket) == b"data"


def test_beam_copies_follow_the_stream() -> None:
    manager = Manager(one_full(4), "sim")
    device = device_of(manager)
    stream = device.create_stream()
    (handle,) = active(manager, (33, 32), stream=stream)
    assert manager.resize(handle, 40, 33)
    device.enqueue_write(stream, address(manager, 1), b"tail")
    manager.set_beam_width(handle, 2)
    assert pages(manager, handle, 0, 1) == [-1, 2]
    assert device.read_result(device.enqueue_read(stream, address(manager, 2), 4)) == b"tail"


def test_step_event_covers_reused_slots() -> None:
    manager = Manager(one_full(4), "sim")
    device = device_of(manager)
    old, young, executor = (device.create_stream() for _ in range(3))
    (first,) = active(manager, (32, 0), stream=old)
    (second,) = active(manager, (32, 0), stream=young)
    device.enqueue_write(old, address(manager, 0), b"late")
    manager.close(first)
    step = Stepper(manager, 1, 4)
    _, _, event = step([second], [0], [64], [32], young)
    assert step.row(0, 0) == [1, 0, -1, -1]
    assert event > 0
    device.wait(executor, event)
    device.enqueue_write(executor, address(manager, 0), b"new!")
    device.run_all("adverse")
    assert device.read_result(device.enqueue_read(executor, address(manager, 0), 4)) == b"new!"
    calls = device.calls()
    assert step([second], [0], [64], [33], young) == ([True], [], 0)
    assert device.calls() == calls  # nothing moved, nothing is asked of the device


def test_one_wait_per_event() -> None:
    manager = Manager(one_full(8), "sim")
    device = device_of(manager)
    streams = [device.create_stream() for _ in range(2)]
    (first,), (second,) = active(manager, (128, 0), stream=streams[0]), active(manager, (0, 0), stream=streams[1])
    manager.close(first)
    before = device.calls()
    assert manager.resize(second, 128, 0)
    assert device.calls() == before + 1
    assert manager.resize(second, 0, 0)
    assert device.calls() == before + 2
    assert manager.resize(second, 128, 0)  # its own stream needs no wait
    assert device.calls() == before + 2


def test_construction_fails_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 2, 3, 4):
        device = SimDevice()
        device.fail_call(n)
        monkeypatch.setattr("kvpool._py.manager.state.make_device", lambda name, device=device: device)
        with pytest.raises(CuOOMError):
            Manager(config([attention(0), attention(1, 64, 16384)]), "sim")
        assert sum(arena.committed_bytes for arena in device._arenas) == 0


# ---------------------------------------------------------------------------------------------------- fault sweep


class World:
    """A manager on the sim device in some state, driven by a seed, and one more random call on it."""

    def __init__(self, seed: int) -> None:
        layers = [attention(0, 9, MIB // 2), attention(1, None, MIB // 2), attention(2, 40, MIB // 8), ssm(3, MIB)]
        rewind = 2 if seed % 2 else None
        typical = batch(*[(60, 40)] * 4)
        cfg = config(layers, 96 * MIB, tpb=4, rewind=rewind, typical_step=typical, commit_min_snapshot=True)
        cfg.commit_min_snapshot = seed % 3 == 0  # the core takes both, with states or without
        self.stories = [np.arange(300, dtype=np.int32) // 50 * k for k in (1, 1, 2)]
        self.manager = Manager(cfg, "sim")
        self.device = device_of(self.manager)
        self.streams = [self.device.create_stream() for _ in range(3)]
        self.rng = random.Random(seed)
        self.handles: list[int] = []
        self.table = np.full((len(self.manager.layout().life_cycles), 8, 64), -7, np.int32)

    def choose(self) -> Callable[[], Any]:
        """A random call with its arguments fixed."""
        rng, manager = self.rng, self.manager
        if len(self.handles) < 2 or (len(self.handles) < 6 and rng.random() < 0.15):
            return self.create
        handle = rng.choice(self.handles)
        _, history, capacity, _ = manager.lengths(handle)
        new_history = rng.randint(history, capacity)
        new_capacity = new_history + rng.choice((0, 1, 4, 30, 60))
        stream = rng.choice(self.streams)
        calls: list[Callable[[], Any]] = [
            lambda: manager.resize(handle, new_capacity, new_history),
            lambda: manager.resize(handle, new_capacity, new_history),
            lambda: manager.resize(handle, new_capacity, new_history),
            lambda: manager.resume(handle, stream),
            lambda: manager.resume(handle, stream),
            lambda: manager.suspend(handle),
            lambda: manager.set_stream(handle, stream),
            lambda: manager.stop_committing(handle),
            lambda: self.close(handle),
        ]
        if manager.status(handle) == 1 and manager.beam_width(handle) == 1:
            ids, is_end = self.next_tokens(handle), rng.random() < 0.1
            calls += [lambda: manager.commit(handle, ids, (), is_end)] * 6
        width = rng.randint(1, 3)
        calls.append(lambda: manager.set_beam_width(handle, width))
        chosen = [h for h in self.handles if manager.status(h) == 1 and manager.beam_width(h) == 1]
        rng.shuffle(chosen)
        arguments = [(h, *self.next_lengths(h)) for h in chosen]
        tokens = [self.next_tokens(h) if rng.random() < 0.5 else i32() for h in chosen]
        for k, (h, capacity, history) in enumerate(arguments):
            committed = manager.lengths(h)[0] + len(tokens[k])
            arguments[k] = h, max(capacity, committed), max(history, committed)
        calls += [lambda: self.step(arguments, stream, tokens)] * 5
        return rng.choice(calls)

    def create(self) -> None:
        story = self.rng.choice(self.stories)
        length = self.rng.randrange(60)
        handle = self.manager.create(ids=story[:length], prompt_length=length)
        self.handles.append(handle)

    def next_tokens(self, handle: int) -> Any:
        committed, history, capacity, _ = self.manager.lengths(handle)
        count = self.rng.choice(
            (0, 1, capacity - committed, history - committed, self.rng.randint(0, capacity - committed))
        )
        done = self.manager.committed_tokens(handle)[0]
        same = [story for story in self.stories if (story[:committed] == done).all()]
        return self.rng.choice(same)[committed : committed + count] if self.manager.commit_allowed(handle) else i32()

    def close(self, handle: int) -> None:
        self.manager.close(handle)
        self.handles.remove(handle)

    def next_lengths(self, handle: int) -> tuple[int, int]:
        _, history, capacity, _ = self.manager.lengths(handle)
        history = self.rng.randint(history, capacity)
        return min(history + self.rng.choice((1, 2, 30)), 250) if history < 240 else capacity, history

    def step(self, arguments: list[tuple[int, int, int]], stream: int, tokens: list[Any]) -> Any:
        handles, capacities, histories = (
            (list(column) for column in zip(*arguments, strict=True)) if arguments else ([],) * 3
        )
        rows = [self.handles.index(h) for h in handles]
        offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        return self.manager.step(
            i64(*handles),
            i32(*rows),
            i32(*capacities),
            i32(*histories),
            self.table,
            (np.concatenate([i32(), *tokens]), offsets),
            stream,
        )

    def state(self) -> tuple[Any, ...]:
        manager = self.manager
        streams = [manager.stream(handle) for handle in self.handles]
        exposed = [
            pages(manager, handle, group, beam)
            for handle in self.handles
            for group in range(len(manager.layout().life_cycles))
            for beam in range(manager.beam_width(handle))
        ]
        sets = [
            [manager._tier.ready_set(group, slot) for slot in range(count)]
            for group, count in enumerate(manager.slot_counts())
        ]
        return manager.snapshot(), streams, exposed, self.table.tolist(), sets


@pytest.mark.parametrize("seed", range(12))
def test_a_failing_device_call_leaves_everything_as_it_was(seed: int) -> None:
    world = World(seed)
    failures = 0
    for _ in range(150):
        call = world.choose()
        before = world.state()
        for n in range(1, 20):
            world.device.fail_call(n, "oom" if n % 2 else "cu")
            handles = list(world.handles)
            try:
                call()
            except (CuOOMError, CuError):
                failures += 1
                assert world.handles == handles
                assert world.state() == before
                world.manager.audit()
            except (LogicError, OutOfPagesError, ValueError):
                break
            else:
                break
        world.device.fail_call(None)
        world.manager.audit()
    assert failures > 10
    for handle in world.handles:
        world.manager.close(handle)
    world.manager.audit()
    assert world.manager.all_tree_pages_droppable()
    world.manager.clear_reusable_blocks()
    assert world.manager.statistics() == [(total, total, 0) for total, _, _ in world.manager.statistics()]
    world.device.synchronize()


def test_out_of_memory_tree() -> None:
    assert issubclass(CuOOMError, OutOfMemoryError)
