"""What windows need behind a likely end point is evicted late (retain_window_tails, window_tail_slack)."""

from __future__ import annotations

import pytest

from tests.support.configs import MIB, config, full_and_window, one, windowed
from tests.support.reuse import Lab, ids


def lab_of(make, slot_count: int, window: int, retain: bool = True, slack: int = 0, **fields) -> Lab:
    """One windowed layer, 32 tokens a block, ``slot_count`` slots."""
    fields.setdefault("window_tail_interval", 0)
    fields.update(max_util_for_resume=1.0, retain_window_tails=retain, window_tail_slack=slack)
    return Lab(make, windowed(slot_count, window, **fields))


def both(make, run, *args, **fields) -> tuple[object, object]:
    """The same work with and without retention."""
    return tuple(run(lab_of(make, *args, retain=retain, **fields)) for retain in (True, False))


def in_steps(lab: Lab, sequence, step: int = 64, lookup: int | None = None, **fields) -> int:
    """A request that computes and commits ``step`` tokens at a time. Returns what was reused."""
    turn = lab.open(sequence, lookup, **fields)
    for end in (*range(turn.reused + step, len(sequence), step), len(sequence)):
        turn.advance(end)
    turn.close()
    return turn.reused


@pytest.mark.parametrize(("window", "slots"), [(64, 12), (128, 20), (33, 9)])
def test_the_end_of_a_sequence_outlives_its_stale_pages(make, window, slots) -> None:
    """Conversations take turns in a pool that holds the window of each, but not every page that they ever wrote."""

    def run(lab: Lab) -> list[int]:
        for seed in range(3):
            in_steps(lab, ids(640, seed))
        return [lab.reused(ids(640, seed)) for seed in range(3)]

    kept, lost = both(make, run, slots, window)
    assert kept == [640] * 3
    assert lost[0] < 640
    assert lost[2] == 640


def test_many_turns_of_many_conversations(make) -> None:
    """Each turn finds all of the turn before, as long as the pool holds a window for each conversation."""

    def run(lab: Lab) -> int:
        reused = 0
        for turn in range(1, 7):
            for seed in range(4):
                reused += in_steps(lab, ids(200 * turn, seed))
        return reused

    kept, lost = both(make, run, 18, 64)
    assert kept == 4 * sum(200 * turn for turn in range(1, 6))
    assert lost < kept


def test_an_older_end_of_the_same_line_is_given_up(make) -> None:
    """A newer end of a conversation supersedes the one before: one window per conversation is kept, not one per turn."""
    lab = lab_of(make, 40, 64)
    for end in (96, 192, 288):
        in_steps(lab, ids(end))
    pages = [node for node in lab.manager.snapshot()["tree"] if node[2]]
    assert [node[5][0] > 0 for node in pages] == [False] * 7 + [True] * 2
    assert [node[1] for node in pages if node[3]] == [8]


def test_the_end_of_a_prompt_is_kept_for_siblings(make) -> None:
    """A long answer pushes the window far on; another request with the same prompt still finds it."""

    def run(lab: Lab) -> int:
        prompt = ids(256)
        in_steps(lab, prompt + ids(1024, 1), lookup=256)
        return lab.reused(prompt + ids(64, 2))

    kept, lost = both(make, run, 16, 64)
    assert kept == 256
    assert lost == 0


@pytest.mark.parametrize(("slack", "found"), [(0, 0), (64, 224), (128, 160), (512, 64)])
def test_slack_before_the_end_of_a_prompt(make, slack, found) -> None:
    """A prompt that is cut a little shorter next time still hits, as far as the slack goes."""

    def run(lab: Lab) -> list[int]:
        in_steps(lab, ids(256) + ids(1280, 1), lookup=256)
        return [lab.probe(ids(end) + ids(64, 2)) for end in (64, 160, 224, 256)]

    kept, lost = both(make, run, 16, 64, slack=slack)
    assert kept == [end if found and end >= found else 0 for end in (64, 160, 224)] + [256]
    assert lost == [0] * 4


def test_the_expected_prompt_length_says_where_the_prompt_ends(make) -> None:
    """The look-up may be shorter (the last token is computed again) or longer than the prompt."""

    def run(lab: Lab) -> int:
        in_steps(lab, ids(256) + ids(1024, 1), lookup=255, expected_prompt_length=256)
        return lab.reused(ids(256) + ids(64, 2))

    assert both(make, run, 16, 64) == (256, 0)


def test_the_fork_of_two_branches_is_kept(make) -> None:
    """Where two requests parted a third may part again: the window behind the fork outlives both branches' middles."""

    def run(lab: Lab) -> int:
        stem = ids(320)
        in_steps(lab, stem + ids(64, 1), lookup=0)
        lab.run(stem + ids(64, 2))
        for seed in (1, 2):
            in_steps(lab, stem + ids(64, seed) + ids(640, seed + 10), lookup=None, expected_prompt_length=0)
        return lab.reused(stem + ids(64, 3))

    kept, lost = both(make, run, 18, 64)
    assert kept == 320
    assert lost < 320


@pytest.mark.parametrize(
    ("interval", "fork", "found"),
    [
        (256, 700, 512),
        (256, 512, 512),
        (256, 511, 511),
        (256, 479, 256),
        (250, 700, 512),
        (512, 700, 512),
        (None, 1500, 1024),
        (None, 1000, 0),
        (0, 1500, 0),
    ],
)
def test_a_grid_inside_long_sequences(make, interval, fork, found) -> None:
    """Who parts from an old prompt deep inside finds the last window before a multiple of the interval (None: 16 windows)."""

    def run(lab: Lab) -> int:
        in_steps(lab, ids(2240), 128, lookup=0, expected_prompt_length=0)
        return lab.reused(ids(fork) + ids(64, 1))

    kept, lost = both(make, run, 20, 64, window_tail_interval=interval)
    assert (kept, lost) == (found, 0)


def test_kept_is_not_held(make) -> None:
    """Retention orders victims; it never makes a request wait."""
    lab = lab_of(make, 8, 64, slack=512)
    for seed in range(6):
        in_steps(lab, ids(256, seed))
    turn = lab.open(ids(256, 9))
    turn.compute(256)  # all eight slots
    assert lab.held() == [8]
    turn.close()


def test_priority_comes_before_retention(make) -> None:
    """A stale page of priority 80 stays, a window tail of priority 20 goes."""
    lab = lab_of(make, 8, 64)
    in_steps(lab, ids(128), custom_priority_callback=lambda ordinal, group: 80)
    in_steps(lab, ids(128, 1), custom_priority_callback=lambda ordinal, group: 20)
    lab.run(ids(128, 2))
    assert lab.probe(ids(128, 1)) == 0
    assert lab.pages(ids(128), 0) == [32] * 4


def test_full_attention_pages_go_after_stale_window_pages(make) -> None:
    """Both kinds in one pool group: what no likely match needs goes first, however recent."""

    def run(retain: bool) -> list[int]:
        lab = Lab(make, _shared_pool(retain))
        in_steps(lab, ids(320))
        in_steps(lab, ids(320, 1))
        in_steps(lab, ids(96, 2))
        return [lab.reused(ids(320)), lab.reused(ids(320, 1))]

    assert run(True) == [320, 320]
    assert run(False)[0] < 320


def _shared_pool(retain: bool):
    layers = [one(0, 2 * MIB), one(1, 2 * MIB, 64)]
    fields = {"max_util_for_resume": 1.0, "retain_window_tails": retain, "window_tail_slack": 0}
    fields["window_tail_interval"] = 0
    return config(layers, 32 * 2 * MIB, **fields)


@pytest.mark.parametrize("slack", [0, 1, 31, 32, 10_000])
def test_any_slack_is_legal_and_harmless(make, slack) -> None:
    lab = Lab(make, full_and_window(60, 14, 100, window_tail_slack=slack), "virtual")
    for seed in range(4):
        for end in (130, 260, 390):
            in_steps(lab, ids(end, seed))
        lab.manager.audit()
    assert lab.probe(ids(390, 3)) == 390
