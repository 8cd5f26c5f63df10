"""Scratch reuse for windowed prefill (v2_request §2.5, v2_storage §2.2, §3.5)."""

from __future__ import annotations

import pytest

from kvpool.errors import ArgumentError, ConfigError
from kvpool.v2 import AttentionLayerConfig, BufferConfig, PageIndexMode, SwaScratchReuseConfig
from tests.support import oracle
from tests.support.configs import GIB, MIB, attention, batch, config, full, used, windowed
from tests.support.engine import Engine


def swa(layers: int, window: int, *, rewind: int = 0, quota: int = 64 * MIB, size: int = 8192, **fields):
    return config(
        [attention(i, size, window) for i in range(layers)],
        quota,
        swa_scratch_reuse=SwaScratchReuseConfig(max_rewind_len=rewind),
        **fields,
    )


def test_scenario_82_slot_count(make) -> None:
    manager = make(swa(32, 128, quota=32 * MIB), "host")
    cache = make.open(manager)
    engine = Engine(manager)
    assert cache.resize(1024, 0)
    desc = cache.get_scratch_desc(0)
    assert (desc.range.beg, desc.range.end) == (0, 28)
    assert len(desc.slot_ids) == -(-28 // 32)
    assert cache.has_scratch_slots
    exposed = [int(i) for i in cache.get_base_page_indices(0)]
    assert exposed[:28] == [-1] * 28
    assert all(i >= 0 for i in exposed[28:])
    assert used(manager) == [4 + 1]
    assert cache.resize(1024, 1024)
    assert cache.get_scratch_desc(0) is None
    assert not cache.has_scratch_slots
    assert used(manager) == [4]
    engine.write(cache, 1, 28 * 32, 1024)
    assert engine.check(cache, 1, 1024) > 0
    short = make.open(manager)
    assert short.resize(896, 0)
    assert (short.get_scratch_desc(0).range.beg, short.get_scratch_desc(0).range.end) == (0, 24)


@pytest.mark.parametrize(("rewind", "count"), [(0, 7), (64, 5)])
def test_scenario_83_shared_ids(make, rewind: int, count: int) -> None:
    manager = make(swa(8, 32, rewind=rewind))
    cache = make.open(manager)
    assert cache.resize(256, 0)
    desc = cache.get_scratch_desc(0)
    assert len(desc.range) == count
    assert len(desc.slot_ids) == -(-count // 8) == 1
    assert list(desc.slot_ids)
    base = [int(i) for i in cache.get_base_page_indices(0)]
    assert base[7] >= 0
    total = manager.pool_group_descs[0].num_slots * 16
    for layer in range(8):
        for role in ("key", "value"):
            indices = manager.get_page_index_converter(layer, role)(base, PageIndexMode.PER_LAYER, desc)
            assert len(indices) == 8
            assert all(0 <= i < total for i in indices[: desc.range.end])


def test_scenario_79_scratch_aware_constraint(make) -> None:
    """4 requests of 512 fresh tokens: full 4·16 slots, windowed 4·(5 + 1); a quota of just that constructs and runs them."""
    layers = [attention(i, 8192, 128, 32) for i in range(48)] + [attention(48 + i, 8192) for i in range(80)]
    cfg = config(
        layers,
        18 * MIB + 80 * MIB,
        max_util_for_resume=1.0,
        constraints=[batch(*[(512, 0)] * 4)],
        swa_scratch_reuse=SwaScratchReuseConfig(),
    )
    manager = make(cfg)
    assert [g.num_slots for g in manager.pool_group_descs] == [24, 64]
    caches = [make.open(manager) for _ in range(4)]
    for cache in caches:
        assert cache.resize(512, 0)
        assert len(cache.get_scratch_desc(0).slot_ids) == 1
        assert cache.get_scratch_desc(1) is None
    assert used(manager) == [24, 64]


def test_desc_is_none_for_full_and_state_groups(make) -> None:
    from tests.support.configs import ssm

    cfg = config(
        [attention(0), attention(1, window=32), ssm(2, 4096)],
        64 * MIB,
        swa_scratch_reuse=SwaScratchReuseConfig(),
    )
    manager = make(cfg)
    cache = make.open(manager)
    assert cache.resize(512, 0)
    assert cache.get_scratch_desc(0) is None
    assert len(cache.get_scratch_desc(1).range) == 15
    assert cache.get_scratch_desc(2) is None


def test_index_modes_with_scratch(make) -> None:
    manager = make(swa(8, 32))
    with pytest.raises(ValueError, match="(?i)index_mode"):
        manager.get_mem_pool_base_address(0, "key")
    assert manager.supports_index_mode(PageIndexMode.PER_LAYER) is True
    assert manager.supports_index_mode(PageIndexMode.SHARED) is None
    cache = make.open(manager)
    assert cache.supports_index_mode(PageIndexMode.SHARED) is True
    assert cache.resize(256, 0)
    assert cache.supports_index_mode(PageIndexMode.SHARED) is False
    assert cache.supports_index_mode(PageIndexMode.PER_LAYER) is True
    converter = manager.get_page_index_converter(0, "key")
    with pytest.raises(ValueError, match="(?i)mode"):
        converter([int(i) for i in cache.get_base_page_indices(0)], None, cache.get_scratch_desc(0))
    plain = make(full(4))
    assert plain.supports_index_mode(PageIndexMode.SHARED) is True


def test_freed_on_suspend_and_back_on_resume(make, device) -> None:
    manager = make(swa(4, 32), device)
    cache = make.open(manager)
    assert cache.resize(512, 0)
    count = len(cache.get_scratch_desc(0).slot_ids)
    assert count == -(-15 // 4)
    before = manager.snapshot()
    cache.suspend()
    assert used(manager) == [1]
    assert not cache.has_scratch_slots
    assert cache.resume()
    assert manager.snapshot() == before


def test_resume_is_all_or_nothing_for_scratch(make) -> None:
    manager = make(windowed(6, 32, swa_scratch_reuse=SwaScratchReuseConfig(), max_util_for_resume=1.0))
    cache = make.open(manager)
    assert cache.resize(4 * 32, 0)  # three scratch blocks in three slots (one layer), one page
    assert used(manager) == [4]
    cache.suspend()
    other = make.open(manager)
    assert other.resize(96, 32)  # stale(96) is [0, 2): block 1 is new and scratch, blocks 0 and 2 are pages
    assert used(manager) == [4]
    before = manager.snapshot()
    assert cache.resume() is False
    assert manager.snapshot() == before
    other.close()
    assert cache.resume() is True


def test_c11_turning_it_off_and_on(make) -> None:
    never = make(full(4))
    cache = make.track(never.create_kv_cache())
    cache.enable_swa_scratch_reuse = False  # on a manager that never enabled it, suspended
    assert cache.enable_swa_scratch_reuse is False
    with pytest.raises(ValueError, match="(?i)scratch"):
        cache.enable_swa_scratch_reuse = True
    assert cache.resume()
    cache.enable_swa_scratch_reuse = False

    manager = make(swa(4, 32))
    cache = make.track(manager.create_kv_cache())
    assert cache.enable_swa_scratch_reuse is True
    cache.enable_swa_scratch_reuse = False
    cache.enable_swa_scratch_reuse = True
    assert cache.resume()
    assert cache.resize(512, 0)
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="in use"):
        cache.enable_swa_scratch_reuse = False
    assert manager.snapshot() == before
    assert cache.enable_swa_scratch_reuse is True
    assert cache.resize(512, 512)
    cache.enable_swa_scratch_reuse = False
    assert cache.resize(1024, 512)
    assert not cache.has_scratch_slots
    assert used(manager) == [17]
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="would need scratch"):
        cache.enable_swa_scratch_reuse = True  # these lengths would need scratch blocks now
    assert cache.enable_swa_scratch_reuse is False
    assert manager.snapshot() == before


def test_B044_rewind_tail_and_two_steps(make) -> None:
    """w=128, B=32, 4096 tokens as one chunk, rewind up to 3: the tail of the rewound window has pages of its own."""
    manager = make(swa(8, 128, rewind=3, quota=64 * MIB), "host")
    engine = Engine(manager)
    cache = make.open(manager)
    assert cache.resize(4096, 0)
    gone = (4096 - 3 + 1 - 128) // 32
    assert (cache.get_scratch_desc(0).range.beg, cache.get_scratch_desc(0).range.end) == (0, gone)
    engine.write(cache, 5, gone * 32, 4096)
    assert cache.resize(4093, 4093) is True  # rewind 3
    assert engine.check(cache, 5, 4093) > 0
    first_needed = 4093 + 1 - 128
    assert cache.get_base_page_indices(0)[first_needed // 32] >= 0

    one = make.open(manager)
    two = make.open(manager)
    assert one.resize(4096, 0)
    assert one.resize(4128, 4093)
    assert two.resize(4096, 0)
    assert two.resize(None, 4093)
    assert two.resize(4128, None)
    assert visible(one) == visible(two)
    assert one.has_scratch_slots == two.has_scratch_slots
    held = engine.check(cache, 5, 4093)
    assert held == 8 * 2 * len([p for p in range(4093) if oracle.needed(p, 4093, 128)])


def visible(cache) -> list[bool]:
    return [int(i) >= 0 for i in cache.get_base_page_indices(0)]


def layout_cases():
    def layer(i, *sizes, window=32):
        roles = ("key", "value", "key_scale", "value_scale")
        return AttentionLayerConfig(i, [BufferConfig(r, s) for r, s in zip(roles, sizes, strict=False)], window)

    yield "one layer K", [layer(0, 8192)]
    yield "one layer K V", [layer(0, 8192, 8192)]
    yield "eight layers K V", [layer(i, 8192, 8192) for i in range(8)]
    yield "three layers K V with scales", [layer(i, 8192, 8192, 512, 512) for i in range(3)]
    yield "unlike K and V", [layer(i, 8192, 4096) for i in range(5)]
    yield "two sizes of layers", [layer(i, *([8192] * 2 if i % 2 else [4096] * 2)) for i in range(6)]
    yield "utils 2 and 1 in even pool", [layer(0, 8192, 8192), layer(1, 8192), layer(2, 8192)]
    yield (
        "kernel blocks of their own",
        [AttentionLayerConfig(i, [BufferConfig("key", 4096, 16), BufferConfig("value", 8192)], 32) for i in range(4)],
    )


@pytest.mark.parametrize(("name", "layers"), list(layout_cases()), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize(("capacity", "history"), [(256, 0), (352, 70), (1024, 33)])
def test_conversion_covers_every_block_without_collision(make, name, layers, capacity, history) -> None:
    """For one layer, no two (block, role) ever share a byte, scratch or not, and all lie inside the cache's own slots."""
    manager = make(config(layers, 64 * MIB, swa_scratch_reuse=SwaScratchReuseConfig()))
    cache = make.open(manager)
    other = make.open(manager)  # interleaved slots
    assert cache.resize(history, history)
    assert other.resize(64, 0)
    assert cache.resize(capacity, history)
    desc = cache.get_scratch_desc(0)
    assert desc is not None
    base = [int(i) for i in cache.get_base_page_indices(0)]
    own = {i for i in base if i >= 0} | set(desc.slot_ids)
    (group,) = manager.pool_group_descs
    pools = [(pool.base_address, pool.slot_bytes) for pool in group.pools]
    live = [o for o in range(len(base)) if base[o] >= 0 or desc.range.beg <= o < desc.range.end]
    for layer in layers:
        taken: dict[int, int] = {}
        for buffer in layer.buffers:
            converter = manager.get_page_index_converter(layer.layer_id, buffer.role)
            stride = manager.get_page_stride(layer.layer_id, buffer.role)
            address = manager.get_mem_pool_base_address(layer.layer_id, buffer.role, PageIndexMode.PER_LAYER)
            indices = converter(base, PageIndexMode.PER_LAYER, desc)
            expansion = converter.expansion
            assert len(indices) == len(base) * expansion
            for ordinal in range(len(base)):
                pages = indices[ordinal * expansion : (ordinal + 1) * expansion]
                if ordinal not in live:
                    assert list(pages) == [-1] * expansion
                    continue
                for index in pages:
                    begin = address + stride * index
                    (hit,) = [(b, s) for b, s in pools if b <= begin < b + s * group.num_slots]
                    slot, rest = divmod(begin - hit[0], hit[1])
                    assert slot in own
                    assert rest + stride <= hit[1]
                    assert begin not in taken, f"block {ordinal} and {taken.get(begin)} share bytes"
                    for step in range(0, stride, 512):
                        assert begin + step not in taken
                        taken[begin + step] = ordinal


@pytest.mark.parametrize("utils", [[2, 1], [2, 2, 1], [1, 2]])
def test_layouts_whose_scratch_would_alias_are_refused(arm, utils) -> None:
    from tests.support.arms import build

    roles = ("key", "value")
    layers = [
        AttentionLayerConfig(i, [BufferConfig(roles[k], 8192) for k in range(n)], 32) for i, n in enumerate(utils)
    ]
    with pytest.raises(ConfigError, match="(?i)scratch.*alias|alias.*scratch"):
        build(arm, config(layers, 64 * MIB, swa_scratch_reuse=SwaScratchReuseConfig()))
    manager = build(arm, config(layers, 64 * MIB))  # legal without scratch reuse
    manager.shutdown()


def test_bytes_of_a_layer_survive_its_own_run(make) -> None:
    """As a kernel does: layer after layer writes the whole chunk and reads it back before the next layer runs."""
    manager = make(swa(8, 64, quota=16 * MIB), "host")
    engine = Engine(manager)
    cache = make.open(manager)
    assert cache.resize(40, 0)
    engine.write(cache, 3, 0, 40)
    assert cache.resize(700, 40)
    import numpy as np

    for order, buffer, _ in engine.buffers:
        positions = np.arange(40, 700)
        view, where = engine._records(engine.addresses(cache, buffer.layer_id, buffer.role, positions))
        view[where] = engine.record(3, buffer.layer_id, order, 0, positions)
        if buffer.role == "value":
            for role_order, role in ((order - 1, "key"), (order, "value")):
                view, where = engine._records(engine.addresses(cache, buffer.layer_id, role, positions))
                assert (view[where] == engine.record(3, buffer.layer_id, role_order, 0, positions)).all()
    assert cache.resize(700, 700)
    assert engine.check(cache, 3, 700) == 8 * 2 * 63


def test_scratch_saves_memory(make) -> None:
    """A prompt of 64 k tokens through a window of 128 needs a few slots, not 2,048."""
    manager = make(swa(32, 128, quota=1 * GIB // 4))
    cache = make.open(manager)
    assert cache.resize(65536, 0)
    assert used(manager) == [4 + -(-2044 // 32)]
