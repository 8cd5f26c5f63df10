"""One episode: a random configuration and random commands on two managers, compared after every command."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

from kvpool.errors import ConfigError
from tests.support.arms import build
from tests.support.commands import CommandMaker, Driver, random_manager_config


class Mismatch(AssertionError):
    """Two managers answered unlike; the message has the seed, the step and the command."""


def pool_bytes(manager: Any) -> list[np.ndarray]:
    views = []
    for group in manager.pool_group_descs:
        for pool in group.pools:
            size = pool.slot_bytes * group.num_slots
            views.append(np.frombuffer((ctypes.c_uint8 * size).from_address(pool.base_address), np.uint8))
    return views


class Stamper:
    """Writes a mark at the head and the tail of each exposed slot, and compares whole pools."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.views = pool_bytes(manager)
        self.slot_bytes = [p.slot_bytes for g in manager.pool_group_descs for p in g.pools]
        self.first = [0]
        for group in manager.pool_group_descs:
            self.first.append(self.first[-1] + len(group.pools))
        self.group_of = list(manager.get_life_cycle_pool_group_indices())

    def stamp(self, driver: Driver, mark: int) -> None:
        value = np.frombuffer(np.uint64(mark * 2654435761 + 1).tobytes(), np.uint8)
        for cache in driver.caches:
            if cache is None or not cache.is_active:
                continue
            for group in range(driver.groups):
                pg = self.group_of[group]
                for beam in range(cache.beam_width):
                    slots = [int(i) for i in cache.get_base_page_indices(group, beam) if i >= 0]
                    if not slots and self.manager._layout.life_cycles[group].is_ssm:
                        slots = [s for s in [cache.get_ssm_block_base_index(group, beam)] if s >= 0]
                    for pool in range(self.first[pg], self.first[pg + 1]):
                        for slot in slots:
                            begin = slot * self.slot_bytes[pool]
                            end = begin + self.slot_bytes[pool]
                            self.views[pool][begin : begin + 8] = value
                            self.views[pool][end - 8 : end] = value


def run_episode(
    seed: int, commands: int, arms: tuple[str, str] = ("v2py", "v2cpp"), device: str = "virtual"
) -> dict[str, int]:
    """Run it; raises :class:`Mismatch`. Returns how often each command ran and succeeded."""
    rng = random.Random(seed)
    config = random_manager_config(rng, bytes_matter=device == "host")
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
    left, right = (Driver(manager, streams_of(manager, device)) for manager in built)
    if left.manager.get_storage_statistics() and slots(left) != slots(right):
        raise Mismatch(f"seed {seed}: slot counts {slots(left)} and {slots(right)}")
    maker = CommandMaker(rng, config.tokens_per_block, left.groups)
    stampers = [Stamper(d.manager) for d in (left, right)] if device == "host" else []
    counts: dict[str, int] = {}
    for turn in range(commands):
        command = maker.next(left)
        answers = [d.run(command) for d in (left, right)]
        where = f"seed {seed}, command {turn}: {command}"
        if answers[0] != answers[1]:
            raise Mismatch(f"{where}\n {arms[0]}: {answers[0]}\n {arms[1]}: {answers[1]}")
        key = f"{command[0]}:{answers[0][0] if answers[0][0] == 'ok' else answers[0][1]}"
        counts[key] = counts.get(key, 0) + 1
        seen = [d.observe() for d in (left, right)]
        if seen[0] != seen[1]:
            raise Mismatch(f"{where}\n{first_difference(seen[0], seen[1])}")
        for driver in (left, right):
            driver.manager.audit()
        for stamper, driver in zip(stampers, (left, right), strict=False):
            stamper.stamp(driver, turn)
        if stampers and turn % 25 == 24:
            for driver in (left, right):
                driver.manager.synchronize()
            for pool, (a, b) in enumerate(zip(stampers[0].views, stampers[1].views, strict=True)):
                if not np.array_equal(a, b):
                    raise Mismatch(f"{where}\n pool {pool}: bytes differ at {int(np.nonzero(a != b)[0][0])}")
    for driver in (left, right):
        driver.finish()
    return counts


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
