"""Prefix reuse call by call, beside other managers in one run, and in instructions as the tree grows.

Layout GPT-OSS-120B, blocks of 32 tokens, prompts as int32 arrays, `virtual` device, one thread.  Every row says what its timed
calls are; what is not named (making the prompt, the calls before) is outside.  The peers' own scripts (`KVPOOL_PEERS`, see
the README there; `run.sh setup` makes their environments) run before, on the same machine; their rows are added up where they
split what one call of ours does.

    KVPOOL_PEERS=… python -m benchmarks.prefix [--ours] [--markdown OUT.md]        --ours: without the peers
    python -m benchmarks.prefix --instructions [--markdown OUT.md]                 needs cmake, g++ and valgrind
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import machine
from benchmarks.layouts import gpt_oss_120b
from benchmarks.peers import PEERS, run_peer
from benchmarks.prefix_instructions import table as instruction_table
from kvpool.v2 import KVCache, KVCacheManager

Ids = npt.NDArray[np.int32]
BLOCK = 32
PAGES = 65_536
CACHED = 32_768
ARMS = {"cpp": "v2cpp", "python": "v2py"}
LENGTHS = {1024: 64, 8192: 16, 32_768: 4}
"""Prompt lengths, and how many of them one sample opens."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed, and which rows of a peer are the same work: name of the peer → starts of its case names."""

    timed: str
    peers: dict[str, tuple[str, ...]]


CASES: dict[str, Case] = {
    "c.probe32k": Case(
        "probe_reuse(prompt of 32,768 cached and 8 new tokens)",
        {
            "vllm": ("c.match32k hash", "c.match32k hit"),
            "sglang": ("c.match32k key", "c.match32k hit"),
            "floor": ("c.match32k copy+hash", "c.match32k lookup+adopt"),
        },
    ),
    "c.memcmp32k": Case("libc memcmp of the same 131,072 bytes, equal and in another place", {}),
    "c.create32k": Case(
        "create_kv_cache of that prompt: match, ownership of its 1,024 + 4 pages",
        {
            "vllm": ("c.match32k hash", "c.match32k hit", "c.match32k adopt"),
            "sglang": ("c.match32k key", "c.match32k hit", "c.match32k adopt"),
            "floor": ("c.match32k copy+hash", "c.match32k lookup+adopt"),
        },
    ),
    "c.close32k": Case("close() of it, never resumed", {}),
    **{
        f"d.commit{length}": Case(
            f"commit of {length:,} tokens at once into an empty tree",
            {"vllm": (f"d.commit{length}",), "sglang": (f"d.commit{length}",), "floor": (f"d.commit{length}",)},
        )
        for length in LENGTHS
    },
    **{
        f"d.commit{length}+keys": Case(f"the same and block_keys(): {length // BLOCK:,} chained SHA-256", {})
        for length in LENGTHS
    },
    "d.sha1024": Case("1,024 × hashlib.sha256(160 bytes).digest(), what 32k tokens' keys hash", {}),
    **{
        f"a.alloc{length}": Case(
            f"create_kv_cache of an unknown prompt (a miss), resume, resize to {length:,}",
            {}
            if length != 1024
            else {
                "vllm": ("a.request ctor+hash caching=True", "a.alloc1024 caching=True"),
                "sglang": ("a.alloc1024",),
                "floor": ("a.alloc1024",),
            },
        )
        for length in LENGTHS
    },
    **{
        f"a.free{length}": Case(
            "close() of it, nothing committed",
            {}
            if length != 1024
            else {"vllm": ("a.free1024 caching=True",), "sglang": ("a.free1024",), "floor": ("a.free1024",)},
        )
        for length in LENGTHS
    },
    "e.churn2k": Case(
        "create_kv_cache (a miss), resume, resize, commit, close of a 2,048-token prompt; 4,096 pages, all cached",
        {"vllm": ("e.churn2k",), "sglang": ("e.churn2k",), "floor": ("e.churn2k",)},
    ),
}


def commit_and_keys(cache: KVCache, prompt: Ids) -> list[bytes]:
    cache.commit(prompt)
    return cache.block_keys()


def close_all(caches: list[KVCache]) -> None:
    for cache in caches:
        cache.close()


def hash_all(blocks: list[bytes]) -> list[bytes]:
    sha256 = hashlib.sha256
    return [sha256(block).digest() for block in blocks]


class Bench:
    """The samples of one backend: case → microseconds."""

    def __init__(self, backend: str, repeats: int) -> None:
        self._backend = backend
        self._repeats = repeats
        self._rng = np.random.default_rng(0)
        self.samples: dict[str, list[float]] = {name: [] for name in CASES}

    def run(self) -> dict[str, list[float]]:
        """Every case."""
        gc.collect()
        gc.disable()
        self._match()
        self._commit()
        self._allocate()
        self._churn()
        self._bytes()
        gc.enable()
        return self.samples

    def _manager(self, pages: int = PAGES) -> KVCacheManager:
        return KVCacheManager(gpt_oss_120b(BLOCK, pages), backend=self._backend, device="virtual")

    def _tokens(self, count: int) -> Ids:
        return self._rng.integers(0, 200_000, count, dtype=np.int32)

    def _time(self, case: str, call: Callable[..., object], *arguments: object, per: int = 1) -> object:
        begin = time.perf_counter_ns()
        result = call(*arguments)
        self.samples[case].append((time.perf_counter_ns() - begin) / 1e3 / per)
        return result

    @staticmethod
    def _open(manager: KVCacheManager, prompt: Ids) -> KVCache:
        cache = manager.create_kv_cache(None, prompt)
        if not (cache.resume(None) and cache.resize(len(prompt))):
            raise RuntimeError("the benchmark's own manager is too small")
        return cache

    def _open_all(self, manager: KVCacheManager, prompts: list[Ids]) -> list[KVCache]:
        return [self._open(manager, prompt) for prompt in prompts]

    def _match(self) -> None:
        manager = self._manager()
        base = self._tokens(CACHED)
        cache = manager.create_kv_cache()
        assert cache.resume(None)
        for end in range(8192, CACHED + 1, 8192):
            assert cache.resize(end)
            cache.commit(base[end - 8192 : end])
        cache.close()
        for _ in range(25 * self._repeats):
            query = np.concatenate((base, self._tokens(8)))
            assert self._time("c.probe32k", manager.probe_reuse, None, query) == CACHED
            made = self._time("c.create32k", manager.create_kv_cache, None, query)
            assert isinstance(made, KVCache)
            assert made.num_committed_tokens == CACHED
            self._time("c.close32k", made.close)
        manager.shutdown()

    def _commit(self) -> None:
        manager = self._manager()
        for length in LENGTHS:
            for suffix in ("", "+keys"):
                for _ in range(9 * self._repeats):
                    prompt = self._tokens(length)
                    cache = self._open(manager, prompt)
                    if suffix:
                        self._time(f"d.commit{length}+keys", commit_and_keys, cache, prompt)
                    else:
                        self._time(f"d.commit{length}", cache.commit, prompt)
                    cache.close()
                    manager.clear_reusable_blocks()
        manager.shutdown()

    def _allocate(self) -> None:
        manager = self._manager()
        for length, count in LENGTHS.items():
            for _ in range(9 * self._repeats):
                prompts = [self._tokens(length) for _ in range(count)]
                caches = self._time(f"a.alloc{length}", self._open_all, manager, prompts, per=count)
                assert isinstance(caches, list)
                self._time(f"a.free{length}", close_all, caches, per=count)
        manager.shutdown()

    def _churn(self) -> None:
        manager = self._manager((1 << 16) // BLOCK * 2)

        def one(prompts: list[Ids]) -> None:
            for prompt in prompts:
                cache = self._open(manager, prompt)
                cache.commit(prompt)
                cache.close()

        for _ in range(8):
            one([self._tokens(2048) for _ in range(16)])
        for _ in range(9 * self._repeats):
            prompts = [self._tokens(2048) for _ in range(32)]
            self._time("e.churn2k", one, prompts, per=32)
        manager.shutdown()

    def _bytes(self) -> None:
        memcmp = ctypes.CDLL(None).memcmp
        memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        first = self._tokens(CACHED)
        blocks = [self._rng.bytes(160) for _ in range(1024)]
        for _ in range(25 * self._repeats):
            second = first.copy()
            a, b, size = first.ctypes.data, second.ctypes.data, first.nbytes
            assert self._time("c.memcmp32k", memcmp, a, b, size) == 0
            self._time("d.sha1024", hash_all, blocks)


def peer_microseconds(rows: list[dict[str, object]], starts: tuple[str, ...]) -> float:
    """The sum of the rows of block 32 that begin so; the shortest name where several do."""
    total = 0.0
    for start in starts:
        mine = [row for row in rows if str(row["case"]).startswith(start) and row["block"] == BLOCK]
        total += float(str(min(mine, key=lambda row: len(str(row["case"])))["median"]))
    return total


def run_peers() -> dict[str, list[dict[str, object]]]:
    """Every peer's rows."""
    home = os.environ.get("KVPOOL_PEERS")
    if not home:
        sys.exit("KVPOOL_PEERS is not set: it names the folder with the peers' run.sh (--ours runs without)")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peers.jsonl"
        return {peer: run_peer(Path(home), peer, out) for peer in PEERS}


def table(ours: dict[str, dict[str, list[float]]], theirs: dict[str, list[dict[str, object]]]) -> Iterator[str]:
    """Markdown: medians of both backends, and each peer's time with its ratio to v2cpp."""
    yield "| case | timed | v2cpp µs | v2py µs |" + "".join(f" {peer} µs (× v2cpp) |" for peer in theirs)
    yield "|---|---|---|---|" + "---|" * len(theirs)
    for name, case in CASES.items():
        medians = [statistics.median(samples[name]) for samples in ours.values()]
        line = f"| {name} | {case.timed} | " + " | ".join(f"{median:,.2f}" for median in medians) + " |"
        for peer, rows in theirs.items():
            starts = case.peers.get(peer)
            if starts is None:
                line += " |"
                continue
            microseconds = peer_microseconds(rows, starts)
            line += f" {microseconds:,.1f} ({microseconds / medians[0]:,.1f}) |"
        yield line


def notes(theirs: dict[str, list[dict[str, object]]]) -> Iterator[str]:
    """Which rows of which peer stand in the table."""
    if not theirs:
        return
    yield "What the peers' rows hold (names of their benchmark, added up):"
    yield ""
    for peer, rows in theirs.items():
        held = [f"{name}: {' + '.join(case.peers[peer])}" for name, case in CASES.items() if peer in case.peers]
        yield f"- {', '.join(sorted({str(row['peer']) for row in rows}))}. {'; '.join(held)}"
    yield ""
    yield (
        "vLLM and the floor hash a prompt before they look it up: that is in c and a, and for vLLM not in d and e, for the "
        "floor not in d. kvpool hashes nothing unless block_keys() asks."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="store_true", help="without the peers")
    parser.add_argument("--instructions", action="store_true", help="count instructions instead of time")
    parser.add_argument("--repeats", type=int, default=1, help="times as many samples")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.instructions:
        lines, problem = instruction_table()
    else:
        theirs = {} if options.ours else run_peers()
        ours = {ARMS[backend]: Bench(backend, options.repeats).run() for backend in ARMS}
        lines, problem = list(table(ours, theirs)), None
        lines += ["", *notes(theirs)]
    text = f"{machine.describe()}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    sys.exit(problem)


if __name__ == "__main__":
    main()
