"""A long differential campaign: ``python -m tests.differential.campaign --commands N --seed S --jobs J``.

Prints the seed of each episode that fails and ends with exit code 1; one failing episode runs again alone with
``--seed S --episodes 1``.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from tests.differential.episode import run_episode
from tests.support.arms import NATIVE

DEVICES = ("virtual", "host", "sim")


def device_of(seed: int, choice: str) -> str:
    return DEVICES[seed % len(DEVICES)] if choice == "all" else choice


def one(seed: int, *, commands: int, arms: tuple[str, ...], device: str, reuse: bool | None) -> tuple[int, Any, str]:
    """Seed, counts, and the words of a failure."""
    try:
        return seed, run_episode(seed, commands, arms, device_of(seed, device), reuse=reuse), ""
    except Exception as error:
        words = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        return seed, {}, f"{type(error).__name__}: {words}"


def results(seeds: range, work: Any, jobs: int) -> Iterator[tuple[int, Any, str]]:
    """In any order; a process that dies ends it, with the seeds that may be to blame."""
    if jobs == 1:
        yield from map(work, seeds)
        return
    waiting = iter(seeds)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(work, seed): seed for seed in itertools.islice(waiting, 2 * jobs)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    yield future.result()
                except BrokenProcessPool:
                    print(f"a process died in one of the episodes {sorted(running.values())}", flush=True)
                    raise
                del running[future]
                running.update({pool.submit(work, seed): seed for seed in itertools.islice(waiting, 1)})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential.campaign")
    parser.add_argument("--commands", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=None, help="of the first episode; default: from the clock")
    parser.add_argument("--episodes", type=int, default=None, help="stop after so many")
    parser.add_argument("--per-episode", type=int, default=250)
    parser.add_argument("--device", choices=[*DEVICES, "all"], default="all")
    parser.add_argument("--arms", default="v2py,v2cpp", help="two, or one that only the oracles judge")
    parser.add_argument("--reuse", choices=["on", "off", "mixed"], default="mixed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="to 20 failures")
    options = parser.parse_args()
    if "v2cpp" in options.arms and not NATIVE:
        parser.error("the extension kvpool._native is not built")
    seed = options.seed if options.seed is not None else time.time_ns() % 10**9
    print(f"seed {seed}", flush=True)
    episodes = -(-options.commands // options.per_episode)
    if options.episodes is not None:
        episodes = min(episodes, options.episodes)
    work = partial(
        one,
        commands=options.per_episode,
        arms=tuple(options.arms.split(",")),
        device=options.device,
        reuse={"on": True, "off": False, "mixed": None}[options.reuse],
    )
    counts: collections.Counter[str] = collections.Counter()
    done = failures = 0
    started = time.monotonic()
    for number, (where, found, words) in enumerate(results(range(seed, seed + episodes), work, options.jobs), 1):
        counts.update(found)
        done += options.per_episode
        if words:
            failures += 1
            device = device_of(where, options.device)
            print(f"FAILED --seed {where} --episodes 1 --device {device} --reuse {options.reuse}\n{words}", flush=True)
            if not options.keep_going or failures == 20:
                break
        if number % 100 == 0:
            rate = done / (time.monotonic() - started)
            print(f"{done} commands, {number} episodes, {rate:.0f} commands per second", flush=True)
    for key, count in sorted(counts.items()):
        print(f"{count:9d}  {key}")
    print(
        f"{done} commands from seed {seed}, {done / (time.monotonic() - started):.0f} per second: {failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
