"""Beam search: full prompt blocks stay beam 0's, the tail is copied, new blocks are per beam."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.errors import LogicError, NeverFitsError, OutOfPagesError
from kvpool.v2 import SwaScratchReuseConfig
from tests.support.configs import KIB, MIB, attention, config, full, ssm, used, windowed
from tests.support.engine import Engine


def row(cache, group: int, beam: int) -> list[int]:
    return [int(i) for i in cache.get_base_page_indices(group, beam)]


def test_scenario_106_aligned_prompt(make, device) -> None:
    manager = make(full(8, tpb=4), device)
    cache = make.open(manager)
    assert cache.resize(4, 0)
    assert cache.resize(4, 4)
    cache.beam_width = 2
    assert used(manager) == [1]
    assert cache.resize(5, 4)
    assert row(cache, 0, 1)[0] == -1
    assert row(cache, 0, 1)[1] >= 0
    assert row(cache, 0, 0) == [0, 1]
    assert row(cache, 0, 1) == [-1, 2]


def test_B162_full_blocks_shared_tail_copied(make) -> None:
    """Prompt 40, B=32, beam 4, one step: 1 shared + 4 tails = 5 pages; closing gives all back."""
    manager = make(config([attention(i, 8 * KIB) for i in range(4)], 4 * MIB), "host")
    engine = Engine(manager)
    cache = make.open(manager)
    assert cache.resize(40, 0)
    engine.write(cache, 9, 0, 40)
    assert cache.resize(40, 40)
    cache.beam_width = 4
    assert cache.beam_width == 4
    assert cache.resize(41, 40)
    assert used(manager) == [5]
    assert [row(cache, 0, b) for b in range(4)] == [[0, 1], [-1, 2], [-1, 3], [-1, 4]]
    manager.synchronize()
    tail = np.arange(32, 40)
    for order, buffer, _ in engine.buffers:
        want = engine.record(9, buffer.layer_id, order, 0, tail)
        for beam in range(4):
            address = engine.addresses(cache, buffer.layer_id, buffer.role, tail, beam)
            view, where = engine._records(address)
            assert (view[where] == want).all()
    manager.audit()
    cache.beam_width = 1
    assert used(manager) == [2]
    cache.close()
    assert used(manager) == [0]


def test_B161_two_prompts_with_four_beams(make) -> None:
    """Without reuse both stand alone: context shared among beams, tails private, same shape for both."""
    manager = make(full(32))
    shapes = []
    for _ in range(2):
        cache = make.open(manager)
        assert cache.resize(64, 64)
        cache.beam_width = 4
        assert cache.resize(70, 64)
        shapes.append([[i >= 0 for i in row(cache, 0, b)] for b in range(4)])
    assert shapes[0] == shapes[1] == [[True, True, True]] + [[False, False, True]] * 3
    assert used(manager) == [2 * (2 + 4)]


def test_B007_beam_32_in_a_small_pool(make) -> None:
    manager = make(full(256))
    cache = make.open(manager)
    assert cache.resize(9, 0)
    assert cache.resize(9, 9)
    cache.beam_width = 32
    assert used(manager) == [32]
    for tokens in range(10, 74):
        assert cache.resize(tokens, tokens - 1)
    assert used(manager)[0] <= 97
    assert used(manager) == [96]


def test_state_is_copied_too(make) -> None:
    manager = make(config([attention(0, 8 * KIB), ssm(1, 64 * KIB)], 8 * MIB), "host")
    group = manager.get_layer_group_id(1)
    cache = make.open(manager)
    assert cache.resize(40, 0)
    view = manager.get_buffers(1, "state", np.uint8, 1, 64 * KIB)
    flat = view.reshape(view.shape[0], -1)
    flat[cache.get_ssm_block_base_index(group)] = np.arange(64 * KIB, dtype=np.uint32).astype(np.uint8)
    assert cache.resize(40, 40)
    cache.beam_width = 3
    manager.synchronize()
    ids = [cache.get_ssm_block_base_index(group, b) for b in range(3)]
    assert len(set(ids)) == 3
    for slot in ids[1:]:
        assert (flat[slot] == flat[ids[0]]).all()
    cache.beam_width = 1
    assert cache.get_ssm_block_base_index(group, 0) == ids[0]


def test_windows_slide_in_every_beam(make) -> None:
    manager = make(windowed(24, 64))
    cache = make.open(manager)
    assert cache.resize(50, 0)
    assert cache.resize(50, 50)
    cache.beam_width = 4
    for history in range(50, 400):
        assert cache.resize(history + 1, history)
        assert used(manager)[0] <= 4 * 3
    assert used(manager)[0] == 4 * len([o for o in row(cache, 0, 0) if o >= 0])
    assert len({i for b in range(4) for i in row(cache, 0, b) if i >= 0}) == used(manager)[0]


def test_refusals_change_nothing(make, device) -> None:
    manager = make(full(4), device)
    cache = make.open(manager)
    assert cache.resize(40, 40)
    other = make.open(manager)
    assert other.resize(32, 0)
    before = manager.snapshot()
    with pytest.raises(OutOfPagesError) as caught:
        cache.beam_width = 3
    assert not isinstance(caught.value, NeverFitsError)
    assert manager.snapshot() == before
    with pytest.raises(NeverFitsError):
        cache.beam_width = 10
    for bad in (0, -1):
        with pytest.raises(ValueError, match="(?i)beam"):
            cache.beam_width = bad
    with pytest.raises(TypeError):
        cache.beam_width = 1.5
    assert manager.snapshot() == before
    manager.audit()
    cache.suspend()
    with pytest.raises(LogicError):
        cache.beam_width = 2


def test_refused_while_scratch_is_in_use(make) -> None:
    manager = make(windowed(24, 32, swa_scratch_reuse=SwaScratchReuseConfig()))
    cache = make.open(manager)
    assert cache.resize(256, 0)
    before = manager.snapshot()
    with pytest.raises(LogicError, match="(?i)scratch"):
        cache.beam_width = 2
    assert manager.snapshot() == before
    assert cache.resize(256, 256)
    cache.beam_width = 2


def test_suspend_and_close_with_beams(make) -> None:
    manager = make(full(16))
    cache = make.open(manager)
    assert cache.resize(40, 40)
    cache.beam_width = 4
    rows = [list(cache.get_aggregated_page_indices(0, b)) for b in range(4)]
    cache.suspend()
    assert [row(cache, 0, b) for b in range(4)] == [[-1, -1]] * 4
    assert [list(cache.get_aggregated_page_indices(0, b)) for b in range(4)] == rows
    assert cache.resume()
    assert [row(cache, 0, b) for b in range(4)] == rows
    assert cache.resize(20 + 20, 40)
    cache.beam_width = 1
    cache.close()
    assert used(manager) == [0]


def test_unknown_beam(make) -> None:
    manager = make(full(4))
    cache = make.open(manager)
    for beam in (1, -1):
        with pytest.raises((ValueError, IndexError), match="(?i)beam"):
            cache.get_base_page_indices(0, beam)
