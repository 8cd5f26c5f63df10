"""One decode step of 256 running requests, as the peers' benchmark does it.

Prompts of 2,048 + (i mod tokens-per-block) tokens on the GPT-OSS-120B layout; every step each request has one token and
one position of capacity more.  Timed: one `manager.step(...)` call, which advances, grows and writes the page table of
all requests.  The arrays of the call are prepared outside, as an executor keeps them.

    python -m benchmarks.decode_step [--block 32] [--steps 512] [--out rows.jsonl]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.layouts import gpt_oss_120b
from kvpool.v2 import KVCacheManager

REQUESTS = 256
PROMPT = 2048
WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """Microseconds of one call, over `n` calls."""

    peer: str
    case: str
    block: int
    median: float
    mean: float
    p99: float
    min: float
    n: int
    unit: str = "us/step"


def prepare(manager: KVCacheManager, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Opens the requests with their prompts prefilled; returns handles, rows and prompt lengths."""
    lengths = np.array([PROMPT + i % block for i in range(REQUESTS)], np.int32)
    handles = np.empty(REQUESTS, np.int64)
    for i, length in enumerate(lengths.tolist()):
        cache = manager.create_kv_cache()
        cache.stop_committing()
        assert cache.resume(None)
        assert cache.resize(length, 0)
        handles[i] = cache.handle
    return handles, np.arange(REQUESTS, dtype=np.int32), lengths


def measure(backend: str, block: int, steps: int) -> Row:
    """Times `steps` decode steps of one backend on the virtual device."""
    slots = (1 << 21) // block
    manager = KVCacheManager(gpt_oss_120b(block, slots), backend=backend, device="virtual")
    handles, rows, lengths = prepare(manager, block)
    table = np.full((2, REQUESTS, (PROMPT + block + steps + WARM_UP) // block + 2), -1, np.int32)
    histories, capacities = lengths.copy(), lengths + 1
    samples: list[float] = []
    gc.disable()
    for step in range(steps + WARM_UP):
        begin = time.perf_counter_ns()
        result = manager.step(handles, rows, capacities, histories, table)
        end = time.perf_counter_ns()
        assert result.ok.all()
        histories += 1
        capacities += 1
        if step >= WARM_UP:
            samples.append((end - begin) / 1e3)
    gc.enable()
    samples.sort()
    name = {"cpp": "kvpool v2cpp", "python": "kvpool v2py"}[backend]
    return Row(
        name,
        "b.decode256@2k step (advance, grow, page table)",
        block,
        statistics.median(samples),
        statistics.fmean(samples),
        samples[int(len(samples) * 0.99)],
        samples[0],
        len(samples),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for backend in ("cpp", "python"):
        row = measure(backend, options.block, options.steps)
        print(
            f"{row.peer:14s} {row.case:50s} bs={row.block:<3} median {row.median:9.2f}  mean {row.mean:9.2f}  "
            f"p99 {row.p99:9.2f}  min {row.min:9.2f} {row.unit}  n={row.n}",
            flush=True,
        )
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
