"""Optional layer groups (number 130; v2_request §1.11): they never shorten a match, and resume says which of them share."""

from __future__ import annotations

import pytest

from kvpool.errors import ArgumentError
from kvpool.v2 import AttentionLayerConfig, ReusePolicy
from kvpool.v2 import _introspection as introspection
from tests.support.configs import MIB, attention, buffers, config, full, ssm
from tests.support.reuse import Lab, ids, tokens


def optional(layer: int, window: int | None, tpb: int, sinks: int | None = None) -> AttentionLayerConfig:
    return AttentionLayerConfig(layer, buffers(16 * tpb), window, sinks, ReusePolicy.OPTIONAL)


def lab_of(make, windows=(4, 2), tpb: int = 4, device: str = "host", **fields) -> Lab:
    layers = [attention(0, 16 * tpb), *(optional(i, window, tpb) for i, window in enumerate(windows, 1))]
    return Lab(make, config(layers, 4 * MIB, tpb=tpb, **fields), device)


def slot(cache, group: int, ordinal: int) -> int:
    return list(cache.get_aggregated_page_indices(group))[ordinal]


def source(lab: Lab, sequence, group: int, ordinal: int) -> int:
    _, pages = introspection.reuse_match_pages(lab.manager, None, sequence, group)
    return pages[ordinal][0]


@pytest.mark.parametrize(
    ("windows", "tpb", "length", "coverage"),
    [((4, 2), 4, 8, [(4, 8), (4, 8)]), ((8, 33), 16, 64, [(48, 64), (32, 64)]), ((None, 5), 4, 12, [(0, 12), (8, 12)])],
)
def test_scenario_130_status_and_choice(make, windows, tpb, length, coverage) -> None:
    lab = lab_of(make, windows, tpb)
    sequence = ids(length)
    lab.run(sequence)
    reader = lab.create(sequence)
    status = reader.cache.reuse_status
    assert [entry.group_id for entry in status] == [0, 1, 2]
    assert [entry.policy for entry in status] == [ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL, ReusePolicy.OPTIONAL]
    assert all(entry.complete and entry.endpoint == length for entry in status)
    assert [list(entry.coverage) for entry in status] == [[(0, length)], *([part] for part in coverage)]
    before = lab.manager.snapshot()
    for bad in ([0], [3], [-1], [1, 0], [1, 99], [2**31]):
        with pytest.raises(ArgumentError, match="optional"):
            reader.cache.resume(None, optional_reuse_groups=bad)
        assert not reader.cache.is_active
    assert lab.manager.snapshot() == before
    last = length // tpb - 1
    assert reader.cache.resume(None, optional_reuse_groups=[1]) is True
    assert slot(reader.cache, 0, last) == source(lab, sequence, 0, last)
    assert slot(reader.cache, 1, last) == source(lab, sequence, 1, last)
    assert slot(reader.cache, 2, last) != source(lab, sequence, 2, last)
    pages = [list(reader.cache.get_base_page_indices(group)) for group in range(3)]
    reader.cache.suspend()
    for other in ([2], [], [1, 2]):
        with pytest.raises(ArgumentError, match="chosen at the first resume"):
            reader.cache.resume(None, optional_reuse_groups=other)
    assert reader.cache.resume(None, optional_reuse_groups=[1]) is True
    reader.cache.suspend()
    assert reader.cache.resume() is True
    assert [list(reader.cache.get_base_page_indices(group)) for group in range(3)] == pages


@pytest.mark.parametrize("chosen", [None, [], [1], [2], [1, 2], (2, 1), {1}, "iterator"])
def test_every_choice(make, chosen) -> None:
    """None is every optional group that is complete. Groups not chosen have pages of their own for every live block."""
    lab = lab_of(make, (9, None))
    sequence = ids(20)
    lab.run(sequence)
    reader = lab.create(sequence)
    if chosen == "iterator":
        taken, chosen = {2}, iter([2, 2])
    else:
        taken = {1, 2} if chosen is None else set(chosen)
    assert reader.cache.resume(None, optional_reuse_groups=chosen)
    live = {1: range(3, 5), 2: range(5)}
    for group, ordinals in live.items():
        for ordinal in range(5):
            mine = slot(reader.cache, group, ordinal)
            if ordinal not in ordinals:
                assert mine == -1
            else:
                assert mine >= 0
                assert (mine == source(lab, sequence, group, ordinal)) == (group in taken)
    if chosen is None:
        reader.check()
    lab.manager.audit()


@pytest.mark.parametrize("windows", [(4, 2), (None, 7), (4, None)])
def test_it_never_shortens_a_match(make, windows) -> None:
    """Without a single page of the optional groups all of the prefix is matched."""
    lab = lab_of(make, windows)
    sequence = tokens(30)
    lab.run(sequence)
    status = [entry.complete for entry in lab.create(sequence).cache.reuse_status]
    assert status == [True, True, True]
    for length in (*range(4, 30, 4), 30):
        for group in (1, 2):
            if lab.pages(sequence[:length], group)[-1] is not None:
                introspection.set_test_coverage(lab.manager, None, sequence[:length], group, 0)
    reader = lab.create(sequence)
    assert reader.reused == lab.probe(sequence) == 30
    full_layer, *others = reader.cache.reuse_status
    assert full_layer.complete
    assert list(full_layer.coverage) == [(0, 30)]
    assert all(not entry.complete and not entry.coverage and entry.endpoint == 30 for entry in others)
    before = lab.manager.snapshot()
    with pytest.raises(ArgumentError, match="layer group 1 is not complete"):
        reader.cache.resume(None, optional_reuse_groups=[1])
    assert lab.manager.snapshot() == before
    assert reader.cache.resume()  # None: those that are complete, here none
    assert all(slot(reader.cache, group, 7) >= 0 for group in range(3))


def test_ranges_with_a_hole(make) -> None:
    lab = lab_of(make, (None, 17))
    sequence = ids(24)
    lab.run(sequence)
    introspection.set_test_coverage(lab.manager, None, sequence[:12], 1, 0)
    introspection.set_test_coverage(lab.manager, None, sequence[:20], 1, 2)
    introspection.set_test_coverage(lab.manager, None, sequence[:16], 2, 0)
    status = lab.create(sequence).cache.reuse_status
    assert [list(entry.coverage) for entry in status] == [[(0, 24)], [(0, 8), (12, 18), (20, 24)], [(8, 12), (16, 24)]]
    assert [entry.complete for entry in status] == [True, False, False]


@pytest.mark.parametrize("length", [10, 11, 9])
@pytest.mark.parametrize("chosen", [None, [], [1]])
def test_an_unfinished_block_is_copied_for_those_that_share(make, length, chosen) -> None:
    """Groups that share get a copy of the last block, the others a fresh page; both are written from there on."""
    lab = lab_of(make, (4, 6))
    sequence = ids(length) + ids(20, seed=1)
    lab.run(ids(length))
    reader = lab.create(sequence, length)
    assert reader.reused == length
    assert reader.cache.resume(None, optional_reuse_groups=chosen)
    last = length // 4
    for group in range(3):
        mine = slot(reader.cache, group, last)
        assert mine >= 0
        assert mine not in [
            page[0] for page in introspection.reuse_match_pages(lab.manager, None, ids(length), group)[1]
        ]
    if chosen is None:
        reader.check()
        reader.advance(length + 20)
        reader.close()
        assert lab.reused(sequence) == length + 20
        again = lab.create(sequence)
        assert all(entry.complete for entry in again.cache.reuse_status)


def test_fresh_pages_are_counted_before_any_change(make) -> None:
    """An unselected group needs pages for all its live blocks: not now, then later."""
    layers = [attention(0, MIB, None), AttentionLayerConfig(1, buffers(MIB), None, None, ReusePolicy.OPTIONAL)]
    lab = Lab(make, config(layers, 10 * 2 * MIB, max_util_for_resume=1.0), "virtual")
    lab.run(ids(96))
    busy = lab.open(ids(96, seed=1))
    busy.compute(64)
    reader, other = lab.create(ids(96)), lab.create(ids(96))
    before = lab.manager.snapshot()
    assert reader.cache.resume(None, optional_reuse_groups=[]) is False
    assert lab.manager.snapshot() == before
    assert reader.cache.resume(None, optional_reuse_groups=[1]) is True
    reader.close()
    busy.close()
    reader = lab.create(ids(96))
    assert reader.cache.resume(None, optional_reuse_groups=[]) is True
    assert other.cache.resume() is True


def test_pages_that_are_not_wanted_make_room(make) -> None:
    """What an unselected group had matched is given up first, so that the fresh pages may take its place."""
    layers = [attention(0, MIB, None), AttentionLayerConfig(1, buffers(MIB), None, None, ReusePolicy.OPTIONAL)]
    lab = Lab(make, config(layers, 6 * 2 * MIB, max_util_for_resume=1.0), "virtual")
    lab.run(ids(96))
    reader = lab.create(ids(96))
    assert lab.held() == [6]
    assert reader.cache.resume(None, optional_reuse_groups=[]) is True
    assert lab.held() == [6]
    assert lab.pages(ids(96), 1) == [None] * 3
    assert lab.probe(ids(96)) == 96


def test_a_fresh_copy_does_not_replace_what_is_cached(make) -> None:
    """The reader computes its own pages of an unselected group; the tree keeps the old ones."""
    lab = lab_of(make, (None, None))
    lab.run(ids(16))
    reader = lab.create(ids(16) + ids(16, seed=1), 16)
    assert reader.cache.resume(None, optional_reuse_groups=[])
    mine = slot(reader.cache, 1, 0)
    assert mine != source(lab, ids(16), 1, 0)
    reader.close()
    again = lab.open(ids(16))
    assert slot(again.cache, 1, 0) == source(lab, ids(16), 1, 0) != mine


def test_optional_with_states(make) -> None:
    layers = [attention(0, 512), optional(1, 32, 32), ssm(2, 4096)]
    lab = Lab(make, config(layers, 8 * MIB))
    lab.run(ids(64))
    reader = lab.create(ids(64))
    status = reader.cache.reuse_status
    assert status[2] is None
    assert [entry.complete for entry in status[:2]] == [True, True]
    with pytest.raises(ArgumentError, match="2 is not an optional layer group"):
        reader.cache.resume(None, optional_reuse_groups=[2])
    assert reader.cache.resume(None, optional_reuse_groups=[1])
    reader.check()


def test_without_a_match_the_choice_is_empty_coverage(make) -> None:
    lab = lab_of(make)
    reader = lab.create(ids(8))
    assert reader.reused == 0
    assert [(entry.complete, entry.endpoint, list(entry.coverage)) for entry in reader.cache.reuse_status] == [
        (True, 0, [])
    ] * 3
    assert reader.cache.resume(None, optional_reuse_groups=[1, 2])
    reader.advance(8)


def test_layers_that_differ_in_policy_are_groups_of_their_own(make) -> None:
    layers = [attention(0, 64, 8), optional(1, 8, 4), attention(2, 64, 8), optional(3, 8, 4)]
    lab = Lab(make, config(layers, 4 * MIB, tpb=4))
    assert [list(group) for group in lab.manager.layer_grouping] == [[0, 2], [1, 3]]
    assert [info.policy for info in lab.create(ids(4)).cache.reuse_status] == [
        ReusePolicy.REQUIRED,
        ReusePolicy.OPTIONAL,
    ]


@pytest.mark.parametrize("bad", ["1", 1, [1.0], ["1"], [None], [True]])
def test_wrong_types(make, bad) -> None:
    lab = lab_of(make)
    cache = lab.create(ids(8)).cache
    with pytest.raises(TypeError):
        cache.resume(None, optional_reuse_groups=bad)
    assert not cache.is_active


def test_a_manager_without_optional_groups(make) -> None:
    lab = Lab(make, full(4))
    cache = lab.create(ids(8)).cache
    with pytest.raises(ArgumentError, match="0 is not an optional layer group"):
        cache.resume(None, optional_reuse_groups=[0])
    assert cache.resume(None, optional_reuse_groups=[])
