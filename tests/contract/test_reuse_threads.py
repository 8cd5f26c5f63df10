"""Prefix reuse from many threads: one mutex per manager, one thread per cache (numbers 122–128, trial B096)."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from kvpool.errors import LogicError
from kvpool.v2 import ReuseScope, sequence_to_blockchain_keys
from tests.support.configs import MIB, attention, config, full
from tests.support.reuse import Lab, Turn, ids, tokens
from tests.support.threads import run_all


def small(quota: int = 8 * MIB, tpb: int = 4, window: int | None = 8, **fields):
    return config([attention(0, 16 * tpb), attention(1, 16 * tpb, window)], quota, tpb, **fields)


def test_scenario_127_probes_of_an_empty_tree(make, fast_switching) -> None:
    lab = Lab(make, small())
    found: list[int] = []
    query = np.array(ids(64), np.int32)

    def prober() -> None:
        found.extend(lab.manager.probe_reuse(None, query) for _ in range(500))

    assert run_all(*[prober] * 8) == []
    assert found == [0] * 4000


def test_scenario_128_shared_blocks_read_by_their_owners(make, fast_switching) -> None:
    """Eight caches share 256 blocks; each is read a thousand times by a thread of its own."""
    lab = Lab(make, small(window=None), "virtual")
    lab.run(ids(1024))
    caches = [lab.open(ids(1024)).cache for _ in range(8)]
    want = list(caches[0].get_base_page_indices(0))
    assert len(want) == 256
    wrong: list[int] = []

    def reader(cache) -> None:
        for _ in range(1000):
            if cache.get_base_page_indices(0).tolist() != want:
                wrong.append(1)

    assert run_all(*[lambda c=cache: reader(c) for cache in caches]) == []
    assert wrong == []


def test_scenario_122_setters_beside_priority_callbacks(make, fast_switching) -> None:
    """A callback in Python never runs under the manager's lock, so nobody waits for anybody in a circle."""
    lab = Lab(make, small(64 * MIB), "virtual")
    cache = lab.open(ids(8), 0).cache
    stop = threading.Event()
    asked = [0]

    def setter() -> None:
        for n in range(1, 501):
            cache.capacity = 4 * n
            cache.history_length = 4 * n - 1
        stop.set()

    def creator() -> None:
        def priority(ordinal: int, life_cycle: object) -> int:
            asked[0] += 1
            lab.manager.probe_reuse(None, [1, 2, 3])  # back into the manager
            return 10 + ordinal % 50

        turn = 0
        while not stop.is_set() or turn < 20:
            turn += 1
            other = lab.manager.create_kv_cache(None, ids(20, turn), custom_priority_callback=priority)
            assert other.resume()
            assert other.resize(40, None)
            other.commit(ids(20, turn))
            other.close()

    assert run_all(setter, creator, stop=stop) == []
    assert asked[0] > 0
    lab.manager.audit()


@pytest.mark.parametrize("discard", [False, True])
def test_scenario_124_drops_from_other_threads(make, fast_switching, discard) -> None:
    """200 plans, each dropped (or its handle discarded) by another thread while the first goes on making them."""
    lab = Lab(make, small(64 * MIB), "virtual")
    handed: list = []
    ready, done = threading.Semaphore(0), []

    def maker() -> None:
        for seed in range(200):
            turn = lab.open(ids(24, seed))
            turn.advance(24)
            turn.cache.stop_committing()
            plan = turn.cache.plan_committed_block_drop()
            turn.close()
            handed.append(plan)
            del plan
            ready.release()

    def dropper() -> None:
        for _ in range(100):
            assert ready.acquire(timeout=60)
            plan = handed.pop()
            if not discard:
                plan.drop()
            done.append(1)
            del plan

    assert run_all(maker, dropper, dropper) == []
    assert len(done) == 200
    lab.create(ids(1)).close()  # plans of discarded handles are applied by a call that changes something
    assert [lab.probe(ids(24, seed)) for seed in range(200)] == [16] * 200


def test_B096_of_two_drops_one_wins(make, fast_switching) -> None:
    lab = Lab(make, small(64 * MIB), "virtual")
    rounds = 300
    plans = []
    for seed in range(rounds):
        turn = lab.open(ids(16, seed))
        turn.advance(16)
        turn.cache.stop_committing()
        plans.append(turn.cache.plan_committed_block_drop())
        turn.close()
    won, lost = [], []
    barrier = threading.Barrier(2)

    def dropper() -> None:
        for number, plan in enumerate(plans):
            barrier.wait(60)
            try:
                plan.drop()
                won.append(number)
            except LogicError:
                lost.append(number)

    assert run_all(dropper, dropper) == []
    assert sorted(won) == sorted(lost) == list(range(rounds))
    assert {lab.probe(ids(16, seed)) for seed in range(rounds)} == {8}
    lab.manager.audit()


def test_probes_while_another_commits(make, fast_switching) -> None:
    """A probe sees some state between two commits: a number of whole blocks, never less than before."""
    lab = Lab(make, small(window=None))
    sequence = ids(400)
    query = np.array(sequence, np.int32)
    keys = {key for _, key in sequence_to_blockchain_keys(4, None, sequence)} | {None}
    seen: list[list[int]] = [[], []]
    finished = threading.Event()

    def committer() -> None:
        turn = lab.open(sequence)
        for end in range(4, 401, 4):
            turn.advance(end)
        finished.set()
        turn.close()

    def prober(mine: list[int]) -> None:
        while not finished.is_set():
            mine.append(lab.manager.probe_reuse(None, query))
            assert lab.manager.probe_first_new_block_key(None, query) in keys

    assert run_all(committer, lambda: prober(seen[0]), lambda: prober(seen[1]), stop=finished) == []
    for mine in seen:
        assert mine == sorted(mine)
        assert all(value % 4 == 0 for value in mine)
    assert lab.reused(sequence) == 400


@pytest.mark.parametrize("slots_for", ["plenty", "little"])
def test_many_threads_over_one_family_of_prompts(make, fast_switching, slots_for) -> None:
    """Threads look up, compute, commit and close texts that fork everywhere; every reused byte is checked at each step."""
    cfg = small() if slots_for == "plenty" else full(14, tpb=4, max_util_for_resume=1.0)
    lab = Lab(make, cfg)
    stems = [tokens(17, 1), tokens(30, 2), tokens(8, 1) + tokens(20, 3)]
    reused: list[int] = []

    def worker(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            stem = rng.choice(stems)
            sequence = stem[: rng.randint(1, len(stem))] + tokens(rng.randint(1, 9), rng.randint(4, 6))
            scope = rng.choice([None, None, ReuseScope(rng.randint(0, 1))])
            turn = lab.create(sequence, rng.randint(0, len(sequence)), scope)
            if turn.cache.resume():
                _go_on(rng, turn)
            reused.append(turn.reused)
            turn.close()

    assert run_all(*[lambda s=seed: worker(s) for seed in range(6)]) == []
    lab.manager.audit()
    assert sum(reused) > 0
    assert set(lab.held()) == {0}


def _go_on(rng: random.Random, turn: Turn) -> None:
    """A few steps, as far as there is room."""
    turn.check()
    while turn.done < len(turn.sequence):
        end = min(len(turn.sequence), turn.done + rng.randint(1, 7))
        if not turn.cache.resize(end, None):
            return  # not now: given up
        turn.compute(end)
        if rng.random() < 0.8:
            turn.commit(end)
        turn.check()


def test_two_threads_in_one_cache(make, fast_switching) -> None:
    """Both commit; whoever finds the other inside gets LogicError, and what is committed is what was let in."""
    lab = Lab(make, full(64, tpb=4), "virtual")
    turn = lab.open([7] * 256, 0)
    assert turn.cache.resize(256, None)
    counts, refused = [0, 0], [0, 0]

    def committer(who: int) -> None:
        for _ in range(100):
            try:
                turn.cache.commit([7])
                counts[who] += 1
            except LogicError as error:
                assert "thread" in str(error).lower()  # noqa: PT017
                refused[who] += 1

    assert run_all(lambda: committer(0), lambda: committer(1)) == []
    assert sum(counts) + sum(refused) == 200
    assert turn.cache.num_committed_tokens == sum(counts)
    lab.manager.audit()
    turn.close()
    assert lab.probe([7] * 256) == sum(counts)


@pytest.mark.parametrize("call", ["commit", "stop", "plan", "tokens", "keys", "status"])
def test_a_second_call_while_the_first_waits_is_refused(make, call) -> None:
    """One thread holds the manager, a second waits inside the cache: the third gets LogicError at once."""
    lab = Lab(make, full(16, tpb=4), "virtual")
    turn = lab.open(ids(40))
    assert turn.cache.resize(40, None)
    turn.cache.commit(ids(8))
    calls = {
        "commit": lambda: turn.cache.commit([1]),
        "stop": turn.cache.stop_committing,
        "plan": turn.cache.plan_committed_block_drop,
        "tokens": lambda: turn.cache.committed_tokens,
        "keys": turn.cache.block_keys,
        "status": lambda: turn.cache.reuse_status,
    }
    holding = threading.Thread(target=lab.manager._core._hold_lock, args=(0.45,))
    holding.start()
    time.sleep(0.1)
    waiting = threading.Thread(target=turn.cache.commit, args=(ids(40)[8:16],))
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(LogicError, match="(?i)thread"):
        calls[call]()
    waiting.join(10)
    holding.join(10)
    assert turn.cache.num_committed_tokens == 16
    turn.cache.commit(ids(40)[16:40])
    lab.manager.audit()


def test_clearing_beside_creating(make, fast_switching) -> None:
    """A clear happens between two requests, or is refused because one is open; never in the middle of one."""
    lab = Lab(make, small(window=None))
    done = threading.Event()
    cleared, refused = [0], [0]

    def user() -> None:
        for number in range(150):
            turn = lab.open(ids(22, number % 3))
            assert turn.reused in (0, 22)
            turn.advance(22)
            turn.close()
        done.set()

    def clearer() -> None:
        while not done.is_set():
            try:
                lab.manager.clear_reusable_blocks()
                cleared[0] += 1
            except LogicError as error:
                assert "still open" in str(error)  # noqa: PT017
                refused[0] += 1

    assert run_all(user, clearer, stop=done) == []
    assert cleared[0] + refused[0] > 0
    lab.manager.audit()


def test_steps_with_tokens_beside_other_requests(make, fast_switching) -> None:
    """One thread steps a batch that commits; others create, hit and close on the same prefixes."""
    lab = Lab(make, small(window=None), "virtual")
    texts = [ids(120, seed) for seed in range(4)]
    caches = [lab.open(text).cache for text in texts]
    handles, rows = np.array([cache.handle for cache in caches], np.int64), np.arange(4, dtype=np.int32)
    table = np.full((len(lab.manager.layer_grouping), 4, 32), -1, np.int32)
    stop = threading.Event()

    def stepper() -> None:
        for n in range(120):
            values = np.array([text[n - 1] for text in texts] if n else [], np.int32)
            offsets = np.arange(5, dtype=np.int32) if n else np.zeros(5, np.int32)
            lengths = np.full(4, n, np.int32)
            assert lab.manager.step(handles, rows, lengths + 1, lengths, table, (values, offsets)).ok.all()
        stop.set()

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            text = texts[rng.randrange(4)]
            turn = lab.create(text, rng.randint(0, 120))
            assert turn.cache.committed_tokens == text[: turn.reused]
            if turn.cache.resume():
                turn.commit(turn.reused)
            turn.close()

    assert run_all(stepper, lambda: reader(1), lambda: reader(2), stop=stop) == []
    lab.manager.audit()
    assert [cache.num_committed_tokens for cache in caches] == [119] * 4
    for cache in caches:
        cache.close()
    assert [lab.probe(text) for text in texts] == [119] * 4
