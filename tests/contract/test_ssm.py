"""State-space layers: one slot per beam, whatever the length."""

from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool.v2 import AttentionLayerConfig, BufferConfig, SsmLayerConfig
from tests.support.arms import build
from tests.support.configs import KIB, MIB, attention, batch, config, group_slot_bytes, slots, ssm, used


def hybrid(quota: int = 32 * MIB, **fields):
    return config([attention(0), ssm(1, 256 * KIB), attention(2), ssm(3, 256 * KIB)], quota, **fields)


def test_scenario_38_slot_survives_suspend(make, device) -> None:
    manager = make(hybrid(), device)
    cache = make.track(manager.create_kv_cache())
    group = manager.get_layer_group_id(1)
    assert manager.get_layer_group_id(3) == group
    assert cache.get_ssm_block_base_index(group) < 0  # allocated at the first resume
    cache.stop_committing()
    assert cache.resume()
    slot = cache.get_ssm_block_base_index(group)
    assert slot >= 0
    assert cache.resize(64, 63)
    cache.suspend()
    assert manager.snapshot()["caches"][0]["ssm"] == [[slot]]
    assert cache.resume()
    assert cache.get_ssm_block_base_index(group) == slot
    assert cache.get_ssm_block_base_index(group, 0) == slot
    cache.close()
    assert used(manager) == [0, 0]


def test_state_needs_one_slot_at_any_length(make) -> None:
    manager = make(hybrid())
    cache = make.open(manager)
    state = manager.get_life_cycle_pool_group_indices()[manager.get_layer_group_id(1)]
    for tokens in (1, 32, 33, 1000):
        assert cache.resize(tokens, tokens - 1)
        assert used(manager)[state] == 1
    assert [int(i) for i in cache.get_base_page_indices(manager.get_layer_group_id(1))] == [-1] * 32


def test_resume_waits_for_a_state_slot(make) -> None:
    cfg = hybrid(4 * MIB, max_util_for_resume=1.0, constraints=[batch((64, 63))], initial_pool_ratio=[0.5, 0.5])
    manager = make(cfg)
    state = manager.get_life_cycle_pool_group_indices()[manager.get_layer_group_id(1)]
    caches = [make.open(manager) for _ in range(slots(manager)[state])]
    late = make.track(manager.create_kv_cache())
    before = manager.snapshot()
    assert late.resume() is False
    assert manager.snapshot() == before
    caches[1].close()
    assert late.resume() is True
    assert late.get_ssm_block_base_index(manager.get_layer_group_id(1)) == 1


def test_scenario_67_dummy_request_has_one_state(make) -> None:
    """Batch [(64,63), (0,0)]: two state slots, two attention slots, and a quota of just that is enough."""
    cfg = config(
        [attention(0, MIB), ssm(1, 2 * MIB)],
        2 * 2 * MIB + 2 * 2 * MIB,
        max_util_for_resume=1.0,
        merge_equal_pools=False,
        constraints=[batch((64, 63), (0, 0))],
    )
    manager = make(cfg)
    assert slots(manager) == [2, 2]
    with pytest.raises(ConfigError, match="(?i)floor"):
        build(
            make.arm,
            config(
                [attention(0, MIB), ssm(1, 2 * MIB)],
                3 * 2 * MIB,
                max_util_for_resume=1.0,
                merge_equal_pools=False,
                constraints=[batch((64, 63), (0, 0))],
            ),
        )


def test_state_groups_are_not_divided_by_the_limit(make) -> None:
    """8 states under limit 0.5: 8 slots for the state group, 16 for attention."""
    cfg = config(
        [attention(0, MIB), ssm(1, 4 * MIB)],
        16 * 2 * MIB + 8 * 4 * MIB,
        max_util_for_resume=0.5,
        constraints=[batch(*[(32, 0)] * 8)],
    )
    assert slots(make(cfg)) == [16, 8]


def test_B016_a_short_prompt_takes_one_block_and_the_states(make) -> None:
    layers = [
        AttentionLayerConfig(i, [BufferConfig("key", 512 * 32), BufferConfig("value", 512 * 32)]) for i in range(6)
    ] + [SsmLayerConfig(6 + i, [BufferConfig("state", 2_134_016)]) for i in range(23)]
    manager = make(config(layers, 512 * MIB))
    cache = make.open(manager)
    assert cache.resize(12, 0)
    bytes_used = [n * size for n, size in zip(used(manager), group_slot_bytes(manager), strict=True)]
    assert bytes_used == [192 * KIB, 23 * 2_134_016]
    assert abs(bytes_used[1] / MIB - 46.8) < 0.05


def test_B021_states_follow_requests_not_blocks(make) -> None:
    """8 running sequences and 1,000 attention blocks: 8 state slots, not 1,000."""
    states = 183 * MIB
    cfg = config(
        [attention(0, MIB), ssm(1, states)],
        1000 * 2 * MIB + 8 * states + 16 * MIB,
        max_util_for_resume=1.0,
        typical_step=batch(*[(125 * 32, 125 * 32 - 1)] * 8),
    )
    manager = make(cfg)
    attention_slots, state_slots = slots(manager)
    assert state_slots in (8, 9)
    assert attention_slots >= 990
    for _ in range(8):
        assert make.open(manager).resize(120 * 32, 0)
    assert used(manager) == [960, 8]


def test_state_layers_need_commit_min_snapshot() -> None:
    with pytest.raises(ConfigError, match="commit_min_snapshot"):
        build("v2py", config([attention(0), ssm(1, 4096)], 32 * MIB, commit_min_snapshot=False))


def test_ssm_only(make) -> None:
    manager = make(config([ssm(0, 2 * MIB)], 8 * MIB))
    caches = [make.open(manager) for _ in range(4)]  # no gate for states
    assert [c.get_ssm_block_base_index(0) for c in caches] == [0, 1, 2, 3]
    assert caches[0].resize(10_000, 9_999)
    assert make.track(manager.create_kv_cache()).resume() is False
