"""Every kind of bad input the issue lists: a clear error that names the argument, and nothing changed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvpool.errors import ConfigError, OutOfMemoryError, UnsupportedError
from kvpool.v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from tests.support.arms import BACKEND_OF, build
from tests.support.configs import MIB, attention, config, full, one, ssm

NAN, INF = math.nan, math.inf


def refused(arm, make_config, match: str, error=ConfigError) -> None:
    with pytest.raises(error, match=match):
        build(arm, make_config())


def test_layers_that_overlap(arm) -> None:
    refused(arm, lambda: config([attention(0), attention(0)], 32 * MIB), r"(?i)layer.*0")
    refused(arm, lambda: config([attention(3), ssm(3, 64)], 32 * MIB), r"(?i)layer.*3")
    roles = [BufferConfig("key", 64), BufferConfig("key", 64)]
    refused(arm, lambda: config([AttentionLayerConfig(1, roles)], 32 * MIB), "key")
    refused(arm, lambda: config([SsmLayerConfig(1, roles)], 32 * MIB), "key")


@pytest.mark.parametrize("size", [0, -1, -(2**40)])
def test_sizes_not_positive(arm, size) -> None:
    refused(arm, lambda: config([one(0, size)], 32 * MIB), "(?i)size")
    refused(arm, lambda: config([ssm(0, size)], 32 * MIB), "(?i)size")
    refused(arm, lambda: config([attention(0)], size), "(?i)quota")
    refused(arm, lambda: config([attention(0)], 32 * MIB, tpb=size), "tokens_per_block")
    for tier in (GpuCacheTierConfig, HostCacheTierConfig):
        with pytest.raises(ConfigError, match="(?i)quota"):
            tier(quota=size)


@pytest.mark.parametrize("size", [1.5, "1", None, True])
def test_sizes_of_a_wrong_type(arm, size) -> None:
    wrong = (ConfigError, TypeError)
    with pytest.raises(wrong):
        build(arm, config([one(0, size)], 32 * MIB))
    with pytest.raises(wrong):
        build(arm, config([attention(0)], size))


def test_sizes_past_64_bits(arm) -> None:
    refused(arm, lambda: config([one(0, 2**64)], 32 * MIB), "(?i)size|bytes")
    refused(arm, lambda: config([one(0, 2**62), one(1, 2**62)], 2**62), "(?i)bytes|quota|size")
    refused(arm, lambda: config([attention(0)], 2**64), "(?i)quota")


@pytest.mark.parametrize("window", [0, -1, -(2**31)])
def test_windows_not_positive(arm, window) -> None:
    refused(arm, lambda: config([attention(0, window=window)], 32 * MIB), "(?i)window")


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**62])
def test_huge_windows_meet_the_quota(arm, window) -> None:
    """No 32-bit wrap: the floor of such a window is above any quota, and the error says so (or the field is refused)."""
    refused(arm, lambda: config([attention(0, window=window)], 32 * MIB), "(?i)floor|window")


def test_huge_window_beside_full_attention_is_sized_by_its_floor(arm) -> None:
    with pytest.raises(ConfigError) as caught:
        build(arm, config([attention(0, window=2**31 - 1), attention(1, 4096)], 32 * MIB))
    assert str((2**31 - 1 + 30) // 32 + 1) in str(caught.value).replace(",", "").replace("_", "")


def test_sinks(arm) -> None:
    refused(arm, lambda: config([attention(0, window=64, sinks=-1)], 32 * MIB), "(?i)sink")
    refused(arm, lambda: config([attention(0, sinks=4)], 32 * MIB), "(?i)sink")
    manager = build(arm, config([attention(0, sinks=0), attention(1, window=64, sinks=0)], 32 * MIB))
    manager.shutdown()


@pytest.mark.parametrize("override", [0, -1, 3, 33, 64, 5])
def test_overrides(arm, override) -> None:
    layer = lambda: AttentionLayerConfig(0, [BufferConfig("key", 64, override)])  # noqa: E731
    refused(arm, lambda: config([layer()], 32 * MIB), "tokens_per_block_override")


def test_override_on_state(arm) -> None:
    refused(
        arm,
        lambda: config([SsmLayerConfig(0, [BufferConfig("s", 64, 16)])], 32 * MIB),
        "tokens_per_block_override",
    )


@pytest.mark.parametrize(
    "ratio",
    [[NAN, 0.5], [INF, 0.5], [0.5, -INF], [1.0, 0.0], [1.5, -0.5], [0.5, 0.6], [1.0], [0.2, 0.3, 0.5], [], [NAN, NAN]],
)
def test_ratios(arm, ratio) -> None:
    layers = [attention(0, window=64), attention(1, 4096)]
    refused(arm, lambda: config(layers, 32 * MIB, initial_pool_ratio=ratio), "initial_pool_ratio")
    with pytest.raises(ValueError, match="initial_pool_ratio"):
        build(arm, config(layers, 32 * MIB, initial_pool_ratio=ratio))


REBALANCE = [
    ("rebalance_min_sampled_kv_caches", -1),
    ("rebalance_cooldown_secs", -1.0),
    ("rebalance_cooldown_secs", INF),
    ("rebalance_cooldown_secs", NAN),
    ("rebalance_target_ratio_update_interval", 0),
    ("rebalance_ratio_threshold", 1.0),
    ("rebalance_ratio_threshold", INF),
    ("rebalance_ratio_threshold", NAN),
    ("rebalance_moving_average_decay", 0.0),
    ("rebalance_moving_average_decay", 1.0),
    ("rebalance_moving_average_decay", NAN),
    ("reuse_match_backoff", -1),
    ("pool_sizing", "magic"),
]


@pytest.mark.parametrize(("field", "value"), REBALANCE)
def test_other_fields(arm, field, value) -> None:
    refused(arm, lambda: full(4, **{field: value}), field)


def test_workload_descriptions() -> None:
    for capacity, history in ((-1, 0), (1, -1), (1, 2)):
        with pytest.raises(ConfigError, match="(?i)capacity|history"):
            KVCacheDesc(capacity, history)
    with pytest.raises(ConfigError, match="system_prompt_length"):
        BatchDesc([KVCacheDesc(1, 0)], -1)
    with pytest.raises(ConfigError, match="max_rewind_len"):
        SwaScratchReuseConfig(-1)


def test_tiers(arm, tmp_path) -> None:
    layers = [attention(0)]
    refused(arm, lambda: KVCacheManagerConfig(32, [], layers), "cache_tiers")
    refused(arm, lambda: KVCacheManagerConfig(32, [HostCacheTierConfig(MIB)], layers), "(?i)cache_tiers")
    with pytest.raises(ConfigError, match="path"):
        DiskCacheTierConfig(MIB, str(tmp_path / "nowhere"))
    two = [GpuCacheTierConfig(32 * MIB), HostCacheTierConfig(32 * MIB)]
    refused(arm, lambda: KVCacheManagerConfig(32, two, layers), "(?i)tier", UnsupportedError)


def test_fields_changed_after_construction_are_checked_again(arm) -> None:
    cfg = full(4)
    cfg.max_util_for_resume = 7.0
    refused(arm, lambda: cfg, "max_util_for_resume")
    cfg = full(4)
    cfg.layers[0].sliding_window_size = -5
    refused(arm, lambda: cfg, "(?i)window")


def test_the_manager_keeps_a_copy(make) -> None:
    cfg = full(4)
    manager = make(cfg)
    cfg.layers.clear()
    cfg.tokens_per_block = 1
    assert manager.tokens_per_block == 32
    assert manager.init_config.layers[0].layer_id == 0
    replaced = dataclasses.replace(manager.init_config, commit_min_snapshot=True)
    assert replaced.commit_min_snapshot is True


def test_constructor_arguments(arm) -> None:
    backend = BACKEND_OF[arm]
    with pytest.raises(TypeError, match="config"):
        KVCacheManager({"tokens_per_block": 32}, backend=backend, device="virtual")
    with pytest.raises(ConfigError, match="auto.*host.*virtual.*sim.*cuda"):
        KVCacheManager(full(4), backend=backend, device="gpu")
    with pytest.raises(UnsupportedError, match="(?i)cuda"):
        KVCacheManager(full(4), backend=backend, device="cuda")
    with pytest.raises(ValueError, match="cpp.*python|python.*cpp"):
        KVCacheManager(full(4), backend="rust", device="virtual")


def test_backend_from_the_environment(arm, monkeypatch) -> None:
    name = "TLLM_KV_CACHE_MANAGER_V2_BACKEND"
    monkeypatch.setenv(name, BACKEND_OF[arm])
    manager = KVCacheManager(full(4), device="virtual")
    assert manager.backend == BACKEND_OF[arm]
    manager.shutdown()
    monkeypatch.setenv(name, "fortran")
    with pytest.raises(ValueError, match="cpp.*python|python.*cpp"):
        KVCacheManager(full(4), device="virtual")
    explicit = KVCacheManager(full(4), backend=BACKEND_OF[arm], device="virtual")  # an argument wins
    assert explicit.backend == BACKEND_OF[arm]
    explicit.shutdown()


def test_auto_device_has_bytes_here(make) -> None:
    manager = make(full(4), "auto")
    assert manager.device == "host"


def test_create_arguments(make) -> None:
    manager = make(full(4))
    before = manager.snapshot()
    for bad in (["x"], [1.5], [-1], [2**31], [b"short"], 5):
        with pytest.raises((TypeError, ValueError)):
            manager.create_kv_cache(None, bad)
    for scope in ("scope", 3):
        with pytest.raises((TypeError, ValueError)):
            manager.create_kv_cache(scope)
    assert manager.snapshot() == before


def test_level_arguments(make) -> None:
    manager = make(full(4))
    for call in (manager.get_quota, manager.get_storage_statistics, manager.get_life_cycle_pool_group_indices):
        for level in (1, -1):
            with pytest.raises((ValueError, LookupError), match="(?i)level"):
                call(level)
        with pytest.raises(TypeError):
            call("hot")


def test_memory_that_can_not_be_had(arm) -> None:
    """4 PiB of host memory: a typed error, nothing kept, and the next manager is fine."""
    layer = AttentionLayerConfig(0, [BufferConfig("key", 2**50)])
    with pytest.raises(OutOfMemoryError):
        build(arm, config([layer], 2**52), "host")
    planned = build(arm, config([layer], 2**52), "virtual")  # a plan needs no memory
    assert planned.pool_group_descs[0].num_slots == 4
    planned.shutdown()
    manager = build(arm, full(4), "host")
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(128)
    cache.close()
    manager.shutdown()
