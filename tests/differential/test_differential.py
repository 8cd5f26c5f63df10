"""Both backends decide alike: equal answers, errors, slot ids, tables, buffers and bytes after every command."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpool.errors import ConfigError
from tests.differential.episode import first_difference, run_episode, streams_of
from tests.support.arms import build, needs_native
from tests.support.commands import MAX_CACHES, TABLE_BLOCKS, TABLE_ROWS, Driver, random_manager_config
from tests.support.reuse_oracle import ReuseWatch
from tests.support.texts import Library

pytestmark = [pytest.mark.native, needs_native]


@pytest.mark.parametrize("device", ["virtual", "host", "sim"])
@pytest.mark.parametrize("block", range(8))
def test_random_episodes(device: str, block: int) -> None:
    counts: dict[str, int] = {}
    for seed in range(block * 1000, block * 1000 + 6):
        for key, n in run_episode(seed, 200, device=device).items():
            counts[key] = counts.get(key, 0) + n
    assert counts


@pytest.mark.parametrize("device", ["virtual", "host", "sim"])
def test_random_episodes_meet_what_they_are_for(device: str) -> None:
    """Prefixes are found, also inside blocks and in small pools, so that pages are evicted all the time."""
    counts: dict[str, int] = {}
    for seed in range(500, 510):
        for key, n in run_episode(seed, 200, device=device, reuse=True).items():
            counts[key] = counts.get(key, 0) + n
    for key in ("hit", "hit inside a block", "command that evicted", "commit:ok", "plan:ok", "drop:ok"):
        assert counts[key] > 3, (key, counts)
    assert counts["token compared"] > 0 or device != "host"
    assert any(key.startswith("fault:commit") for key in counts) or device != "sim"


class BothBackends(RuleBasedStateMachine):
    """The same by Hypothesis' own rules, so that a failure shrinks to a few commands."""

    def __init__(self) -> None:
        super().__init__()
        self.drivers: list[Driver] = []

    @initialize(seed=st.integers(0, 10_000), device=st.sampled_from(["virtual", "virtual", "sim"]))
    def start(self, seed: int, device: str) -> None:
        while True:
            config = random_manager_config(random.Random(seed), reuse=seed % 4 != 0)
            try:
                self.drivers = [Driver(m, streams_of(m, device)) for m in (build(a, config, device) for a in ARMS)]
                break
            except ConfigError:
                seed += 1
        self.tpb = config.tokens_per_block
        self.top = TABLE_BLOCKS * self.tpb
        library = Library(random.Random(seed), self.tpb, self.top, digests=not config.text_only)
        self.texts = [library.text() for _ in range(6)]
        self.watch = ReuseWatch(self.drivers[0])
        self.seen = self.drivers[0].observe()

    def both(self, *command) -> None:
        self.watch.before(self.seen["snapshot"])
        answers = [driver.run(command) for driver in self.drivers]
        assert answers[0] == answers[1], command
        seen = [driver.observe() for driver in self.drivers]
        assert seen[0] == seen[1], first_difference(seen[0], seen[1])
        for driver in self.drivers:
            driver.manager.audit()
        self.seen = seen[0]
        self.watch.after(command, answers[0], self.seen, discarded=True)

    def live(self) -> list[int]:
        return [k for k, c in enumerate(self.drivers[0].caches) if c is not None] if self.drivers else []

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(self.live()), label="cache")

    @precondition(lambda self: self.drivers and len(self.live()) < MAX_CACHES)
    @rule(
        stop=st.sampled_from([False, False, False, True]),
        resume=st.booleans(),
        scope=st.sampled_from([0, 0, 1]),
        text=st.integers(0, 5),
        blocks=st.integers(0, 8),
        rest=st.integers(0, 4),
    )
    def create(self, stop, resume, scope, text, blocks, rest) -> None:
        self.both("create", stop, scope, self.texts[text], min(self.top, blocks * self.tpb + rest))
        if resume:
            self.both("resume", self.live()[-1], None)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), share=st.integers(1, 4), is_end=st.sampled_from([False, False, False, True]))
    def commit(self, data, share, is_end) -> None:
        """A part of what the lengths allow; with more history than committed, all of it."""
        k = self.pick(data)
        d = self.drivers[0]
        committed, (history, capacity) = d.committed(k), d.lengths(k)
        count = history - committed if history > committed else (capacity - committed) * share // 4
        self.both("commit", k, count, is_end)

    @rule(scope=st.sampled_from([0, 0, 1]), text=st.integers(0, 5), blocks=st.integers(0, 8), rest=st.integers(0, 4))
    def probe(self, scope, text, blocks, rest) -> None:
        self.both("probe", scope, self.texts[text], min(self.top, blocks * self.tpb + rest), True)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def plan(self, data) -> None:
        self.both("plan", self.pick(data))

    @rule(which=st.integers(0, 2), how=st.sampled_from(["drop", "drop", "discard"]))
    def drop(self, which, how) -> None:
        self.both(how, which)

    @rule()
    def clear(self) -> None:
        self.both("clear")

    @precondition(lambda self: self.live())
    @rule(data=st.data(), stream=st.one_of(st.none(), st.integers(0, 2)))
    def resume(self, data, stream) -> None:
        self.both("resume", self.pick(data), stream)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def suspend(self, data) -> None:
        self.both("suspend", self.pick(data))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), blocks=st.integers(0, TABLE_BLOCKS), rest=st.integers(-1, 1), share=st.integers(-1, 10))
    def resize(self, data, blocks, rest, share) -> None:
        capacity = max(0, blocks * self.tpb + rest)
        history = None if share < 0 else capacity * share // 10
        self.both("resize", self.pick(data), capacity, history)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), move=st.integers(-1, 70))
    def advance(self, data, move) -> None:
        k = self.pick(data)
        history, capacity = self.drivers[0].lengths(k)
        self.both("resize", k, None, min(capacity, history + move))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), count=st.integers(1, 40), second=st.booleans(), commits=st.booleans())
    def decode(self, data, count, second, commits) -> None:
        """Many steps of one token for all that can."""
        d = self.drivers[0]
        chosen = tuple(k for k in self.live() if d.active(k) and d.beams(k) == 1)
        rows = tuple(data.draw(st.permutations(range(TABLE_ROWS)), label="rows")[: len(chosen)])
        for _ in range(count):
            lengths = [d.lengths(k) for k in chosen]
            capacities = tuple(min(self.top, c + 1) for _, c in lengths)
            counts = tuple(
                c - d.committed(k) if commits and d.allowed(k) else 0 for k, (_, c) in zip(chosen, lengths, strict=True)
            )
            self.both("step", second, chosen, rows, capacities, tuple(c for _, c in lengths), None, counts)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), width=st.integers(1, 3))
    def beams(self, data, width) -> None:
        self.both("beam", self.pick(data), width)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def stop(self, data) -> None:
        self.both("stop", self.pick(data))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), value=st.booleans())
    def scratch(self, data, value) -> None:
        self.both("scratch", self.pick(data), value)

    @precondition(lambda self: self.live() and self.drivers[0].groups)
    @rule(data=st.data(), length=st.sampled_from([1, 6, TABLE_BLOCKS]))
    def attach(self, data, length) -> None:
        group = data.draw(st.integers(0, self.drivers[0].groups - 1), label="group")
        self.both("attach", self.pick(data), 0, group, length)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), stream=st.integers(0, 2))
    def stream(self, data, stream) -> None:
        self.both("stream", self.pick(data), stream)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def close(self, data) -> None:
        self.both("close", self.pick(data))

    @rule(batch=st.integers(1, 5), bound=st.integers(0, 2000))
    def clamp(self, batch, bound) -> None:
        self.both("clamp", batch, bound)

    def teardown(self) -> None:
        for driver in self.drivers:
            driver.finish()


ARMS = ("v2py", "v2cpp")
BothBackends.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestBothBackends = BothBackends.TestCase
