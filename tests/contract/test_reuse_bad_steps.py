"""Wrong tokens in a batch step: the whole call fails, names the request and the place, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ArgumentError, LogicError
from tests.support.configs import KIB, MIB, attention, config, ssm
from tests.support.reuse import WRONG_ARRAYS, Lab, ids, refused, tokens

INT32_MAX = 2**31 - 1


def batch(
    lab: Lab, *turns: Any, capacity: int = 40, history: int = 8, values: Any = None, offsets: Any = None
) -> Callable[[], Any]:
    """A step that commits eight tokens per request unless told otherwise."""
    n = len(turns)
    handles = np.array([turn.cache.handle for turn in turns], np.int64)
    table = np.full((1, n, 8), -1, np.int32)
    lengths = [np.arange(n, dtype=np.int32), np.full(n, capacity, np.int32), np.full(n, history, np.int32)]
    if values is None:
        values = np.arange(8 * n, dtype=np.int32)
    if offsets is None:
        offsets = np.arange(0, 8 * n + 1, 8, dtype=np.int32)
    return lambda: lab.manager.step(handles, *lengths, table, (values, offsets))


@pytest.fixture
def pair(lab) -> tuple[Any, Any]:
    turns = lab.open(ids(64, 1)), lab.open(ids(64, 2))
    for turn in turns:
        assert turn.cache.resize(32, None)
    return turns


STEP_OFFSETS = {
    "does not begin with 0": [1, 8, 16],
    "decreases": [0, 9, 8],
    "ends early": [0, 8, 15],
    "ends late": [0, 8, 17],
    "negative": [0, -1, 16],
}


@pytest.mark.parametrize("kind", STEP_OFFSETS)
def test_step_offsets(lab, pair, kind) -> None:
    offsets = np.array(STEP_OFFSETS[kind], np.int32)
    words = r"step\(\): offsets must begin with 0, never decrease and end with 16"
    refused(lab, batch(lab, *pair, offsets=offsets), ArgumentError, words)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_step_number_of_offsets(lab, pair, count) -> None:
    words = rf"step\(\): offsets has {count} entries, 3 are needed"
    refused(lab, batch(lab, *pair, offsets=np.linspace(0, 16, count, dtype=np.int32)), ArgumentError, words)


@pytest.mark.parametrize("kind", [kind for kind in WRONG_ARRAYS if kind not in ("bool", "object")])
def test_step_arrays_of_another_kind(lab, pair, kind) -> None:
    refused(lab, batch(lab, *pair, values=WRONG_ARRAYS[kind]), ArgumentError, "tokens values")
    refused(lab, batch(lab, *pair, offsets=WRONG_ARRAYS[kind]), ArgumentError, "tokens offsets")


@pytest.mark.parametrize("bad", [7, [1, 2], "ab", np.zeros(2, np.int32), (np.zeros(0, np.int32),), {}])
def test_step_tokens_are_a_pair(lab, pair, bad) -> None:
    handles = np.array([turn.cache.handle for turn in pair], np.int64)
    numbers = [np.arange(2, dtype=np.int32), np.full(2, 40, np.int32), np.full(2, 8, np.int32)]
    table = np.full((1, 2, 8), -1, np.int32)
    refused(lab, lambda: lab.manager.step(handles, *numbers, table, bad), TypeError, "tokens")


def test_step_requests_are_named(lab, pair) -> None:
    """The second request is wrong: nothing of the first is done."""
    values = np.arange(16, dtype=np.int32)
    values[11] = -3
    words = rf"step\(\): request 1: tokens\[11\]: token ids must be from 0 to {INT32_MAX}, not -3"
    refused(lab, batch(lab, *pair, values=values), ArgumentError, words)
    many = {"values": np.arange(41, dtype=np.int32), "offsets": np.array([0, 8, 41], np.int32)}
    words = r"step\(\): request 1: 33 tokens after 0 exceed the capacity 32"
    refused(lab, batch(lab, *pair, history=33, **many), ArgumentError, words)
    words = r"step\(\): request 0: history 7: must be at least the 8 committed tokens"
    refused(lab, batch(lab, *pair, history=7), ArgumentError, words)
    pair[1].cache.stop_committing()
    words = r"step\(\): request 1: Cannot commit tokens after stop_committing\(\)"
    refused(lab, batch(lab, *pair), LogicError, words)
    fine = {"values": np.arange(8, dtype=np.int32), "offsets": np.array([0, 8, 8], np.int32)}
    assert batch(lab, *pair, **fine)().ok.tolist() == [True, True]
    assert [turn.cache.num_committed_tokens for turn in pair] == [8, 0]


def test_step_with_a_snapshot_at_each_commit(make) -> None:
    cfg = config([attention(0, KIB), ssm(1, KIB)], 8 * MIB)
    lab = Lab(make, cfg, "virtual")
    turn = lab.open(tokens(64))
    assert turn.cache.resize(32, 4)
    handle, zero = np.array([turn.cache.handle], np.int64), np.zeros(1, np.int32)
    table = np.full((2, 1, 4), -1, np.int32)
    pair = np.arange(8, dtype=np.int32), np.array([0, 8], np.int32)
    words = r"step\(\): request 0: commit_min_snapshot needs a history of 0 or 8 tokens, not 4"
    refused(lab, lambda: lab.manager.step(handle, zero, zero + 32, zero + 8, table, pair), ArgumentError, words)
