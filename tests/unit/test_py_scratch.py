"""Scratch reuse: blocks that a prefill chunk will leave behind share a few slots."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool._py.manager.manager import Manager
from kvpool.errors import ArgumentError, LogicError
from tests.unit.py_cases import MIB, Stepper, active, attention, config, free, pages


def windowed(layers: int, window: int, rewind: int | None = 0, **more: Any) -> Manager:
    return Manager(config([attention(i, window) for i in range(layers)], rewind=rewind, **more), "virtual")


def used(manager: Manager) -> list[int]:
    return [total - left for total, left, _ in manager.statistics()]


def test_slot_count() -> None:  # scenario 82
    manager = windowed(32, 128)
    (handle,) = active(manager, (1024, 0), keep=True)
    begin, end, slots = manager.scratch_desc(handle, 0) or (0, 0, [])
    assert (begin, end, len(slots)) == (0, 28, 1)
    assert pages(manager, handle)[:28] == [-1] * 28
    assert min(pages(manager, handle)[28:]) >= 0
    assert used(manager) == [5]
    manager.audit()
    assert manager.resize(handle, None, 1024)
    assert manager.scratch_desc(handle, 0) is None
    manager.audit()


@pytest.mark.parametrize(("rewind", "blocks"), [(0, 7), (64, 5)])
def test_shared_slots(rewind: int, blocks: int) -> None:  # scenario 83
    manager = windowed(8, 32, rewind)
    (handle,) = active(manager, (256, 0))
    begin, end, slots = manager.scratch_desc(handle, 0) or (0, 0, [])
    assert (end - begin, len(slots)) == (blocks, 1)
    assert pages(manager, handle)[7] >= 0
    assert slots == [0]  # scratch slots come before pages


def test_rewind_tail_is_kept_and_two_steps_equal_one() -> None:  # B044
    one, two = windowed(4, 128, 3), windowed(4, 128, 3)
    (first,), (second,) = active(one, (4096, 0)), active(two, (2000, 0))
    assert two.resize(second, 4096, 0)
    assert used(one) == used(two)
    live = pages(one, first)
    assert live[:123] == [-1] * 123
    assert min(live[123:]) >= 0
    for manager, handle in ((one, first), (two, second)):
        assert manager.resize(handle, 4093, 4093)  # three tokens taken back
        assert [page >= 0 for page in pages(manager, handle)] == [False] * 123 + [True] * 5
        manager.audit()
    assert used(one) == used(two)


def test_shrink_recomputes_scratch() -> None:  # C2
    manager = windowed(4, 64)
    (handle,) = active(manager, (1024, 0))
    assert manager.resize(handle, 512, 0)
    assert manager.scratch_desc(handle, 0) == (0, 14, [0, 1, 2, 3])
    assert min(pages(manager, handle)[14:]) >= 0
    assert manager.resize(handle, 32, 0)
    assert manager.scratch_desc(handle, 0) is None
    assert used(manager) == [1]
    manager.audit()
    manager.suspend(handle)


def test_suspend_gives_scratch_back_and_resume_takes_it() -> None:
    manager = windowed(4, 64)
    (handle,) = active(manager, (512, 0))
    before = used(manager)
    manager.suspend(handle)
    assert manager.scratch_desc(handle, 0) is None
    assert used(manager) == [before[0] - 4]
    manager.audit()
    assert manager.resume(handle, None)
    assert used(manager) == before
    assert (manager.scratch_desc(handle, 0) or (0, 0, []))[:2] == (0, 14)
    manager.suspend(handle)
    manager.set_scratch_enabled(handle, False)  # nothing in use now
    assert manager.resume(handle, None)
    assert min(pages(manager, handle)) >= 0
    manager.audit()


def test_switch() -> None:  # C11
    plain = windowed(4, 64, None)
    handle = plain.create()
    assert not plain.scratch_enabled(handle)
    plain.set_scratch_enabled(handle, False)
    with pytest.raises(ArgumentError, match="not configured"):
        plain.set_scratch_enabled(handle, True)
    manager = windowed(4, 64)
    (busy,) = active(manager, (512, 0))
    with pytest.raises(ArgumentError, match="in use"):
        manager.set_scratch_enabled(busy, False)
    other = manager.create()
    manager.set_scratch_enabled(other, False)
    assert manager.resume(other, None)
    assert manager.resize(other, 512, 0)
    assert manager.scratch_desc(other, 0) is None
    assert min(pages(manager, other)) >= 0
    with pytest.raises(ArgumentError, match="would need scratch"):
        manager.set_scratch_enabled(other, True)
    assert manager.resize(other, 32, 0)
    manager.set_scratch_enabled(other, True)
    manager.audit()
    assert manager.resize(other, 513, 0)
    assert manager.scratch_desc(other, 0) is not None
    manager.audit()
    with pytest.raises(LogicError):
        manager.set_beam_width(other, 2)


def test_full_attention_has_no_scratch() -> None:  # C10
    manager = Manager(config([attention(0), attention(1, 64)], rewind=0), "virtual")
    (handle,) = active(manager, (512, 0))
    assert manager.scratch_desc(handle, 0) is None
    assert manager.scratch_desc(handle, 1) is not None
    manager.close(handle)
    assert free(manager) == manager.slot_counts()


def test_decode_with_scratch_enabled_needs_no_plan() -> None:
    manager = Manager(config([attention(0), attention(1, 64)], rewind=2, quota=256 * MIB), "virtual")
    (handle,) = active(manager, (512, 0))
    step = Stepper(manager, 1, 64)
    step([handle], [0], [513], [512])
    limits = manager._registry.all()
    (cache,) = limits
    assert cache.capacity_high > 0
    for length in range(514, 900):
        assert step([handle], [0], [length], [length - 1])[0] == [True]
        manager.audit()
