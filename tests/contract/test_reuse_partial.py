"""Blocks that are reused in part: coverage of pages (numbers 86–92), copy on write, forks inside a block."""

from __future__ import annotations

import pytest

from kvpool.v2 import _introspection as introspection
from tests.support.configs import MIB, attention, config, full, windowed
from tests.support.reuse import Lab, ids, tokens


def lab_of(make, window: int, **fields) -> Lab:
    """Layer 0 full, layer 1 windowed, 32 tokens a block, a snapshot at each commit."""
    fields.setdefault("commit_min_snapshot", True)
    return Lab(make, pair(window, **fields))


def pair(window: int, **fields):
    return config([attention(0, 512), attention(1, 512, window)], 8 * MIB, **fields)


@pytest.mark.parametrize(("first", "second", "third"), [(72, 80, 96), (65, 95, 96), (70, 71, 128)])
def test_scenario_86_a_replaced_page_lives_on_in_its_cache(make, first, second, third) -> None:
    lab = lab_of(make, 16)
    kv1 = lab.open(tokens(first))
    kv1.advance(first, is_end=True)
    assert [introspection.committed_page_is_linked(kv1.cache, 2, group) for group in (0, 1)] == [True, True]
    kv2 = lab.open(tokens(second))
    assert kv2.reused == first
    kv2.advance(second, is_end=True)
    assert [introspection.committed_page_is_linked(kv1.cache, 2, group) for group in (0, 1)] == [False, False]
    assert [introspection.committed_page_is_linked(kv2.cache, 2, group) for group in (0, 1)] == [True, True]
    kv1.check()
    kv3 = lab.open(tokens(third))
    assert kv3.reused == second
    kv3.advance(third)
    assert lab.nodes() == third // 32
    kv1.check()
    kv1.close()
    kv2.check()
    lab.manager.audit()
    kv2.close()
    kv3.close()
    assert lab.reused(tokens(third)) == third
    assert lab.reused(tokens(first)) == first  # the longer block serves the shorter end


@pytest.mark.parametrize(("base", "extended"), [(80, 160), (72, 128), (33, 96), (95, 200)])
def test_scenario_88_coverage_after_extension(make, base, extended) -> None:
    """The longer block has the full layer's page whole, the window's only as far as the shorter turn wrote it."""
    lab = lab_of(make, 16)
    sequence = tokens(extended)
    assert lab.run(sequence[:base]) == 0
    assert lab.run(sequence) == base
    rewind = sequence[:base] + tokens(40, seed=7)
    assert lab.pages(rewind, 0)[-1] == 32
    assert lab.pages(rewind, 1)[-1] == base % 32
    assert lab.reused(rewind) == base
    assert lab.reused(sequence) == extended


@pytest.mark.parametrize("policy", ["longest", "reference"])
@pytest.mark.parametrize(("base", "extended"), [(80, 160), (72, 160), (48, 96)])
def test_scenario_89_the_longer_one_first(make, base, extended, policy) -> None:
    """No window page was ever kept below the longer one's own window, so the shorter gets nothing; then it adds its tail."""
    lab = lab_of(make, 16, match_policy=policy)
    sequence = tokens(extended)
    assert lab.run(sequence) == 0
    assert lab.run(sequence[:base]) == 0
    rewind = sequence[:base] + tokens(40, seed=7)
    assert lab.reused(rewind) == base
    assert lab.pages(rewind, 1)[-1] == base % 32
    assert lab.reused(sequence) == extended


def test_scenario_89_a_covered_tail_that_is_moved(make) -> None:
    """is_end: the live page itself goes into the covering block."""
    lab = lab_of(make, 16)
    lab.run(tokens(160))
    kv = lab.open(tokens(80))
    assert kv.reused == 0
    kv.advance(80, is_end=True)
    assert introspection.committed_page_is_linked(kv.cache, 2, 1) is True
    assert introspection.committed_page_is_linked(kv.cache, 2, 0) is False  # the block has a longer one
    kv.close()
    assert lab.reused(tokens(80) + tokens(40, seed=7)) == 80


@pytest.mark.parametrize(("first", "second"), [(80, 96), (40, 64), (65, 96)])
def test_scenario_91_a_window_of_one_needs_no_page_behind_it(make, first, second) -> None:
    lab = lab_of(make, 1)
    assert lab.run(tokens(first)) == 0
    assert lab.run(tokens(second)) == first
    assert lab.pages(tokens(second), 1)[-1] == first % 32
    assert lab.reused(tokens(second)) == second


@pytest.mark.parametrize(("base", "boundary", "backoff"), [(48, 96, 1), (40, 96, 1), (48, 128, 3)])
def test_scenario_92_back_off_into_a_shorter_page(make, base, boundary, backoff) -> None:
    """Back-off leaves the block boundary, where the window's page of the block covers only the base: so down to the base."""
    lab = lab_of(make, 33, reuse_match_backoff=backoff)
    sequence = tokens(boundary)
    assert lab.run(sequence[:base]) == 0
    assert lab.run(sequence) == base - backoff
    assert lab.pages(sequence, 1)[1] == base % 32
    assert lab.reused(sequence) == base


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("shared", [40, 33, 47, 48])
def test_B049_writing_into_a_partly_shared_block(make, shared, partial) -> None:
    """48 tokens are cached (a full block and 16 of 32); followers share some of them, then differ, each in its own copy."""
    lab = Lab(make, pair(64, enable_partial_reuse=partial))
    lab.run(tokens(48))
    owner = lab.create(tokens(48))
    assert owner.reused == 48
    followers = [lab.open(tokens(shared) + tokens(60, seed=seed)) for seed in (1, 2, 3)]
    want = shared if partial else 32
    assert [turn.reused for turn in followers] == [want] * 3
    for end in (shared + 1, 64, shared + 60):
        for turn in followers:
            turn.advance(end)
    blocks = [list(turn.cache.get_base_page_indices(0)) for turn in followers]
    assert len({line[0] for line in blocks}) == 1
    assert len({line[1] for line in blocks}) == 3
    for turn in followers:
        turn.close()
        assert lab.reused(turn.sequence) == shared + 60
    assert owner.cache.resume()
    owner.check()


def test_many_branches_of_one_block(make) -> None:
    """Forty children of one node, far more than a scan would look at: each is found, and every fork inside them."""
    lab = Lab(make, full(128, tpb=32, max_util_for_resume=1.0), "virtual")
    stem = ids(32)
    branches = [[*stem, seed * 7919 % 41 + 1000, *ids(31, seed=seed)] for seed in range(1, 41)]
    for number, branch in enumerate(branches):
        assert lab.run(branch) == (32 if number else 0)
    for branch in branches:
        assert lab.reused(branch) == 64
        assert lab.reused(branch[:50] + ids(20, seed=99)) == 50
    assert lab.reused([*stem, 5000]) == 32


def test_the_best_of_several_forks(make) -> None:
    """Children that share 3, 10 and 20 tokens with the query: the longest."""
    lab = Lab(make, full(64))
    sequence = ids(64)
    for shared in (3, 20, 10):
        lab.run(sequence[: 32 + shared] + ids(32 - shared, seed=shared))
    assert lab.reused(sequence) == 52
    assert lab.reused(sequence[:45] + ids(10, seed=9)) == 45


def test_a_longer_fork_without_its_window_loses_to_a_shorter_one_with_it(make) -> None:
    """Longest legal end point: the child that shares most tokens lacks its window page, the next one has it."""
    lab = lab_of(make, 40, commit_min_snapshot=False)
    sequence = ids(96)
    for shared in (20, 10):
        lab.run(sequence[: 64 + shared] + ids(32 - shared, seed=shared))
    assert lab.reused(sequence) == 84
    introspection.set_test_coverage(lab.manager, None, sequence[:84] + ids(12, seed=20), 1, 0)
    assert lab.reused(sequence) == 74


def test_the_reference_policy_only_shortens(make) -> None:
    """The same tree: the reference takes the child that shares most and prunes it to nothing."""
    labs = [lab_of(make, 40, commit_min_snapshot=False, match_policy=policy) for policy in ("longest", "reference")]
    sequence = ids(96)
    found = []
    for lab in labs:
        parent = introspection.make_test_block(lab.manager, sequence[:32], [32, 32])
        parent = introspection.make_test_block(lab.manager, sequence[32:64], [32, 32], parent)
        introspection.make_test_block(lab.manager, sequence[64:84] + ids(12, seed=20), [32, 5], parent)
        introspection.make_test_block(lab.manager, sequence[64:74] + ids(22, seed=10), [32, 32], parent)
        found.append(lab.probe(sequence))
    assert found == [74, 69]


@pytest.mark.parametrize("partial", [True, False])
def test_the_switch_for_partial_reuse(make, partial) -> None:
    lab = Lab(make, pair(64, enable_partial_reuse=partial))
    assert lab.manager.enable_partial_match is partial
    sequence = tokens(112)
    lab.run(sequence)
    assert lab.reused(sequence) == 112  # the exact end is found either way
    assert lab.reused(sequence[:111]) == (111 if partial else 96)
    assert lab.reused(sequence + tokens(9, seed=4)) == (112 if partial else 96)
    assert lab.reused(sequence[:70]) == (70 if partial else 64)
    assert lab.reused(sequence[:31]) == (31 if partial else 0)
    assert lab.reused(sequence[:96]) == 96


@pytest.mark.parametrize("window", [None, 40])
def test_B054_the_shorter_version_of_a_block_is_gone(make, window) -> None:
    """A block with 10 of 16 tokens is cached, taken up after a preemption and filled otherwise: one block is left."""
    lab = Lab(make, windowed(12, window, tpb=16) if window else full(12, tpb=16))
    lab.run(ids(26))
    assert lab.nodes() == 2
    other = ids(26) + ids(22, seed=1)
    assert lab.run(other) == 26
    assert lab.nodes() == 3
    assert lab.reused(ids(32)) == 26  # by way of the longer block
    assert lab.reused(other) == 48


def test_a_tail_of_an_open_cache_is_private(make) -> None:
    """Without snapshots a tail is shared only when committing stops."""
    lab = Lab(make, full(12))
    turn = lab.open(ids(100))
    turn.advance(50)
    assert lab.reused(ids(50)) == 32
    turn.cache.stop_committing()
    assert lab.reused(ids(50)) == 50
    assert lab.reused(ids(45)) == 45
    turn.check()
    turn.close()
    assert lab.reused(ids(50)) == 50


def test_a_cache_that_never_ran_leaves_the_tree_as_it_was(make) -> None:
    lab = Lab(make, pair(64))
    lab.run(tokens(112))
    before = lab.manager.snapshot()["tree"]
    for lookup in (112, 100, 64):
        lab.create(tokens(112), lookup).close()
        kept = lab.create(tokens(112), lookup)
        kept.cache.stop_committing()
        kept.close()
    after = lab.manager.snapshot()["tree"]
    assert [node[2] for node in after] == [node[2] for node in before]
    assert [node[4] for node in after] == [node[4] for node in before]


def test_the_private_copy_needs_a_slot(make) -> None:
    """Nothing to spare and the source is somebody else's too: the first resume is put off, and the match is kept meanwhile."""
    lab = Lab(make, full(4, max_util_for_resume=1.0))
    lab.run(ids(48))
    busy = lab.open(ids(64, seed=1))
    busy.compute(64)
    late, other = lab.create(ids(48)), lab.create(ids(48))
    assert late.reused == other.reused == 48
    before = lab.manager.snapshot()
    assert late.cache.resume() is False
    assert lab.manager.snapshot() == before
    busy.close()
    assert late.cache.resume() is True
    assert other.cache.resume() is True
    for turn in (late, other):
        turn.check()
        turn.advance(48)
    assert late.cache.get_base_page_indices(0)[1] != other.cache.get_base_page_indices(0)[1]


def test_a_source_of_its_own_is_taken_over_when_nothing_is_left(make) -> None:
    """A prefix that fills the pool can be resumed by its only owner: the unfinished block leaves the tree instead of a copy."""
    lab = Lab(make, full(3, max_util_for_resume=1.0))
    lab.run(ids(80))
    busy = lab.create(ids(80))
    assert busy.reused == 80
    assert busy.cache.resume() is True
    assert lab.held() == [3]
    busy.check()
    assert lab.probe(ids(80)) == 64
    busy.advance(80)
    busy.close()
    assert lab.reused(ids(80)) == 80
