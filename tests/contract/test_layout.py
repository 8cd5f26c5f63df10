"""From buffers to pools, and every address formula against brute force (v2_storage §3)."""

from __future__ import annotations

import itertools
import random

import pytest

from kvpool.errors import ConfigError, UnknownBufferError
from kvpool.v2 import AttentionLayerConfig, BufferConfig, BufferId, PageIndexMode, SsmLayerConfig
from tests.support.arms import build
from tests.support.configs import KIB, MIB, attention, config, full, ssm

SHARED, PER_LAYER = PageIndexMode.SHARED, PageIndexMode.PER_LAYER


def shape(manager) -> list[list[int]]:
    return [[pool.slot_bytes for pool in group.pools] for group in manager.pool_group_descs]


def test_worked_check_1(make) -> None:
    manager = make(config([attention(i) for i in range(4)], 32 * MIB))
    assert len(manager.layer_grouping) == 1
    assert shape(manager) == [[4 * 2 * 8192]]


def test_worked_check_2(make) -> None:
    layers = [attention(i, window=100 if i % 2 == 0 else None) for i in range(4)]
    manager = make(config(layers, 32 * MIB))
    assert len(manager.layer_grouping) == 2
    assert shape(manager) == [[2 * 2 * 8192]]
    assert list(manager.get_life_cycle_pool_group_indices()) == [0, 0]
    apart = make(config(layers, 32 * MIB, merge_equal_pools=False))
    assert shape(apart) == [[32768], [32768]]
    assert list(apart.get_life_cycle_pool_group_indices()) == [0, 1]


def test_worked_check_3(make) -> None:
    manager = make(config([attention(0), attention(1, 16384, window=100)], 32 * MIB))
    assert shape(manager) == [[16384], [32768]]


def test_worked_check_4(make) -> None:
    layers = [
        AttentionLayerConfig(
            i,
            [
                BufferConfig("key_block_quant", 512),
                BufferConfig("key", 8192),
                BufferConfig("value", 8192),
                BufferConfig("value_block_quant", 512),
            ],
        )
        for i in range(2)
    ]
    manager = make(config(layers, 32 * MIB))
    assert shape(manager) == [[32768, 2048]]
    (group,) = manager.pool_group_descs
    (variant,) = group.slot_desc.variants
    assert variant.layer_group_id == 0
    assert list(variant.slot_size_list) == list(group.slot_desc.slot_size_list) == [32768, 2048]
    data, scales = variant.coalesced_buffers
    assert (data.single_buffer_size, data.num_buffers, data.size) == (8192, 4, 32768)
    assert list(data.buffer_ids) == [(0, "key"), (0, "value"), (1, "key"), (1, "value")]
    assert list(scales.buffer_ids) == [
        (0, "key_block_quant"),
        (0, "value_block_quant"),
        (1, "key_block_quant"),
        (1, "value_block_quant"),
    ]


def test_equal_totals_of_unlike_composition_merge(make) -> None:
    """4 × 8 KiB of one life cycle and 2 × 16 KiB of the other: same list of totals, one pool group."""
    manager = make(config([attention(0), attention(1), attention(2, 16384, window=64)], 32 * MIB))
    assert shape(manager) == [[32768]]
    (group,) = manager.pool_group_descs
    assert [v.layer_group_id for v in group.slot_desc.variants] == [0, 1]
    assert [v.coalesced_buffers[0].num_buffers for v in group.slot_desc.variants] == [4, 2]


def test_equal_totals_inside_a_life_cycle_stay_two_pools(make) -> None:
    """4 × 8 KiB seen first, then 2 × 16 KiB: ties keep first-seen order."""
    manager = make(config([attention(0), attention(1), attention(2, 16384)], 32 * MIB))
    assert shape(manager) == [[32768, 32768]]
    (variant,) = manager.pool_group_descs[0].slot_desc.variants
    assert [c.single_buffer_size for c in variant.coalesced_buffers] == [8192, 16384]


def test_pool_groups_are_numbered_by_first_life_cycle(make) -> None:
    layers = [attention(0, 16384, window=64), attention(1, 4096), attention(2, 16384, window=128), ssm(3, 8192)]
    manager = make(config(layers, 64 * MIB))
    assert shape(manager) == [[32768], [8192]]
    assert list(manager.get_life_cycle_pool_group_indices()) == [0, 1, 0, 1]


def test_state_and_attention_of_equal_size_merge_unless_told(make) -> None:
    layers = [attention(0, 4096), ssm(1, 8192)]
    assert shape(make(config(layers, 32 * MIB))) == [[8192]]
    assert shape(make(config(layers, 32 * MIB, merge_equal_pools=False))) == [[8192], [8192]]


def random_layers(seed: int) -> list:
    rng = random.Random(seed)
    layers = []
    for i in range(rng.randint(1, 7)):
        if rng.random() < 0.2:
            layers.append(SsmLayerConfig(i * 3, [BufferConfig(f"s{k}", rng.choice([1024, 4096])) for k in range(2)]))
            continue
        buffers = []
        for role in ("key", "value", "key_scale", "value_scale")[: rng.choice([1, 2, 2, 4])]:
            override = rng.choice([None, None, 16, 8, 32])
            size = rng.choice([1024, 2048, 8192])
            buffers.append(BufferConfig(role, size, override))
        layers.append(AttentionLayerConfig(i * 3, buffers, rng.choice([None, 64, 128])))
    return layers


@pytest.mark.parametrize("seed", range(12))
def test_addresses_against_brute_force(make, seed: int) -> None:
    """Every (buffer, slot, kernel page) has its own bytes; both index modes name the same address; nothing is left over."""
    layers = random_layers(seed)
    manager = make(config(layers, 32 * MIB))
    tpb = manager.tokens_per_block
    pools = {}
    for group in manager.pool_group_descs:
        for pool in group.pools:
            pools[group.pool_group_index, pool.pool_index] = (pool.base_address, pool.slot_bytes, group.num_slots)
    spans = sorted((b, b + s * n) for b, s, n in pools.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    group_of = list(manager.get_life_cycle_pool_group_indices())
    assert {tuple(b) for b in manager.all_buffer_ids} == {
        (layer.layer_id, b.role) for layer in layers for b in layer.buffers
    }
    per_life_cycle: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for layer in layers:
        for buffer in layer.buffers:
            expansion = 1 if buffer.tokens_per_block_override is None else tpb // buffer.tokens_per_block_override
            life_cycle = manager.get_layer_group_id(layer.layer_id)
            stride = manager.get_page_stride(layer.layer_id, buffer.role)
            assert stride == buffer.size
            converter = manager.get_page_index_converter(layer.layer_id, buffer.role)
            assert converter.expansion == expansion
            assert converter.scale == manager.get_page_index_scale(layer.layer_id, buffer.role)
            shared = manager.get_mem_pool_base_address(layer.layer_id, buffer.role, SHARED)
            assert manager.get_mem_pool_base_address(layer.layer_id, buffer.role) == shared
            assert manager.get_mem_pool_base_address(layer.layer_id, buffer.role, None) == shared
            own = manager.get_mem_pool_base_address(layer.layer_id, buffer.role, PER_LAYER)
            last = pools[group_of[life_cycle], 0][2] - 1
            slots = [0, 1, last, -1, min(5, last)]
            in_shared = converter(slots, SHARED)
            in_own = converter(slots, PER_LAYER)
            assert converter(slots) == in_shared
            assert len(in_shared) == len(in_own) == len(slots) * expansion
            for k, slot in enumerate(slots):
                for i in range(expansion):
                    s, p = in_shared[k * expansion + i], in_own[k * expansion + i]
                    if slot < 0:
                        assert s == p == -1
                        continue
                    address = shared + stride * s
                    assert address == own + stride * p
                    (where,) = [key for key, (b, size, n) in pools.items() if b <= address < b + size * n]
                    assert where[0] == group_of[life_cycle]
                    base, slot_bytes, _ = pools[where]
                    offset = address - base - slot * slot_bytes
                    assert offset >= 0
                    assert offset + stride <= slot_bytes
                    if slot == 0:
                        per_life_cycle.setdefault((life_cycle, where[1]), []).append((offset, stride))
            bound = manager.get_page_index_upper_bound(layer.layer_id, buffer.role)
            base, slot_bytes, count = pools[where]
            assert bound == (base + slot_bytes * count - shared) // stride
            assert max(in_shared) < bound
    for (life_cycle, pool), parts in per_life_cycle.items():
        position = 0
        for offset, size in sorted(parts):
            assert offset == position
            position += size
        assert position == pools[group_of[life_cycle], pool][1]


def test_one_index_array_serves_a_group_in_shared_mode(make) -> None:
    manager = make(config([attention(i) for i in range(4)], 32 * MIB))
    converters = {
        (c.scale, c.expansion)
        for c in (manager.get_page_index_converter(i, r) for i in range(4) for r in ("key", "value"))
    }
    assert converters == {(8, 1)}
    assert [manager.get_page_index_converter(i, r).layer_offset for i in range(4) for r in ("key", "value")] == list(
        range(8)
    )
    assert manager.get_page_index_converter(2, "key").scratch_pages_per_block == 2


def test_B166_kernel_block_inside_a_manager_block(make) -> None:
    """Manager block 528, kernel block 16: 33 consecutive kernel indices per page."""
    layer = AttentionLayerConfig(0, [BufferConfig("key", 4096, 16), BufferConfig("value", 4096, 16)])
    manager = make(config([layer], 32 * MIB, tpb=528))
    converter = manager.get_page_index_converter(0, "value")
    assert (converter.scale, converter.expansion) == (2, 33)
    assert list(converter([3, -1, 0])) == [3 * 2 * 33 + i for i in range(33)] + [-1] * 33 + list(range(33))
    assert list(converter([3], PER_LAYER)) == [(3 * 2 + 1) * 33 + i for i in range(33)]


def test_aggregated_pages(make) -> None:
    layers = [
        attention(0),
        attention(1),
        attention(2, window=64),
        AttentionLayerConfig(3, [BufferConfig("key", 4096, 16)]),
    ]
    manager = make(config(layers, 64 * MIB))

    def pages(ids):
        return sorted(manager.get_aggregated_pages(ids), key=lambda d: (d.layer_group_id, d.base))

    every = pages([BufferId(layer, role) for layer in (2, 1, 0) for role in ("value", "key")] + [BufferId(3, "key")])
    descs = manager.pool_group_descs
    group_of = list(manager.get_life_cycle_pool_group_indices())
    assert [d.layer_group_id for d in every] == [0, 1]
    for desc in every:
        pool = descs[group_of[desc.layer_group_id]].pools[0]
        assert (desc.base, desc.size, desc.stride) == (pool.base_address, pool.slot_bytes, pool.slot_bytes)
    assert [tuple(b.id) for b in every[0].buffers] == [
        (0, "key"), (0, "value"), (1, "key"), (1, "value"), (3, "key"),
    ]  # fmt: skip
    assert [b.expansion for b in every[0].buffers] == [1, 1, 1, 1, 2]
    split = pages([BufferId(0, "key"), BufferId(1, "value"), BufferId(3, "key")])
    base = descs[group_of[0]].pools[0].base_address
    assert [(d.base, d.size) for d in split] == [(base, 8192), (base + 3 * 8192, 2 * 8192)]
    assert list(manager.get_aggregated_pages([])) == []
    with pytest.raises(KeyError):
        list(manager.get_aggregated_pages([BufferId(0, "nothing")]))


def test_aggregated_pages_reach_what_the_engine_wrote(make) -> None:
    import ctypes

    import numpy as np

    from tests.support.engine import Engine

    manager = make(config([attention(i, 16 * KIB, 64 if i % 2 else None) for i in range(4)], 16 * MIB), "host")
    cache = make.open(manager)
    engine = Engine(manager)
    assert cache.resize(100, 0)
    engine.write(cache, 4, 0, 100)
    for desc in manager.get_aggregated_pages(manager.all_buffer_ids):
        for ordinal, slot in enumerate(cache.get_aggregated_page_indices(desc.layer_group_id)):
            assert slot >= 0
            raw = ctypes.string_at(desc.base + desc.stride * slot, desc.size)
            part = desc.size // len(desc.buffers)
            for k, buffer in enumerate(desc.buffers):
                words = np.frombuffer(raw[k * part : k * part + 16], "<u4")
                assert words[1] == buffer.id.layer_id
                assert words[3] == ordinal * 32


def test_c13_unknown_buffers(make) -> None:
    manager = make(full(4))
    for call in (
        lambda: manager.get_mem_pool_base_address(1, "key"),
        lambda: manager.get_mem_pool_base_address(0, "value"),
        lambda: manager.get_page_stride(5, "key"),
        lambda: manager.get_page_index_upper_bound(0, "x"),
        lambda: manager.get_page_index_scale(0, "x"),
        lambda: manager.get_page_index_converter(-1, "key"),
        lambda: manager.get_layer_group_id(7),
        lambda: manager.get_buffers(0, "value", "uint8", 1, 1),
    ):
        with pytest.raises(UnknownBufferError):
            call()
        with pytest.raises(KeyError):
            call()
        with pytest.raises(ConfigError):
            call()


def test_B006_only_groups_with_local_layers(make) -> None:
    """A pattern of six windows, four local layers, all sliding: two groups exist; absent ones are a clear error."""
    windows = [512, 512, 1024, 512, 2048, None]
    manager = make(config([attention(i, 8192, windows[i]) for i in range(4)], 64 * MIB))
    assert [list(g) for g in manager.layer_grouping] == [[0, 1, 3], [2]]
    cache = make.open(manager)
    with pytest.raises((KeyError, ValueError), match="(?i)group"):
        cache.get_base_page_indices(2)
    with pytest.raises(KeyError, match="5"):
        manager.get_layer_group_id(5)


def test_B199_no_layers_and_one_layer(make, device) -> None:
    manager = make(config([], 32 * MIB), device)
    assert list(manager.layer_grouping) == []
    assert list(manager.pool_group_descs) == []
    assert manager.num_layers == 0
    assert manager.get_quota(0) == 32 * MIB
    cache = make.open(manager)
    assert cache.resize(10_000, 9_000) is True
    assert (cache.capacity, cache.history_length, cache.num_blocks) == (10_000, 9_000, 313)
    cache.suspend()
    assert cache.resume() is True
    assert manager.clamp_max_seq_len_for_mem(4, 1000) == 1000
    assert list(manager.get_storage_statistics()) == []
    cache.close()
    single = make(full(2), device)
    assert [list(g) for g in single.layer_grouping] == [[0]]
    assert make.open(single).resize(64)


def test_B019_an_extra_draft_layer_pads_nothing(make) -> None:
    """18 sliding + 18 full + 1 full draft layer: a token's bytes are those of 37 layers."""
    layers = [attention(i, 8192, 128 if i % 2 == 0 else None) for i in range(36)] + [attention(36, 8192)]
    manager = make(config(layers, 64 * MIB))
    total = sum(sum(pool.slot_bytes for pool in group.pools) for group in manager.pool_group_descs)
    assert total == 37 * 2 * 8192


# slots × stride pairs that have wrapped in 32 bits elsewhere
WRAPS = [
    (2066, 1_039_680),
    (7024, 1_039_680),
    (1994, 1_077_120),
    (4564, 1_435_968),
    (3_728_271, 576),
    (57_359, 37_440),
]


@pytest.mark.parametrize(("page", "stride"), WRAPS)
def test_B182_products_are_exact(make, page: int, stride: int) -> None:
    import numpy as np

    count = page + 2
    layer = AttentionLayerConfig(0, [BufferConfig("key", stride)])
    grain = 32 * MIB
    quota = -(-(count * stride) // grain) * grain
    manager = make(config([layer], quota), "host")  # memory is touched by nobody: addresses alone count
    (group,) = manager.pool_group_descs
    assert group.num_slots >= count
    base = group.pools[0].base_address
    converter = manager.get_page_index_converter(0, "key")
    view = manager.get_buffers(0, "key", np.uint8, 1, stride // 32)
    (aggregate,) = manager.get_aggregated_pages([BufferId(0, "key")])
    edges = [2**31 // stride, 2**32 // stride]
    for slot in [page - 1, page, page + 1] + [e + d for e in edges for d in (-1, 0, 1, 2) if e + d < group.num_slots]:
        (index,) = converter([slot])
        assert base + manager.get_page_stride(0, "key") * index == base + slot * stride
        assert view[slot].__array_interface__["data"][0] == base + slot * stride
        assert aggregate.base + aggregate.stride * slot == base + slot * stride
    if page == 2066:
        assert page * stride == 2_147_978_880
    assert view.nbytes == group.num_slots * stride


def test_B182_index_products_past_int32_are_refused(arm) -> None:
    """1,024 kernel pages of one byte for each of two buffers: 2^20 slots are the last whose indices fit."""
    layer = AttentionLayerConfig(3, [BufferConfig("key", 1, 1), BufferConfig("value", 1, 1)])
    fits = build(arm, config([layer], 2048 * MIB, tpb=1024))
    assert fits.pool_group_descs[0].num_slots == 2**20
    assert fits.get_page_index_upper_bound(3, "key") == 2**31
    assert list(fits.get_page_index_converter(3, "value")([2**20 - 1], PER_LAYER))[-1] == 2**31 - 1
    fits.shutdown()
    with pytest.raises(ConfigError) as caught:
        build(arm, config([layer], 2052 * MIB, tpb=1024))
    message = str(caught.value).replace(",", "").replace("_", "")
    assert "3" in message
    assert "key" in message or "value" in message
    assert any(str(n) in message for n in (2**31 + 2**22, 2**31 + 2**22 - 1)), message
