"""Both backends refuse the same thing in the same words (DESIGN D3), where the words come from the cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.v2 import AttentionLayerConfig, BufferConfig, ReusePolicy, SwaScratchReuseConfig
from kvpool.v2 import _introspection as introspection
from tests.support.arms import AVAILABLE, build
from tests.support.configs import MIB, attention, batch, buffers, config, full, one, ssm
from tests.support.reuse import digest, ids

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


# prefix reuse
DIGESTS = [digest(number) for number in range(2)]


def _array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _commit(cache: Any, count: int, **fields: Any) -> None:
    cache.resize(64)
    cache.commit(ids(count), **fields)


def _step_tokens(cache: Any, values: Any, offsets: Any, *, capacity: int = 64, history: int = 8) -> None:
    table = np.full((len(cache.manager.layer_grouping), 1, 4096), -1, np.int32)
    numbers = [_array(n) for n in (0, capacity, history)]
    cache.manager.step(np.array([cache.handle], np.int64), *numbers, table, (values, offsets))


def _eight(cache: Any, **fields: Any) -> None:
    _step_tokens(cache, _array(*range(8)), _array(0, 8), **fields)


def _stopped(cache: Any) -> Any:
    cache.resize(64)
    cache.stop_committing()
    return cache


def _with_beams(cache: Any) -> None:
    _commit(cache, 40)
    cache.beam_width = 2


def _dropped_twice(cache: Any) -> None:
    _commit(cache, 40)
    cache.stop_committing()
    plan = cache.plan_committed_block_drop()
    plan.drop()
    plan.drop()


REUSE: dict[str, Callable[[Any], Any]] = {
    "create: negative id": lambda cache: cache.manager.create_kv_cache(None, _array(1, -3, 2)),
    "probe: negative id": lambda cache: cache.manager.probe_reuse(None, _array(-(2**31))),
    "key: negative id": lambda cache: cache.manager.probe_first_new_block_key(None, _array(1, 2, -1)),
    "commit: negative id": lambda cache: (cache.resize(64), cache.commit(_array(1, 2, -5))),
    "core: a digest that did not come along": lambda cache: (
        cache.resize(64),
        cache.manager._core.commit(cache.handle, _array(1, -1, -2, -3), DIGESTS, False),
    ),
    "commit: suspended": lambda cache: (cache.suspend(), cache.commit([1])),
    "commit: closed": lambda cache: (cache.close(), cache.commit([1])),
    "commit: beams": lambda cache: (_with_beams(cache), cache.commit([1])),
    "commit: stopped": lambda cache: _stopped(cache).commit([1]),
    "commit: ended": lambda cache: (_commit(cache, 40, is_end=True), cache.commit([1])),
    "commit: too much": lambda cache: _commit(cache, 65),
    "commit: too much after some": lambda cache: (_commit(cache, 60), cache.commit(ids(5))),
    "core: text only": lambda cache: (
        cache.resize(64),
        cache.manager._core.commit(_text_only(cache), _array(-1), DIGESTS[:1], False),
    ),
    "step: negative": lambda cache: (cache.resize(64), _step_tokens(cache, _array(1, 2, -9), _array(0, 3))),
    "step: suspended": lambda cache: (cache.suspend(), _eight(cache)),
    "step: beams": lambda cache: (_with_beams(cache), _eight(cache, history=48)),
    "step: stopped": lambda cache: _eight(_stopped(cache)),
    "step: too much": lambda cache: (cache.resize(4), _eight(cache)),
    "step: history below": lambda cache: (cache.resize(64), _eight(cache, history=7)),
    "step: offsets begin": lambda cache: _step_tokens(cache, _array(1, 2), _array(1, 2)),
    "step: offsets end": lambda cache: _step_tokens(cache, _array(1, 2), _array(0, 1)),
    "step: offsets go back": lambda cache: _step_tokens(cache, _array(1, 2), _array(3, 2)),
    "step: number of offsets": lambda cache: _step_tokens(cache, _array(1, 2), _array(0, 1, 2)),
    "step: no offsets": lambda cache: _step_tokens(cache, _array(), _array()),
    "step: values of int64": lambda cache: _step_tokens(cache, np.zeros(2, np.int64), _array(0, 2)),
    "step: offsets of int64": lambda cache: _step_tokens(cache, _array(1, 2), np.array([0, 2])),
    "step: strided values": lambda cache: _step_tokens(cache, np.zeros(4, np.int32)[::2], _array(0, 2)),
    "step: a list of values": lambda cache: _step_tokens(cache, [1, 2], _array(0, 2)),
    "step: no pair": lambda cache: cache.manager.step(
        np.array([cache.handle], np.int64), _array(0), _array(64), _array(8), np.full((1, 1, 64), -1, np.int32), 7
    ),
    "clear: open": lambda cache: cache.manager.clear_reusable_blocks(),
    "shutdown: open": lambda cache: cache.manager.shutdown(),
    "plan: not stopped": lambda cache: (_commit(cache, 40), cache.plan_committed_block_drop()),
    "plan: dropped": _dropped_twice,
    "optional: not one": lambda cache: cache.manager.create_kv_cache(None, [1]).resume(None, optional_reuse_groups=[0]),
    "optional: unknown": lambda cache: cache.manager.create_kv_cache(None, [1]).resume(None, optional_reuse_groups=[5]),
    "optional: later": lambda cache: (cache.suspend(), cache.resume(None, optional_reuse_groups=[1])),
    "test block: no parent": lambda cache: cache.manager._core.debug_insert_block(
        (None, None), _array(*range(40)), (), [40 % 32]
    ),
    "test coverage: no block": lambda cache: introspection.set_test_coverage(cache.manager, None, ids(40), 0, 1),
    "priorities: unknown handle": lambda cache: cache.manager._core.extend_priorities(1 << 40, [[1]]),
    "keys: unknown handle": lambda cache: cache.manager._core.block_keys(1 << 40),
    "tokens: unknown handle": lambda cache: cache.manager._core.committed_tokens(1 << 40),
    "status: unknown handle": lambda cache: cache.manager._core.reuse_status(1 << 40),
    "depths: unknown handle": lambda cache: cache.manager._core.match_depths(1 << 40),
    "plan: unknown handle": lambda cache: cache.manager._core.plan_drop(1 << 40),
    "stop: unknown handle": lambda cache: cache.manager._core.stop_committing(1 << 40),
    "linked: unknown handle": lambda cache: cache.manager._core.page_is_linked(1 << 40, 0, 0),
}


def _text_only(cache: Any) -> int:
    """A handle that promised text only, ACTIVE with space."""
    core = cache.manager._core
    handle = core.create((None, None), None, (), 0, True, None)
    core.resume(handle, None)
    core.resize(handle, 64, None)
    return int(handle)


@pytest.mark.parametrize("name", REUSE)
def test_reuse(name: str) -> None:
    def call(arm: str) -> None:
        manager = build(arm, full(8))
        cache = manager.create_kv_cache()
        cache.resume()
        REUSE[name](cache)

    first, *others = _words(call)
    assert first[0] in ("ArgumentError", "LogicError", "TypeError")
    assert others == [first] * len(others)


@pytest.mark.parametrize("history", [1, 9])
@pytest.mark.parametrize("by_step", [False, True])
def test_commit_min_snapshot(history: int, by_step: bool) -> None:
    def call(arm: str) -> None:
        manager = build(arm, config([attention(0), ssm(1, 4096)], 8 * MIB))
        cache = manager.create_kv_cache()
        cache.resume()
        cache.resize(64, history)
        if by_step:
            _eight(cache, history=16)
        else:
            cache.commit(ids(8))

    first, *others = _words(call)
    assert f"needs a history of 0 or 8 tokens, not {history}" in first[1]
    assert others == [first] * len(others)


def test_optional_groups() -> None:
    """Not complete; and another choice than the first."""

    def manager_of(arm: str) -> Any:
        layer = AttentionLayerConfig(1, buffers(8192), 64, None, ReusePolicy.OPTIONAL)
        manager = build(arm, config([attention(0), layer], 8 * MIB))
        introspection.make_test_block(manager, ids(32), [32, 0])
        return manager

    for calls in ([[1]], [[], [1]]):

        def call(arm: str, calls: list[list[int]] = calls) -> None:
            cache = manager_of(arm).create_kv_cache(None, ids(32))
            for groups in calls:
                cache.resume(None, optional_reuse_groups=groups)
                cache.suspend()

        first, *others = _words(call)
        assert first[0] == "ArgumentError"
        assert others == [first] * len(others)
