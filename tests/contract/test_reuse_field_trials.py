"""Field trials of windows and of prefix reuse (sections B, C, P, Q), with stamps of the whole prefix in every page."""

from __future__ import annotations

import random

import pytest

from kvpool.errors import ArgumentError, LogicError
from kvpool.v2 import _introspection as introspection
from kvpool.v2 import sequence_to_blockchain_keys
from tests.support.configs import MIB, attention, config, full, slots, windowed
from tests.support.reuse import Lab, ids, tokens


def pair(window: int, tpb: int = 32, quota: int = 8 * MIB, **fields):
    """Layer 0 full (group 0), layer 1 windowed (group 1)."""
    return config([attention(0, 16 * tpb), attention(1, 16 * tpb, window)], quota, tpb, **fields)


# windows
@pytest.mark.parametrize("policy", ["longest", "reference"])
@pytest.mark.parametrize(("whole", "window_has"), [(256, 192), (320, 64), (256, 0)])
def test_B027_one_length_for_all_layers(make, policy, whole, window_has) -> None:
    """The full layer has more than the windowed one: what is reused is complete for both."""
    lab = Lab(make, pair(100, 64, match_policy=policy))
    parent = None
    for begin in range(0, whole, 64):
        coverage = [64, 64 if begin < window_has else 0]
        parent = introspection.make_test_block(lab.manager, ids(whole)[begin : begin + 64], coverage, parent)
    assert introspection.reuse_match_pages(lab.manager, None, ids(whole), 0)[0] == whole
    turn = lab.create(ids(whole))
    assert turn.reused == turn.cache.history_length == window_has
    assert [entry.endpoint for entry in turn.cache.reuse_status] == [window_has] * 2


@pytest.mark.parametrize("slot_count", [6, 8, 16])
@pytest.mark.parametrize(("length", "shared"), [(256, 64), (300, 32), (300, 20)])
def test_B029_and_B067_the_first_tokens_of_a_long_windowed_prompt(make, slot_count, length, shared) -> None:
    """w=64, B=16: a true hit with the stamps of the first tokens, or a miss; never the stamps of later ones."""
    lab = Lab(make, windowed(slot_count, 64, tpb=16, max_util_for_resume=1.0))
    long = ids(length)
    lab.run(long, *range(16, length, 16), length)
    turn = lab.open(long[:shared] + ids(64, 1), shared)
    assert turn.reused <= shared
    if length == 16 * slot_count:
        assert turn.reused == shared  # nothing had to be evicted
    for end in range(turn.reused + 16, shared + 65, 16):
        turn.advance(end)


@pytest.mark.parametrize("lookup", [5293, 13_858, 5120, 100])
@pytest.mark.parametrize("minimal", [True, False])
def test_B037_back_to_a_shorter_history(make, lookup, minimal) -> None:
    """w=128, B=32: going back is refused; a new request gets the largest length at which the window is there."""
    lab = Lab(make, pair(128, commit_min_snapshot=minimal))
    sequence = tokens(13_858)
    turn = lab.open(sequence)
    for end in (*range(1024, 13_858, 1024), 13_858):
        turn.advance(end)
    before = lab.manager.snapshot()
    with pytest.raises(ArgumentError, match="(?i)history"):
        turn.cache.resize(13_858, 5293)
    assert lab.manager.snapshot() == before
    turn.close()
    ends = [*range(0, 13_858, 1024), 13_858]
    assert lab.reused(sequence[:lookup]) == (max(end for end in ends if end <= lookup) if minimal else lookup)


@pytest.mark.parametrize("older", [512, 96, 0])
def test_B039_the_newest_window_is_gone_an_older_one_is_not(make, older) -> None:
    lab = Lab(make, pair(128, commit_min_snapshot=True))
    lab.run(ids(1024), *([older] if older else []), 1024)
    assert lab.reused(ids(1024)) == 1024
    introspection.set_test_coverage(lab.manager, None, ids(1024), 1, 0)
    assert lab.reused(ids(1024)) == older


def test_B039_every_other_page_of_the_window(make) -> None:
    """The full layer has 1,024 tokens; of the windowed one only the blocks right before 512 are left."""
    lab = Lab(make, pair(128))
    lab.run(ids(1024), *range(32, 1025, 32))
    for ordinal in (*range(31, 15, -1), *range(12)):
        prefix = ids(32 * (ordinal + 1))
        matched = lab.pages(prefix, 1)
        if len(matched) == ordinal + 1 and matched[-1] is not None:
            introspection.set_test_coverage(lab.manager, None, prefix, 1, 0)
    assert lab.reused(ids(1024)) == 512
    introspection.set_test_coverage(lab.manager, None, ids(448), 1, 0)
    assert lab.reused(ids(1024)) == 0


@pytest.mark.parametrize("window", [None, 100])
def test_B041_drafts_leave_nothing_behind(make, window) -> None:
    """B=64, three drafts, 200 random accept lengths: free + held + cached is the total at every step."""
    lab = Lab(make, pair(window, 64) if window else config([attention(0, 1024)], 4 * MIB, 64))
    rng = random.Random(41)
    sequence = ids(1000)
    turn = lab.open(sequence)
    for _ in range(200):
        turn.compute(turn.done + 1 + rng.randint(0, 3), turn.done + 4)
        turn.commit(turn.done)
        assert turn.cache.resize(turn.done, None)  # what was refused goes back
        assert turn.cache.num_blocks == -(-turn.done // 64)
        for info in lab.manager.get_storage_statistics():
            assert info.free + info.unavailable + info.evictable == info.total
    turn.close()
    assert lab.held() == [0] * len(slots(lab.manager))
    assert lab.reused(sequence[: turn.done]) == turn.done


@pytest.mark.parametrize(("backoff", "reused"), [(0, 8), (1, 7), (2, 6), (3, 5)])
@pytest.mark.parametrize("minimal", [True, False])
def test_B211_back_off_before_the_window_is_looked_at(make, backoff, reused, minimal) -> None:
    """w=4, B=2, 8 tokens: after the drop the window before the *new* end must be there (tokens 3..5 for 6)."""
    lab = Lab(make, config([attention(0, 32, 4)], 2 * MIB, 2, reuse_match_backoff=backoff, commit_min_snapshot=minimal))
    sequence = ids(8)
    lab.run(sequence)
    need = {8: (2, 4), 7: (2, 4), 6: (1, 3), 5: (1, 3)}[reused]
    here = lab.pages(sequence, 0)
    there = len(here) == 4 and all(here[ordinal] is not None for ordinal in range(*need))
    assert there or minimal
    assert lab.reused(sequence) == (reused if there else 0)
    assert there or (lab.nodes(), lab.cached()) == (0, [0])  # what no match can end at is not kept


# prefix reuse
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("length", "tpb"), [(64, 16), (32, 32), (96, 32)])
def test_B047_the_whole_prompt_is_cached(make, partial, length, tpb) -> None:
    """The last token is computed again: the caller looks up one less. The last block is not stored twice."""
    lab = Lab(make, full(16, tpb=tpb, enable_partial_reuse=partial))
    lab.run(ids(length))
    for _ in range(2):
        turn = lab.open(ids(length), length - 1)
        assert turn.reused == (length - 1 if partial else length - tpb)
        turn.advance(length)
        turn.close()
        assert lab.nodes() == length // tpb
        assert lab.cached() == [length // tpb]
    assert lab.reused(ids(length)) == length


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("backoff", [0, 1])
@pytest.mark.parametrize("window", [None, 128])
def test_B057_every_turn_hits_the_turn_before(make, partial, backoff, window) -> None:
    """Each turn adds 100 tokens, with drafts: the hit is the previous length less at most a block and the back-off."""
    fields = {"enable_partial_reuse": partial, "reuse_match_backoff": backoff}
    lab = Lab(make, pair(window, **fields) if window else config([attention(0, 512)], 4 * MIB, **fields))
    conversation = tokens(1000)
    for length in range(100, 1001, 100):
        turn = lab.open(conversation[:length])
        previous = length - 100
        assert max(0, previous - 32 - backoff) < turn.reused + 1 <= previous + 1
        if partial and previous:
            assert turn.reused == previous - backoff
        turn.compute(length, length + 3)
        turn.commit(length)
        assert turn.cache.resize(length, None)
        turn.close()


def test_B059_no_hit_past_a_gap(make) -> None:
    lab = Lab(make, full(16))
    sequence = ids(128)
    lab.run(sequence)
    assert lab.reused(sequence[:32] + ids(32, 1) + sequence[64:]) == 32
    assert lab.reused(ids(32, 1) + sequence[32:]) == 0


def test_B061_a_block_that_was_filled_up_late(make) -> None:
    """Space for 47, then 48 (B=16), then commit: block 2 is stored once, with 16 tokens."""
    lab = Lab(make, full(8, tpb=16))
    turn = lab.open(ids(48))
    turn.compute(47)
    turn.compute(48)
    turn.commit(48)
    assert lab.nodes() == 3
    assert turn.cache.block_keys() == [key for _, key in sequence_to_blockchain_keys(16, None, ids(48))][1:]
    turn.close()
    assert lab.nodes() == 3
    assert lab.reused(ids(48)) == 48


def test_B066_without_reuse_nothing_is_registered(make) -> None:
    lab = Lab(make, pair(128, quota=4 * MIB), "virtual")
    rng = random.Random(66)
    for _ in range(5000):
        cache = lab.manager.create_kv_cache()
        cache.stop_committing()
        assert cache.resume()
        length = rng.randint(1, 200)
        assert cache.resize(length, 0)
        assert cache.resize(length, length)
        cache.close()
    assert lab.manager.snapshot()["tree"] == []
    assert lab.free() == slots(lab.manager)


def test_B069_order_of_the_blocks(make) -> None:
    """Stored in the order 0 to 3, used in the same order, whatever order they were released in."""
    lab = Lab(make, full(8))
    turn = lab.open(ids(128))
    turn.advance(128)
    stored = list(turn.cache.get_base_page_indices(0))
    turn.close()
    again = lab.open(ids(128))
    assert list(again.cache.get_base_page_indices(0)) == stored
    assert again.check() > 0


@pytest.mark.parametrize(("window", "length"), [(128, 500), (16, 100), (1, 64), (1000, 500)])
def test_B071_a_sliding_layer_does_not_switch_reuse_off(make, window, length) -> None:
    lab = Lab(make, pair(window))
    assert lab.run(tokens(length)) == 0
    assert lab.run(tokens(length), lookup=length - 1) == length - 1


@pytest.mark.parametrize(
    ("partial", "diverges", "reused"), [(True, 100, 100), (False, 100, 0), (True, 300, 300), (False, 300, 256)]
)
def test_B072_large_blocks(make, partial, diverges, reused) -> None:
    lab = Lab(make, pair(64, 256, enable_partial_reuse=partial))
    lab.run(ids(512))
    assert lab.reused(ids(512)[:diverges] + ids(200, 1)) == reused


# edges
def test_B197_what_may_not_be_committed(make) -> None:
    lab = Lab(make, full(8))
    turn = lab.open(ids(100))
    turn.compute(40)

    def refused(error: type[Exception], count: int, words: str) -> None:
        before = lab.manager.snapshot()
        with pytest.raises(error, match=words):
            turn.cache.commit(ids(count))
        assert lab.manager.snapshot() == before

    refused(ArgumentError, 41, "41 tokens after 0 exceed the capacity 40")
    turn.commit(40)
    refused(ArgumentError, 1, "1 tokens after 40 exceed the capacity 40")
    refused(ArgumentError, 40, "exceed the capacity")  # the same tokens once more
    turn.cache.commit([])
    turn.cache.suspend()
    refused(LogicError, 0, "ACTIVE")
    assert turn.cache.resume()
    turn.cache.stop_committing()
    refused(LogicError, 1, r"Cannot commit tokens after stop_committing\(\)")
    turn.close()
    refused(LogicError, 1, "CLOSED|closed")
    assert lab.reused(ids(40)) == 40


# streams: everything as late as events permit
def sim_lab(make, slot_count: int) -> tuple[Lab, list[int]]:
    lab = Lab(make, full(slot_count, max_util_for_resume=1.0), "sim")
    return lab, [lab.manager.device_handle.create_stream() for _ in range(3)]


def fill(lab: Lab, turn, stream: int, end: int, value: int) -> int:
    """Grow to ``end`` and queue a write of every new page's first bytes; the address of block 0."""
    first = turn.done // 32
    assert turn.cache.resize(end, None)
    base = lab.manager.get_mem_pool_base_address(0, "key")
    stride = lab.manager.get_page_stride(0, "key")
    pages = list(turn.cache.get_base_page_indices(0))
    for ordinal in range(first, len(pages)):
        data = bytes([value, ordinal]) * 8
        lab.manager.device_handle.enqueue_write(stream, base + stride * pages[ordinal], data)
    turn.done = end
    return base + stride * pages[0]


def test_B031_an_evicted_page_is_written_after_its_last_reader(make) -> None:
    lab, (one, two, _) = sim_lab(make, 2)
    device = lab.manager.device_handle
    reader = lab.open(ids(64), stream=one)
    where = fill(lab, reader, one, 64, 7)
    reader.commit(64)
    ticket = device.enqueue_read(one, where, 16)
    reader.close()
    writer = lab.open(ids(64, 1), stream=two)
    assert fill(lab, writer, two, 64, 9) == where
    assert lab.probe(ids(64)) == 0
    device.run_all()
    assert device.read_result(ticket) == bytes([7, 0]) * 8


@pytest.mark.parametrize("closed", [True, False])
def test_a_hit_waits_for_the_writer(make, closed) -> None:
    """The pages are shared while the writer's stream has not run yet; the follower's stream comes after it."""
    lab, (one, two, _) = sim_lab(make, 4)
    device = lab.manager.device_handle
    writer = lab.open(ids(64), stream=one)
    where = fill(lab, writer, one, 64, 7)
    writer.commit(64)
    if closed:
        writer.close()
    follower = lab.open(ids(64), stream=two)
    assert follower.reused == 64
    ticket = device.enqueue_read(two, where, 16)
    device.run_all()
    assert device.read_result(ticket) == bytes([7, 0]) * 8


def test_the_source_of_a_copy_is_overwritten_after_the_copy(make) -> None:
    """A private copy of an unfinished block is queued; then its source is evicted and written by another stream."""
    lab, (one, two, three) = sim_lab(make, 2)
    device = lab.manager.device_handle
    writer = lab.open(ids(40), 0, stream=one)
    where = fill(lab, writer, one, 20, 7)
    writer.commit(20)
    writer.close()
    follower = lab.open(ids(40), 20, stream=two)
    assert follower.reused == 20
    copy = lab.manager.get_mem_pool_base_address(0, "key")
    copy += lab.manager.get_page_stride(0, "key") * follower.cache.get_base_page_indices(0)[0]
    assert copy != where
    ticket = device.enqueue_read(two, copy, 16)
    other = lab.open(ids(32, 1), stream=three)
    assert fill(lab, other, three, 32, 9) == where
    device.run_all()
    assert device.read_result(ticket) == bytes([7, 0]) * 8


def test_rebasing_waits_for_the_page_that_it_takes_over(make) -> None:
    lab, (one, two, _) = sim_lab(make, 4)
    device = lab.manager.device_handle
    a, b = lab.open(ids(64), stream=one), lab.open(ids(64), stream=two)
    where = fill(lab, a, one, 32, 7)
    own = fill(lab, b, two, 32, 7)
    assert own != where
    a.commit(32)
    b.commit(32)
    base = lab.manager.get_mem_pool_base_address(0, "key")
    stride = lab.manager.get_page_stride(0, "key")
    assert base + stride * b.cache.get_base_page_indices(0)[0] == where
    ticket = device.enqueue_read(two, where, 16)
    device.run_all()
    assert device.read_result(ticket) == bytes([7, 0]) * 8
