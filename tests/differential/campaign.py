"""A long differential campaign: ``python -m tests.differential.campaign --commands N --seed S``.

Prints the seed of each episode that fails and ends with exit code 1; one failing episode runs again alone with
``--seed S --episodes 1``.
"""

from __future__ import annotations

import argparse
import collections
import time

from tests.differential.episode import Mismatch, run_episode
from tests.support.arms import NATIVE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential.campaign")
    parser.add_argument("--commands", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=None, help="of the first episode; default: from the clock")
    parser.add_argument("--episodes", type=int, default=None, help="stop after so many")
    parser.add_argument("--per-episode", type=int, default=250)
    parser.add_argument("--device", choices=["virtual", "host", "sim", "all"], default="all")
    parser.add_argument("--arms", default="v2py,v2cpp")
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    if "v2cpp" in options.arms and not NATIVE:
        parser.error("the extension kvpool._native is not built")
    seed = options.seed if options.seed is not None else time.time_ns() % 10**9
    print(f"seed {seed}", flush=True)
    devices = ["virtual", "host", "sim"] if options.device == "all" else [options.device]
    counts: collections.Counter[str] = collections.Counter()
    done = episode = failures = 0
    started = time.monotonic()
    while done < options.commands and (options.episodes is None or episode < options.episodes):
        device = devices[(seed + episode) % len(devices)]
        try:
            counts.update(run_episode(seed + episode, options.per_episode, tuple(options.arms.split(",")), device))
        except (Mismatch, AssertionError) as error:
            failures += 1
            print(f"FAILED on {device}, --seed {seed + episode} --episodes 1 --device {device}\n{error}", flush=True)
            if not options.keep_going:
                return 1
        done += options.per_episode
        episode += 1
        if episode % 100 == 0:
            print(f"{done} commands, {episode} episodes, {time.monotonic() - started:.0f} s", flush=True)
    for key, count in sorted(counts.items()):
        print(f"{count:9d}  {key}")
    print(f"{done} commands in {episode} episodes from seed {seed}: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
