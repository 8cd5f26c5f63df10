"""Mutation checks: a fault planted in the Python backend does not get past the oracles."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool._py.device.host_device import HostDevice
from kvpool._py.page import page_store, reclaim
from kvpool._py.page.prefix_cache import PrefixCache
from kvpool._py.reuse import match, radix_tree
from kvpool.errors import CorruptedError
from tests.differential.episode import run_episode


def pages_of_the_block_do_not_matter(monkeypatch: Any) -> None:
    real = match.Matcher.end_in
    monkeypatch.setattr(
        match.Matcher, "end_in", lambda self, node, limit, ssm: limit if ssm < 0 else real(self, node, limit, ssm)
    )


def gaps_in_a_window_do_not_matter(monkeypatch: Any) -> None:
    monkeypatch.setattr(match.Matcher, "is_legal_above", lambda self, parent, end: True)


def only_whole_pages_serve(monkeypatch: Any) -> None:
    monkeypatch.setattr(match.Matcher, "is_usable", lambda self, child, ssm: all(child.coverage))


def scopes_are_one(monkeypatch: Any) -> None:
    real = radix_tree.RadixTree.root
    monkeypatch.setattr(
        radix_tree.RadixTree, "root", lambda self, scope, create=False: real(self, (None, None), create)
    )


def too_many_companions(monkeypatch: Any) -> None:
    def run_below(self: Any, node: Any, lc: int) -> list[Any]:
        run = []
        while len(node.children) == 1:
            (node,) = node.children.values()
            if not node.coverage[lc] or self._is_owned(node, lc):
                break
            run.append(node)
        return run

    monkeypatch.setattr(reclaim.Reclaim, "_useless_below", run_below)


def ends_are_pruned(monkeypatch: Any) -> None:
    monkeypatch.setattr(match.Matcher, "serves_an_end", lambda self, node: False)


def no_window_page_goes_early(monkeypatch: Any) -> None:
    monkeypatch.setattr(page_store.PageStore, "_is_class_b", lambda self, node, lc: True)


def the_newest_goes_first(monkeypatch: Any) -> None:
    def make_room(self: Any, group: int, wanted: int) -> None:
        while self._tier.num_free(group) < wanted:
            *_, victim = iter(self._pages.queues[group])
            self.remove_page(victim)

    monkeypatch.setattr(reclaim.Reclaim, "make_room", make_room)


def nothing_is_copied(monkeypatch: Any) -> None:
    monkeypatch.setattr(HostDevice, "copy", lambda self, stream, tasks: None)


def owners_are_forgotten(monkeypatch: Any) -> None:
    """A shared page goes back with its first owner."""

    def release(self: Any, lc: int, slot: int) -> None:
        page = self.pages.get(lc, slot)
        self._journal.set(page, "refs", 1)
        self._tier.finish(page.group, slot)
        self.pages.disown(page)

    monkeypatch.setattr(PrefixCache, "release", release)


PLANTED = {
    pages_of_the_block_do_not_matter: ("virtual", 3003),
    gaps_in_a_window_do_not_matter: ("virtual", 3011),
    only_whole_pages_serve: ("virtual", 3021),
    scopes_are_one: ("virtual", 3004),
    too_many_companions: ("virtual", 3027),
    ends_are_pruned: ("virtual", 3006),
    no_window_page_goes_early: ("virtual", 3003),
    the_newest_goes_first: ("virtual", 3010),
    nothing_is_copied: ("host", 3002),
    owners_are_forgotten: ("virtual", 3006),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant, monkeypatch) -> None:
    plant(monkeypatch)
    device, first = PLANTED[plant]
    assert any(fails(seed, device) for seed in range(first, first + 40))


def fails(seed: int, device: str) -> bool:
    try:
        run_episode(seed, 250, ("v2py",), device, reuse=True)
    except (AssertionError, CorruptedError):
        return True
    return False


def test_without_a_fault_nothing_is_found() -> None:
    for device in ("virtual", "host"):
        for seed in range(3000, 3004):
            run_episode(seed, 250, ("v2py",), device, reuse=True)
