"""Fail the n-th device call of every mutating call, for each n: the state is as before, then the call succeeds.

The outcome after the retry equals that of a run without any fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ConfigError, CuError, CuOOMError
from kvpool.v2 import ReuseScope, SwaScratchReuseConfig
from tests.differential.episode import streams_of
from tests.support.arms import build
from tests.support.commands import CommandMaker, Driver, random_manager_config
from tests.support.configs import MIB, batch, config, one, ratio, slots, ssm
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


def step(
    s: Stage, capacities: list[int], histories: list[int], stream: int | None, tokens: list[list[int]] | None = None
) -> Any:
    rows = [3, 0, 4, 1][: len(s.caches)]
    ok = s.stepper.step(s.caches, rows, capacities, histories, stream, tokens=tokens)
    return ok, list(s.stepper.last_dirty), bool(s.stepper.last_event)


# reuse ---------------------------------------------------------------------------------------------------------
FULL_SLOTS, WINDOW_SLOTS = 12, 12


def prefix_stage(arm: str, *, states: bool = False, min_snapshot: bool = False, filled: bool = True) -> Stage:
    """A full and a windowed group of twelve slots (and states); ``filled``: all slots are cached or have events."""
    layers: list[Any] = [one(0, 2 * MIB), one(1, 4 * MIB, 64)]
    shares = [FULL_SLOTS * 2, WINDOW_SLOTS * 4]
    if states:
        layers.append(ssm(2, 8 * MIB))
        shares.append(8 * 8)
    fields: dict[str, Any] = {"commit_min_snapshot": True} if states or min_snapshot else {}
    manager = build(
        arm,
        config(layers, sum(shares) * MIB, max_util_for_resume=1.0, initial_pool_ratio=ratio(*shares), **fields),
        "sim",
    )
    s = Stage(manager, manager.device_handle, [manager.device_handle.create_stream() for _ in range(4)])
    assert slots(manager)[:2] == [FULL_SLOTS, WINDOW_SLOTS]
    if filled:
        for stream, base in ((0, 5000), (1, 6000)):
            leave(s, list(range(base, base + 32 * FULL_SLOTS // 2)), stream)
    return s


def leave(s: Stage, tokens: list[int], stream: int) -> None:
    """A request computes and commits these tokens, and is gone."""
    cache = s.manager.create_kv_cache()
    assert cache.resume(s.streams[stream])
    grown = 0
    while grown < len(tokens):  # in chunks, so that a small window pool suffices
        now = min(len(tokens), grown + 64)
        assert cache.resize(now)
        cache.commit(tokens[grown:now])
        grown = now
    cache.close()


def matched(s: Stage, tokens: list[int], stream: int | None = None, expect: int | None = None) -> Any:
    cache = s.manager.create_kv_cache(None, tokens)
    assert cache.num_committed_tokens == (len(tokens) if expect is None else expect)
    s.caches.append(cache)
    if stream is not None:
        assert cache.resume(s.streams[stream])
    return cache


def op_match_then_resume(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    leave(s, list(range(80)), 1)
    cache = matched(s, list(range(75)))
    return s, lambda: cache.resume(s.streams[2])


def op_match_of_full_blocks(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    leave(s, list(range(96)), 1)
    cache = matched(s, list(range(64)))
    return s, lambda: cache.resume(s.streams[2])


def op_match_with_a_state(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm, states=True)
    leave(s, list(range(80)), 1)
    cache = matched(s, list(range(100)), expect=80)
    return s, lambda: cache.resume(s.streams[2])


def op_match_to_the_end_of_a_block_with_a_state(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm, states=True)
    leave(s, list(range(64)), 1)
    cache = matched(s, list(range(100)), expect=64)
    cache.cuda_stream = s.streams[0]
    return s, lambda: cache.resume(s.streams[2])


def op_match_elsewhere(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    leave(s, list(range(80)), 1)
    cache = matched(s, list(range(75)), 3)
    cache.suspend()
    return s, lambda: cache.resume(s.streams[2])


def op_grow_by_evicting(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 0, 0, 3, stop=False)
    return s, lambda: cache.resize(200)


def op_beams_by_evicting(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 40, 40, 3, stop=False)
    return s, lambda: setattr(cache, "beam_width", 3)


def op_commit_new_blocks(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 200, 0, 3, stop=False)
    return s, lambda: cache.commit(list(range(70)))


def op_commit_behind_the_window(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 200, 150, 3, stop=False)
    return s, lambda: cache.commit(list(range(190)))


def op_commit_what_is_there(arm: str) -> tuple[Stage, Callable[[], Any]]:
    """Another has committed the same: its pages take the place of ours."""
    s = prefix_stage(arm)
    cache = opened(s, 120, 0, 3, stop=False)
    other = opened(s, 100, 0, 0, stop=False)
    other.commit(list(range(100)))
    s.buffer = np.full(8, 7, np.int32)
    cache.set_base_page_index_buf(0, 1, memoryview(s.buffer))
    return s, lambda: cache.commit(list(range(110)))


def op_commit_adopts_missing_pages(arm: str) -> tuple[Stage, Callable[[], Any]]:
    """The tree has the blocks, but no window pages any more: ours become the tree's."""
    s = prefix_stage(arm, filled=False)
    leave(s, list(range(128)), 1)
    cache = s.manager.create_kv_cache()
    s.caches.append(cache)
    assert cache.resume(s.streams[2])
    assert cache.resize(128)
    probe = s.manager.create_kv_cache(None, list(range(128)))
    probe.stop_committing()
    plan = probe.plan_committed_block_drop()
    probe.close()
    plan.drop()
    return s, lambda: cache.commit(list(range(128)))


def op_commit_a_snapshot(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm, states=True)
    cache = opened(s, 100, 0, 3, stop=False)
    return s, lambda: cache.commit(list(range(75)))


def op_commit_a_snapshot_at_a_boundary(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm, states=True)
    cache = opened(s, 100, 0, 3, stop=False)
    return s, lambda: cache.commit(list(range(64)))


def op_commit_the_end(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm, states=True)
    cache = opened(s, 100, 0, 3, stop=False)
    cache.commit(list(range(50)))
    return s, lambda: cache.commit(list(range(50, 90)), is_end=True)


def op_commit_the_end_without_snapshots(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 100, 0, 3, stop=False)
    return s, lambda: cache.commit(list(range(90)), is_end=True)


def op_commit_the_end_inside_another(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 100, 0, 3, stop=False)
    leave(s, list(range(96)), 0)
    return s, lambda: cache.commit(list(range(90)), is_end=True)


def op_stop_with_a_tail(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 180, 0, 3, stop=False)
    cache.commit(list(range(75)))
    assert cache.resize(180, 170)
    return s, lambda: cache.stop_committing()


def op_stop_while_suspended(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 180, 0, 3, stop=False)
    cache.commit(list(range(75)))
    assert cache.resize(180, 170)
    cache.suspend()
    return s, lambda: cache.stop_committing()


def op_close_with_cached_blocks(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 130, 0, 3, stop=False)
    cache.commit(list(range(110)))
    return s, lambda: cache.close()


def op_close_a_shared_prefix(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    leave(s, list(range(96)), 1)
    cache = matched(s, list(range(90)), 3)
    matched(s, list(range(64)), 2)
    assert cache.resize(140)
    cache.commit(list(range(90, 130)))
    return s, lambda: cache.close()


def op_slide_into_the_cache(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = opened(s, 180, 0, 3, stop=False)
    cache.commit(list(range(60)))
    return s, lambda: cache.resize(190, 170)


def op_scope_of_its_own(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = prefix_stage(arm)
    cache = s.manager.create_kv_cache(ReuseScope(3, None))
    s.caches.append(cache)
    assert cache.resume(s.streams[3])
    assert cache.resize(40)
    return s, lambda: cache.commit(list(range(40)))


def committing(arm: str) -> Stage:
    s = prefix_stage(arm)
    for k in range(3):
        opened(s, 40 + 20 * k, 0, k, stop=False)
    s.stepper = Stepper(s.manager, 5, 12)
    return s


def op_step_commits(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = committing(arm)
    tokens = [list(range(40)), list(range(60)), list(range(33))]
    return s, lambda: step(s, [70, 61, 90], [40, 60, 33], s.streams[3], tokens)


def op_step_commits_again(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = committing(arm)
    tokens = [list(range(40)), list(range(60)), list(range(33))]
    step(s, [70, 61, 90], [40, 60, 33], s.streams[3], tokens)
    more = [list(range(40, 70)), [60], []]
    return s, lambda: step(s, [71, 62, 100], [70, 61, 90], s.streams[2], more)


def op_step_commits_with_a_shortage(arm: str) -> tuple[Stage, Callable[[], Any]]:
    s = committing(arm)
    tokens = [list(range(40)), list(range(60)), list(range(33))]
    return s, lambda: step(s, [70, 32 * FULL_SLOTS, 90], [40, 60, 33], s.streams[3], tokens)


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
    s.manager.audit()
    s.manager.clear_reusable_blocks()
    assert all(g["used"] == [] for g in s.manager.snapshot()["pool_groups"])
    s.manager.synchronize()
    s.manager.audit()
    s.manager.shutdown()


def test_a_step_that_lacks_room_for_one_request_takes_back_its_commit_only(arm) -> None:
    s, operation = op_step_commits_with_a_shortage(arm)
    ok, _, _ = operation()
    assert ok == [True, False, True]
    assert [cache.num_committed_tokens for cache in s.caches] == [40, 0, 33]
    assert [cache.history_length for cache in s.caches] == [40, 0, 33]
    assert [cache.capacity for cache in s.caches] == [70, 60, 90]
    close(s)


SHORTAGES: dict[str, Callable[[Stage, Any], Any]] = {
    "grow": lambda s, cache: cache.resize(32 * (FULL_SLOTS - 1)),
    "grow and slide": lambda s, cache: cache.resize(32 * (FULL_SLOTS - 1), 60),
    "the first resume of a match": lambda s, cache: s.caches[-1].resume(s.streams[1]),
}


@pytest.mark.parametrize("name", SHORTAGES)
def test_a_shortage_leaves_everything_as_it_was(arm, name) -> None:
    """Cached pages count as room, held ones do not; "not now" evicts nothing and moves nothing in the queues."""
    s = prefix_stage(arm)
    leave(s, list(range(80)), 1)
    cache = opened(s, 60, 0, 3, stop=False)
    cache.commit(list(range(1000, 1040)))
    holder = matched(s, list(range(75)))
    del s.caches[-1]
    if name.startswith("the first"):
        matched(s, list(range(75)))  # a second owner: otherwise the private copy takes its source over
        assert cache.resize(32 * (FULL_SLOTS - 3))  # all but the three pages of the match
    else:
        assert holder.resume(s.streams[2])
    s.caches.append(holder)
    before = s.observe()
    calls = s.device.calls()
    assert SHORTAGES[name](s, cache) is False
    assert s.observe() == before
    assert s.device.calls() == calls
    s.manager.audit()
    close(s)


def test_calls_that_need_no_device(arm) -> None:
    """Look-ups, requests that never ran, plans and clearing work while the device fails."""
    s = prefix_stage(arm)
    leave(s, list(range(80)), 1)
    s.device.fail_call(1, "cu")
    calls = s.device.calls()
    cache = s.manager.create_kv_cache(None, list(range(80)))
    assert cache.num_committed_tokens == s.manager.probe_reuse(None, list(range(80))) == 80
    assert s.manager.probe_first_new_block_key(None, list(range(96))) is not None
    cache.cuda_stream = s.streams[2]
    cache.stop_committing()
    plan = cache.plan_committed_block_drop()
    cache.close()
    plan.drop()
    assert s.manager.probe_reuse(None, list(range(80))) == 0
    s.manager.clear_reusable_blocks()
    assert s.device.calls() == calls
    s.device.fail_call(None)
    close(s)


@pytest.mark.parametrize("seed", range(24))
def test_random_faults_in_random_commands(arm, seed: int) -> None:
    """Random commands, some of them with a fault; the model of before and after is the manager itself."""
    reuse = seed % 4 != 0
    rng = random.Random(500 + seed)
    while True:
        cfg = random_manager_config(rng, reuse=reuse)
        try:
            manager = build(arm, cfg, "sim")
            break
        except ConfigError:
            continue
    driver = Driver(manager, streams_of(manager, "sim"))
    maker = CommandMaker(rng, cfg, driver.groups, reuse=reuse)
    device = manager.device_handle
    hit = 0
    discarded = False
    for turn in range(150):
        command = maker.next(driver)
        if rng.random() < 0.5:
            before = driver.observe()
            error = rng.choice(["oom", "cu"])
            device.fail_call(rng.randint(1, 4), error)
            answer = driver.run(command)
            device.fail_call(None)
            if answer[:2] == ("error", "CuOOMError" if error == "oom" else "CuError"):
                hit += 1
                after = driver.observe()
                assert after == before or discarded, f"seed {seed}, command {turn}: {command}"
                manager.audit()
                answer = driver.run(command)
                assert answer[0] == "ok", f"seed {seed}, command {turn}: {command}: {answer}"
        else:
            driver.run(command)
        discarded = command[0] in ("discard", "plan")  # a later call drops what such a plan names
        manager.audit()
    assert hit or min((stats.total for stats in manager.get_storage_statistics()), default=0) < 8
    driver.finish()
