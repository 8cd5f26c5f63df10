from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from kvpool._py.manager.manager import Manager
from kvpool._py.storage.demand import batch_demand
from kvpool._py.storage.layout import build_layout, check_index_range
from kvpool._py.storage.sizing import (
    cost_of_slots,
    grain_for_quota,
    grains_for_slots,
    grains_to_slots,
    solve_slot_counts,
)
from kvpool.errors import ConfigError
from kvpool.v2.config import AttentionLayerConfig, BufferConfig
from tests.unit.py_cases import GIB, MIB, attention, batch, config, ssm

FULL, W128 = (0, -1, 0), (0, 128, 0)


def counts(cfg: Any) -> list[int]:
    return Manager(cfg, "virtual").slot_counts()


def test_grain_table() -> None:
    quotas = (1, 2 * GIB - 1, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB, 80 * GIB)
    assert [grain_for_quota(q, 2 * MIB) // MIB for q in quotas] == [2, 2, 4, 8, 16, 32, 32]
    assert grain_for_quota(1, 3 * MIB) == 3 * MIB


def test_grains_round_trip() -> None:  # scenario 2
    sizes = [16252928, 4063232]
    grains = grains_for_slots(157, sizes, 16 * MIB)
    slots, used = grains_to_slots(grains, sizes, 16 * MIB)
    assert slots >= 157
    assert used <= grains
    assert grains_to_slots(1, sizes, 16 * MIB) == (0, 0)


def gpt_oss(quota: int, max_seq_len: int | None = None) -> Any:
    layers = [attention(i, 128 if i % 2 == 0 else None, 32768) for i in range(36)]
    constraints = [] if max_seq_len is None else [batch((max_seq_len, max_seq_len - 1)), batch((8192, 0))]
    return config(layers, quota, constraints=constraints, max_util_for_resume=0.95)


def test_gpt_oss_at_four_gibibytes() -> None:
    manager = Manager(gpt_oss(4 * GIB), "virtual")
    layout = manager.layout()
    assert layout.grain == 8 * MIB
    assert [group.slot_sizes for group in layout.pool_groups] == [[36 * 32768]]
    assert manager.slot_counts() == [3640]
    assert manager.mapped_bytes() <= 4 * GIB
    assert counts(gpt_oss(4 * GIB, 110528)) == [3640]
    with pytest.raises(ConfigError, match="floor 3642 slots"):
        Manager(gpt_oss(4 * GIB, 110560), "virtual")


def test_rest_goes_to_the_smallest_share_then_to_the_larger_slot() -> None:  # scenario 74
    sizes = [[2 * MIB - 1], [2 * MIB]]
    assert solve_slot_counts(10 * MIB, 2 * MIB, sizes, [1, 1], [1, 1], [FULL, W128]) == [2, 3]
    assert solve_slot_counts(10 * MIB, 2 * MIB, sizes[::-1], [1, 1], [1, 1], [W128, FULL]) == [3, 2]


def test_equal_slots_tie_by_key_not_by_position() -> None:
    sizes = [[2 * MIB], [2 * MIB]]
    assert solve_slot_counts(10 * MIB, 2 * MIB, sizes, [1, 1], [1, 1], [FULL, W128]) == [3, 2]
    assert solve_slot_counts(10 * MIB, 2 * MIB, sizes, [1, 1], [1, 1], [W128, FULL]) == [2, 3]


def test_solver_is_a_hard_cap_and_leaves_no_room_for_one_more() -> None:
    groups = [([65536, 4096], 3, 7, FULL), ([MIB], 1, 2, W128), ([3000], 2, 50, (0, 64, 0))]
    answers = set()
    for order in permutations(range(3)):
        sizes, floors, needs, keys = (list(column) for column in zip(*(groups[i] for i in order), strict=True))
        found = solve_slot_counts(50 * MIB, 2 * MIB, sizes, floors, needs, keys)
        total = sum(cost_of_slots(n, s, 2 * MIB) for n, s in zip(found, sizes, strict=True))
        assert total <= 50 * MIB
        for i in range(3):
            more = cost_of_slots(found[i] + 1, sizes[i], 2 * MIB) - cost_of_slots(found[i], sizes[i], 2 * MIB)
            assert total + more > 50 * MIB
        answers.add(tuple(n for _, n in sorted(zip(order, found, strict=True))))
    assert len(answers) == 1


def test_floors_above_the_quota_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"layer group 0 \(window 32\): floor 2 slots = 4194304 bytes"):
        Manager(config([attention(0, 32, MIB)], quota=2 * MIB), "virtual")  # scenario 62
    assert counts(config([attention(0, 32, MIB)], quota=4 * MIB)) == [2]


def split(quota: int = 128 * MIB, **more: Any) -> list[int]:
    """Two pool groups with slots of 768 KiB (window 128, sink 32) and 1280 KiB (full)."""
    return counts(config([attention(0, 128, 384 * 1024, 32), attention(1, None, 640 * 1024)], quota, **more))


def shares(found: list[int]) -> tuple[float, float]:
    window, full = found[0] * 768, found[1] * 1280
    return window / (window + full), full / (window + full)


def test_initial_split() -> None:
    window, full = shares(split())  # scenario 64
    assert window < full
    window, full = shares(split(typical_step=batch(*[(64, 32)] * 64)))  # scenario 65
    assert window / full == pytest.approx(0.6, abs=0.15)
    constraint = batch(*[(256, 128)] * 256)  # scenario 68
    assert shares(split(8 * GIB, constraints=[constraint]))[0] > shares(split(8 * GIB))[0]
    with pytest.raises(ConfigError, match="below the floors"):
        split(constraints=[constraint])


def test_constraints_are_floors() -> None:
    both = [batch(*[(256, 255)] * 8), batch((2048, 0))]  # scenario 76
    assert min(split(136 * MIB, constraints=both)) >= 66
    with pytest.raises(ConfigError, match="floor 66 slots"):
        split(128 * MIB, constraints=both)
    covered = batch(*[(256, 128)] * 4)  # scenario 77
    typical = batch(*[(256, 128)] * 8)
    assert split(constraints=[covered], typical_step=typical) == split(typical_step=typical)


def test_ratio_is_a_byte_share_per_layer_group() -> None:  # B011
    assert shares(split(initial_pool_ratio=[0.9, 0.1]))[0] == pytest.approx(0.9, abs=0.05)
    assert shares(split(initial_pool_ratio=[0.2, 0.8]))[0] == pytest.approx(0.2, abs=0.05)
    window, full = shares(split(initial_pool_ratio=[0.8, 0.2], constraints=[batch((1024, 0))]))  # scenario 70
    assert full > 0.2
    assert window < 0.8
    shared = counts(config([attention(0), attention(1, 64)], initial_pool_ratio=[0.25, 0.75]))  # scenario 71
    assert shared == [64 * MIB // (2 * 8192)]


def test_states_take_one_slot_a_request() -> None:  # scenario 67, B021
    layers = [attention(0), ssm(1)]
    cfg = config(layers)
    layout = build_layout(cfg)
    assert batch_demand(layout, batch((64, 63), (0, 0)), None) == [2, 2]
    many = config(layers, 16 * MIB + 32 * MIB, typical_step=batch(*[(4000, 3999)] * 8))
    attention_slots, states = counts(many)
    assert states < attention_slots / 50
    assert states >= 8


def test_scratch_shrinks_demand() -> None:  # scenario 79
    layers = [attention(2 * i + k, 128 if k == 0 else None, 8192 * (k + 1), None) for i in range(4) for k in (0, 1)]
    cfg = config(layers, rewind=0, typical_step=batch(*[(512, 0)] * 4))
    layout = build_layout(cfg)
    # 16 blocks; stale(512) = 12 of them share ceil(12 / 4) slots.
    assert batch_demand(layout, batch((512, 0)), 0) == [4 + 3, 16]
    assert batch_demand(layout, batch((512, 0)), None) == [16, 16]


def test_shared_prompt_counts_once() -> None:
    layout = build_layout(config([attention(0), attention(1, 64)]))
    # Full: 4 shared + (8 - 4) + (8 - 4). Window 64 at history 255: blocks 6 and 7 live, none shared.
    assert batch_demand(layout, batch((256, 255), (256, 255), system=128), None) == [12, 4]
    # One request at the start still reads the shared blocks.
    assert batch_demand(layout, batch((256, 255), (256, 0), system=128), None) == [12, 4 + 2 + 4]
    assert batch_demand(layout, batch(system=128), None) == [0, 0]


def test_window_shorter_than_a_block() -> None:  # B001, B017
    constraints = [batch(*[(200, 199)] * 8)]
    assert counts(config([attention(0, 16)], 64 * MIB, constraints=constraints))[0] >= 8 * 1
    assert Manager(config([attention(0, 16)]), "virtual").layout().pool_groups[0].floor == 2
    small = Manager(config([attention(0, 128, MIB)], 64 * 2 * MIB, tpb=16), "virtual")
    assert small.layout().pool_groups[0].floor == 9
    assert small.slot_counts() == [64]


@pytest.mark.parametrize(
    ("bound", "batch_size", "expected"), [(0, 1, 0), (32, 1, 32), (64, 1, 32), (64, 2, 0), (64, 3, 0)]
)
def test_clamp_full(bound: int, batch_size: int, expected: int) -> None:  # scenario 61
    manager = Manager(config([attention(0, None, MIB)], quota=2 * MIB), "virtual")
    assert manager.clamp_max_seq_len(batch_size, bound) == expected


def test_clamp_window_and_zero_layers() -> None:  # scenario 62, B199
    assert Manager(config([attention(0, 32, MIB)], quota=4 * MIB), "virtual").clamp_max_seq_len(1, 96) == 96
    empty = Manager(config([]), "virtual")
    assert empty.clamp_max_seq_len(4, 100) == 100
    assert (empty.mapped_bytes(), empty.slot_counts()) == (0, [])
    handle = empty.create()
    assert empty.resume(handle, None)
    assert empty.resize(handle, 1000, 10)
    assert empty.lengths(handle) == (0, 10, 1000, 32)
    empty.close(handle)
    empty.shutdown()


def test_mapped_bytes_stay_below_an_odd_quota() -> None:  # scenario 7
    manager = Manager(config([attention(i) for i in range(8)], quota=5619712), "virtual")
    assert manager.mapped_bytes() <= 5619712


# ------------------------------------------------------------------------------------------------------- layout


def test_layouts_of_the_reference() -> None:  # v2_storage 3.8
    def groups(layers: list[Any]) -> list[list[int]]:
        return [list(group.slot_sizes) for group in build_layout(config(layers)).pool_groups]

    assert groups([attention(i) for i in range(4)]) == [[4 * 2 * 8192]]
    assert groups([attention(i, 100 if i % 2 == 0 else None) for i in range(4)]) == [[2 * 2 * 8192]]
    assert groups([attention(0), attention(1, 100, 16384)]) == [[16384], [32768]]
    scales = [BufferConfig(role="key_scale", size=512), BufferConfig(role="value_scale", size=512)]
    with_scales = [AttentionLayerConfig(layer_id=i, buffers=[*attention(i).buffers, *scales]) for i in range(2)]
    assert groups(with_scales) == [[32768, 2048]]


def test_equal_pools_stay_apart_on_request() -> None:
    layers = [attention(i, 100 if i % 2 == 0 else None) for i in range(4)]
    assert len(build_layout(config(layers, merge_equal_pools=False)).pool_groups) == 2


def test_buffer_places() -> None:
    own = BufferConfig(role="index", size=2048, tokens_per_block_override=8)  # expansion 4, expanded 8192
    layers = [AttentionLayerConfig(layer_id=5, buffers=[*attention(5).buffers, own]), attention(3)]
    layout = Manager(config(layers), "virtual").layout()
    assert layout.buffers[5, "index"] == (0, 0, 2 * 8192, 8192, 4, 5, 3)
    assert layout.buffers[3, "value"] == (0, 0, 4 * 8192, 8192, 1, 5, 2)
    assert layout.life_cycles[0].layers == [5, 3]
    assert layout.life_cycles[0].scratch_fraction == (3, 5)
    assert list(layout.buffers) == [(5, "key"), (5, "value"), (5, "index"), (3, "key"), (3, "value")]


def test_one_state_life_cycle_and_sink_blocks_in_the_key() -> None:
    layers = [ssm(0), attention(1, 64, sinks=1), attention(2, 64, sinks=32), ssm(3), attention(4, 64)]
    layout = build_layout(config(layers))
    assert [life_cycle.key for life_cycle in layout.life_cycles] == [(1, -1, 0, 0), (0, 64, 1, 0), (0, 64, 0, 0)]
    assert layout.life_cycles[0].layers == (0, 3)


def test_extra_draft_layer_costs_one_layer() -> None:  # B019
    layers = [attention(i, 128 if i % 2 == 0 else None) for i in range(36)] + [attention(36)]
    layout = build_layout(config(layers))
    assert sum(group.slot_bytes for group in layout.pool_groups) == 37 * 2 * 8192


def test_scratch_mapping_that_would_alias() -> None:
    uneven = AttentionLayerConfig(layer_id=1, buffers=[BufferConfig(role="key", size=8192)], sliding_window_size=64)
    layers = [attention(0, 64), uneven]
    build_layout(config(layers))
    with pytest.raises(ConfigError, match="would alias"):
        build_layout(config(layers, rewind=0))


def test_index_products_fit_int32() -> None:  # B182
    layout = build_layout(config([attention(i, size=64) for i in range(64)], tpb=32))
    check_index_range(layout, [2**31 // 128])
    with pytest.raises(
        ConfigError, match=r'layer 0, role "key": page indices do not fit int32: 16777217 slots \* scale 128'
    ):
        check_index_range(layout, [2**31 // 128 + 1])
    tiny = [BufferConfig(role="key", size=1), BufferConfig(role="value", size=1)]
    with pytest.raises(ConfigError, match="int32"):
        Manager(config([AttentionLayerConfig(layer_id=0, buffers=tiny)], quota=8 * GIB), "virtual")


@pytest.mark.parametrize(
    ("slots", "size"), [(2066, 1039680), (7024, 1039680), (1994, 1077120), (4564, 1435968), (3728271, 576)]
)
def test_addresses_are_64_bit(slots: int, size: int) -> None:  # B182
    manager = Manager(config([attention(0, size=size // 2)], quota=slots * size * 2 + 256 * MIB), "virtual")
    pool = manager._tier.pools[0][0]
    for slot in (slots - 1, slots, slots + 1):
        assert pool.slot_address(slot) - pool.address == slot * size
    assert 2066 * 1039680 == 2147978880
