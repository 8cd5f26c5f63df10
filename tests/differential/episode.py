"""One episode: a random configuration and random commands on two managers, compared after every command."""

from __future__ import annotations

import collections
import ctypes
import random
from typing import Any

import numpy as np

from kvpool.errors import ConfigError
from tests.support.arms import build
from tests.support.commands import Command, CommandMaker, Driver, random_manager_config
from tests.support.reuse_oracle import ReuseWatch, Scribe

AUDIT_EVERY = 4  # commands; an audit of the Python backend costs as much as the rest, and what is broken stays so


class Mismatch(AssertionError):
    """Two managers answered unlike; the message has the seed, the step and the command."""


def pool_bytes(manager: Any) -> list[np.ndarray]:
    views = []
    for group in manager.pool_group_descs:
        for pool in group.pools:
            size = pool.slot_bytes * group.num_slots
            views.append(np.frombuffer((ctypes.c_uint8 * size).from_address(pool.base_address), np.uint8))
    return views


def run_episode(
    seed: int,
    commands: int,
    arms: tuple[str, str] = ("v2py", "v2cpp"),
    device: str = "virtual",
    *,
    reuse: bool | None = None,
) -> dict[str, int]:
    """Run it; raises :class:`Mismatch`. Returns how often each command ran and succeeded.

    ``reuse`` None: in most episodes. On ``host`` an engine writes and checks every token, on ``sim`` some device calls
    fail; both backends must make the same number of them. The oracle of reuse judges one of the two, which are equal.
    """
    rng = random.Random(seed)
    if reuse is None:
        reuse = rng.random() < 0.85
    config = random_manager_config(rng, bytes_matter=device == "host", reuse=reuse)
    built = []
    for arm in arms:
        try:
            built.append(build(arm, config, device))
        except ConfigError as error:
            built.append(error)
    if any(isinstance(b, ConfigError) for b in built):
        if not all(isinstance(b, ConfigError) for b in built):
            raise Mismatch(f"seed {seed}: only one backend refuses the configuration: {built}")
        return {"refused": 1}
    drivers = [Driver(manager, streams_of(manager, device)) for manager in built]
    if drivers[0].manager.get_storage_statistics() and slots(drivers[0]) != slots(drivers[-1]):
        raise Mismatch(f"seed {seed}: slot counts {slots(drivers[0])} and {slots(drivers[-1])}")
    episode = Episode(
        rng, drivers, arms, CommandMaker(rng, config, drivers[0].groups, reuse=reuse, exact=device == "host")
    )
    episode.where = f"seed {seed}"
    if device == "host":
        episode.scribes = [Scribe(driver) for driver in drivers]
    for turn in range(commands):
        episode.where = f"seed {seed}, command {turn}"
        try:
            episode.one(turn, faults=device == "sim")
        except AssertionError as error:
            raise Mismatch(f"{episode.where}: {error}") from error
    for driver in drivers:
        driver.finish()
    counts = episode.counts
    counts["hit"] = episode.watch.hits
    counts["hit inside a block"] = episode.watch.partial_hits
    counts["command that evicted"] = episode.watch.evictions
    counts["token compared"] = sum(scribe.compared for scribe in episode.scribes)
    return dict(counts)


class Episode:
    """Two drivers in step (or one), and what watches them."""

    def __init__(self, rng: random.Random, drivers: list[Driver], arms: tuple[str, ...], maker: CommandMaker) -> None:
        self.rng, self.drivers, self.arms, self.maker = rng, drivers, arms, maker
        self.watch = ReuseWatch(drivers[0])
        self.scribes: list[Scribe] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.where = ""
        self.discarded = (
            False  # a plan whose handle is gone is carried out by some later call, even one that is refused
        )
        self.seen = self.observe()

    def observe(self) -> dict[str, Any]:
        seen = [driver.observe() for driver in self.drivers]
        if seen[0] != seen[-1]:
            raise Mismatch(first_difference(seen[0], seen[-1]))
        return seen[0]

    def answer(self, command: Command) -> tuple[Any, ...]:
        answers = [driver.run(command) for driver in self.drivers]
        if answers[0] != answers[-1]:
            raise Mismatch("".join(f"\n {arm}: {a}" for arm, a in zip(self.arms, answers, strict=True)))
        return answers[0]

    def one(self, turn: int, *, faults: bool) -> None:
        command = self.maker.next(self.drivers[0])
        self.where += f": {command}"
        for scribe in self.scribes:
            scribe.before(command)
        self.watch.before(self.seen["snapshot"])
        answer = self.faulty(command) if faults and self.rng.random() < 0.15 else self.answer(command)
        self.counts[f"{command[0]}:{answer[0] if answer[0] == 'ok' else answer[1]}"] += 1
        seen = self.observe()
        for number, driver in enumerate(self.drivers):
            if turn % AUDIT_EVERY == 0 or self.arms[number] == "v2cpp":
                driver.manager.audit()
        refused = answer[0] == "error" or (answer[1] is False and command[0] in ("resize", "resume"))
        if refused and seen != self.seen and not self.discarded:
            raise Mismatch(f"a refusal changed the state: {first_difference(self.seen, seen)}")
        discarded = self.discarded
        self.discarded = command[0] in ("discard", "plan") or (self.discarded and seen == self.seen)
        self.seen = seen
        self.watch.after(command, answer, seen, discarded=discarded)
        if faults:
            calls = [driver.manager.device_handle.calls() for driver in self.drivers]
            if calls[0] != calls[-1]:
                raise Mismatch(f"device calls: {calls}")
        whole = turn % 25 == 24
        for scribe in self.scribes:
            scribe.after(command, answer, seen["snapshot"], whole=whole)
        if self.scribes and whole:
            self.compare_pools()

    def faulty(self, command: Command) -> tuple[Any, ...]:
        """Let one of the next device calls fail; a command that failed so must succeed, or be refused, without it."""
        n, error = self.rng.randint(1, 4), self.rng.choice(["oom", "cu"])
        for driver in self.drivers:
            driver.manager.device_handle.fail_call(n, error)
        answer = self.answer(command)
        for driver in self.drivers:
            driver.manager.device_handle.fail_call(None)
        if answer[0] == "error" and answer[1] in ("CuOOMError", "CuError"):
            self.counts[f"fault:{command[0]}"] += 1
            seen = self.observe()
            if seen != self.seen and not self.discarded:
                raise Mismatch(f"a fault changed the state: {first_difference(self.seen, seen)}")
            answer = self.answer(command)
        return answer

    def compare_pools(self) -> None:
        for driver in self.drivers:
            driver.manager.synchronize()
        pools = [pool_bytes(driver.manager) for driver in self.drivers]
        for number, (a, b) in enumerate(zip(pools[0], pools[-1], strict=True)):
            if not np.array_equal(a, b):
                raise Mismatch(f"pool {number}: bytes differ at {int(np.nonzero(a != b)[0][0])}")


def streams_of(manager: Any, device: str) -> list[int]:
    if device != "sim":
        return [0, 1, 2]
    return [0, manager.device_handle.create_stream(), manager.device_handle.create_stream()]


def slots(driver: Driver) -> list[int]:
    return [g.num_slots for g in driver.manager.pool_group_descs]


def first_difference(a: Any, b: Any, path: str = "") -> str:
    if type(a) is not type(b):
        return f" {path}: {a!r} and {b!r}"
    if isinstance(a, dict):
        for key in a.keys() | b.keys():
            if a.get(key) != b.get(key):
                return first_difference(a.get(key), b.get(key), f"{path}.{key}")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f" {path}: {a!r} and {b!r}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return first_difference(x, y, f"{path}[{i}]")
    return f" {path}: {a!r} and {b!r}"
