"""Micro-benchmarks of the manager, one process, one thread, on the virtual device.

Layout and cases are those of the measured peers, so that rows compare by name: GPT-OSS-120B (36 layers, window 128 and full,
8 KV heads × 64, bfloat16), blocks of 32 tokens, 65,536 pages.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from kvpool import __version__
from kvpool.models import config_for, get_model
from kvpool.sim.arms import backend_problems
from kvpool.sim.usage import UsageError
from kvpool.v2 import KVCache, KVCacheManager

MODEL, BLOCK, PAGES = "gpt-oss-120b", 32, 65_536
PROMPTS = 64


class BenchRow(BaseModel):
    """One case on one backend. ``n`` samples; ``params`` says what one sample is."""

    name: str
    backend: str
    median: float
    min: float
    max: float
    unit: str
    n: int
    params: dict[str, int | str]


class BenchResult(BaseModel):
    """The file that ``kvpool bench --json`` writes."""

    schema_: Literal[1] = Field(alias="schema")
    kvpool: str
    rows: list[BenchRow]


@dataclass(frozen=True, slots=True)
class Case:
    """``run(backend)`` gives samples in ``unit``."""

    run: Callable[[str], list[float]]
    unit: str
    params: dict[str, int | str]


def run_bench(pattern: str | None) -> Iterator[BenchRow]:
    """A row per case that matches ``pattern`` and backend that exists; UsageError when none matches."""
    cases = {name: case for name, case in CASES.items() if pattern is None or matches(name, pattern)}
    if not cases:
        raise UsageError("--filter", f"{pattern!r} matches no case", "a part of, or a pattern for, " + ", ".join(CASES))
    for backend, problem in backend_problems().items():
        if problem is not None:
            continue
        for name, case in cases.items():
            samples = case.run(backend)
            yield BenchRow(
                name=name,
                backend=backend,
                median=statistics.median(samples),
                min=min(samples),
                max=max(samples),
                unit=case.unit,
                n=len(samples),
                params={"model": MODEL, "block": BLOCK, **case.params},
            )


def matches(name: str, pattern: str) -> bool:
    """A part of the name, or a shell pattern for all of it."""
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


def as_result(rows: list[BenchRow]) -> BenchResult:
    """The rows as a file."""
    return BenchResult.model_construct(schema_=1, kvpool=__version__, rows=rows)


def _manager(backend: str, pages: int = PAGES) -> KVCacheManager:
    layers = get_model(MODEL).layer_configs(BLOCK)
    slot_bytes = sum(b.size for layer in layers for b in layer.buffers) // 2  # two equal layer groups share the pages
    config = config_for(MODEL, quota=pages * slot_bytes, tokens_per_block=BLOCK, max_util_for_resume=1.0)
    return KVCacheManager(config, backend=backend, device="virtual")


def _open(manager: KVCacheManager, tokens: int) -> KVCache:
    cache = manager.create_kv_cache()
    cache.stop_committing()
    if not (cache.resume(None) and cache.resize(tokens, 0)):
        raise RuntimeError("the benchmark's own manager is too small")
    return cache


def _construct(backend: str) -> list[float]:
    samples = []
    for _ in range(15):
        start = perf_counter_ns()
        manager = _manager(backend)
        samples.append((perf_counter_ns() - start) / 1e3)
        manager.shutdown()
    return samples


def _prompt_cycle(backend: str) -> tuple[list[float], list[float]]:
    """µs a prompt of 1,024 tokens: to open it, and to close it."""
    opened, closed = [], []
    with _manager(backend) as manager:
        for _ in range(15):
            start = perf_counter_ns()
            caches = [_open(manager, 1024) for _ in range(PROMPTS)]
            middle = perf_counter_ns()
            for cache in caches:
                cache.close()
            closed.append((perf_counter_ns() - middle) / 1e3 / PROMPTS)
            opened.append((middle - start) / 1e3 / PROMPTS)
    return opened[1:], closed[1:]


def _decode(context: int, requests: int = 256, steps: int = 256) -> Callable[[str], list[float]]:
    """µs a step of ``requests`` that decode at about ``context`` tokens, page table included."""

    def run(backend: str) -> list[float]:
        pages = requests * (context // BLOCK + 32)
        with _manager(backend, max(PAGES, pages)) as manager:
            caches = []
            for number in range(requests):
                cache = _open(manager, 1)
                tokens = context + number % BLOCK
                assert cache.resize(tokens, tokens)
                caches.append(cache)
            handles = np.asarray([cache.handle for cache in caches], np.int64)
            rows = np.arange(requests, dtype=np.int32)
            histories = context + np.arange(requests, dtype=np.int32) % BLOCK
            capacities = histories + 1
            blocks = (context + BLOCK + steps + 16) // BLOCK + 1
            table = np.full((len(manager.layer_grouping), requests, blocks), -1, np.int32)
            samples = []
            for _ in range(steps + 2):
                start = perf_counter_ns()
                granted = manager.step(handles, rows, capacities, histories, table).ok
                samples.append((perf_counter_ns() - start) / 1e3)
                assert granted.all()
                histories += 1
                capacities += 1
            for cache in caches:
                cache.close()
        return samples[2:]

    return run


def _with_room(manager: KVCacheManager, tokens: int, prompt: npt.NDArray[np.int32] | None = None) -> KVCache:
    """A cache that may commit, with the prompt's match if one is given."""
    cache = manager.create_kv_cache(None, prompt)
    if not (cache.resume(None) and cache.resize(tokens)):
        raise RuntimeError("the benchmark's own manager is too small")
    return cache


def _computed(manager: KVCacheManager, prompt: npt.NDArray[np.int32]) -> KVCache:
    """A cache that has matched what it could and committed the rest."""
    cache = _with_room(manager, len(prompt), prompt)
    cache.commit(prompt[cache.num_committed_tokens :])
    return cache


def _match(backend: str, cached: int = 32_768) -> list[float]:
    """µs to look up, own and close a cached prompt of ``cached`` tokens with 8 new ones behind."""
    samples = []
    draw = np.random.default_rng(0).integers
    with _manager(backend) as manager:
        prompt = draw(0, 200_000, cached + 8, np.int32)
        _computed(manager, prompt[:cached]).close()
        for _ in range(25):
            prompt[cached:] = draw(0, 200_000, 8, np.int32)
            start = perf_counter_ns()
            cache = manager.create_kv_cache(None, prompt)
            cache.close()
            samples.append((perf_counter_ns() - start) / 1e3)
            assert cache.num_committed_tokens == cached
    return samples


def _commit(tokens: int) -> Callable[[str], list[float]]:
    """µs to commit ``tokens`` new tokens at once."""

    def run(backend: str) -> list[float]:
        samples = []
        draw = np.random.default_rng(0).integers
        with _manager(backend) as manager:
            for _ in range(15):
                cache = _with_room(manager, tokens)
                prompt = draw(0, 200_000, tokens, np.int32)
                start = perf_counter_ns()
                cache.commit(prompt)
                samples.append((perf_counter_ns() - start) / 1e3)
                cache.close()
                manager.clear_reusable_blocks()
        return samples

    return run


def _churn(backend: str, tokens: int = 2048, pages: int = 4096) -> list[float]:
    """µs a new prompt through a pool full of cached pages: look-up, room, commit, close."""
    samples = []
    draw = np.random.default_rng(0).integers
    with _manager(backend, pages) as manager:
        for number in range(64 + 15 * 16):
            prompt = draw(0, 200_000, tokens, np.int32)
            start = perf_counter_ns()
            _computed(manager, prompt).close()
            if number >= 64:
                samples.append((perf_counter_ns() - start) / 1e3)
    return samples


CASES: dict[str, Case] = {
    "a.construct": Case(_construct, "us", {"pages": PAGES}),
    "a.alloc1024": Case(lambda backend: _prompt_cycle(backend)[0], "us/prompt", {"tokens": 1024, "prompts": PROMPTS}),
    "a.free1024": Case(lambda backend: _prompt_cycle(backend)[1], "us/prompt", {"tokens": 1024, "prompts": PROMPTS}),
    "b.decode256@2k": Case(_decode(2048), "us/step", {"requests": 256, "context": 2048}),
    "b.decode256@32k": Case(_decode(32768), "us/step", {"requests": 256, "context": 32768}),
    "b.decode256@128k": Case(_decode(131072), "us/step", {"requests": 256, "context": 131072}),
    "c.match32k": Case(_match, "us/prompt", {"tokens": 32_776, "cached": 32_768}),
    "d.commit1024": Case(_commit(1024), "us", {"tokens": 1024}),
    "d.commit32768": Case(_commit(32_768), "us", {"tokens": 32_768}),
    "e.churn2k": Case(_churn, "us/prompt", {"tokens": 2048, "pages": 4096}),
}
"""Every case by name."""
