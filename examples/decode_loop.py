"""A small executor over real memory: admit, prefill, decode, pause, finish. Run it with ``python examples/decode_loop.py``.

Twelve requests share 48 MiB, too little for all at once. The "model" writes a known value as the key of every token, through
the page table and a view of the pool, and before each step reads back every key that it could attend to.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvpool.models import config_for
from kvpool.v2 import KVCache, KVCacheManager

MODEL, HEADS, HEAD_DIM = "gpt-oss-20b", 8, 64
WINDOW, LAYERS = 128, (0, 1)  # layer 0 reads a window, layer 1 everything
ROWS, LONGEST = 8, 512  # requests at once; tokens of the longest


@dataclass
class Request:
    number: int
    total: int  # tokens at its end
    known: int  # tokens so far: the prompt, then one more per step
    written: int = 0  # of them, those whose keys are in the cache
    row: int = -1  # of the page table
    cache: KVCache | None = None

    def close(self, free_rows: list[int]) -> None:
        assert self.cache is not None
        self.cache.close()
        free_rows.append(self.row)
        self.cache, self.written = None, 0


def run(manager: KVCacheManager, waiting: deque[Request]) -> tuple[int, int, int]:
    """Every request to its end; (keys compared, wrong ones, pauses)."""
    block = manager.tokens_per_block
    table = np.full((len(manager.layer_grouping), ROWS, LONGEST // block), -1, np.int32)
    groups = [manager.get_layer_group_id(layer) for layer in LAYERS]
    keys = [manager.get_buffers(layer, "key", np.float16, HEADS, HEAD_DIM) for layer in LAYERS]
    running: list[Request] = []
    free_rows = list(range(ROWS))
    compared = wrong = pauses = 0
    crowded = False  # somebody was paused: nobody is admitted before somebody has finished

    while waiting or running:
        while waiting and free_rows and not crowded:  # in order
            cache = manager.create_kv_cache()
            cache.stop_committing()  # so that pages behind the window go back at once
            if not cache.resume():  # the manager's gate: not now
                cache.close()
                break
            request = waiting.popleft()
            request.cache, request.row = cache, free_rows.pop()
            running.append(request)

        handles = np.array([request.cache.handle for request in running if request.cache], np.int64)
        rows = np.array([request.row for request in running], np.int32)
        capacities = np.array([request.known for request in running], np.int32)  # room for these tokens
        histories = np.array([request.written for request in running], np.int32)  # these are done
        served = manager.step(handles, rows, capacities, histories, table).ok.tolist()

        for request, ok in zip(list(running), served, strict=True):
            if not ok:  # not now: it has what it had
                continue
            for layer, (group, key) in enumerate(zip(groups, keys, strict=True)):
                first = max(0, request.written + 1 - WINDOW) if layer == 0 else 0
                old = np.arange(first, request.written)
                new = np.arange(request.written, request.known)
                pages = table[group, request.row]
                found = key[pages[old // block], old % block]
                compared, wrong = compared + old.size, wrong + int((found != value(request, old)).any((1, 2)).sum())
                key[pages[new // block], new % block] = value(request, new)
            request.written = request.known
            request.known += 1  # the token that the step yields
            if request.written == request.total:
                running.remove(request)
                request.close(free_rows)
                crowded = False
        if not all(served):  # short of pages: the youngest gives its own back and computes them again later
            youngest = running.pop()
            youngest.close(free_rows)
            waiting.appendleft(youngest)
            crowded, pauses = True, pauses + 1
    return compared, wrong, pauses


def value(request: Request, positions: np.ndarray) -> np.ndarray:
    """The key of each position, broadcast over heads and head dimension: exact in float16, different per request."""
    return ((request.number * 512 + positions) % 2039).astype(np.float16)[:, None, None]


def main() -> int:
    config = config_for(MODEL, quota=48 << 20, max_seq_len=LONGEST)
    requests = [Request(number, total=200 + 20 * number, known=60 + 25 * number) for number in range(12)]
    with KVCacheManager(config, device="host") as manager:
        compared, wrong, pauses = run(manager, deque(requests))
        print(f"{len(requests)} requests, {manager.backend}: {compared:,} keys read, {wrong} wrong, {pauses} pauses")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
