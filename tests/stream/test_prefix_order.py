"""Pages that several requests share change hands between streams only behind events, as slots do."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from kvpool.v2 import PlannedDropHandle
from tests.support.arms import build
from tests.support.configs import KIB, MIB, config, full, full_and_window, one, ssm, used
from tests.support.reuse_oracle import Chains, Rules, Tree, scope_seed
from tests.support.stepping import Stepper
from tests.support.texts import SCOPES, Library

BYTES = 64
ORDERS = [("adverse", 0), ("fifo", 0), *[("adverse", seed) for seed in (1, 2, 3, 4, 5)]]


def mark(*values: int) -> bytes:
    return b"".join(v.to_bytes(8, "little") for v in (*values, *[0] * (BYTES // 8 - len(values))))


def slot_address(manager, slot: int, group: int = 0) -> int:
    pool = manager.pool_group_descs[manager.get_life_cycle_pool_group_indices()[group]].pools[0]
    return pool.base_address + slot * pool.slot_bytes


def address(manager, cache, ordinal: int = 0, group: int = 0) -> int:
    slot = int(cache.get_base_page_indices(group)[ordinal])
    assert slot >= 0
    return slot_address(manager, slot, group)


@pytest.fixture
def sim(make):
    def start(cfg, streams: int = 4):
        manager = make(cfg, "sim")
        device = manager.device_handle
        return manager, device, [device.create_stream() for _ in range(streams)]

    return start


def writer(manager, device, stream: int, tokens: list[int], *, group: int = 0) -> Any:
    """A request that has written a mark into each of its blocks and committed all."""
    cache = manager.create_kv_cache()
    assert cache.resume(stream)
    assert cache.resize(len(tokens))
    for ordinal in range(cache.num_blocks):
        device.enqueue_write(stream, address(manager, cache, ordinal, group), mark(1, ordinal))
    cache.commit(tokens)
    return cache


def reader(manager, device, stream: int, tokens: list[int]) -> tuple[Any, list[int]]:
    """A request that matches all of ``tokens`` and has asked for the bytes of each block."""
    cache = manager.create_kv_cache(None, tokens)
    assert cache.num_committed_tokens == len(tokens)
    assert cache.resume(stream)
    reads = [device.enqueue_read(stream, address(manager, cache, o), BYTES) for o in range(cache.num_blocks)]
    return cache, reads


def results(device, tickets: list[int]) -> list[bytes]:
    return [device.read_result(ticket) for ticket in tickets]


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("younger", [True, False])
def test_a_match_reads_behind_its_writer(sim, order, seed, closed, younger) -> None:
    manager, device, (s1, s2, *_) = sim(full(8))
    first, second = (s1, s2) if younger else (s2, s1)
    tokens = list(range(64))
    owner = writer(manager, device, first, tokens)
    if closed:
        owner.close()
    cache, reads = reader(manager, device, second, tokens)
    device.run_all(order, seed)
    assert results(device, reads) == [mark(1, 0), mark(1, 1)]
    cache.close()
    owner.close()


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_a_private_copy_comes_after_the_writer_and_before_the_next_tenant(sim, order, seed) -> None:
    """The copy of a partial block waits for who wrote it; the source is evicted, and its next writer waits for the copy."""
    manager, device, (s1, s2, s3, _) = sim(full(4, max_util_for_resume=1.0))
    tokens = list(range(48))
    owner = writer(manager, device, s1, tokens)
    source = address(manager, owner, 1)
    owner.close()
    cache, reads = reader(manager, device, s2, tokens)
    assert address(manager, cache, 1) != source
    cache.suspend()
    tenant = manager.create_kv_cache(None, None)
    tenant.stop_committing()
    assert tenant.resume(s3)
    assert tenant.resize(64)
    taken = [address(manager, tenant, o) for o in range(2)]
    assert source in taken
    for place in taken:
        device.enqueue_write(s3, place, mark(3))
    device.run_all(order, seed)
    assert results(device, reads) == [mark(1, 0), mark(1, 1)]
    tenant.close()
    cache.close()


@pytest.mark.parametrize("suspended", [True, False])
@pytest.mark.parametrize("stop_first", [True, False])
def test_the_owner_of_a_linked_tail_keeps_writing_behind_it(sim, suspended, stop_first) -> None:
    """What others read of a partial block is what was committed; the owner writes later positions at the same time."""
    manager, device, (s1, s2, *_) = sim(full(6))
    owner = writer(manager, device, s1, list(range(40)))
    place = address(manager, owner, 1)
    if stop_first:
        owner.stop_committing()
    if suspended:
        owner.suspend()
    owner.stop_committing()
    if suspended:
        assert owner.resume(s1)
    assert address(manager, owner, 1) == place
    device.enqueue_write(s1, place + BYTES, mark(9))
    cache, reads = reader(manager, device, s2, list(range(40)))
    copy = address(manager, cache, 1)
    assert copy != place
    device.enqueue_write(s2, copy + BYTES, mark(8))
    device.run_all("adverse")
    assert results(device, reads) == [mark(1, 0), mark(1, 1)]
    for where, want in ((place, mark(9)), (copy, mark(8)), (place - BYTES + BYTES, mark(1, 1))):
        offset = 0 if want == mark(1, 1) else BYTES
        assert device.read_result(device.enqueue_read(0, where + offset, BYTES)) == want
    cache.close()
    owner.close()


@pytest.mark.parametrize("sequence", list(itertools.permutations(range(3))))
def test_an_evicted_page_waits_for_all_its_readers(sim, sequence) -> None:
    """A page shared by three streams is released in any order, evicted and taken by a fourth."""
    manager, device, (s1, s2, s3, s4) = sim(full(2, max_util_for_resume=1.0))
    tokens = list(range(64))
    owner = writer(manager, device, s1, tokens)
    own_reads = [device.enqueue_read(s1, address(manager, owner, o), BYTES) for o in range(2)]
    one_cache, reads2 = reader(manager, device, s2, tokens)
    other, reads3 = reader(manager, device, s3, tokens)
    caches = [owner, one_cache, other]
    assert used(manager) == [2]
    for k in sequence:
        caches[k].close()
    tenant = manager.create_kv_cache()
    tenant.stop_committing()
    assert tenant.resume(s4)
    assert tenant.resize(64)
    for ordinal in range(2):
        device.enqueue_write(s4, address(manager, tenant, ordinal), mark(4, ordinal))
    device.run_all("adverse")
    for reads in (own_reads, reads2, reads3):
        assert results(device, reads) == [mark(1, 0), mark(1, 1)]
    for ordinal in range(2):
        got = device.read_result(device.enqueue_read(0, address(manager, tenant, ordinal), BYTES))
        assert got == mark(4, ordinal)
    tenant.close()


@pytest.mark.parametrize("done", [0, 3, 11, 12])
def test_a_page_that_many_streams_read(sim, done) -> None:
    """More events than a slot keeps beside each other: only those that are complete may be forgotten."""
    manager, device, streams = sim(full(2, max_util_for_resume=1.0), streams=14)
    tokens = list(range(64))
    writer(manager, device, streams[0], tokens).close()
    tickets = []
    for number, stream in enumerate(streams[1:13]):
        cache, reads = reader(manager, device, stream, tokens)
        cache.close()
        if number < done:
            assert results(device, reads) == [mark(1, 0), mark(1, 1)]
        else:
            tickets += reads
    tenant = manager.create_kv_cache()
    tenant.stop_committing()
    assert tenant.resume(streams[13])
    assert tenant.resize(64)
    for ordinal in range(2):
        device.enqueue_write(streams[13], address(manager, tenant, ordinal), mark(4))
    device.run_all("adverse")
    assert results(device, tickets) == [mark(1, 0), mark(1, 1)] * (12 - done)
    tenant.close()


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_a_source_that_is_taken_over_is_read_behind_its_writer(sim, order, seed) -> None:
    """The match fills the pool, so the private block is the source itself."""
    manager, device, (s1, s2, *_) = sim(full(2, max_util_for_resume=1.0))
    tokens = list(range(40))
    owner = writer(manager, device, s1, tokens)
    source = address(manager, owner, 1)
    owner.close()
    cache, reads = reader(manager, device, s2, tokens)
    assert address(manager, cache, 1) == source
    assert manager.probe_reuse(None, tokens) == 32
    device.enqueue_write(s2, source, mark(2))
    device.run_all(order, seed)
    assert results(device, reads) == [mark(1, 0), mark(1, 1)]
    assert device.read_result(device.enqueue_read(0, source, BYTES)) == mark(2)
    cache.close()


@pytest.mark.parametrize("how", ["slide", "suspend", "close"])
def test_a_window_page_that_went_back_is_behind_its_readers(sim, how) -> None:
    """Committed pages behind the window are cached at once; who evicts them comes after the reader."""
    manager, device, (s1, s2, *_) = sim(full_and_window(12, 6, 32))
    owner = manager.create_kv_cache()
    assert owner.resume(s1)
    assert owner.resize(96, 0)
    places = [address(manager, owner, o, 1) for o in range(3)]
    for place in places:
        device.enqueue_write(s1, place, mark(1))
    owner.commit(list(range(32)))
    reads = [device.enqueue_read(s1, place, BYTES) for place in places]
    assert owner.resize(96, 96)
    owner.commit(list(range(32, 96)))
    if how == "suspend":
        owner.suspend()
    elif how == "close":
        owner.close()
    tenant = manager.create_kv_cache()
    tenant.stop_committing()
    assert tenant.resume(s2)
    count = manager.get_storage_statistics()[1].available
    assert tenant.resize(32 * count, 0)
    taken = [address(manager, tenant, o, 1) for o in range(tenant.num_blocks)]
    assert set(taken) & set(places)
    for place in taken:
        device.enqueue_write(s2, place, mark(2))
    device.run_all("adverse")
    assert results(device, reads) == [mark(1)] * 3
    tenant.close()
    owner.close()


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("younger", [True, False])
@pytest.mark.parametrize("how", ["commit", "step"])
def test_a_rebased_page_is_read_behind_its_writer(sim, order, seed, younger, how) -> None:
    """Two compute the same block; the second takes the first one's page, and its own goes to a third behind its use."""
    manager, device, (s1, s2, s3, _) = sim(full(4, max_util_for_resume=1.0))
    first, second = (s1, s2) if younger else (s2, s1)
    tokens = list(range(32))
    late = manager.create_kv_cache()
    assert late.resume(second)
    assert late.resize(40)
    own = address(manager, late)
    device.enqueue_write(second, own, mark(2))
    own_read = device.enqueue_read(second, own, BYTES)
    owner = writer(manager, device, first, tokens)
    if how == "commit":
        late.commit(tokens)
    else:
        assert Stepper(manager, 1, 4).step([late], [0], [40], [32], stream=second, tokens=[tokens]) == [True]
    assert address(manager, late) == address(manager, owner) != own
    read = device.enqueue_read(second, address(manager, late), BYTES)
    tenant = manager.create_kv_cache()
    tenant.stop_committing()
    assert tenant.resume(s3)
    assert tenant.resize(64)
    taken = [address(manager, tenant, o) for o in range(2)]
    assert own in taken
    for place in taken:
        device.enqueue_write(s3, place, mark(3))
    device.run_all(order, seed)
    assert device.read_result(own_read) == mark(2)
    assert device.read_result(read) == mark(1, 0)
    tenant.close()
    late.close()
    owner.close()


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_pages_of_a_committing_step_are_behind_its_stream(sim, order, seed) -> None:
    manager, device, (s1, s2, s3, _) = sim(full(8))
    tokens = list(range(64))
    owner = manager.create_kv_cache()
    assert owner.resume(s1)
    assert owner.resize(64)
    for ordinal in range(2):
        device.enqueue_write(s1, address(manager, owner, ordinal), mark(1, ordinal))
    stepper = Stepper(manager, 1, 4)
    assert stepper.step([owner], [0], [65], [64], stream=s2, tokens=[tokens]) == [True]
    assert owner.num_committed_tokens == 64
    cache, reads = reader(manager, device, s3, tokens)
    device.run_all(order, seed)
    assert results(device, reads) == [mark(1, 0), mark(1, 1)]
    cache.close()
    owner.close()


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_a_snapshot_is_taken_at_its_point_of_the_stream(sim, order, seed) -> None:
    """The tail and the state go on being written; the copies in the tree are those of the commit, and others wait for them."""
    manager, device, (s1, s2, s3, _) = sim(config([one(0, 256 * KIB), ssm(1, 256 * KIB)], 8 * MIB))
    tokens = list(range(40))
    owner = manager.create_kv_cache()
    assert owner.resume(s1)
    assert owner.resize(64)
    for ordinal in range(2):
        device.enqueue_write(s1, address(manager, owner, ordinal), mark(1, ordinal))
    state = slot_address(manager, owner.get_ssm_block_base_index(1), 1)
    device.enqueue_write(s1, state, mark(40))
    owner.commit(tokens)
    device.enqueue_write(s1, state, mark(64))
    device.enqueue_write(s1, address(manager, owner, 1), mark(9))
    cache = manager.create_kv_cache(None, [*tokens, 7, 7])
    assert cache.num_committed_tokens == 40
    assert cache.resume(s2)
    reads = [device.enqueue_read(s2, address(manager, cache, o), BYTES) for o in range(2)]
    own_state = slot_address(manager, cache.get_ssm_block_base_index(1), 1)
    reads.append(device.enqueue_read(s2, own_state, BYTES))
    device.enqueue_write(s2, own_state, mark(41))
    device.enqueue_write(s2, address(manager, cache, 1), mark(8))
    third = manager.create_kv_cache(None, tokens)
    assert third.resume(s3)
    third_state = slot_address(manager, third.get_ssm_block_base_index(1), 1)
    reads += [device.enqueue_read(s3, address(manager, third, o), BYTES) for o in range(2)]
    reads.append(device.enqueue_read(s3, third_state, BYTES))
    device.run_all(order, seed)
    want = [mark(1, 0), mark(1, 1), mark(40)]
    assert results(device, reads) == want * 2
    for c in (owner, cache, third):
        c.close()


def test_a_dropped_page_is_behind_its_readers(sim) -> None:
    manager, device, (s1, s2, s3, _) = sim(full_and_window(4, 4, 64))
    tokens = list(range(64))
    owner = manager.create_kv_cache()
    assert owner.resume(s1)
    assert owner.resize(64)
    places = [address(manager, owner, o, 1) for o in range(2)]
    for place in places:
        device.enqueue_write(s1, place, mark(1))
    owner.commit(tokens)
    cache = manager.create_kv_cache(None, tokens)
    assert cache.resume(s2)
    reads = [device.enqueue_read(s2, place, BYTES) for place in places]
    cache.stop_committing()
    owner.close()
    plan = cache.plan_committed_block_drop()
    assert isinstance(plan, PlannedDropHandle)
    cache.close()
    plan.drop()
    tenant = manager.create_kv_cache()
    tenant.stop_committing()
    assert tenant.resume(s3)
    assert tenant.resize(128)
    for ordinal in range(4):
        device.enqueue_write(s3, address(manager, tenant, ordinal, 1), mark(3))
    device.run_all("adverse")
    assert results(device, reads) == [mark(1)] * 2
    tenant.close()


def test_the_host_never_waits_for_a_prefix(sim) -> None:
    """No call runs queued work: not commit, match, first resume, eviction, close."""
    manager, device, (s1, s2, s3, _) = sim(full_and_window(6, 6, 64))
    clock = device.clock()
    tokens = list(range(90))
    owner = writer(manager, device, s1, tokens)
    owner.close()
    cache, _ = reader(manager, device, s2, tokens)
    cache.close()
    tenant = manager.create_kv_cache()
    assert tenant.resume(s3)
    assert tenant.resize(32 * 6, 32 * 3)
    tenant.commit(list(range(32 * 6)))
    tenant.close()
    manager.clear_reusable_blocks()
    assert device.clock() == clock
    manager.synchronize()
    assert device.clock() > clock


# random churn --------------------------------------------------------------------------------------------------
RECORD = 16
TOP = 120  # tokens that fit any one request


class Churn:
    """Requests on three streams write a record per token, which names the whole prefix, and read what they may use."""

    def __init__(self, arm: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tpb = 8
        layers: list[Any] = [one(0, 128 * KIB), one(1, 64 * KIB, 20), one(2, 64 * KIB, 20)]
        if seed % 2:
            layers.append(ssm(3, 128 * KIB))
        fields = {"commit_min_snapshot": True} if seed % 2 or seed % 3 == 0 else {}
        quota = (len(layers) - 1) * 2 * MIB
        cfg = config(layers, quota, self.tpb, max_util_for_resume=1.0, merge_equal_pools=seed % 4 < 2, **fields)
        self.manager = build(arm, cfg, "sim")
        self.min_snapshot = cfg.commit_min_snapshot
        self.device = self.manager.device_handle
        self.streams = [self.device.create_stream() for _ in range(3)]
        self.stepper = Stepper(self.manager, 6, 40)
        self.library = Library(self.rng, self.tpb, 200, digests=False)
        self.chains = Chains()
        self.caches: list[Any] = []
        self.texts: dict[int, Any] = {}
        self.tickets: list[tuple[int, bytes]] = []
        self.hits = self.wrong = 0

    # records
    def names(self, cache: Any) -> list[int]:
        return self.chains.chain(cache.reuse_scope, self.texts[cache.handle])

    def records(self, names: list[int], group: int, begin: int, end: int) -> bytes:
        return b"".join(
            names[p + 1].to_bytes(8, "little") + (group << 32 | p).to_bytes(8, "little") for p in range(begin, end)
        )

    def blocks(self, cache: Any, group: int) -> list[tuple[int, int]]:
        """(ordinal, address) of what the cache shows."""
        shown = cache.get_base_page_indices(group)
        return [
            (o, slot_address(self.manager, int(s), group))
            for o, s in enumerate(shown)
            if s >= 0 and o < cache.num_blocks
        ]

    def touch(self, cache: Any) -> None:
        """Read what is history, write what is not."""
        names, stream = self.names(cache), cache.cuda_stream
        history, capacity = cache.history_length, cache.capacity
        for group in range(2):
            for ordinal, place in self.blocks(cache, group):
                begin, end = ordinal * self.tpb, min(capacity, (ordinal + 1) * self.tpb)
                split = max(begin, min(end, history))
                if split > begin:
                    ticket = self.device.enqueue_read(stream, place, (split - begin) * RECORD)
                    self.tickets.append((ticket, self.records(names, group, begin, split)))
                if end > split:
                    data = self.records(names, group, split, end)
                    self.device.enqueue_write(stream, place + (split - begin) * RECORD, data)

    def state_place(self, cache: Any) -> int | None:
        if len(self.manager.layer_grouping) < 3:
            return None
        slot = cache.get_ssm_block_base_index(2)
        return None if slot < 0 else slot_address(self.manager, slot, 2)

    def write_state(self, cache: Any, position: int) -> None:
        place = self.state_place(cache)
        if place is not None:
            self.device.enqueue_write(cache.cuda_stream, place, self.names(cache)[position].to_bytes(8, "little"))

    # turns
    def open(self) -> None:
        text = self.library.text()
        query = text[: self.rng.randint(0, 120)]
        cache = self.manager.create_kv_cache(self.rng.choice([SCOPES[0], *SCOPES[:2]]), list(query))
        self.texts[cache.handle] = text
        matched = cache.num_committed_tokens
        if not cache.resume(self.rng.choice(self.streams)):
            cache.close()
            return
        self.hits += matched > 0
        self.caches.append(cache)
        place = self.state_place(cache)
        if place is not None and matched:
            ticket = self.device.enqueue_read(cache.cuda_stream, place, 8)
            self.tickets.append((ticket, self.names(cache)[matched].to_bytes(8, "little")))
        self.touch(cache)

    def commit(self, cache: Any) -> None:
        committed, history, capacity = cache.num_committed_tokens, cache.history_length, cache.capacity
        count = capacity - committed
        if self.min_snapshot and history > committed:
            count = history - committed
        elif count:
            count = self.rng.choice([count, self.rng.randint(1, count)])
        if not count:
            return
        self.write_state(cache, committed + count)
        cache.commit(list(self.texts[cache.handle][committed : committed + count]))
        self.touch(cache)

    def step(self) -> None:
        chosen = [c for c in self.caches if self.rng.random() < 0.7]
        tokens, lengths, histories = [], [], []
        for c in chosen:
            committed, history, capacity = c.num_committed_tokens, c.history_length, c.capacity
            count = capacity - committed if not self.min_snapshot or history == committed else 0
            count = count if self.rng.random() < 0.7 else 0
            if count:
                self.write_state(c, committed + count)
            tokens.append(list(self.texts[c.handle][committed : committed + count]))
            histories.append(max(history, committed + count))
            lengths.append(max(histories[-1], min(TOP, capacity + self.rng.choice([1, 8, 10]))))
        ok = self.stepper.step(
            chosen, range(len(chosen)), lengths, histories, stream=self.rng.choice(self.streams), tokens=tokens
        )
        for c, fine in zip(chosen, ok, strict=True):
            if fine:
                self.touch(c)

    def end(self, cache: Any) -> None:
        if self.rng.random() < 0.3:
            cache.suspend()
        cache.close()
        self.caches.remove(cache)

    def turn(self) -> None:
        action = self.rng.random()
        if len(self.caches) < 5 and action < 0.25:
            self.open()
        elif self.caches:
            cache = self.rng.choice(self.caches)
            if action < 0.35:
                self.end(cache)
            elif action < 0.42:
                cache.cuda_stream = self.rng.choice(self.streams)
            elif action < 0.5:
                cache.suspend()
                if cache.resume(self.rng.choice(self.streams)):
                    self.touch(cache)
                else:
                    cache.close()
                    self.caches.remove(cache)
            elif action < 0.65:
                self.step()
            elif action < 0.8:
                self.commit(cache)
            else:
                capacity = min(TOP, max(cache.history_length, cache.capacity + self.rng.choice([-8, 1, 8, 40])))
                if cache.resize(capacity):
                    self.touch(cache)
        if self.rng.random() < 0.08:
            self.settle()
        self.manager.audit()

    def settle(self) -> None:
        """Run all; every read so far, and every page of the tree, must be right."""
        self.device.run_all("adverse", self.rng.randrange(1, 1000))
        for ticket, want in self.tickets:
            self.wrong += self.device.read_result(ticket) != want
        self.tickets.clear()
        tree = Tree(self.manager.snapshot()["tree"], Rules.of(self.manager.init_config))
        names: dict[int, list[int]] = {}
        for node in tree.nodes:
            before = names[id(node.parent)] if node.parent is not None else [scope_seed(node.scope)]
            names[id(node)] = [*before, *self.chains.extend(before[-1], node.tokens)[1:]]
            start = node.depth * self.tpb
            for group, page in enumerate(node.pages):
                if page is None:
                    continue
                want = self.records(names[id(node)], group, start, start + page.coverage)
                if group == 2:
                    want = names[id(node)][start + page.coverage].to_bytes(8, "little")
                place = slot_address(self.manager, page.slot, group)
                ticket = self.device.enqueue_read(0, place, len(want))
                self.wrong += self.device.read_result(ticket) != want

    def finish(self) -> None:
        self.settle()
        for cache in self.caches:
            cache.close()
        self.manager.synchronize()
        self.manager.clear_reusable_blocks()
        self.manager.audit()
        self.manager.shutdown()


def churn(arm: str, seed: int, turns: int = 200) -> Churn:
    run = Churn(arm, seed)
    for _ in range(turns):
        run.turn()
    run.finish()
    return run


@pytest.mark.parametrize("seed", range(12))
def test_prefixes_stay_right_in_random_churn(arm, seed: int) -> None:
    run = churn(arm, seed)
    assert run.wrong == 0
    assert run.hits > 3


@pytest.mark.parametrize("what", ["wait", "wait for the writer of a match"])
def test_the_churn_would_show_missing_waits(monkeypatch, what) -> None:
    """Mutation check on the Python backend: without the device's waits, or those for matched pages, bytes come out wrong."""
    from kvpool._py.device.sim_device import SimDevice
    from kvpool._py.storage.tier import Tier

    if what == "wait":
        monkeypatch.setattr(SimDevice, "wait", lambda self, stream, event: None)
    else:
        monkeypatch.setattr(Tier, "borrow", lambda self, group, slot: None)
    assert sum(churn("v2py", seed).wrong for seed in range(6)) > 0
