"""Random requests over texts that fork everywhere, in little memory: every byte that a request may read is its own (I4).

After each command all running requests are checked, and the invariants I1, I3 and I5 by ``audit`` and the statistics.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool.errors import NeverFitsError
from kvpool.v2 import ReuseScope, SwaScratchReuseConfig
from tests.support.configs import KIB, MIB, attention, config, full_and_window, one, ratio, ssm, windowed
from tests.support.reuse import Lab, Turn, digest

LENGTH = 150


def hybrid(tpb: int, **fields: Any) -> Any:
    layers = [one(0, 256 * KIB), one(1, 256 * KIB, 40), ssm(2, 512 * KIB)]
    return config(layers, 16 * MIB, tpb, max_util_for_resume=1.0, initial_pool_ratio=ratio(3, 3, 2), **fields)


CONFIGS: dict[str, Any] = {
    "full and window": lambda: full_and_window(14, 9, 40, tpb=16),
    "sinks": lambda: full_and_window(12, 9, 33, tpb=16, sinks=20),
    "one window": lambda: windowed(9, 50, tpb=16, max_util_for_resume=1.0),
    "window, snapshots": lambda: windowed(9, 50, tpb=16, max_util_for_resume=1.0, commit_min_snapshot=True),
    "snapshots": lambda: full_and_window(14, 9, 40, tpb=16, commit_min_snapshot=True),
    "whole blocks only": lambda: full_and_window(14, 9, 40, tpb=16, enable_partial_reuse=False),
    "back-off": lambda: full_and_window(14, 9, 40, tpb=16, reuse_match_backoff=5),
    "reference": lambda: full_and_window(14, 9, 40, tpb=16, match_policy="reference"),
    "no retention": lambda: full_and_window(14, 9, 40, tpb=16, retain_window_tails=False),
    "no slack, dense grid": lambda: full_and_window(14, 9, 40, tpb=16, window_tail_slack=0, window_tail_interval=32),
    "small blocks": lambda: windowed(20, 9, tpb=4, max_util_for_resume=1.0),
    "window of one": lambda: full_and_window(14, 9, 1, tpb=16),
    "shared pool": lambda: config([one(0, MIB), one(1, MIB, 40)], 26 * MIB, 16, max_util_for_resume=1.0),
    "states": lambda: hybrid(16),
    "states, whole blocks": lambda: hybrid(16, enable_partial_reuse=False),
    "states, back-off": lambda: hybrid(16, reuse_match_backoff=1),
    "scratch": lambda: config(
        [attention(i, 64 * KIB, 40) for i in range(4)],
        8 * MIB,
        16,
        max_util_for_resume=1.0,
        swa_scratch_reuse=SwaScratchReuseConfig(max_rewind_len=3),
    ),
}


class Story:
    """Draws commands for one manager and checks everything after each."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab, self.rng = lab, random.Random(seed)
        self.texts: list[list[Any]] = [self.fresh()]
        self.turns: list[Turn] = []
        self.plans: list[Any] = []
        self.minimal = lab.manager.commit_min_snapshot
        self.reused = 0

    def fresh(self) -> list[Any]:
        return [self.rng.choice([0, 1, 2, 3, 4, digest(self.rng.randint(0, 2))]) for _ in range(LENGTH)]

    def text(self) -> list[Any]:
        old = self.rng.choice(self.texts)
        if self.rng.random() < 0.4:
            return old
        at = self.rng.choice([self.rng.randint(0, LENGTH), 16 * self.rng.randint(0, 6), 33, 47])
        text = [*old[:at], *self.fresh()[at:]]
        self.texts = [*self.texts[-5:], text]
        return text

    def act(self) -> None:
        rng = self.rng
        if not self.turns or (len(self.turns) < 4 and rng.random() < 0.25):
            scope = rng.choice([None, None, None, ReuseScope(1)])
            turn = self.lab.create(self.text(), rng.choice([0, LENGTH, rng.randint(0, LENGTH)]), scope)
            self.reused += turn.reused
            self.turns.append(turn)
            return
        turn = rng.choice(self.turns)
        kind = rng.random()
        if not turn.cache.is_active:
            if kind < 0.8:
                turn.cache.resume()
            else:
                self.close(turn)
        elif kind < 0.45:
            self.grow(turn)
        elif kind < 0.8:
            self.commit(turn)
        elif kind < 0.86:
            turn.cache.suspend()
        elif kind < 0.89:
            turn.cache.stop_committing()
        elif kind < 0.91:
            turn.cache.resize(max(turn.done, turn.cache.history_length), None)
        else:
            self.close(turn)

    def grow(self, turn: Turn) -> None:
        """A chunk of the text, with some room more; the whole of it is written before anything else may happen."""
        end = min(LENGTH, turn.done + self.rng.choice([1, 2, 16, self.rng.randint(0, 40)]))
        if turn.cache.enable_swa_scratch_reuse:  # what is not history yet may become scratch
            assert turn.cache.resize(None, turn.done)
        try:
            if not turn.cache.resize(max(turn.cache.capacity, end + self.rng.randint(0, 3)), None):
                return
        except NeverFitsError:
            self.close(turn)
            return
        if self.minimal and turn.cache.history_length > turn.cache.num_committed_tokens:
            return
        if end > turn.done:
            turn.compute(end)

    def commit(self, turn: Turn) -> None:
        committed = turn.cache.num_committed_tokens
        if turn.done <= committed or not self.lab.manager._core.commit_allowed(turn.cache.handle):
            return
        end = turn.done if self.minimal else self.rng.choice([turn.done, self.rng.randint(committed, turn.done)])
        last = end == turn.done and self.rng.random() < 0.08
        turn.commit(end, is_end=last)
        if last:
            self.close(turn)

    def close(self, turn: Turn) -> None:
        if self.rng.random() < 0.3:
            turn.cache.stop_committing()
            plan = turn.cache.plan_committed_block_drop()
            if plan is not None:
                self.plans.append(plan)
        turn.close()
        self.turns.remove(turn)
        if self.plans and self.rng.random() < 0.5:
            self.plans.pop(self.rng.randrange(len(self.plans))).drop()

    def check(self) -> None:
        for turn in self.turns:
            if turn.cache.is_active and turn.cache.history_length <= turn.done and self.readable(turn):
                turn.check()
        self.lab.manager.audit()
        for info in self.lab.manager.get_storage_statistics():
            assert info.free + info.unavailable + info.evictable == info.total

    @staticmethod
    def readable(turn: Turn) -> bool:
        """Scratch blocks hold one layer at a time: nothing to read back."""
        return not turn.cache.has_scratch_slots


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_every_byte_is_its_own(make, name, seed) -> None:
    lab = Lab(make, CONFIGS[name]())
    story = Story(lab, seed)
    for _ in range(150):
        story.act()
        story.check()
    for turn in list(story.turns):
        turn.close()
    assert story.reused > 0 or name == "states, back-off"  # seldom: a snapshot, and a token more in common
    assert set(lab.held()) == {0}
