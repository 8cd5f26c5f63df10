"""Prefix reuse as the facade offers it: arguments, priorities, drop handles, what a cache tells about its match."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ArgumentError, LogicError, UnknownBufferError, UnsupportedError
from kvpool.v2 import (
    AttentionLayerConfig,
    AttnLifeCycle,
    BufferConfig,
    GpuCacheTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    MmItemContext,
    PlannedDropHandle,
    ReusePolicy,
    ReuseScope,
    ReuseStatus,
    SsmLayerConfig,
    SsmLifeCycle,
    sequence_to_blockchain_keys,
)
from kvpool.v2 import _introspection as introspection

DIGEST = bytes(range(32))
FULL, WINDOW = 0, 1
"""Layer groups of :func:`config`."""


def layer(layer_id: int, window: int | None = None, policy: ReusePolicy = ReusePolicy.REQUIRED) -> AttentionLayerConfig:
    return AttentionLayerConfig(layer_id, [BufferConfig("key", 4096)], window, reuse_policy=policy)


def config(layers: list[Any] | None = None, **fields: Any) -> KVCacheManagerConfig:
    given = {"layers": layers or [layer(0), layer(1, 8)], "cache_tiers": [GpuCacheTierConfig(16 << 20)], **fields}
    return KVCacheManagerConfig(tokens_per_block=4, **given)


Make = Callable[..., KVCacheManager]


@pytest.fixture
def make(backend: str) -> Iterator[Make]:
    """Builds managers; at the end each is audited and emptied."""
    made: list[KVCacheManager] = []

    def build(layers: list[Any] | None = None, **fields: Any) -> KVCacheManager:
        made.append(KVCacheManager(config(layers, **fields), backend=backend, device="virtual"))
        return made[-1]

    yield build
    for manager in made:
        if manager.mapped_bytes:
            manager.audit()
            manager.clear_reusable_blocks()
            manager.shutdown()


def run(manager: KVCacheManager, tokens: Any, *, close: bool = True, **fields: Any) -> KVCache:
    """A request that computes and commits all of ``tokens``."""
    cache = manager.create_kv_cache(None, tokens, **fields)
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[cache.num_committed_tokens :])
    if close:
        cache.close()
    return cache


# -- create and probes -------------------------------------------------------------------------------------------------


def test_lengths_right_after_create(make: Make) -> None:
    manager = make()
    prompt = [1, DIGEST, *range(3, 11)]
    run(manager, prompt)
    for tokens, reused in ((prompt, 10), (tuple(prompt), 10), ([*prompt, 5], 10), (prompt[:9], 9), (prompt[::-1], 0)):
        assert manager.probe_reuse(None, tokens) == manager.probe_reuse(input_tokens=tokens) == reused
        with manager.create_kv_cache(ReuseScope(), tokens) as cache:
            assert cache.num_committed_tokens == cache.history_length == cache.capacity == reused
            assert cache.num_blocks == -(-reused // 4)
            assert cache.committed_tokens == list(tokens[:reused])
            assert cache._get_num_reusable_tokens_before_pruning() == reused
            assert cache._get_num_reusable_tokens_before_hybrid_pruning() == reused
    for scope in (ReuseScope(0), ReuseScope(None, 0), ReuseScope(7, 2**64 - 1)):
        assert manager.probe_reuse(scope, prompt) == 0
    for nothing in (None, [], (), np.zeros(0, np.int32)):  # C5
        assert manager.probe_reuse(None, nothing) == 0
        assert manager.probe_first_new_block_key(None, nothing) is None


def test_arrays_and_lists_are_one(make: Make) -> None:
    manager = make()
    prompt = np.arange(100, 123, dtype=np.int32)
    prompt.flags.writeable = False
    run(manager, prompt)
    assert manager.probe_reuse(None, prompt[:21]) == manager.probe_reuse(None, prompt[:21].tolist()) == 21
    with manager.create_kv_cache(None, prompt) as cache:
        assert cache.committed_tokens == prompt.tolist()
        assert all(type(token) is int for token in cache.committed_tokens)


def test_first_new_block_key(make: Make) -> None:
    manager = make()
    prompt = [*range(10), DIGEST, 11]
    keys = [key for _, key in sequence_to_blockchain_keys(4, None, prompt)][1:]
    assert manager.probe_first_new_block_key(None, prompt) == keys[0]
    run(manager, prompt[:8])
    assert manager.probe_first_new_block_key(ReuseScope(), prompt) == keys[2]
    assert manager.probe_first_new_block_key(None, prompt[:11]) is None
    salted = [key for _, key in sequence_to_blockchain_keys(4, ReuseScope(7, 11), prompt)][1:]
    assert manager.probe_first_new_block_key(ReuseScope(7, 11), prompt) == salted[0]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ("text", TypeError),
        (range(4), TypeError),
        ([True], TypeError),
        ([-1], ArgumentError),
        ([2**31], ArgumentError),
        ([DIGEST[:31]], ArgumentError),
        (np.arange(4), ArgumentError),
        (np.array([3, -1], np.int32), ArgumentError),
    ],
    ids=repr,
)
def test_wrong_tokens_change_nothing(make: Make, tokens: Any, error: type[Exception]) -> None:
    manager = make()
    cache = run(manager, [1, 2, 3, 4, 5], close=False)
    assert cache.resize(32)
    before = manager.snapshot()
    for call, name in (
        (lambda: manager.create_kv_cache(None, tokens), "input_tokens"),
        (lambda: manager.probe_reuse(None, tokens), "input_tokens"),
        (lambda: manager.probe_first_new_block_key(None, tokens), "input_tokens"),
        (lambda: cache.commit(tokens), "tokens"),
    ):
        with pytest.raises(error, match=name):
            call()
    assert manager.snapshot() == before
    cache.close()


def test_text_only(make: Make) -> None:
    manager = make(text_only=True)
    for call in (manager.create_kv_cache, manager.probe_reuse, manager.probe_first_new_block_key):
        with pytest.raises(ArgumentError, match="text_only was promised"):
            call(None, [DIGEST])
    manager = make()
    cache = manager.create_kv_cache(text_only=True)
    assert cache.resume()
    assert cache.resize(8)
    with pytest.raises(ArgumentError, match=r"accepted_input_tokens\[1\] is a digest, but text_only was promised"):
        cache.commit([1, DIGEST])
    cache.text_only = False
    cache.commit([1, DIGEST])
    with pytest.raises(ArgumentError, match="text_only = True: 1 of the committed tokens are digests"):
        cache.text_only = True
    assert not cache.text_only
    cache.close()
    with manager.create_kv_cache(None, [1, 2]) as cache:
        cache.text_only = True
        assert cache.text_only


# -- commit ------------------------------------------------------------------------------------------------------------


def test_commit_and_keys(make: Make) -> None:
    manager = make()
    tokens = [0, MmItemContext(DIGEST, "u"), 1001, 1002, 4, 5]
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(16)
    assert cache.block_keys() == []
    cache.commit(tokens)
    assert (cache.num_committed_tokens, cache.history_length) == (6, 6)
    assert cache.committed_tokens == [0, DIGEST, 1001, 1002, 4, 5]
    keys = [key for _, key in sequence_to_blockchain_keys(4, None, tokens)][1:]
    assert cache.block_keys() == keys[:1]
    cache.commit(np.array([6, 7], np.int32), None, False)
    keys = [key for _, key in sequence_to_blockchain_keys(4, None, [*tokens, 6, 7])][1:]
    assert cache.block_keys() == keys
    assert all(type(key) is bytes for key in cache.block_keys())
    cache.commit([])
    assert introspection.is_commit_allowed(cache)
    cache.commit((), is_end=True)
    assert not introspection.is_commit_allowed(cache)
    with pytest.raises(LogicError, match=r"Cannot commit tokens after stop_committing\(\)"):
        cache.commit([8])
    cache.close()
    for call in (
        lambda: cache.commit([8]),
        lambda: cache.committed_tokens,
        cache.block_keys,
        lambda: cache.reuse_status,
    ):
        with pytest.raises(LogicError):
            call()


def test_commit_arguments(make: Make) -> None:
    manager = make()
    cache = manager.create_kv_cache()
    with pytest.raises(LogicError, match=r"commit\(\) needs an ACTIVE KV cache; this one is SUSPENDED"):
        cache.commit([1])
    assert cache.resume()
    assert cache.resize(4)
    for arguments, error, text in (
        (([1], [0]), UnsupportedError, "beam_search_indices: tokens must be converged and in beam 0"),
        ((None,), TypeError, "accepted_input_tokens must be a list"),
        (([1], None, 1), TypeError, "is_end must be True or False"),
        (([1, 2, 3, 4, 5],), ArgumentError, "5 tokens after 0 exceed the capacity 4"),
    ):
        with pytest.raises(error, match=text):
            cache.commit(*arguments)
    cache.beam_width = 2
    with pytest.raises(LogicError, match="beam_width is 2"):
        cache.commit([1])
    cache.close()


# -- priorities --------------------------------------------------------------------------------------------------------


def priorities(manager: KVCacheManager, life_cycle: int) -> list[int]:
    """Of the pages of the only path in the tree, root first."""
    pages = [node[4][life_cycle] for node in manager.snapshot()["tree"] if len(node[2])]
    return [page[3] for page in pages if page is not None]


def test_priorities(make: Make) -> None:
    manager = make([layer(0), layer(1, 8), SsmLayerConfig(2, [BufferConfig("state", 4096)])], commit_min_snapshot=True)
    asked: list[tuple[int, Any]] = []

    def priority(ordinal: int, life_cycle: Any) -> Any:
        asked.append((ordinal, life_cycle))
        return np.int64(10 * ordinal + (3 if isinstance(life_cycle, SsmLifeCycle) else 1))

    full, window, state = AttnLifeCycle(None, 0), AttnLifeCycle(8, 0), SsmLifeCycle()
    cache = manager.create_kv_cache(None, list(range(7)), custom_priority_callback=priority)
    assert asked == [(n, lc) for lc in (full, window, state) for n in (0, 1)]
    asked.clear()
    assert cache.resume()
    assert cache.resize(8)
    assert asked == [(2, state)]  # the state after 8 tokens belongs to block 2
    assert cache.resize(16)
    assert asked[1:] == [(2, full), (3, full), (2, window), (3, window), (3, state), (4, state)]
    asked.clear()
    cache.capacity = 15
    assert cache.resize(16)
    assert cache.resize(None, 0)
    assert asked == []
    cache.commit(range_of(0, 16))
    assert priorities(manager, 0) == [1, 11, 21, 31]
    cache.close()
    assert priorities(manager, 2) == [43]
    tables = np.full((3, 1, 16), -1, np.int32)
    more = manager.create_kv_cache(None, range_of(100, 108), custom_priority_callback=lambda n, lc: 50 + n)
    assert more.resume()
    handles, rows = np.array([more.handle]), np.zeros(1, np.int32)
    assert manager.step(handles, rows, rows + 16, rows, tables).ok[0]  # asks nobody: the last answer goes on
    more.commit(range_of(100, 116))
    assert [page[4][0][3] for page in manager.snapshot()["tree"] if page[2] and page[2][0] >= 100] == [50, 51, 51, 51]
    more.close()


def range_of(beg: int, end: int) -> list[int]:
    return list(range(beg, end))


def test_expected_prompt_length_bounds_the_questions(make: Make) -> None:
    manager = make([layer(0)])
    for arguments, blocks in (({}, 0), ({"expected_prompt_length": 9}, 3), ({"input_tokens": [1] * 9}, 3)):
        asked: list[int] = []
        manager.create_kv_cache(**arguments, custom_priority_callback=lambda n, lc, to=asked: to.append(n) or 1).close()
        assert asked == list(range(blocks))
    manager.create_kv_cache(None, [1] * 9, custom_priority_callback=None).close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [(101, ArgumentError), (-1, ArgumentError), (True, TypeError), (1.0, TypeError), (None, TypeError)],
)
def test_wrong_priorities(make: Make, answer: Any, error: type[Exception]) -> None:
    manager = make([layer(0)])
    before = manager.snapshot()
    answers = {0: 7, 1: answer}
    with pytest.raises(error, match=r"custom_priority_callback\(1, AttnLifeCycle.*\) must be"):
        manager.create_kv_cache(None, [1] * 8, custom_priority_callback=lambda n, lc: answers[n])
    assert manager.snapshot() == before
    cache = manager.create_kv_cache(None, [1] * 4, custom_priority_callback=lambda n, lc: answers[n])
    assert cache.resume()
    before = manager.snapshot()
    for call in (lambda: cache.resize(8), lambda: setattr(cache, "capacity", 8)):
        with pytest.raises(error):
            call()
    answers.clear()
    with pytest.raises(KeyError):
        cache.resize(8)
    assert manager.snapshot() == before
    answers[1] = 9
    assert cache.resize(8)
    cache.commit([1] * 8)
    assert priorities(manager, 0) == [7, 9]
    cache.close()


def test_callback_may_use_the_manager(make: Make) -> None:
    manager = make()
    seen: list[int] = []

    def priority(ordinal: int, life_cycle: Any) -> int:
        seen.append(manager.probe_reuse(None, [1, 2, 3]))  # no lock is held
        manager.create_kv_cache().close()
        return 1

    manager.create_kv_cache(None, [1] * 8, custom_priority_callback=priority).close()
    assert seen == [0] * 4


# -- optional groups ---------------------------------------------------------------------------------------------------


def test_reuse_status_and_optional_groups(make: Make) -> None:  # scenario 130
    required, optional = ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL
    manager = make([layer(0), layer(1, 4, optional), layer(2, 2, optional)])
    run(manager, range_of(0, 8))
    reader = manager.create_kv_cache(None, range_of(0, 8))
    assert list(reader.reuse_status) == [
        ReuseStatus(0, required, True, 8, [(0, 8)]),
        ReuseStatus(1, optional, True, 8, [(4, 8)]),
        ReuseStatus(2, optional, True, 8, [(4, 8)]),
    ]
    assert reader.reuse_status[1].policy is optional
    for wrong, text in (
        ([0], "optional_reuse_groups: 0 is not an optional layer group"),
        ([3], "optional_reuse_groups: 3 is not an optional layer group"),
        ([1, -1], "optional_reuse_groups: -1 is not an optional layer group"),
        ([2**40], "is not an optional layer group"),
    ):
        with pytest.raises(ValueError, match=text):
            reader.resume(None, wrong)
        assert not reader.is_active
    for no_ids in (["1"], [1.0], [True], [None]):
        with pytest.raises(TypeError, match="optional_reuse_groups must be layer group ids"):
            reader.resume(optional_reuse_groups=no_ids)
    source = {group: slots(reader, group) for group in (1, 2)}
    assert reader.resume(optional_reuse_groups=(1, np.int64(1)))
    assert slots(reader, 1)[1] == source[1][1]
    assert slots(reader, 2)[1] != source[2][1]
    reader.suspend()
    with pytest.raises(ArgumentError, match="optional_reuse_groups: chosen at the first resume already"):
        reader.resume(None, [1, 2])
    assert reader.resume(None, {1})
    reader.close()


def slots(cache: KVCache, group: int) -> list[int]:
    return list(cache.get_aggregated_page_indices(group))


def test_reuse_status_has_an_entry_per_group(make: Make) -> None:
    manager = make([SsmLayerConfig(0, [BufferConfig("state", 64)]), layer(1)], commit_min_snapshot=True)
    with manager.create_kv_cache() as cache:
        assert list(cache.reuse_status) == [None, ReuseStatus(1, ReusePolicy.REQUIRED, True, 0, [])]


# -- planned drops -----------------------------------------------------------------------------------------------------


def plan(manager: KVCacheManager, tokens: list[int]) -> PlannedDropHandle:
    cache = run(manager, tokens, close=False)
    with pytest.raises(LogicError, match="committing has not stopped"):
        cache.plan_committed_block_drop()
    cache.stop_committing()
    handle = cache.plan_committed_block_drop()
    cache.close()
    assert handle is not None
    return handle


def counts(manager: KVCacheManager, tokens: list[int], group: int) -> list[int | None]:
    return introspection.reuse_match_planned_drop_counts(manager, None, tokens, group)


def test_drop(make: Make) -> None:
    manager = make()
    tokens = range_of(0, 16)
    handle = plan(manager, tokens)
    assert counts(manager, tokens, FULL) == [0, 0, 0, 0]
    assert counts(manager, tokens, WINDOW)[2:] == [1, 1]
    assert manager.probe_reuse(None, tokens) == 16
    assert handle.drop() is None
    assert manager.probe_reuse(None, tokens) < 16
    with pytest.raises(LogicError, match="already been dropped"):
        handle.drop()
    with handle:  # nothing left to do at its end
        pass


def test_drop_as_a_context_manager(make: Make) -> None:
    manager = make()
    tokens = range_of(0, 16)
    with plan(manager, tokens) as handle:
        assert counts(manager, tokens, WINDOW)[3] == 1
    assert manager.probe_reuse(None, tokens) < 16
    with pytest.raises(LogicError, match="already been dropped"):
        handle.drop()
    with pytest.raises(ZeroDivisionError), plan(manager, tokens):
        raise ZeroDivisionError
    assert manager.probe_reuse(None, tokens) < 16


@pytest.mark.parametrize("call", ["create", "close", "resume", "suspend", "resize", "commit", "stop", "beams", "clear"])
def test_discarded_handles_are_applied_by_the_next_call_that_changes_something(make: Make, call: str) -> None:
    manager = make()
    tokens = range_of(0, 16)
    handle = plan(manager, tokens)
    other = manager.create_kv_cache()
    if call != "resume":
        assert other.resume()
    del handle
    gc.collect()
    assert manager.probe_reuse(None, tokens) == 16  # queries do not apply it
    assert other.num_blocks == 0
    calls = {
        "create": lambda: manager.create_kv_cache().close(),
        "close": other.close,
        "resume": other.resume,
        "suspend": other.suspend,
        "resize": lambda: other.resize(4),
        "commit": lambda: other.commit([]),
        "stop": other.stop_committing,
        "beams": lambda: setattr(other, "beam_width", 1),
        "clear": manager.clear_reusable_blocks,
    }
    with pytest.raises(LogicError, match="still open") if call == "clear" else contextlib.nullcontext():
        calls[call]()
    assert manager.probe_reuse(None, tokens) < 16
    other.close()


def test_a_plan_shared_by_two_handles_goes_with_the_second(make: Make) -> None:
    manager = make()
    tokens = range_of(0, 16)
    first, second = plan(manager, tokens), plan(manager, tokens)
    assert counts(manager, tokens, WINDOW)[3] == 2
    first.drop()
    assert counts(manager, tokens, WINDOW)[3] == 1
    assert manager.probe_reuse(None, tokens) == 16
    del second
    manager.create_kv_cache().close()
    assert manager.probe_reuse(None, tokens) < 16


def test_handles_outlive_what_they_planned(make: Make) -> None:
    manager = make()
    tokens = range_of(0, 16)
    dropped, discarded, late = (plan(manager, tokens) for _ in range(3))
    manager.clear_reusable_blocks()
    run(manager, tokens)
    dropped.drop()
    del discarded
    manager.create_kv_cache().close()
    assert manager.probe_reuse(None, tokens) == 16  # these pages were never planned
    fresh = plan(manager, tokens)
    manager.shutdown()
    late.drop()
    with pytest.raises(LogicError, match="already been dropped"):
        late.drop()
    del fresh
    gc.collect()
    manager.shutdown()


def test_no_plan(make: Make) -> None:
    manager = make()
    cache = manager.create_kv_cache()
    cache.stop_committing()
    assert cache.plan_committed_block_drop() is None
    cache.close()
    with pytest.raises(LogicError):
        cache.plan_committed_block_drop()
    cache = run(manager, range_of(0, 16), close=False)
    cache.stop_committing()
    cache.suspend()
    reader = manager.create_kv_cache(None, range_of(0, 16))
    assert introspection.committed_page_is_linked(reader, 3, FULL)
    assert cache.plan_committed_block_drop() is not None
    reader.close()
    cache.close()


# -- clear and shutdown ------------------------------------------------------------------------------------------------


def test_clear_reusable_blocks(make: Make) -> None:
    manager = make()
    cache = run(manager, range_of(0, 16), close=False)
    with pytest.raises(LogicError, match=r"clear_reusable_blocks\(\): 1 KV cache\(s\) still open"):
        manager.clear_reusable_blocks()
    assert not introspection.all_tree_pages_droppable(manager)
    cache.close()
    assert introspection.all_tree_pages_droppable(manager)
    assert sum(info.evictable for info in manager.get_storage_statistics()) > 0
    manager.clear_reusable_blocks()
    manager.clear_reusable_blocks()
    assert manager.probe_reuse(None, range_of(0, 16)) == 0
    assert all(info.free == info.total for info in manager.get_storage_statistics())
    run(manager, range_of(0, 16))
    manager.shutdown()  # cached pages do not stand in the way
    with pytest.raises(LogicError):
        manager.probe_reuse(None, [1])
    with pytest.raises(LogicError):
        manager.clear_reusable_blocks()


# -- introspection -----------------------------------------------------------------------------------------------------


def test_test_blocks(make: Make) -> None:
    manager = make()
    first = introspection.make_test_block(manager, [1, 2, 3, 4], [4, 4])
    second = introspection.make_test_block(manager, [5, DIGEST], {FULL: 2, WINDOW: 1}, first)
    assert second.tokens == (1, 2, 3, 4, 5, DIGEST)
    keys = [key for _, key in sequence_to_blockchain_keys(4, None, second.tokens)]
    assert [introspection.test_block_key(block) for block in (first, second)] == keys[1:]
    tokens = list(second.tokens)
    matched, pages = introspection.reuse_match_pages(manager, None, tokens, WINDOW)
    assert matched == 6
    assert [page[1] for page in pages if page] == [4, 1]
    assert introspection.reuse_match_planned_drop_counts(manager, None, tokens, FULL) == [0, 0]
    assert introspection.reuse_match_pages(manager, None, [1, 2, 9], FULL)[0] == 0
    assert introspection.reuse_match_pages(manager, None, [1, 2, 9], FULL, True)[0] == 2
    assert manager.probe_reuse(None, tokens) == 5
    introspection.set_test_coverage(manager, None, tokens, WINDOW, 2)
    assert manager.probe_reuse(None, tokens) == 6
    introspection.close_test_block(second)
    assert introspection.reuse_match_pages(manager, None, tokens, FULL)[0] == 4
    introspection.close_test_block(second)
    introspection.close_test_block(first)
    assert manager.probe_reuse(None, tokens) == 0
    salted = introspection.make_test_block(manager, np.array([1, 2], np.int32), [2, None], None, ReuseScope(7, 11))
    assert introspection.reuse_match_pages(manager, ReuseScope(7, 11), [1, 2], WINDOW) == (2, [None])
    introspection.close_test_block(salted)
    for arguments, error in (
        (([], [0, 0]), ArgumentError),
        (([1] * 5, [0, 0]), ArgumentError),
        (([1], [2, 0]), ArgumentError),
        (([1], [1, 1, 1]), ArgumentError),
        (([1], {7: 1}), ArgumentError),
        (([1], [1, 1], second), ArgumentError),
        ((["x"], [1, 1]), TypeError),
    ):
        with pytest.raises(error):
            introspection.make_test_block(manager, *arguments)
    with pytest.raises(UnknownBufferError):
        introspection.reuse_match_pages(manager, None, [1], 2)


def test_committed_page_is_linked(make: Make) -> None:
    manager = make()
    cache = run(manager, range_of(0, 6), close=False)
    assert [introspection.committed_page_is_linked(cache, ordinal, FULL) for ordinal in (0, 1)] == [True, False]
    assert introspection.is_commit_allowed(cache)
    cache.stop_committing()
    assert introspection.committed_page_is_linked(cache, 1, FULL)
    cache.close()
