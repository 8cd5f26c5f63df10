"""Both backends refuse the same thing in the same words (DESIGN D3), where the words come from the cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.v2 import AttentionLayerConfig, BufferConfig, SwaScratchReuseConfig
from tests.support.arms import AVAILABLE, build
from tests.support.configs import MIB, batch, config, full, one, ssm

pytestmark = pytest.mark.skipif(len(AVAILABLE) < 2, reason="needs both backends")


def _words(call: Callable[[str], Any]) -> list[tuple[str, str]]:
    said = []
    for arm in AVAILABLE:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it must be the same
            call(arm)
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


CONFIGS = {
    "floors": lambda: config([one(0, MIB, 64, 40), one(1, MIB), one(2, MIB // 2, 128)], 4 * MIB),
    "floors of states": lambda: config([one(0, MIB), ssm(1, 3 * MIB)], 2 * MIB),
    "floors of constraints": lambda: config([one(0, MIB), one(1, 9000, 33)], 8 * MIB, constraints=[batch((9000, 0))]),
    "one byte": lambda: config([one(0, MIB)], 1),
    "int32": lambda: config([one(3, 1)], 1 << 40),
    "int32 with own tokens per block": lambda: config(
        [AttentionLayerConfig(0, [BufferConfig("key", 16, 1), BufferConfig("value", 16, 1)])], 1 << 40
    ),
    "scratch aliases": lambda: config(
        [
            AttentionLayerConfig(0, [BufferConfig("key", 512), BufferConfig("value", 512)], 32),
            AttentionLayerConfig(1, [BufferConfig("key", 512)], 32),
        ],
        64 * MIB,
        swa_scratch_reuse=SwaScratchReuseConfig(),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_construction(name: str) -> None:
    first, *others = _words(lambda arm: build(arm, CONFIGS[name]()))
    assert first[0] == "ConfigError"
    assert others == [first] * len(others)


def _grow_beams(cache: Any, width: int) -> None:
    cache.resize(40, 0)
    cache.history_length = 40
    cache.resize(64, 40)
    cache.beam_width = width


def _step(cache: Any, capacity: int, history: int) -> None:
    table = np.full((1, 1, 4096), -1, np.int32)
    numbers = [np.array([n], np.int32) for n in (0, capacity, history)]
    cache.manager.step(np.array([cache.handle], np.int64), *numbers, table)


CALLS: dict[str, Callable[[Any], Any]] = {
    "never fits": lambda cache: cache.resize(1 << 20),
    "capacity never fits": lambda cache: setattr(cache, "capacity", 1 << 20),
    "history goes back": lambda cache: (cache.resize(64, 33), cache.resize(64, 32)),
    "capacity below history": lambda cache: (cache.resize(64, 33), cache.resize(32)),
    "beams never fit": lambda cache: _grow_beams(cache, 500),
    "step never fits": lambda cache: _step(cache, 1 << 16, 0),
    "step: history goes back": lambda cache: (cache.resize(64, 33), _step(cache, 64, 32)),
    "resume twice": lambda cache: cache.resume(),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    def call(arm: str) -> None:
        manager = build(arm, full(8))
        cache = manager.create_kv_cache()
        try:
            cache.resume()
            CALLS[name](cache)
        finally:
            cache.close()
            manager.shutdown()

    first, *others = _words(call)
    assert others == [first] * len(others)


def test_beams_do_not_fit_now() -> None:
    def call(arm: str) -> None:
        manager = build(arm, full(8))
        other, cache = manager.create_kv_cache(), manager.create_kv_cache()
        try:
            other.resume()
            other.resize((manager.pool_group_descs[0].num_slots - 2) * 32, 0)
            cache.resume()
            _grow_beams(cache, 5)
        finally:
            other.close()
            cache.close()
            manager.shutdown()

    first, *others = _words(call)
    assert first[0] == "OutOfPagesError"
    assert others == [first] * len(others)
