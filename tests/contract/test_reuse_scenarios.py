"""Named scenarios of prefix reuse with attention layers, with real bytes (planned drops, states, … have files of their own)."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.errors import LogicError
from kvpool.v2 import AttentionLayerConfig, BufferConfig, ReuseScope, SwaScratchReuseConfig
from kvpool.v2 import _introspection as introspection
from tests.support import oracle
from tests.support.configs import MIB, alternating, attention, config, full, slots, windowed
from tests.support.reuse import Lab, ids, tokens


@pytest.mark.parametrize("n", [1, 2, 4])
def test_scenario_10_a_prefix_that_ends_inside_a_block(make, n) -> None:
    """n requests of 704 tokens; then the first 704 // 2 - 7 tokens of request 0 are reused and it runs to 704 again."""
    lab = Lab(make, alternating(36, 128, 1, 32768, n * 64 * MIB))
    for request in range(n):
        assert lab.run(tokens(704, request), 256, *range(288, 705, 32), lookup=256) == 0
    assert introspection.all_tree_pages_droppable(lab.manager)
    assert lab.held() == [0]
    sequence = tokens(345) + tokens(704 - 345, seed=90)
    turn = lab.open(sequence, 345)
    assert turn.reused == 345
    assert not introspection.all_tree_pages_droppable(lab.manager)
    for end in range(361, 705, 49):
        turn.advance(end)
    turn.advance(704)
    turn.close()
    assert introspection.all_tree_pages_droppable(lab.manager)


def test_scenario_10_in_memory_for_one(make) -> None:
    """Scenario 8's 28 slots, which one request of 704 tokens fills: what is left is reused, and never wrong."""
    lab = Lab(make, alternating(36, 128, 1, 32768, 32 * MIB))
    assert slots(lab.manager) == [28]
    lab.run(tokens(704), 256, *range(288, 705, 32), lookup=256)
    turn = lab.open(tokens(345) + tokens(704 - 345, seed=90), 345)
    assert turn.reused in range(32, 346)  # the sink and every full page are there
    for end in range(turn.reused + 16, 704, 16):
        turn.advance(end)
    turn.advance(704)


@pytest.mark.parametrize("own_row", [True, False])
@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("lag", [0, 1, 40])
def test_scenario_23_decoding_with_late_commits(make, own_row, scales, lag) -> None:
    """Window 128 with 48 sink tokens beside full attention: prompt 1, decoded to 512, every step checked.

    Commits come ``lag`` tokens late: pages behind the window stay until then, and are shared like all others.
    """
    roles = ["key", "value", *(["key_block_scale", "value_block_scale"] if scales else [])]
    kinds = [BufferConfig(role, 1024 if "scale" in role else 512) for role in roles]
    layers = [AttentionLayerConfig(i, kinds, None if i % 2 else 128, None if i % 2 else 48) for i in range(2)]
    lab = Lab(make, config(layers, 16 * MIB))
    sequence = tokens(512)
    turn = lab.open(sequence, 0)
    rows = np.full((2, 20), -7, np.int32)
    for group in range(2) if own_row else ():
        turn.cache.set_base_page_index_buf(0, group, memoryview(rows[group]))
    for end in range(1, 513):
        turn.compute(end)
        assert turn.cache.resize(None, end - 1)
        if end > lag:
            turn.commit(end - lag)
        turn.check()
        if own_row:
            assert rows.tolist() == [list(turn.cache.get_base_page_indices(group)) for group in range(2)]
    turn.close()
    assert lab.reused(sequence) == 512 - lag


@pytest.mark.parametrize(
    ("tpb", "window", "blocks", "first"), [(32, 64, 4, 2), (32, 64, 9, 7), (8, 20, 6, 3), (4, 1, 3, 3)]
)
def test_scenario_11_only_the_window_was_ever_there(make, tpb, window, blocks, first) -> None:
    """resize(n, n): pages of the window alone (none at all for a window of 1). A match ends at n or nowhere."""
    lab = Lab(make, config([attention(0, 16 * tpb, window)], 2 * MIB, tpb, commit_min_snapshot=True))
    sequence = tokens(blocks * tpb)
    turn = lab.open(sequence, 0)
    assert turn.cache.resize(blocks * tpb, blocks * tpb)
    lab.engine.write(turn.cache, turn.words, first * tpb, blocks * tpb)
    turn.done = blocks * tpb
    turn.commit(blocks * tpb)
    assert turn.check() > 0 or window == 1
    turn.close()
    assert lab.pages(sequence, 0) == [None] * first + [tpb] * (blocks - first)
    assert lab.reused(sequence) == blocks * tpb
    if window == 1:
        return
    for shorter in range(0, blocks * tpb - tpb + 1, tpb // 2):
        assert lab.reused(sequence[:shorter]) == 0


def test_scenario_16_scopes_are_apart(make) -> None:
    lab = Lab(make, config([attention(0, 8 * 16), attention(1, 8 * 16, 16)], 4 * MIB, tpb=8))
    sequence = tokens(64)
    mine = ReuseScope(lora_id=7, salt=11)
    assert lab.run(sequence, scope=mine) == 0
    others = [ReuseScope(7, 12), ReuseScope(8, 11), ReuseScope(7, None), ReuseScope(None, 11), None, ReuseScope(11, 7)]
    assert lab.reused(sequence, mine) == 64
    for other in others:
        assert lab.reused(sequence, other) == 0
    assert lab.run(sequence, scope=None) == 0
    assert lab.reused(sequence, None) == lab.reused(sequence, ReuseScope()) == 64
    assert lab.reused(sequence, ReuseScope(0, 0)) == lab.reused(sequence, ReuseScope(0)) == 0
    assert lab.reused(sequence, mine) == 64


@pytest.mark.parametrize("form", [tuple, list, lambda t: np.array(t, np.int32)])
@pytest.mark.parametrize("stored", [tuple, list, lambda t: np.array(t, np.int32)])
def test_scenario_17_any_form_of_tokens(make, form, stored) -> None:
    lab = Lab(make, config([attention(0, 4 * 16)], 2 * MIB, tpb=4))
    lab.run(stored(ids(8)))
    cache = lab.create(form(ids(8))).cache
    assert cache.num_committed_tokens == 8
    assert cache.committed_tokens == ids(8)


def test_scenario_17_digests_in_a_tuple(make) -> None:
    lab = Lab(make, config([attention(0, 4 * 16)], 2 * MIB, tpb=4))
    sequence = tuple(tokens(204))
    lab.run(sequence)
    assert lab.reused(sequence) == 204
    assert lab.create(sequence).cache.committed_tokens == list(sequence)
    assert lab.reused((*sequence[:99], sequence[199], *sequence[100:])) == 99


@pytest.mark.parametrize("n", [1, 3])
def test_scenarios_28_and_29_clearing_with_open_caches(make, n) -> None:
    lab = Lab(make, alternating(2, 64, None, 512, 8 * MIB))
    sequence = tokens(100)
    lab.run(sequence)
    caches = [lab.open(sequence).cache for _ in range(n)]
    for left in range(n, 0, -1):
        before = lab.manager.snapshot()
        with pytest.raises(LogicError, match=rf"clear_reusable_blocks.*{left} KV cache\(s\) still open"):
            lab.manager.clear_reusable_blocks()
        assert lab.manager.snapshot() == before
        assert lab.probe(sequence) == 100
        caches[left - 1].close()
    lab.manager.clear_reusable_blocks()  # all closed, though still referred to
    assert lab.probe(sequence) == 0
    assert lab.nodes() == 0
    assert lab.free() == slots(lab.manager)
    assert lab.run(sequence) == 0  # the manager is as good as new
    assert lab.reused(sequence) == 100


def test_scenario_28_a_refused_shutdown_leaves_the_tree(make) -> None:
    lab = Lab(make, alternating(2, 64, None, 512, 8 * MIB))
    lab.run(tokens(100))
    turn = lab.open(tokens(100))
    with pytest.raises(LogicError, match=r"shutdown.*1 KV cache\(s\) still open"):
        lab.manager.shutdown()
    assert lab.reused(tokens(100)) == 100  # a new cache can still be created and resumed
    turn.close()
    lab.make.forget(lab.manager)
    lab.manager.shutdown()


@pytest.mark.parametrize("prompt", [512, 500, 33])
def test_scenario_31_a_transferred_prompt_is_committed(make, prompt) -> None:
    """The decode side of a disaggregated pair: no page behind the window, the rest filled from outside, then commit."""
    lab = Lab(make, alternating(36, 128, None, 8192, 128 * MIB))
    sequence = tokens(prompt)
    turn = lab.open(sequence, 0)
    assert turn.cache.resize(prompt, prompt)
    gone = len(oracle.stale(prompt, 32, 128))
    assert lab.held() == [2 * -(-prompt // 32) - gone]
    _transfer(lab, turn, prompt)
    turn.commit(prompt)
    assert turn.check() > 0
    turn.close()
    assert lab.reused(sequence) == prompt


def _transfer(lab: Lab, turn, prompt: int) -> None:
    """Write what the windows still need, layer by layer."""
    for order, buffer, layer in lab.engine.buffers:
        positions = np.array([p for p in range(prompt) if oracle.needed(p, prompt, layer.window_size)])
        view, where = lab.engine._records(lab.engine.addresses(turn.cache, buffer.layer_id, buffer.role, positions))
        view[where] = lab.engine.record(turn.words, buffer.layer_id, order, 0, positions)
    turn.done = prompt


@pytest.mark.parametrize("length", [1000, 1024, 31])
def test_scenario_37_the_second_pass_reuses_everything(make, length) -> None:
    lab = Lab(make, config([attention(i, 512) for i in range(36)], 64 * MIB))
    prompts = [tokens(length, seed) for seed in range(20)]
    for prompt in prompts:
        assert lab.run(prompt) == 0
    for prompt in prompts:
        assert lab.reused(prompt) == length


def test_scenario_82_scratch_and_reuse(make) -> None:
    """A prefill through scratch slots leaves the trailing window only: the exact prompt is reused, a shorter one is not."""
    layers = [attention(i, 8192, 128) for i in range(32)]
    lab = Lab(make, config(layers, 48 * MIB, swa_scratch_reuse=SwaScratchReuseConfig()))
    sequence = tokens(1024)
    turn = lab.open(sequence)
    assert turn.cache.resize(1024, 0)
    desc = turn.cache.get_scratch_desc(0)
    assert (desc.range.beg, desc.range.end) == (0, 28)
    assert len(desc.slot_ids) == 1
    exposed = list(turn.cache.get_base_page_indices(0))
    assert exposed[:28] == [-1] * 28
    assert min(exposed[28:]) >= 0
    lab.engine.write(turn.cache, turn.words, 0, 1024)
    turn.done = 1024
    turn.commit(1024)
    assert turn.cache.get_scratch_desc(0) is None
    assert turn.check() > 0
    turn.close()
    assert lab.pages(sequence, 0) == [None] * 28 + [32] * 4
    assert lab.reused(sequence) == 1024
    again = lab.open(tokens(1024) + tokens(32, seed=5), 1024)
    again.advance(1056)
    again.close()
    assert lab.reused(sequence[:896]) == 0
    assert lab.run(sequence[:896]) == 0


@pytest.mark.parametrize("minimal", [True, False])
@pytest.mark.parametrize(("first", "second", "window", "gone"), [(127, 200, 64, 2), (95, 130, 33, 1), (64, 65, 32, 1)])
def test_scenario_85_two_turns(make, minimal, first, second, window, gone) -> None:
    """Only commit_min_snapshot gives up pages that are behind the window at the commit; both reuse all of turn 1."""
    lab = Lab(make, config([attention(0, 32 * 16, window)], 4 * MIB, commit_min_snapshot=minimal))
    sequence = tokens(second)
    turn = lab.open(sequence[:first])
    assert turn.reused == 0
    assert turn.cache.resize(first, 0)
    turn.advance(first)
    turn.close()
    covered = [32] * (first // 32) + [first % 32] * (first % 32 > 0)
    assert lab.pages(sequence[:first], 0) == [None] * gone * minimal + covered[gone * minimal :]
    turn = lab.open(sequence)
    assert turn.reused == first
    assert turn.cache._get_num_reusable_tokens_before_pruning() == first
    turn.advance(second)
    turn.close()
    assert lab.reused(sequence) == second


def test_reuse_survives_suspension_of_the_first_owner(make) -> None:
    """Pages of an open, suspended cache serve others too."""
    lab = Lab(make, alternating(2, 64, None, 512, 8 * MIB))
    sequence = tokens(200)
    first = lab.open(sequence)
    first.advance(150)
    first.cache.suspend()
    second = lab.open(sequence)
    assert second.reused == 128  # the tail of an open cache is its own
    assert first.cache.resume()
    first.check()
    first.advance(200)
    second.advance(200)
    first.close()
    second.close()
    assert lab.reused(sequence) == 200


def test_rebasing_gives_the_second_its_twins_pages(make) -> None:
    """Two requests compute the same prompt side by side: the later commit drops its full blocks and shares the other's."""
    lab = Lab(make, full(8, max_util_for_resume=1.0))
    assert lab.manager.allow_seq_rebasing
    a, b = lab.open(ids(96)), lab.open(ids(96))
    a.advance(80)
    b.compute(80)
    assert lab.free() == [8 - 3 - 3]
    b.commit(80)
    assert lab.free() == [8 - 3 - 1]
    assert list(b.cache.get_base_page_indices(0))[:2] == list(a.cache.get_base_page_indices(0))[:2]
    assert b.cache.get_base_page_indices(0)[2] != a.cache.get_base_page_indices(0)[2]
    b.check()
    b.advance(96)
    a.advance(96)
    assert list(a.cache.get_base_page_indices(0)) == list(b.cache.get_base_page_indices(0))
    b.close()
    a.check()
    a.close()
    assert lab.cached() == [3]


def test_rebasing_shows_in_attached_rows_and_in_the_step_table(make) -> None:
    lab = Lab(make, windowed(16, 128, max_util_for_resume=1.0), "virtual")
    a, b = lab.open(ids(64)), lab.open(ids(64))
    row = np.full(8, -9, np.int32)
    b.cache.set_base_page_index_buf(0, 0, memoryview(row))
    a.advance(64)
    b.compute(64)
    mine = row[:2].copy()
    b.commit(64)
    assert row[:2].tolist() == list(a.cache.get_base_page_indices(0)) != mine.tolist()
    c = lab.open(ids(64), 0)
    table = np.full((1, 2, 8), -1, np.int32)
    number = np.array([64], np.int32)
    handle, zero = np.array([c.cache.handle], np.int64), np.zeros(1, np.int32)
    assert lab.manager.step(handle, zero, number, zero, table).ok.all()
    own = table[0, 0, :2].copy()
    values, offsets = np.array(ids(64), np.int32), np.array([0, 64], np.int32)
    result = lab.manager.step(handle, zero, number, number, table, (values, offsets))
    assert result.ok.all()
    assert table[0, 0, :2].tolist() == list(a.cache.get_base_page_indices(0)) != own.tolist()
    assert [tuple(line) for line in result.dirty.tolist()] == [(0, 0, 0, 2)]


def test_the_tokens_of_a_reused_prefix_come_from_the_tree(make) -> None:
    lab = Lab(make, full(64))
    sequence = tokens(250)
    lab.run(sequence)
    turn = lab.open(sequence[:230] + tokens(50, seed=3))
    assert turn.reused == 230
    assert turn.cache.committed_tokens == sequence[:230]
    assert turn.cache.history_length == turn.cache.capacity == turn.cache.num_committed_tokens == 230
    turn.advance(280)
    assert turn.cache.committed_tokens == turn.sequence


@pytest.mark.parametrize("width", [2, 4])
def test_B161_beams_over_a_shared_prompt(make, width) -> None:
    """Two requests with the same prompt of 40 tokens (B=32): one block between them, a tail per beam and request."""
    lab = Lab(make, full(16, max_util_for_resume=1.0))
    first = lab.open(ids(50), 40)
    first.advance(40)
    second = lab.open(ids(50), 40)
    assert second.reused == 32
    second.advance(40)
    for turn in (first, second):
        assert turn.cache.resize(41, 40)
        turn.cache.beam_width = width
        tails = {list(turn.cache.get_base_page_indices(0, beam))[1] for beam in range(width)}
        assert len(tails) == width
        for beam in range(1, width):
            assert turn.cache.get_base_page_indices(0, beam)[0] == -1
    assert lab.held() == [1 + 2 * width]
    for turn in (first, second):
        turn.cache.beam_width = 1
        turn.check()
        turn.advance(50)
        turn.close()
    assert lab.reused(ids(50)) == 50
