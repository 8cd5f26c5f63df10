"""Fail the n-th device call of every mutating call, for each n: the state is as before, then the call succeeds.

The outcome after the retry equals that of a run without any fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvpool.errors import CuError, CuOOMError
from kvpool.v2 import SwaScratchReuseConfig
from tests.support.arms import build
from tests.support.configs import MIB, batch, config, one, ssm
from tests.support.stepping import Stepper


@dataclass
class Stage:
    """A manager on sim whose slots carry events of several streams, two caches, a table and an index buffer."""

    manager: Any
    device: Any
    streams: list[int]
    caches: list[Any] = field(default_factory=list)
    stepper: Any = None
    buffer: Any = None

    def observe(self) -> Any:
        caches = []
        for cache in self.caches:
            rows = []
            if cache.status != cache.Status.CLOSED:
                for group in range(len(self.manager.layer_grouping)):
                    for beam in range(cache.beam_width):
                        rows.append([int(i) for i in cache.get_base_page_indices(group, beam)])
                rows.append((cache.cuda_stream, cache.enable_swa_scratch_reuse, cache.beam_width))
            caches.append((cache.status.name, cache.capacity, cache.history_length, rows))
        stats = [(s.total, s.free, s.evictable, s.available) for s in self.manager.get_storage_statistics()]
        return (
            self.manager.snapshot(),
            caches,
            stats,
            None if self.stepper is None else self.stepper.table.tolist(),
            None if self.buffer is None else self.buffer.tolist(),
        )


def stage(arm: str, *, scratch: bool = False) -> Stage:
    fields: dict[str, Any] = {"swa_scratch_reuse": SwaScratchReuseConfig()} if scratch else {}
    layers = [one(0, MIB), one(1, 512 * 1024, 64), one(2, 512 * 1024, 64), ssm(3, 256 * 1024)]
    cfg = config(
        layers,
        96 * MIB,
        max_util_for_resume=1.0,
        commit_min_snapshot=True,
        typical_step=batch(*[(200, 0)] * 3),
        **fields,
    )
    manager = build(arm, cfg, "sim")
    device = manager.device_handle
    streams = [device.create_stream() for _ in range(4)]
    # every low slot gets an event: two tenants on two streams leave some behind
    tenants = []
    for stream in streams[:2]:
        tenant = manager.create_kv_cache()
        tenant.stop_committing()
        assert tenant.resume(stream)
        tenants.append(tenant)
    for length in (64, 128, 192):
        for tenant in tenants:
            assert tenant.resize(length, 0)
    for tenant in tenants:
        tenant.close()
    return Stage(manager, device, streams)


def opened(stage_: Stage, capacity: int, history: int, stream: int = 2, *, stop: bool = True) -> Any:
    cache = stage_.manager.create_kv_cache()
    if stop:
        cache.stop_committing()
    assert cache.resume(stage_.streams[stream])
    assert cache.resize(capacity, 0)
    assert cache.resize(capacity, history)
    stage_.caches.append(cache)
    return cache


def op_grow(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 40, 0)
    return s, lambda: cache.resize(200)


def op_grow_with_buffer(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 40, 0)
    s.buffer = np.full(12, 7, np.int32)
    cache.set_base_page_index_buf(0, 1, memoryview(s.buffer))
    return s, lambda: cache.resize(200, 100)


def op_slide(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 200, 0)
    return s, lambda: cache.resize(260, 200)


def op_shrink(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 200, 30)
    return s, lambda: cache.resize(40)


def op_history(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 200, 0)
    return s, lambda: setattr(cache, "history_length", 200)


def op_capacity(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 33, 0)
    return s, lambda: setattr(cache, "capacity", 150)


def op_scratch_comes(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm, scratch=True)
    cache = opened(s, 40, 40)
    return s, lambda: cache.resize(400)


def op_scratch_goes(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm, scratch=True)
    cache = opened(s, 40, 40)
    assert cache.resize(400)
    assert cache.has_scratch_slots
    return s, lambda: cache.resize(440, 400)


def op_first_resume(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = s.manager.create_kv_cache()
    cache.stop_committing()
    cache.cuda_stream = s.streams[3]
    s.caches.append(cache)
    return s, lambda: cache.resume(s.streams[2])


def op_resume_elsewhere(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm, scratch=True)
    cache = opened(s, 40, 40)
    assert cache.resize(400)
    cache.suspend()
    return s, lambda: cache.resume(s.streams[3])


def op_suspend(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm, scratch=True)
    cache = opened(s, 40, 40)
    assert cache.resize(400)
    s.buffer = np.full(16, 7, np.int32)
    cache.set_base_page_index_buf(0, 1, memoryview(s.buffer))
    return s, lambda: cache.suspend()


def op_close(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm, scratch=True)
    cache = opened(s, 40, 40)
    assert cache.resize(400)
    return s, lambda: cache.close()


def op_close_suspended(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 140, 40)
    cache.suspend()
    return s, lambda: cache.close()


def op_stop_committing(arm: str) -> tuple[Stage, Callable[[], Any]]:
    layers = [one(0, MIB), one(1, 512 * 1024, 64)]
    manager = build(arm, config(layers, 60 * MIB, max_util_for_resume=1.0, typical_step=batch((200, 0))), "sim")
    s = Stage(manager, manager.device_handle, [manager.device_handle.create_stream() for _ in range(4)])
    cache = opened(s, 200, 200, stop=False)
    return s, lambda: cache.stop_committing()


def op_stream(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 140, 40)
    return s, lambda: setattr(cache, "cuda_stream", s.streams[3])


def op_beams(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 140, 70)
    return s, lambda: setattr(cache, "beam_width", 3)


def op_fewer_beams(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stage(arm)
    cache = opened(s, 140, 70)
    cache.beam_width = 3
    return s, lambda: setattr(cache, "beam_width", 1)


def stepped(arm: str, *, scratch: bool = False) -> Stage:
    s = stage(arm, scratch=scratch)
    for k in range(4):
        opened(s, 30 + 20 * k, 0, stream=k)
    s.stepper = Stepper(s.manager, 5, 24)
    return s


def clean(answer: Any) -> Any:
    ok, dirty, event = answer
    return ok, dirty, bool(event)


def op_step_first(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stepped(arm)
    return s, lambda: step(s, [150, 100, 130, 95], [20, 50, 60, 90], s.streams[1])


def op_step_bound(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stepped(arm)
    step(s, [150, 100, 130, 95], [20, 50, 60, 90], s.streams[1])
    return s, lambda: step(s, [193, 60, 250, 130], [150, 51, 130, 94], s.streams[1])


def op_step_own_stream(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stepped(arm)
    step(s, [150, 100, 130, 95], [20, 50, 60, 90], s.streams[1])
    return s, lambda: step(s, [151, 101, 131, 96], [150, 100, 130, 95], None)


def op_step_with_a_shortage(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stepped(arm)
    return s, lambda: step(s, [500, 24 * 32, 130, 24 * 32], [20, 0, 60, 0], s.streams[3])


def op_step_scratch(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = stepped(arm, scratch=True)
    step(s, [500, 100, 130, 95], [0, 50, 60, 90], s.streams[1])
    return s, lambda: step(s, [510, 300, 131, 400], [500, 100, 130, 95], s.streams[2])


def step(s: Stage, capacities: list[int], histories: list[int], stream: int | None) -> Any:
    ok = s.stepper.step(s.caches, [3, 0, 4, 1], capacities, histories, stream)
    return ok, list(s.stepper.last_dirty), bool(s.stepper.last_event)


OPERATIONS = {name[3:]: value for name, value in list(globals().items()) if name.startswith("op_")}


@pytest.mark.parametrize("error", ["oom", "cu"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_state_is_as_before(arm, name, error) -> None:
    reference, operation = OPERATIONS[name](arm)
    calls = reference.device.calls()
    want = operation()
    needed = reference.device.calls() - calls
    outcome = reference.observe()
    expected = CuOOMError if error == "oom" else CuError
    assert needed > 0, "this call touches no device: nothing is proved"
    for n in range(1, needed + 1):
        s, operation = OPERATIONS[name](arm)
        before = s.observe()
        s.device.fail_call(n, error)
        with pytest.raises(expected):
            operation()
        s.device.fail_call(None)
        assert s.observe() == before, f"call {n} of {needed}"
        s.manager.audit()
        assert operation() == want, f"after failing call {n}"
        assert s.observe() == outcome, f"after failing call {n}"
        s.manager.audit()
        close(s)
    s, operation = OPERATIONS[name](arm)
    s.device.fail_call(needed + 1, error)  # one more than the call makes: it is not reached
    assert operation() == want
    s.device.fail_call(None)
    close(s)
    close(reference)


def close(s: Stage) -> None:
    for cache in s.caches:
        cache.close()
    assert all(g["used"] == [] for g in s.manager.snapshot()["pool_groups"])
    s.manager.synchronize()
    s.manager.audit()
    s.manager.shutdown()


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_in_random_commands(arm, seed: int) -> None:
    """Random commands, some of them with a fault; the model of before and after is the manager itself."""
    import random

    from kvpool.errors import ConfigError
    from tests.differential.episode import streams_of
    from tests.support.commands import CommandMaker, Driver, random_manager_config

    rng = random.Random(500 + seed)
    while True:
        cfg = random_manager_config(rng)
        try:
            manager = build(arm, cfg, "sim")
            break
        except ConfigError:
            continue
    driver = Driver(manager, streams_of(manager, "sim"))
    maker = CommandMaker(rng, cfg.tokens_per_block, driver.groups)
    device = manager.device_handle
    hit = 0
    for turn in range(150):
        command = maker.next(driver)
        if rng.random() < 0.5:
            before = driver.observe()
            error = rng.choice(["oom", "cu"])
            device.fail_call(rng.randint(1, 4), error)
            answer = driver.run(command)
            device.fail_call(None)
            if answer == ("error", "CuOOMError" if error == "oom" else "CuError"):
                hit += 1
                after = driver.observe()
                assert after == before, f"seed {seed}, command {turn}: {command}"
                manager.audit()
                answer = driver.run(command)
                assert answer[0] == "ok", f"seed {seed}, command {turn}: {command}: {answer}"
        else:
            driver.run(command)
        manager.audit()
    assert hit or not cfg.layers
    driver.finish()
