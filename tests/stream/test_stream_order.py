"""Slots change hands between streams only behind events. The sim device runs everything as late as events permit."""

from __future__ import annotations

import random

import pytest

from kvpool.v2 import SwaScratchReuseConfig
from tests.support.arms import build
from tests.support.configs import KIB, MIB, attention, config, full, one, used, windowed
from tests.support.stepping import Stepper

BYTES = 64


def mark(*values: int) -> bytes:
    return b"".join(v.to_bytes(8, "little") for v in (*values, *[0] * (BYTES // 8 - len(values))))


def address(manager, cache, ordinal: int = 0, group: int = 0, beam: int = 0) -> int:
    slot = int(cache.get_base_page_indices(group, beam)[ordinal])
    assert slot >= 0
    pool = manager.pool_group_descs[manager.get_life_cycle_pool_group_indices()[group]].pools[0]
    return pool.base_address + slot * pool.slot_bytes


@pytest.fixture
def sim(make):
    def start(cfg, streams: int = 3):
        manager = make(cfg, "sim")
        device = manager.device_handle
        return manager, device, [device.create_stream() for _ in range(streams)]

    return start


ORDERS = [("adverse", 0), ("fifo", 0), *[("adverse", seed) for seed in (1, 2, 3, 4, 5)]]


def test_the_device_catches_a_missing_wait(sim) -> None:
    """Mutation check: two streams use one place with no event between them, and the bytes come out wrong."""
    manager, device, (old, young, _) = sim(full(2))
    place = manager.pool_group_descs[0].pools[0].base_address
    device.enqueue_write(old, place, mark(1))
    device.enqueue_write(young, place, mark(2))
    device.run_all("adverse")
    ticket = device.enqueue_read(0, place, BYTES)
    assert device.read_result(ticket) == mark(1)  # the older write came last: the younger owner's bytes are lost
    device.enqueue_write(old, place, mark(3))
    device.wait(young, device.record(old))
    device.enqueue_write(young, place, mark(4))
    device.run_all("adverse")
    assert device.read_result(device.enqueue_read(0, place, BYTES)) == mark(4)


def test_the_device_is_late(sim) -> None:
    manager, device, (stream, other, _) = sim(full(2))
    place = manager.pool_group_descs[0].pools[0].base_address
    before = device.pending()
    device.enqueue_write(stream, place, mark(1))
    event = device.record(stream)
    device.enqueue_write(other, place + 64, mark(2))
    assert device.pending() == before + 3
    assert not device.query(event)
    clock = device.clock()
    device.synchronize_event(event)
    assert device.query(event)
    assert device.clock() == clock + 2
    assert device.pending() == before + 1  # exactly what the event depends on has run
    manager.synchronize()
    assert device.pending() == 0


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("younger", [True, False])
def test_a_released_slot_waits_for_its_last_user(sim, order, seed, younger) -> None:
    manager, device, (s1, s2, _) = sim(full(2))
    first_stream, second_stream = (s1, s2) if younger else (s2, s1)
    first = manager.create_kv_cache()
    first.stop_committing()
    assert first.resume(first_stream)
    assert first.resize(64)
    places = [address(manager, first, o) for o in range(2)]
    for place in places:
        device.enqueue_write(first_stream, place, mark(1))
    own_reads = [device.enqueue_read(first_stream, place, BYTES) for place in places]
    first.close()
    second = manager.create_kv_cache()
    second.stop_committing()
    assert second.resume(second_stream)
    assert second.resize(64)
    assert [address(manager, second, o) for o in range(2)] == places
    for place in places:
        device.enqueue_write(second_stream, place, mark(2))
    reads = [device.enqueue_read(second_stream, place, BYTES) for place in places]
    device.run_all(order, seed)
    assert [device.read_result(t) for t in own_reads] == [mark(1)] * 2
    assert [device.read_result(t) for t in reads] == [mark(2)] * 2
    second.close()


@pytest.mark.parametrize("how", ["slide", "shrink", "suspend scratch", "stop committing", "fewer beams"])
def test_every_way_to_release_is_fenced(sim, how) -> None:
    """What the giver's stream still does to the page comes before what the taker's stream does."""
    fields = {"swa_scratch_reuse": SwaScratchReuseConfig()} if how == "suspend scratch" else {}
    manager, device, (giver_stream, taker_stream, _) = sim(windowed(8, 32, max_util_for_resume=1.0, **fields))
    giver = manager.create_kv_cache()
    if how != "stop committing":
        giver.stop_committing()
    assert giver.resume(giver_stream)
    giver.enable_swa_scratch_reuse = how == "suspend scratch"
    if how == "fewer beams":
        assert giver.resize(40, 40)
        giver.beam_width = 3
    else:
        assert giver.resize(128, 0)
    pool = manager.pool_group_descs[0].pools[0]
    places = {slot: pool.base_address + slot * pool.slot_bytes for slot in manager.snapshot()["pool_groups"][0]["used"]}
    for place in places.values():
        device.enqueue_write(giver_stream, place, mark(1))
    reads = {slot: device.enqueue_read(giver_stream, place, BYTES) for slot, place in places.items()}
    if how == "slide":
        assert giver.resize(128, 128)
    elif how == "shrink":
        assert giver.resize(32)
    elif how == "suspend scratch":
        giver.suspend()
    elif how == "stop committing":
        assert giver.resize(128, 128)
        giver.stop_committing()
    else:
        giver.beam_width = 1
    taken = set(places) - set(manager.snapshot()["pool_groups"][0]["used"])
    assert taken
    taker = manager.create_kv_cache()
    taker.stop_committing()
    assert taker.resume(taker_stream)
    taker.enable_swa_scratch_reuse = False
    assert taker.resize(32 * (8 - used(manager)[0]), 0)
    for ordinal in range(taker.num_blocks):
        device.enqueue_write(taker_stream, address(manager, taker, ordinal), mark(2, ordinal))
    device.run_all("adverse")
    for ticket in reads.values():
        assert device.read_result(ticket) == mark(1)
    for ordinal in range(taker.num_blocks):
        place = address(manager, taker, ordinal)
        assert device.read_result(device.enqueue_read(0, place, BYTES)) == mark(2, ordinal)
    giver.close()
    taker.close()


@pytest.mark.parametrize("how", ["setter", "setter while suspended", "resume", "step"])
@pytest.mark.parametrize("younger", [True, False])
def test_rebinding_orders_the_new_stream_behind_the_old(sim, how, younger) -> None:
    manager, device, (s1, s2, _) = sim(full(4))
    old, new = (s1, s2) if younger else (s2, s1)
    cache = manager.create_kv_cache()
    cache.stop_committing()
    assert cache.resume(old)
    assert cache.resize(40, 0)
    place = address(manager, cache)
    device.enqueue_write(old, place, mark(1))
    if how == "setter":
        cache.cuda_stream = new
    elif how == "setter while suspended":
        cache.suspend()
        cache.cuda_stream = new
        assert cache.resume()
    elif how == "resume":
        cache.suspend()
        assert cache.resume(new)
    else:
        assert Stepper(manager, 1, 4).step([cache], [0], [41], [40], stream=new) == [True]
    assert cache.cuda_stream == new
    ticket = device.enqueue_read(new, place, BYTES)
    device.enqueue_write(new, place, mark(2))
    device.run_all("adverse")
    assert device.read_result(ticket) == mark(1)
    assert device.read_result(device.enqueue_read(0, place, BYTES)) == mark(2)
    cache.close()


def test_scenario_80_excess_scratch_slot_waits(sim) -> None:
    """512 layers, window 32, 16 MiB: two slots. The consumer takes the producer's as scratch, moves to another stream,
    and its next page is that very slot: the page's first writer still comes after the producer's last reader."""
    cfg = config(
        [attention(i, 8192, 32) for i in range(512)],
        16 * MIB,
        swa_scratch_reuse=SwaScratchReuseConfig(),
        max_util_for_resume=1.0,
    )
    manager, device, (producer_stream, middle, consumer_stream) = sim(cfg)
    assert manager.pool_group_descs[0].num_slots == 2
    producer = manager.create_kv_cache()
    producer.stop_committing()
    assert producer.resume(producer_stream)
    assert producer.resize(64, 0)
    base, slot_bytes = manager.pool_group_descs[0].pools[0].base_address, 8 * MIB
    gate = []
    for slot in range(2):
        device.enqueue_write(producer_stream, base + slot * slot_bytes, mark(1, slot))
        gate.append(device.enqueue_read(producer_stream, base + slot * slot_bytes, BYTES))
    producer.close()
    consumer = manager.create_kv_cache()
    consumer.stop_committing()
    assert consumer.resume(middle)
    assert consumer.resize(256, 0)
    assert len(consumer.get_scratch_desc(0).slot_ids) == 1
    consumer.cuda_stream = consumer_stream
    assert consumer.resize(288, 256)
    assert not consumer.has_scratch_slots
    assert used(manager) == [2]
    fresh = address(manager, consumer, 8)
    device.enqueue_write(consumer_stream, fresh, mark(9))
    device.run_all("adverse")
    for slot, ticket in enumerate(gate):
        assert device.read_result(ticket) == mark(1, slot)
    assert device.read_result(device.enqueue_read(0, fresh, BYTES)) == mark(9)
    consumer.close()


@pytest.mark.parametrize("younger", [True, False])
def test_beam_copies_are_ordered(sim, younger) -> None:
    """After beam 0's writes, before the new beam's, and after the last use of the slots by another stream."""
    manager, device, (s1, s2, _) = sim(config([one(0, 256 * KIB), one(1, 128 * KIB, 64)], 4 * MIB))
    stream, other = (s1, s2) if younger else (s2, s1)
    tenant = manager.create_kv_cache()
    tenant.stop_committing()
    cache = manager.create_kv_cache()
    cache.stop_committing()
    assert cache.resume(stream)
    assert cache.resize(40, 40)
    assert tenant.resume(other)
    assert tenant.resize(96, 0)
    tenant_reads = []
    for group in range(2):
        for ordinal in range(3):
            place = address(manager, tenant, ordinal, group)
            device.enqueue_write(other, place, mark(7, group, ordinal))
            tenant_reads.append((device.enqueue_read(other, place, BYTES), mark(7, group, ordinal)))
    tenant.close()
    for group in range(2):
        device.enqueue_write(stream, address(manager, cache, 1, group), mark(1, group))
    cache.beam_width = 3
    reads = []
    for group in range(2):
        for beam in range(3):
            place = address(manager, cache, 1, group, beam)
            reads.append((device.enqueue_read(stream, place, BYTES), mark(1, group)))
            device.enqueue_write(stream, place, mark(5, group, beam))
    device.run_all("adverse")
    for ticket, want in [*tenant_reads, *reads]:
        assert device.read_result(ticket) == want
    for group in range(2):
        for beam in range(3):
            place = address(manager, cache, 1, group, beam)
            assert device.read_result(device.enqueue_read(0, place, BYTES)) == mark(5, group, beam)
    cache.close()


def test_the_events_of_a_step(sim) -> None:
    """``event`` says when other streams may use the pages: the step's stream has waited for the last owners."""
    manager, device, (owner_stream, step_stream, worker) = sim(full(4))
    owner = manager.create_kv_cache()
    owner.stop_committing()
    assert owner.resume(owner_stream)
    assert owner.resize(96)
    place = address(manager, owner)
    device.enqueue_write(owner_stream, place, mark(1))
    ticket = device.enqueue_read(owner_stream, place, BYTES)
    owner.close()
    cache = manager.create_kv_cache()
    cache.stop_committing()
    assert cache.resume(step_stream)
    stepper = Stepper(manager, 1, 4)
    assert stepper.step([cache], [0], [40], [0], stream=step_stream) == [True]
    assert address(manager, cache) == place
    device.wait(worker, stepper.last_event)
    device.enqueue_write(worker, place, mark(2))
    device.run_all("adverse")
    assert device.read_result(ticket) == mark(1)
    assert device.read_result(device.enqueue_read(0, place, BYTES)) == mark(2)
    cache.close()


def test_the_host_never_waits(sim) -> None:
    """No call of the manager runs queued work."""
    manager, device, streams = sim(windowed(16, 64, max_util_for_resume=1.0))
    clock = device.clock()
    caches = []
    for stream in streams:
        cache = manager.create_kv_cache()
        cache.stop_committing()
        assert cache.resume(stream)
        assert cache.resize(128, 0)
        assert cache.resize(140, 128)
        caches.append(cache)
    stepper = Stepper(manager, 3, 8)
    stepper.step(caches, [0, 1, 2], [161] * 3, [140] * 3, stream=streams[0])
    caches[0].beam_width = 2
    caches[1].suspend()
    assert caches[1].resume(streams[2])
    for cache in caches:
        cache.close()
    assert device.clock() == clock
    manager.synchronize()
    assert device.clock() > clock


def churn(arm: str, seed: int, turns: int = 120) -> int:
    """Caches on three streams write a mark into each page they get and read their live pages back later.

    Returns how many reads were wrong.
    """
    rng = random.Random(seed)
    layers = [one(0, 128 * KIB), one(1, 64 * KIB, 48), one(2, 64 * KIB, 48)]
    fields = {"swa_scratch_reuse": SwaScratchReuseConfig()} if seed % 3 == 0 else {}
    manager = build(arm, config(layers, 4 * MIB, 16, max_util_for_resume=1.0, **fields), "sim")
    device = manager.device_handle
    streams = [device.create_stream() for _ in range(3)]
    stepper = Stepper(manager, 6, 40)
    open_caches: list = []
    content: dict = {}
    tickets: list = []
    serial = 0
    wrong = 0

    def settle(order: str) -> None:
        nonlocal wrong
        device.run_all(order, rng.randrange(1, 1000))
        for ticket, want in tickets:
            wrong += device.read_result(ticket) != want
        tickets.clear()

    def touch(cache) -> None:
        """Check every page that had content, mark every page that is new to the cache."""
        nonlocal serial
        stream = cache.cuda_stream
        seen = {}
        for group in range(2):
            for ordinal, slot in enumerate(cache.get_base_page_indices(group)):
                if slot < 0:
                    continue
                place = address(manager, cache, ordinal, group)
                key = (group, ordinal, place)
                want = content[cache.handle].get(key)
                if want is None:
                    serial += 1
                    want = mark(cache.handle, group, ordinal, serial)
                    device.enqueue_write(stream, place, want)
                tickets.append((device.enqueue_read(stream, place, BYTES), want))
                seen[key] = want
        content[cache.handle] = seen

    for _ in range(turns):
        action = rng.random()
        if len(open_caches) < 5 and action < 0.25:
            cache = manager.create_kv_cache()
            cache.stop_committing()
            if cache.resume(rng.choice(streams)):
                open_caches.append(cache)
                content[cache.handle] = {}
            else:
                cache.close()
        elif open_caches:
            cache = rng.choice(open_caches)
            if action < 0.4:
                cache.close()
                open_caches.remove(cache)
            elif action < 0.5:
                cache.cuda_stream = rng.choice(streams)
            elif action < 0.6:
                cache.suspend()
                assert cache.resume(rng.choice(streams)) in (True, False)
                if not cache.is_active:
                    cache.close()
                    open_caches.remove(cache)
            elif action < 0.75:
                chosen = [c for c in open_caches if rng.random() < 0.7]
                lengths = [min(600, c.capacity + rng.choice([1, 16, 20])) for c in chosen]
                histories = [min(c.capacity, n) for c, n in zip(chosen, lengths, strict=True)]
                ok = stepper.step(chosen, range(len(chosen)), lengths, histories, stream=rng.choice(streams))
                for c, fine in zip(chosen, ok, strict=True):
                    if fine:
                        touch(c)
            else:
                history = min(cache.capacity, cache.history_length + rng.choice([0, 16, 40]))
                capacity = min(600, max(history, cache.capacity + rng.choice([-16, 1, 16, 64])))
                if cache.resize(capacity, history):
                    touch(cache)
        if rng.random() < 0.08:
            settle("adverse")
        manager.audit()
    settle("adverse")
    for cache in open_caches:
        cache.close()
    manager.synchronize()
    manager.shutdown()
    return wrong


@pytest.mark.parametrize("seed", range(10))
def test_bytes_stay_right_in_random_churn(arm, seed: int) -> None:
    assert churn(arm, seed) == 0


def test_the_churn_would_show_missing_waits(monkeypatch) -> None:
    """Mutation check on the Python backend: without the device's waits the same churn reads wrong bytes."""
    from kvpool._py.device.sim_device import SimDevice

    monkeypatch.setattr(SimDevice, "wait", lambda self, stream, event: None)
    assert sum(churn("v2py", seed) for seed in range(4)) > 0
