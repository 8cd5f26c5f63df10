"""Reuse with recurrent state (v2_request §2.3, §5.3): numbers 38–59 and 142, trials B164 and B167, with real states.

Two attention and two state layers, 32 tokens a block, partial reuse off unless said. Values of 40 and 41 that are
statistics belong to the statistics; what they say of reuse is here.
"""

from __future__ import annotations

import random

import pytest

from kvpool.errors import ArgumentError
from kvpool.v2 import _introspection as introspection
from tests.support.configs import KIB, MIB, attention, batch, config, slots, ssm
from tests.support.reuse import Lab, tokens


def lab_of(make, *, partial: bool = False, quota: int = 16 * MIB, window: int | None = None, **fields) -> Lab:
    layers = [attention(0, 512, window), ssm(1, 4 * KIB), attention(2, 512), ssm(3, 4 * KIB)]
    return Lab(make, config(layers, quota, enable_partial_reuse=partial, **fields))


def state_group(lab: Lab) -> int:
    return introspection.ssm_life_cycle_id(lab.manager)


def depths(turn) -> tuple[int, int, int]:
    """(reused, hybrid, divergence)"""
    cache = turn.cache
    return (
        turn.reused,
        cache._get_num_reusable_tokens_before_hybrid_pruning(),
        cache._get_num_reusable_tokens_before_pruning(),
    )


@pytest.mark.parametrize(
    ("partial", "snapshot", "lookup", "reused"),
    [
        (False, None, 48, 0),
        (False, 32, 48, 32),
        (True, 48, 64, 48),
        (False, 48, 64, 0),
        (True, 31, 48, 31),
        (False, 64, 80, 64),
    ],
)
def test_scenario_40_where_the_snapshot_is(make, partial, snapshot, lookup, reused) -> None:
    lab = lab_of(make, partial=partial)
    sequence = tokens(128)
    if snapshot is not None:
        lab.run(sequence[:snapshot])
    for expected in (None, lookup + 17, 1):  # the expected prompt length must not matter
        turn = lab.open(sequence[:lookup], expected_prompt_length=expected)
        assert turn.reused == reused
        turn.close()


@pytest.mark.parametrize("prompt", [63, 32, 1, 70])
def test_scenario_43_prompt_and_decode(make, prompt) -> None:
    """Prompt, then 52 tokens one by one; state and KV are checked before every step, and by a second request."""
    lab = lab_of(make, partial=True)
    sequence = tokens(prompt + 52)
    turn = lab.open(sequence)
    turn.advance(prompt)
    for end in range(prompt + 1, prompt + 53):
        turn.advance(end)
    turn.close()
    assert lab.reused(sequence) == prompt + 52
    again = lab.open(sequence + tokens(20, seed=9), prompt + 52)
    again.advance(prompt + 72)


def test_scenario_43_suspended_now_and_then(make) -> None:
    lab = lab_of(make)
    sequence = tokens(115)
    turn = lab.open(sequence)
    for end in range(5, 116, 5):
        turn.advance(end)
        slot = turn.cache.get_ssm_block_base_index(state_group(lab))
        turn.cache.suspend()
        assert turn.cache.resume()
        assert turn.cache.get_ssm_block_base_index(state_group(lab)) == slot
        turn.check()


@pytest.mark.parametrize(("first", "second"), [(96, 128), (32, 64), (64, 160)])
def test_scenario_44_a_snapshot_at_each_commit(make, first, second) -> None:
    lab = lab_of(make)
    sequence = tokens(second)
    lab.run(sequence[:first])
    assert lab.reused(sequence[:first]) == first
    assert lab.run(sequence) == first
    assert lab.reused(sequence) == second
    assert lab.reused(sequence[:first]) == first


def test_scenario_46_commits_at_32_and_64(make) -> None:
    lab = lab_of(make)
    sequence = tokens(96)
    lab.run(sequence, 32, 64)
    assert lab.reused(sequence[:32]) == 32
    assert lab.reused(sequence[:48]) == 32
    assert lab.reused(sequence[:63]) == 32
    assert lab.reused(sequence) == 64
    assert lab.reused(sequence[:31]) == 0


def test_scenario_47_the_attention_alone_reaches_further(make) -> None:
    lab = lab_of(make, partial=True)
    sequence = tokens(64)
    lab.run(sequence, 32, 64)
    assert depths(lab.open(sequence[:48])) == (32, 48, 48)
    assert depths(lab.open(sequence)) == (64, 64, 64)
    assert depths(lab.open(sequence[:40] + tokens(40, seed=1))) == (32, 40, 40)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("commits", [(32, 64, 96), (10, 50, 90), (96,), (31, 33)])
def test_scenario_49_order_of_the_three_depths(make, partial, commits) -> None:
    lab = lab_of(make, partial=partial)
    sequence = tokens(160)
    lab.run(sequence, *commits)
    for lookup in [*range(16, 129, 16), 1, 33, 97]:
        turn = lab.open(sequence[:lookup])
        reused, hybrid, divergence = depths(turn)
        assert reused <= hybrid <= divergence <= lookup
        if partial:
            assert hybrid == divergence == min(lookup, commits[-1])
        assert reused == 0 or reused in commits
        turn.close()


@pytest.mark.parametrize("shared", [64, 32, 96])
def test_scenario_50_a_snapshot_at_the_fork(make, shared) -> None:
    """Two siblings share a prefix. Without a commit exactly at the fork nothing of it can be reused; with one all."""
    lab = lab_of(make)
    branches = [tokens(shared) + tokens(32, seed=seed) for seed in range(1, 4)]
    lab.run(branches[0])
    third = lab.open(branches[2])
    assert depths(third) == (0, shared, shared)
    third.close()
    assert lab.run(branches[1], shared, shared + 32) == 0
    assert lab.reused(branches[2]) == shared
    assert lab.reused(branches[0]) == shared + 32
    assert lab.reused(branches[1]) == shared + 32


def test_scenario_55_forks_inside_blocks(make) -> None:
    """A block keeps the snapshot of most tokens: after commits at 10 and 20 a fork at 15 finds none, one at 25 the later."""
    lab = lab_of(make, partial=True)
    sequence = tokens(64)
    lab.run(sequence, 10, 20)
    assert lab.reused(sequence[:15] + tokens(20, seed=1)) == 0
    assert lab.run(sequence[:25] + tokens(20, seed=2)) == 20
    assert lab.run(sequence[:32]) == 20
    assert lab.reused(sequence[:40] + tokens(20, seed=3)) == 32


@pytest.mark.parametrize("partial", [False, True])
def test_scenario_56_partial_reuse_off_and_on(make, partial) -> None:
    lab = lab_of(make, partial=partial)
    sequence = tokens(64)
    lab.run(sequence, 32, 48)
    assert lab.reused(sequence) == (48 if partial else 32)
    assert lab.reused(sequence[:48]) == 48  # the exact end is found either way
    assert lab.pages(sequence[:48], state_group(lab)) == [32, 16]


@pytest.mark.parametrize(("first", "second"), [(48, 96), (33, 64), (63, 64), (40, 129)])
def test_scenario_58_the_snapshot_moves_to_the_covering_block(make, first, second) -> None:
    lab = lab_of(make, partial=True)
    sequence = tokens(second)
    lab.run(sequence[:first])
    assert lab.run(sequence, lookup=second) == first
    assert lab.reused(sequence) == second
    assert lab.reused(sequence[:first]) == (first if second != 64 else 0)  # a full block's own snapshot is larger
    covered = lab.pages(sequence[:first], state_group(lab))[first // 32]
    assert covered == (first % 32 if second != 64 else 32)


def test_scenario_58_by_way_of_the_last_commit(make) -> None:
    """is_end moves the live pages and state themselves."""
    lab = lab_of(make, partial=True)
    sequence = tokens(96)
    lab.run(sequence[:48], is_end=True)
    assert lab.reused(sequence[:48]) == 48
    assert lab.run(sequence, is_end=True) == 48
    assert lab.reused(sequence[:48]) == 48
    assert lab.reused(sequence) == 96


@pytest.mark.parametrize(
    ("history", "commit", "fine"),
    [(0, 32, True), (32, 32, True), (48, 32, False), (48, 48, True), (1, 48, False), (0, 48, True)],
)
def test_scenario_59_history_must_be_aligned(make, history, commit, fine) -> None:
    lab = lab_of(make)
    sequence = tokens(64)
    turn = lab.open(sequence, 0)
    assert turn.cache.resize(64, history)
    if fine:
        lab.engine.write(turn.cache, turn.words, max(0, history - 32), commit)
        turn.commit(commit)
        assert turn.cache.history_length == commit
        turn.close()
        assert lab.probe(sequence[:commit]) == commit
        return
    before = lab.manager.snapshot()
    with pytest.raises(ArgumentError, match=f"history of 0 or {commit} tokens, not {history}") as caught:
        turn.cache.commit(sequence[:commit])
    assert isinstance(caught.value, AssertionError)
    assert turn.cache.num_committed_tokens == 0
    assert lab.manager.snapshot() == before


def test_state_and_windows(make) -> None:
    """A match needs the snapshot, every full page, and the window at the same end."""
    lab = lab_of(make, window=40)
    sequence = tokens(200)
    lab.run(sequence, 64, 128, 192, 200)
    for lookup, reused in ((200, 200), (199, 192), (191, 128), (127, 64), (63, 0)):
        assert lab.reused(sequence[:lookup]) == reused
    introspection.set_test_coverage(lab.manager, None, sequence[:192], 0, 0)
    assert lab.reused(sequence[:199]) == 128


def test_each_beam_starts_from_the_snapshot(make) -> None:
    lab = lab_of(make)
    sequence = tokens(64)
    lab.run(sequence)
    turn = lab.open(sequence)
    assert turn.cache.resize(70, None)
    turn.cache.beam_width = 3
    states = {turn.cache.get_ssm_block_base_index(state_group(lab), beam) for beam in range(3)}
    assert len(states) == 3
    assert turn.check() > 0


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("end", [64, 70])
def test_scenario_142_the_snapshot_is_evicted_under_its_owner(make, pure, end) -> None:
    """A commits, suspends, 100 requests flood the states; A resumes, commits on, and still has its own state."""
    layers = [ssm(1, 256 * KIB)] if pure else [attention(0, 512), ssm(1, 256 * KIB)]
    cfg = config(layers, 6 * MIB, max_util_for_resume=1.0, constraints=[batch((256, 255), (256, 255))])
    lab = Lab(make, cfg)
    sequence = tokens(160)
    a = lab.open(sequence)
    a.advance(32)
    a.advance(end)
    a.cache.suspend()
    for seed in range(1, 101):
        lab.run(tokens(64, seed), 32, 64)
    assert lab.probe(sequence[:64]) == 0
    assert lab.pages(sequence[:64], state_group(lab)) == [None, None]
    assert a.cache.resume()
    a.check()
    a.advance(96)
    a.advance(160)
    a.close()
    assert lab.reused(sequence) == 160


def test_B164_no_state_slot_leaks(make) -> None:
    """64 state slots, 1,000 requests that end anywhere: created, resumed, half way, committed, suspended, planned."""
    layers = [attention(0, 512), ssm(1, 256 * KIB)]
    cfg = config(layers, 18 * MIB, max_util_for_resume=1.0, initial_pool_ratio=[0.1, 0.9])
    lab = Lab(make, cfg, "virtual")
    group = lab.manager.get_life_cycle_pool_group_indices()[state_group(lab)]
    assert slots(lab.manager)[group] >= 64
    rng = random.Random(164)
    alive = []
    for number in range(1000):
        sequence = tokens(rng.choice([20, 40, 64, 90]), seed=rng.randrange(12))
        turn = lab.create(sequence)
        alive.append(turn)
        if rng.random() < 0.8 and turn.cache.resume():
            for end in (
                sorted(rng.sample(range(turn.reused, len(sequence) + 1), 2)) if turn.reused < len(sequence) else ()
            ):
                if not turn.cache.resize(max(end, turn.cache.capacity), None):
                    break
                turn.commit(end)
            if rng.random() < 0.5:
                turn.cache.suspend()
        while len(alive) > rng.randrange(8):
            alive.pop(rng.randrange(len(alive))).close()
        if number % 100 == 0:
            lab.manager.audit()
    for turn in alive:
        turn.close()
    assert lab.held() == [0] * len(slots(lab.manager))
    lab.manager.clear_reusable_blocks()
    assert lab.free() == slots(lab.manager)


@pytest.mark.parametrize("window", [None, 32, 45])
def test_B167_partial_reuse_with_states(make, window) -> None:
    """A match ends only where a snapshot exists, never at a state position without one; whatever it ends at is right."""
    lab = lab_of(make, partial=True, window=window)
    sequence = tokens(150)
    ends = [7, 40, 64, 101, 150]
    lab.run(sequence, *ends)
    for lookup in range(0, 151, 3):
        found = lab.reused(sequence[:lookup])
        assert found in (0, *ends)
        assert found <= lookup
    assert lab.reused(sequence) == 150
    assert lab.reused([*sequence[:120], *tokens(30, seed=1)]) == 101
    assert lab.reused([*sequence[:100], *tokens(30, seed=1)]) == 64
