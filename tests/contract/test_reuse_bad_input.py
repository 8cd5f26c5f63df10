"""Wrong tokens, scopes, commits, priorities: a clear error that names the argument and the place, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ArgumentError, LogicError, NeverFitsError, UnsupportedError
from kvpool.v2 import MmItemContext, ReuseScope
from tests.support.configs import full
from tests.support.reuse import WRONG_ARRAYS, Lab, digest, ids, refused

INT32_MAX = 2**31 - 1


def calls(lab: Lab) -> dict[str, Callable[[Any], Any]]:
    """Everything that takes tokens, and what it calls them."""
    turn = lab.open(ids(64, 5))
    assert turn.cache.resize(64, None)
    return {
        "create": lambda value: lab.make.track(lab.manager.create_kv_cache(None, value)),
        "probe": lambda value: lab.manager.probe_reuse(None, value),
        "key": lambda value: lab.manager.probe_first_new_block_key(None, value),
        "commit": turn.cache.commit,
    }


CALLS = ["create", "probe", "key", "commit"]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", [-1, -2, -(2**31), 2**31, 2**40, 2**64, -(2**70)])
def test_ids_out_of_range(lab, name, bad) -> None:
    call = calls(lab)[name]
    refused(
        lab,
        lambda: call([1, 2, bad]),
        ArgumentError,
        rf"tokens\[2\]: token ids must be from 0 to {INT32_MAX}, not {bad}",
    )
    refused(
        lab, lambda: call((bad,)), ArgumentError, rf"tokens\[0\]: token ids must be from 0 to {INT32_MAX}, not {bad}"
    )
    refused(lab, lambda: call([digest(1), bad]), ArgumentError, rf"tokens\[1\].*not {bad}")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", [-1, -2, -(2**31)])
def test_negative_ids_in_an_array(lab, name, bad) -> None:
    """No digest comes along with an array, so a negative number names none."""
    call = calls(lab)[name]
    array = np.array([1, 2, 3, bad, 5], np.int32)
    refused(
        lab, lambda: call(array), ArgumentError, rf"tokens\[3\]: token ids must be from 0 to {INT32_MAX}, not {bad}"
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", [1.0, "1", None, [1], (1,), bytearray(32), np.float32(1), 1j])
def test_tokens_of_a_wrong_type(lab, name, bad) -> None:
    call = calls(lab)[name]
    refused(
        lab, lambda: call([0, bad]), TypeError, rf"tokens\[1\] must be a token id or a digest, not {type(bad).__name__}"
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", ["12", b"12", {1: 2}, {1, 2}, iter([1, 2]), 7, 1.5, range(4), memoryview(b"abcd")])
def test_containers_of_a_wrong_type(lab, name, bad) -> None:
    call = calls(lab)[name]
    refused(lab, lambda: call(bad), TypeError, "tokens must be a list, a tuple or an int32 array")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_arrays_of_another_kind(lab, name, kind) -> None:
    call = calls(lab)[name]
    refused(lab, lambda: call(WRONG_ARRAYS[kind]), ArgumentError, "tokens must be .*int32 array, not")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_digests_of_a_wrong_size(lab, name, size) -> None:
    call = calls(lab)[name]
    words = rf"tokens\[2\] has {size} bytes: a digest has 32"
    refused(lab, lambda: call([1, digest(1), bytes(size)]), ArgumentError, words)
    refused(lab, lambda: call([1, 2, MmItemContext(bytes(size), "u")]), ArgumentError, words)


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_are_fine(lab, name) -> None:
    call = calls(lab)[name]
    readonly = np.arange(3, dtype=np.int32)
    readonly.flags.writeable = False
    fine = [
        [np.int32(1), np.int64(2), np.uint8(3)],
        (0, INT32_MAX),
        [digest(1), MmItemContext(digest(2))],
        readonly,
        np.arange(9, dtype=np.int32)[3:6],
        np.empty(0, np.int32),
        [],
        (),
    ]
    for value in fine:
        call(value)


class SubArray(np.ndarray):
    """An array is an array."""


def test_a_subclass_of_an_array(lab) -> None:
    assert lab.probe(np.array(ids(48), np.int32).view(SubArray)) == 48


def test_numpy_ids_match_plain_ones(lab) -> None:
    assert lab.probe([np.int64(token) for token in ids(48)]) == 48
    assert lab.probe([np.uint16(token) for token in ids(48)]) == 48


def test_no_tokens_at_all(lab) -> None:
    """None: no look-up; empty: none either, and commits stay allowed (C5)."""
    for empty in (None, [], (), np.empty(0, np.int32)):
        turn = lab.create(ids(40), 0) if empty is None else None
        cache = lab.make.track(lab.manager.create_kv_cache(None, empty))
        assert cache.num_committed_tokens == 0
        assert lab.manager.probe_reuse(None, empty) == 0
        assert lab.manager.probe_first_new_block_key(None, empty) is None
        assert cache.resume()
        assert cache.resize(3, None)
        cache.commit([1, 2, 3])
        assert cache.num_committed_tokens == 3
        cache.close()
        if turn is not None:
            turn.close()


def test_a_prompt_far_longer_than_the_match(lab) -> None:
    long = np.zeros(1_000_000, np.int32)
    long[:48] = ids(48)
    assert lab.probe(long) == 48
    assert lab.manager.probe_first_new_block_key(None, long) is not None
    cache = lab.make.track(lab.manager.create_kv_cache(None, long))
    assert cache.num_committed_tokens == 48
    assert cache.resume()
    with pytest.raises(NeverFitsError):
        cache.resize(1_000_000, None)


def test_an_array_is_read_not_kept(lab) -> None:
    array = np.array(ids(64, 2), np.int32)
    cache = lab.make.track(lab.manager.create_kv_cache(None, array))
    assert cache.resume()
    assert cache.resize(64, None)
    cache.commit(array[:40])
    array[:] = 9
    cache.commit(ids(64, 2)[40:])
    assert cache.committed_tokens == ids(64, 2)
    cache.close()
    assert lab.probe(ids(64, 2)) == 64
    assert lab.probe(array) == 0


SCOPES = [
    (ReuseScope(lora_id=2**64), ArgumentError, "lora_id must be from 0 to 2\\^64 - 1"),
    (ReuseScope(salt=2**64), ArgumentError, "salt must be from 0 to 2\\^64 - 1"),
    (ReuseScope(lora_id=-1), ArgumentError, "lora_id"),
    (ReuseScope(salt=-(2**63)), ArgumentError, "salt"),
    (ReuseScope(lora_id="7"), TypeError, "lora_id"),
    (ReuseScope(salt=1.0), TypeError, "salt"),
    (ReuseScope(lora_id=b"7"), TypeError, "lora_id"),
    ((1, 2), TypeError, "reuse_scope must be a ReuseScope"),
    (7, TypeError, "reuse_scope must be a ReuseScope"),
    ("lora", TypeError, "reuse_scope must be a ReuseScope"),
]


@pytest.mark.parametrize(("scope", "error", "words"), SCOPES)
@pytest.mark.parametrize("name", ["create_kv_cache", "probe_reuse", "probe_first_new_block_key"])
def test_scopes(lab, scope, error, words, name) -> None:
    refused(lab, lambda: getattr(lab.manager, name)(scope, [1, 2]), error, words)


def test_scopes_that_are_fine(lab) -> None:
    for scope in (ReuseScope(2**64 - 1, 0), ReuseScope(np.int64(7), np.uint64(2**63))):
        lab.run(ids(40, 3), scope=scope)
        assert lab.probe(ids(40, 3), scope) == 40
    assert lab.probe(ids(40, 3), ReuseScope(7, 2**63)) == 40


# commit
def test_commit_in_the_wrong_state(lab) -> None:
    turn = lab.create(ids(64, 1))
    refused(
        lab, lambda: turn.cache.commit([1]), LogicError, r"commit\(\) needs an ACTIVE KV cache; this one is SUSPENDED"
    )
    assert turn.cache.resume()
    assert turn.cache.resize(64, None)
    turn.commit(10)
    turn.cache.suspend()
    refused(lab, lambda: turn.cache.commit([1]), LogicError, "this one is SUSPENDED")
    assert turn.cache.resume()
    turn.commit(20, is_end=True)
    refused(lab, lambda: turn.cache.commit([1]), LogicError, r"Cannot commit tokens after stop_committing\(\)")
    turn.cache.commit([])  # no tokens: nothing happens
    turn.cache.stop_committing()
    turn.close()
    refused(lab, lambda: turn.cache.commit([1]), LogicError, "(?i)closed")
    refused(lab, turn.cache.stop_committing, LogicError, "(?i)closed")
    refused(lab, turn.cache.plan_committed_block_drop, LogicError, "(?i)closed")
    with pytest.raises(LogicError, match="(?i)closed"):
        _ = turn.cache.committed_tokens


def test_commit_with_beams(lab) -> None:
    turn = lab.open(ids(64, 1))
    assert turn.cache.resize(40, None)
    turn.commit(40)
    assert turn.cache.resize(44, None)
    turn.cache.beam_width = 2
    refused(lab, lambda: turn.cache.commit([1]), LogicError, r"beam_width is 2; only one beam can be committed")
    refused(lab, lambda: turn.cache.commit([1], [0]), UnsupportedError, "beam_search_indices")
    turn.cache.beam_width = 1
    turn.commit(44)


@pytest.mark.parametrize("bad", [1, "yes", None, np.True_])
def test_is_end_is_a_bool(lab, bad) -> None:
    turn = lab.open(ids(64, 1))
    assert turn.cache.resize(40, None)
    if bad is np.True_:
        turn.cache.commit(ids(40, 1), is_end=bad)
        assert turn.cache.num_committed_tokens == 40
        return
    refused(lab, lambda: turn.cache.commit(ids(40, 1), is_end=bad), TypeError, "is_end")


@pytest.mark.parametrize("count", [33, 64, 1000])
def test_more_than_was_written(lab, count) -> None:
    turn = lab.open(ids(64, 1))
    assert turn.cache.resize(32, None)
    words = rf"commit\(\): {count} tokens after 0 exceed the capacity 32"
    refused(lab, lambda: turn.cache.commit(ids(count, 1)), ArgumentError, words)
    turn.commit(32)
    refused(lab, lambda: turn.cache.commit([1]), ArgumentError, r"commit\(\): 1 tokens after 32 exceed the capacity 32")


# text only
@pytest.mark.parametrize("by", ["manager", "cache", "setter"])
def test_text_only(make, by) -> None:
    lab = Lab(make, full(8, text_only=by == "manager"), "virtual")
    cache = lab.make.track(lab.manager.create_kv_cache(text_only=True if by == "cache" else None))
    if by == "setter":
        cache.text_only = True
    assert cache.text_only
    assert cache.resume()
    assert cache.resize(32, None)
    refused(lab, lambda: cache.commit([1, digest(1)]), ArgumentError, "text_only was promised")
    cache.commit([1, 2])
    if by == "manager":
        for call in (lab.manager.create_kv_cache, lab.manager.probe_reuse):
            refused(lab, lambda c=call: c(None, [digest(1)]), ArgumentError, "text_only was promised")
        with pytest.raises(ArgumentError, match="text_only = False"):
            lab.manager.create_kv_cache(text_only=False)
    else:
        assert lab.probe([digest(1)]) == 0
    if by != "cache":
        return
    with pytest.raises(ArgumentError, match="text_only was promised"):
        lab.manager.create_kv_cache(None, [digest(1)], text_only=True)


def test_text_only_after_digests(make) -> None:
    lab = Lab(make, full(8), "virtual")
    lab.run([1, digest(1), 2])
    cache = lab.create([1, digest(1), 2]).cache
    with pytest.raises(ArgumentError, match="text_only = True"):
        cache.text_only = True
    assert cache.text_only is False


# create
@pytest.mark.parametrize(
    ("bad", "error"), [(-1, ArgumentError), (2**40, ArgumentError), ("9", TypeError), (1.0, TypeError)]
)
def test_expected_prompt_length(lab, bad, error) -> None:
    refused(
        lab, lambda: lab.manager.create_kv_cache(None, [1], expected_prompt_length=bad), error, "expected_prompt_length"
    )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (101, ArgumentError),
        (-1, ArgumentError),
        (2**40, ArgumentError),
        ("9", TypeError),
        (3.0, TypeError),
        (None, TypeError),
    ],
)
def test_priorities(lab, answer, error) -> None:
    def wrong(ordinal: int, life_cycle: object) -> Any:
        return 50 if ordinal < 2 else answer

    refused(
        lab,
        lambda: lab.manager.create_kv_cache(None, ids(96), custom_priority_callback=wrong),
        error,
        "custom_priority_callback",
    )
    cache = lab.create(ids(64, 4), custom_priority_callback=wrong).cache
    assert cache.resume()
    assert cache.resize(64, None)
    refused(lab, lambda: cache.resize(96, None), error, "custom_priority_callback")
    assert cache.capacity == 64


def test_a_callback_that_raises(lab) -> None:
    def broken(ordinal: int, life_cycle: object) -> int:
        raise KeyError(ordinal)

    refused(lab, lambda: lab.manager.create_kv_cache(None, ids(40), custom_priority_callback=broken), KeyError, "0")
    refused(lab, lambda: lab.manager.create_kv_cache(None, [1], custom_priority_callback=7), TypeError, "callable")
