"""From a quota to slot counts (DESIGN D6, v2_storage §4): the scenarios, then the oracle's brute force."""

from __future__ import annotations

import random

import pytest

from kvpool.errors import ConfigError, NeverFitsError, OutOfPagesError
from kvpool.v2 import SwaScratchReuseConfig
from tests.support import oracle
from tests.support.arms import build
from tests.support.configs import (
    GIB,
    MIB,
    alternating,
    attention,
    batch,
    config,
    full,
    full_and_window,
    group_slot_bytes,
    one,
    slots,
    ssm,
    used,
    windowed,
)


def ratios(manager) -> list[float]:
    weights = [n * s for n, s in zip(slots(manager), group_slot_bytes(manager), strict=True)]
    return [w / sum(weights) for w in weights]


def mapped(manager, grain: int = 2 * MIB) -> int:
    return sum(
        -(-pool.slot_bytes * group.num_slots // grain) * grain
        for group in manager.pool_group_descs
        for pool in group.pools
    )


def split(quota: int = 128 * MIB, **fields):
    """PG0 windowed (128, sink 32) with 768 KiB slots, PG1 full with 1,280 KiB slots."""
    layers = [attention(i, 8192, 128, 32) for i in range(48)] + [attention(48 + i, 8192) for i in range(80)]
    return config(layers, quota, **fields)


def test_scenario_7_small_quota(make, device) -> None:
    manager = make(config([attention(i) for i in range(8)], 5_619_712), device)
    assert manager.get_quota(0) == 5_619_712
    assert mapped(manager) <= 5_619_712
    assert slots(manager) == [32]


def test_scenario_8_memory_is_used_up(make, device) -> None:
    manager = make(alternating(36, 128, 1, 32768, 32 * MIB), device)
    assert slots(manager) == [28]
    first = make.open(manager)
    assert first.resize(256, 0)
    assert first.resize(256, 256)
    for tokens in range(257, 705):
        assert first.resize(tokens, tokens - 1)
    assert used(manager) == [27]
    first.suspend()
    assert first.get_base_page_indices(0)[0] == -1
    first.close()
    second = make.open(manager)
    assert second.resize(256, 0)
    assert second.resize(704, 703)
    with pytest.raises(OutOfPagesError):
        second.capacity = 705
    with pytest.raises(NeverFitsError):
        second.resize(705, 704)
    second.close()


def test_clamp_61(make) -> None:
    manager = make(full(1))
    assert manager.clamp_max_seq_len_for_mem(1, 0) == 0
    assert manager.clamp_max_seq_len_for_mem(1, 32) == 32
    assert manager.clamp_max_seq_len_for_mem(1, 64) == 32
    assert manager.clamp_max_seq_len_for_mem(2, 64) == 0
    assert manager.clamp_max_seq_len_for_mem(3, 64) == 0


def test_clamp_61_more(make) -> None:
    manager = make(full(10))
    assert manager.clamp_max_seq_len_for_mem(1, 1000) == 320
    assert manager.clamp_max_seq_len_for_mem(4, 1000) == 7 * 32
    assert manager.clamp_max_seq_len_for_mem(4, 200) == 200
    assert manager.clamp_max_seq_len_for_mem(10, 1000) == 32
    assert manager.clamp_max_seq_len_for_mem(11, 1000) == 0
    with pytest.raises(ValueError, match="(?i)batch"):
        manager.clamp_max_seq_len_for_mem(0, 100)
    with pytest.raises(ValueError, match="(?i)token|bound"):
        manager.clamp_max_seq_len_for_mem(1, -1)


def test_clamp_62(make, arm) -> None:
    manager = make(config([one(0, 2 * MIB, 32)], 2 * 2 * MIB))
    assert manager.clamp_max_seq_len_for_mem(1, 96) == 96
    with pytest.raises(ConfigError, match=r"(?i)\b2\b"):
        build(arm, config([one(0, 2 * MIB, 32)], 2 * MIB))


def test_scenario_64_default_split(make) -> None:
    manager = make(split())
    r = ratios(manager)
    assert len(r) == 2
    assert abs(sum(r) - 1) < 1e-9
    assert r[0] < r[1]


def test_scenario_65_typical_step(make) -> None:
    manager = make(split(typical_step=batch(*[(64, 32)] * 64)))
    r = ratios(manager)
    assert abs(r[0] / r[1] - 0.6) <= 0.15


def test_scenario_68_constraint_raises_the_short_side(make, arm) -> None:
    constraint = [batch(*[(256, 128)] * 256)]
    plain = ratios(make(split(8 * GIB)))
    bound = ratios(make(split(8 * GIB, constraints=constraint)))
    assert bound[0] > plain[0]
    assert abs(sum(bound) - 1) < 1e-9
    with pytest.raises(ConfigError) as caught:
        build(arm, split(128 * MIB, constraints=constraint))
    assert_lists_floors(str(caught.value), [(256 * 8, 2112), (256 * 8, 2112)], 128 * MIB)


def assert_lists_floors(message: str, bounds: list[tuple[int, int]], quota: int) -> None:
    """The message has a number of slots for every group, and the quota."""
    import re

    plain = message.replace(",", "").replace("_", "")
    numbers = [int(n) for n in re.findall(r"\d+", plain)]
    for low, high in bounds:
        assert any(low <= n <= high for n in numbers), message
    assert quota in numbers or f"{quota // MIB} MiB" in plain or f"{quota / MIB:g} MiB" in plain, message


def test_scenario_70_constraint_beats_ratio(make) -> None:
    manager = make(split(constraints=[batch((2048, 2047))], initial_pool_ratio=[0.8, 0.2]))
    r = ratios(manager)
    assert r[1] > 0.2
    assert r[0] < 0.8


def test_scenario_71_shared_group(make) -> None:
    layers = [attention(0, window=64), attention(1)]
    manager = make(config(layers, 32 * MIB, initial_pool_ratio=[0.25, 0.75]))
    assert ratios(manager) == [1.0]


@pytest.mark.parametrize("limit", [0, -0.1, 1.1, float("nan"), float("inf"), float("-inf")])
def test_scenario_73_limits(arm, limit) -> None:
    with pytest.raises((ValueError, AssertionError), match="max_util_for_resume must be in"):
        build(arm, full(4, max_util_for_resume=limit))


def test_scenario_74_slot_rounding(make) -> None:
    layers = [one(0, 2 * MIB - 1), one(1, 2 * MIB, window=1)]
    for order in (layers, layers[::-1]):
        manager = make(config(order, 5 * 2 * MIB, typical_step=batch((32, 0))))
        by_size = dict(zip(group_slot_bytes(manager), slots(manager), strict=True))
        assert by_size == {2 * MIB - 1: 2, 2 * MIB: 3}


def test_scenario_76_two_constraints(make, arm) -> None:
    constraints = [batch(*[(256, 255)] * 8), batch((2048, 0))]
    manager = make(split(136 * MIB, constraints=constraints))
    for constraint in constraints:
        caches = [make.open(manager) for _ in constraint.kv_caches]
        for cache, desc in zip(caches, constraint.kv_caches, strict=True):
            assert cache.resize(desc.capacity, desc.history_length)
        for cache in caches:
            cache.close()
    with pytest.raises(ConfigError) as caught:
        build(arm, split(128 * MIB, constraints=constraints))
    assert_lists_floors(str(caught.value), [(66, 66), (66, 66)], 128 * MIB)


def test_scenario_77_typical_covers_constraint(make) -> None:
    typical = batch(*[(64, 32)] * 64)
    plain = ratios(make(split(typical_step=typical)))
    both = ratios(make(split(typical_step=typical, constraints=[batch((64, 32))])))
    assert plain == pytest.approx(both, abs=1e-6)


def test_B001_window_shorter_than_a_block(make, arm) -> None:
    """B=32, w=16, 8 sequences: 16 slots (a window of 16 can straddle two blocks), and all 8 run to the end together."""
    constraint = [batch(*[(33, 32)] * 8)]  # tokens 17..32: two blocks each
    manager = make(windowed(16, 16, max_util_for_resume=1.0, constraints=constraint))
    assert slots(manager) == [16]
    caches = [make.open(manager) for _ in range(8)]
    for history in range(300):
        for cache in caches:
            assert cache.resize(history + 1, history)
    assert max(used(manager)) <= 16
    with pytest.raises(ConfigError, match="16"):
        build(arm, windowed(15, 16, max_util_for_resume=1.0, constraints=constraint))
    with pytest.raises(ConfigError, match="2"):
        build(arm, windowed(1, 16))


def test_B002_straddling_window(make) -> None:
    """w=11, B=16, every h up to 200 with c=h+1: at most ceil(10/16)+1 = 2 pages, e.g. h=20 needs blocks 0 and 1."""
    manager = make(windowed(2, 11, tpb=16))
    cache = make.open(manager)
    peak = 0
    for history in range(201):
        assert cache.resize(history + 1, history)
        live = [o for o, i in enumerate(cache.get_base_page_indices(0)) if i >= 0]
        assert live == list(range(max(0, history + 1 - 11) // 16, history // 16 + 1))
        peak = max(peak, used(manager)[0])
        if history == 20:
            assert live == [0, 1]
    assert peak == 2


def test_B011_ratio_follows_the_group_not_the_layer_order(make) -> None:
    """0.9 for full, 0.1 for the window, declared sFsF and FsFs: entries are in layer-group order, full gets 0.9."""
    counts = []
    for order, weights in (([128, None] * 2, [0.1, 0.9]), ([None, 128] * 2, [0.9, 0.1])):
        layers = [one(i, 512 * 1024 if window is None else 1024 * 1024, window) for i, window in enumerate(order)]
        manager = make(config(layers, 256 * MIB, initial_pool_ratio=weights))
        group = manager.get_life_cycle_pool_group_indices()[manager.get_layer_group_id(order.index(None))]
        share = ratios(manager)[group]
        assert abs(share - 0.9) < 0.03
        counts.append(slots(manager)[group])
    assert counts[0] == counts[1]


def test_B014_second_manager_gets_the_whole_quota(make, arm, device) -> None:
    for _ in range(3):
        manager = build(arm, full(16), device)
        cache = manager.create_kv_cache()
        assert cache.resume()
        assert cache.resize(16 * 32)
        cache.close()
        manager.shutdown()
        del manager, cache
    final = make(full(16), device)
    assert slots(final) == [16]
    assert used(final) == [0]
    assert make.open(final).resize(16 * 32)


def test_B017_no_fixed_reserve_for_tiny_windows(make) -> None:
    """w=128, B=16, 64 blocks: 7 requests of 128 tokens run together, 9 blocks each at most."""
    manager = make(windowed(64, 128, tpb=16))
    assert slots(manager) == [64]
    caches = [make.open(manager) for _ in range(7)]
    for cache in caches:
        assert cache.resize(128, 0)
    for history in range(128, 400):
        for cache in caches:
            assert cache.resize(history + 1, history)
        assert used(manager)[0] <= 7 * 9


def test_floors_message_lists_every_group(arm) -> None:
    with pytest.raises(ConfigError) as caught:
        build(arm, full_and_window(2, 2, 1024))
    message = str(caught.value)
    assert_lists_floors(message, [(33, 33), (33, 33)], 12 * MIB)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, AssertionError)


@pytest.mark.parametrize("quota", [2 * MIB, MIB, 1, 2 * MIB - 1])
def test_quota_below_one_grain(arm, quota: int) -> None:
    if quota >= 2 * MIB:
        manager = build(arm, config([one(0, MIB)], quota))
        assert slots(manager) == [2]
        manager.shutdown()
        return
    with pytest.raises(ConfigError, match="(?i)quota"):
        build(arm, config([one(0, MIB)], quota))


@pytest.mark.parametrize(
    ("quota", "grain"),
    [
        (2 * GIB - 2 * MIB, 2),
        (2 * GIB, 4),
        (4 * GIB - 4 * MIB, 4),
        (4 * GIB, 8),
        (8 * GIB, 16),
        (16 * GIB, 32),
        (40 * GIB, 32),
        (200 * GIB, 32),
    ],
)
def test_grain_table(make, quota: int, grain: int) -> None:
    """A pool fills whole grains: an odd slot size shows which."""
    size = 3 * MIB + 4096
    manager = make(config([one(0, size)], quota))
    assert slots(manager) == [quota // (grain * MIB) * (grain * MIB) // size]


def test_reference_example_of_52_windowed_layers(make) -> None:
    """Gemma-like: demand of the fallback batch is 33 and 65 slots; both pools grow in that proportion within the quota."""
    layers = [attention(i, 131_072, 1024) for i in range(52)] + [attention(52 + i, 131_072) for i in range(10)]
    manager = make(config(layers, 40 * GIB))
    windowed_slots, full_slots = slots(manager)
    assert abs(windowed_slots / full_slots - 33 / 65) < 0.01
    assert mapped(manager, 32 * MIB) <= 40 * GIB
    assert mapped(manager, 32 * MIB) > 40 * GIB - 64 * MIB


def lc_of(layer, tpb: int) -> oracle.LC:
    if not hasattr(layer, "window_size"):
        return oracle.LC(is_ssm=True)
    return oracle.LC(layer.window_size, -(-(layer.num_sink_tokens or 0) // tpb))


def expect(cfg) -> list[int] | None:
    """Slot counts by the oracle; the layers here have one buffer each."""
    from dataclasses import replace
    from fractions import Fraction

    tpb = cfg.tokens_per_block
    order: list[oracle.LC] = []
    members: dict[oracle.LC, list[int]] = {}
    for layer in cfg.layers:
        lc = lc_of(layer, tpb)
        if lc not in members:
            order.append(lc)
        members.setdefault(lc, []).extend(b.size for b in layer.buffers)
    lcs = []
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, lc in enumerate(order):
        sizes = members[lc]
        pools = tuple(sorted((s * sizes.count(s) for s in set(sizes)), reverse=True))
        fraction = max(Fraction(1, sizes.count(s)) for s in set(sizes))
        lcs.append(replace(lc, fraction=fraction))
        groups.setdefault(pools if cfg.merge_equal_pools else (*pools, -i - 1), []).append(i)
    rewind = None if cfg.swa_scratch_reuse is None else cfg.swa_scratch_reuse.max_rewind_len
    limit = oracle.decimal_fraction(cfg.max_util_for_resume)

    def of_batch(desc, lc) -> int:
        return oracle.demand(
            lc, [(d.capacity, d.history_length) for d in desc.kv_caches], desc.system_prompt_length, tpb, rewind
        )

    fallback = batch((2049, 2048))
    solver = []
    for pools, members_of in groups.items():
        mine = [lcs[i] for i in members_of]
        part = oracle.Fraction(1) if all(lc.is_ssm for lc in mine) else limit
        floor = sum(oracle.structural_floor(lc, lcs, tpb) for lc in mine)
        for constraint in cfg.constraints:
            floor = max(floor, oracle.ceil_fraction(sum(of_batch(constraint, lc) for lc in mine) / part))
        slot_bytes = [p for p in pools if p > 0]
        if cfg.initial_pool_ratio is not None:
            weight = sum(int(cfg.initial_pool_ratio[i] * 1e9 + 0.5) for i in members_of)
            need = oracle.share_need(weight, sum(slot_bytes))
        elif cfg.typical_step is not None:
            need = max(1, sum(of_batch(cfg.typical_step, lc) for lc in mine))
        elif cfg.constraints:
            need = sum(
                max(
                    oracle.structural_floor(lc, lcs, tpb),
                    *(oracle.ceil_fraction(of_batch(constraint, lc) / part) for constraint in cfg.constraints),
                )
                for lc in mine
            )
        else:
            need = max(1, sum(of_batch(fallback, lc) for lc in mine))
        solver.append(oracle.Group(mine, slot_bytes, need, floor))
    return oracle.solve(solver, cfg.cache_tiers[0].quota)


def test_constraints_alone_count_per_life_cycle(make) -> None:
    """Demands 10, 2 and 4 below the limit make 11, 3 (its floor) and 5: the shared group needs 14, not ceil(12/0.97)."""
    layers = [one(0, MIB), one(1, MIB, 64), one(2, MIB // 2, 128)]
    manager = make(config(layers, 640 * MIB, constraints=[batch((320, 319))]))
    assert slots(manager) == [542, 196]


def random_config(seed: int):
    rng = random.Random(seed)
    layers = []
    tpb = rng.choice([16, 32])
    kinds = [(None, None), (rng.choice([1, 16, 33, 64, 128]), None), (rng.choice([32, 100]), rng.choice([None, 1, 40]))]
    for i in range(rng.randint(1, 5)):
        if rng.random() < 0.2:
            layers.append(ssm(i, rng.choice([256, 700, 1024]) * 1024))
        else:
            window, sinks = rng.choice(kinds)
            layers.append(one(i, rng.choice([100, 256, 300, 512, 1024]) * 1024, window, sinks if window else None))
    fields = {"max_util_for_resume": rng.choice([0.97, 1.0, 0.5, 0.29])}

    def random_batch():
        pairs = []
        for _ in range(rng.randint(1, 4)):
            capacity = rng.randint(0, 400)
            pairs.append((capacity, rng.randint(0, capacity)))
        return batch(*pairs, system=rng.choice([0, 0, 50, 128]))

    if rng.random() < 0.4:
        fields["typical_step"] = random_batch()
    if rng.random() < 0.4:
        fields["constraints"] = [random_batch() for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        fields["swa_scratch_reuse"] = SwaScratchReuseConfig(rng.choice([0, 7, 40]))
    if rng.random() < 0.3:
        fields["merge_equal_pools"] = False
    cfg = config(layers, rng.choice([16, 40, 64, 100, 150]) * MIB + rng.randint(0, MIB), tpb, **fields)
    if rng.random() < 0.3:
        from dataclasses import replace

        count = len({lc_of(layer, tpb) for layer in layers})
        raw = [rng.randint(1, 9) for _ in range(count)]
        cfg = replace(cfg, initial_pool_ratio=[r / sum(raw) for r in raw])
    return cfg


@pytest.mark.parametrize("seed", range(150))
def test_slot_counts_against_brute_force(make, arm, seed: int) -> None:
    cfg = random_config(seed)
    want = expect(cfg)
    if want is None:
        with pytest.raises(ConfigError, match="(?i)floor"):
            build(arm, cfg)
        return
    manager = make(cfg)
    assert slots(manager) == want
    assert mapped(manager) <= cfg.cache_tiers[0].quota
    assert manager.get_quota(0) == cfg.cache_tiers[0].quota


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_counts_do_not_depend_on_layer_order(arm, seed: int) -> None:
    from dataclasses import replace

    cfg = random_config(seed)
    if cfg.initial_pool_ratio is not None:
        cfg = replace(cfg, initial_pool_ratio=None)
    rng = random.Random(seed)
    found = []
    for _ in range(3):
        try:
            manager = build(arm, cfg)
        except ConfigError:
            found.append(None)
        else:
            groups = manager.get_life_cycle_pool_group_indices()
            counts = slots(manager)
            by_key = {}
            for layer in cfg.layers:
                key = lc_of(layer, cfg.tokens_per_block).key
                by_key[key] = counts[groups[manager.get_layer_group_id(layer.layer_id)]]
            found.append(by_key)
            manager.shutdown()
        shuffled = list(cfg.layers)
        rng.shuffle(shuffled)
        cfg = replace(cfg, layers=shuffled)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("seed", range(100, 116))
def test_a_constraint_batch_really_fits(make, arm, seed: int) -> None:
    """Whatever construction promises runs: every request of every constraint, at once, on an empty manager."""
    cfg = random_config(seed)
    if not cfg.constraints:
        from dataclasses import replace

        cfg = replace(cfg, constraints=[batch((200, 10), (64, 64), (33, 0))])
    try:
        manager = make(cfg)
    except ConfigError:
        pytest.skip("floors above the quota")
    for constraint in cfg.constraints:
        if constraint.system_prompt_length:
            continue  # shared blocks need reuse
        caches = [make.open(manager) for _ in constraint.kv_caches]
        for cache, desc in zip(caches, constraint.kv_caches, strict=True):
            assert cache.resize(desc.capacity, desc.history_length)
        for cache in caches:
            cache.close()


@pytest.mark.parametrize(("short", "long", "counts"), [(1 / 3, 2 / 3, (21, 32)), (0.333333, 0.666667, (21, 32))])
def test_ratios_are_read_to_six_digits(make, short: float, long: float, counts) -> None:
    """A third and two thirds of 192 and 128 KiB slots are needs of 1 : 3, however the last bits of the doubles fall."""
    layers = [one(0, 192 * 1024, 16), one(1, 128 * 1024, 16, 9)]
    manager = make(config(layers, 8 * MIB, 4, initial_pool_ratio=[short, long]))
    assert tuple(slots(manager)) == counts
