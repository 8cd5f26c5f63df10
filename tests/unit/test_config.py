"""Configuration: what is legal, what is refused and how the message names it (v2_storage §1)."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ConfigError, UnsupportedError
from kvpool.v2 import (
    AttentionLayerConfig,
    AttnLifeCycle,
    BatchDesc,
    BufferConfig,
    CacheTier,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerType,
    ReusePolicy,
    SsmLayerConfig,
    SsmLifeCycle,
    SwaScratchReuseConfig,
)

GPU = GpuCacheTierConfig(64 << 20)
NOT_COUNTS = [0, -1, True, 1.0, "8", None, math.nan, np.int64(0), np.bool_(True), 2**62 + 1]


def layer(layer_id: int = 0, window: int | None = None, sinks: int | None = None) -> AttentionLayerConfig:
    return AttentionLayerConfig(layer_id, [BufferConfig("key", 4096), BufferConfig("value", 4096)], window, sinks)


def state(layer_id: int = 9) -> SsmLayerConfig:
    return SsmLayerConfig(layer_id, [BufferConfig("state", 4096)])


def config(**fields: Any) -> KVCacheManagerConfig:
    return KVCacheManagerConfig(**{"tokens_per_block": 32, "cache_tiers": [GPU], "layers": [layer()], **fields})


# -- what is legal -----------------------------------------------------------------------------------------------------


def test_defaults_and_order_of_fields() -> None:
    names = [field.name for field in dataclasses.fields(KVCacheManagerConfig)]
    assert names[:6] == [
        "tokens_per_block",
        "cache_tiers",
        "layers",
        "max_util_for_resume",
        "enable_partial_reuse",
        "reuse_match_backoff",
    ]
    made = KVCacheManagerConfig(32, [GPU], [layer()])
    assert (made.max_util_for_resume, made.enable_partial_reuse, made.reuse_match_backoff) == (0.97, True, 0)
    assert (made.constraints, made.typical_step, made.initial_pool_ratio) == ([], None, None)
    assert not made.enable_swa_scratch_reuse
    assert (made.commit_min_snapshot, made.enable_stats, made.text_only) == (False, True, False)
    assert made.rebalance_min_sampled_kv_caches == 2000
    assert made.rebalance_moving_average_decay == 0.9999
    assert (made.pool_sizing, made.merge_equal_pools) == ("planned", True)
    assert (made.match_policy, made.retain_window_tails) == ("longest", True)
    assert (made.window_tail_slack, made.window_tail_interval) == (512, None)
    assert [field.name for field in dataclasses.fields(AttentionLayerConfig)][-1] == "reuse_policy"
    assert layer().reuse_policy is ReusePolicy.REQUIRED
    assert config().constraints is not config().constraints


def test_positional_and_keyword_forms() -> None:
    assert BufferConfig("key", 8, 16) == BufferConfig(role="key", size=8, tokens_per_block_override=16)
    assert layer(1, 128, 4) == AttentionLayerConfig(
        layer_id=1,
        buffers=[BufferConfig("key", 4096), BufferConfig("value", 4096)],
        sliding_window_size=128,
        num_sink_tokens=4,
    )
    assert KVCacheDesc(5, 4) == KVCacheDesc(capacity=5, history_length=4)
    assert BatchDesc([KVCacheDesc(5, 4)]) == BatchDesc(kv_caches=[KVCacheDesc(5, 4)], system_prompt_length=0)
    assert SwaScratchReuseConfig().max_rewind_len == 0
    assert layer(0, 64).window_size == 64
    assert not hasattr(state(), "window_size")
    assert not hasattr(state(), "sliding_window_size")
    assert (layer().layer_type, state().layer_type) == (LayerType.ATTENTION, LayerType.SSM)


def test_tiers(tmp_path: Path) -> None:
    tiers = [GPU, HostCacheTierConfig(1), DiskCacheTierConfig(quota=1, path=str(tmp_path))]
    assert [tier.tier for tier in tiers] == [CacheTier.GPU_MEM, CacheTier.HOST_MEM, CacheTier.DISK]
    for tier in tiers:
        tier.assert_valid()
    assert DiskCacheTierConfig(1, tmp_path).path == str(tmp_path)  # type: ignore[arg-type]
    assert config(cache_tiers=tiers).cache_tiers == tiers


def test_copy_replace_pickle() -> None:
    made = config(
        constraints=[BatchDesc([KVCacheDesc(8, 0)], 4)],
        layers=[layer(), state()],
        commit_min_snapshot=True,
        swa_scratch_reuse=SwaScratchReuseConfig(3),
    )
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made)) == copy.copy(made)
    assert dataclasses.replace(made, cache_tiers=[GpuCacheTierConfig(1)]).cache_tiers[0].quota == 1
    batch = made.constraints[0]
    assert dataclasses.replace(batch, kv_caches=[]) == BatchDesc([], 4)
    with pytest.raises(ConfigError):
        dataclasses.replace(made, layers=[layer(), layer()])


def test_mutable_and_frozen() -> None:
    made = config()
    made.layers[0].buffers[0].size = 1
    made.tokens_per_block = 16
    made.validate()
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVCacheDesc(1, 0).capacity = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchDesc([]).kv_caches = []  # type: ignore[misc]
    with pytest.raises(AttributeError):
        made.no_such_field = 1  # type: ignore[attr-defined]


def test_numpy_numbers_become_plain() -> None:
    made = config(
        tokens_per_block=np.int32(32),
        cache_tiers=(GpuCacheTierConfig(np.int64(1 << 30)),),
        layers=(AttentionLayerConfig(np.int16(3), (BufferConfig("key", np.uint64(64), np.int8(16)),), np.int64(128)),),
        max_util_for_resume=np.float64(1),
        enable_stats=np.bool_(False),
    )
    assert type(made.tokens_per_block) is type(made.cache_tiers[0].quota) is type(made.layers[0].layer_id) is int
    assert type(made.layers) is type(made.layers[0].buffers) is list
    assert type(made.layers[0].buffers[0].tokens_per_block_override) is int
    assert made.max_util_for_resume == 1.0
    assert type(made.max_util_for_resume) is float
    assert made.enable_stats is False
    made = config(window_tail_slack=np.int64(0), window_tail_interval=np.int8(7), retain_window_tails=np.bool_(False))
    assert (made.window_tail_slack, made.window_tail_interval, made.retain_window_tails) == (0, 7, False)
    assert type(made.window_tail_slack) is type(made.window_tail_interval) is int


def test_edges_that_are_legal() -> None:
    assert layer(0, 2**31 - 1).window_size == 2**31 - 1
    assert layer(0, None, 0).num_sink_tokens == 0
    assert config(layers=[]).life_cycles() == []
    assert config(max_util_for_resume=1).max_util_for_resume == 1.0
    assert config(initial_pool_ratio=(1,)).initial_pool_ratio == [1.0]
    assert KVCacheDesc(0, 0) == KVCacheDesc(capacity=0, history_length=0)
    config(initial_pool_ratio=[0.5 + 4e-7, 0.5], layers=[layer(), layer(1, 64)])


def test_life_cycles_in_order_of_first_mention() -> None:
    layers = [layer(0, 64), state(1), layer(2), layer(3, 64, 1), layer(4, 64, 32), layer(5, 64, 0), state(6)]
    made = config(layers=layers, commit_min_snapshot=True)
    assert made.life_cycles() == [
        AttnLifeCycle(64, 0),
        SsmLifeCycle(),
        AttnLifeCycle(None, 0),
        AttnLifeCycle(64, 1),
    ]


def test_reuse_policy() -> None:
    assert (ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL) == (0, 1)
    optional = dataclasses.replace(layer(1, 64), reuse_policy=1)  # type: ignore[type-var]
    assert optional.reuse_policy is ReusePolicy.OPTIONAL
    made = config(layers=[layer(0, 64), optional, layer(2, 64), dataclasses.replace(optional, layer_id=3)])
    assert made.life_cycles() == [AttnLifeCycle(64, 0), AttnLifeCycle(64, 0, optional=True)]  # ours: not one group
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))
    for value in (2, -1, True, None, "OPTIONAL", 1.0):
        with pytest.raises(
            ConfigError,
            match=rf"AttentionLayerConfig\(3\)\.reuse_policy must be ReusePolicy\.REQUIRED or .*, not {value!r}",
        ):
            dataclasses.replace(layer(3), reuse_policy=value)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_byte_counts(value: Any, tmp_path: Path) -> None:
    for make, field in (
        (lambda: GpuCacheTierConfig(value), "GpuCacheTierConfig.quota"),
        (lambda: HostCacheTierConfig(value), "HostCacheTierConfig.quota"),
        (lambda: DiskCacheTierConfig(value, str(tmp_path)), "DiskCacheTierConfig.quota"),
        (lambda: BufferConfig("key", value), "BufferConfig('key').size"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert field in str(caught.value)
        assert repr(value) in str(caught.value)
        assert "from 1 to" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "x", 2**31], ids=repr)
def test_lengths(value: Any) -> None:
    with pytest.raises(ConfigError, match="tokens_per_block must be"):
        config(tokens_per_block=value)
    with pytest.raises(ConfigError, match="tokens_per_block_override must be"):
        BufferConfig("key", 1, value)
    with pytest.raises(ConfigError, match=r"AttentionLayerConfig\(0\)\.sliding_window_size must be"):
        layer(0, value)
    with pytest.raises(ConfigError, match="num_sink_tokens must be"):
        layer(0, 64, value if value else -1)
    with pytest.raises(ConfigError, match="layer_id must be"):
        layer(value if value else -1)
    with pytest.raises(ConfigError, match="max_rewind_len must be"):
        SwaScratchReuseConfig(value if value else -1)
    with pytest.raises(ConfigError, match="reuse_match_backoff must be"):
        config(reuse_match_backoff=value if value else -1)
    with pytest.raises(ConfigError, match="window_tail_slack must be an integer from 0"):
        config(window_tail_slack=value if value else -1)
    with pytest.raises(ConfigError, match="window_tail_interval must be an integer from 0"):
        config(window_tail_interval=value if value else -1)


def test_layers() -> None:
    with pytest.raises(
        ConfigError, match=r"AttentionLayerConfig\(0\)\.num_sink_tokens must be .*sliding_window_size, not 4"
    ):
        layer(0, None, 4)
    with pytest.raises(ConfigError, match=r"AttentionLayerConfig\(7\).*role 'key' twice"):
        AttentionLayerConfig(7, [BufferConfig("key", 1), BufferConfig("key", 2)])
    with pytest.raises(ConfigError, match="role 'state' twice"):
        SsmLayerConfig(7, [BufferConfig("state", 1), BufferConfig("state", 2)])
    with pytest.raises(ConfigError, match="layer_id 3 twice"):
        config(layers=[layer(3), layer(3, 64)])
    with pytest.raises(
        ConfigError, match=r"layer 0.*tokens_per_block_override must divide tokens_per_block = 32, not 12"
    ):
        config(layers=[AttentionLayerConfig(0, [BufferConfig("key", 1, 12)])])
    with pytest.raises(ConfigError, match="must divide"):
        config(layers=[AttentionLayerConfig(0, [BufferConfig("key", 1, 64)])])
    with pytest.raises(ConfigError, match=r"SsmLayerConfig\(1\).*tokens_per_block_override must be None .*not 32"):
        SsmLayerConfig(1, [BufferConfig("state", 1, 32)])
    with pytest.raises(ConfigError, match="commit_min_snapshot must be True"):
        config(layers=[layer(), state()])
    with pytest.raises(ConfigError, match="layer 0 has no buffers"):
        config(layers=[AttentionLayerConfig(0, [])])
    with pytest.raises(ConfigError, match=r"layers\[1\] must be .*not 'x'"):
        config(layers=[layer(), "x"])
    with pytest.raises(ConfigError, match=r"buffers\[0\]"):
        AttentionLayerConfig(0, [("key", 1)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="role"):
        BufferConfig(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bytes per block"):
        config(layers=[AttentionLayerConfig(0, [BufferConfig("key", 2**61, 1)])])


def test_tier_rules(tmp_path: Path) -> None:
    for tiers in ([], [HostCacheTierConfig(1), GPU], None, GPU, [1]):
        with pytest.raises(ConfigError, match="cache_tiers"):
            config(cache_tiers=tiers)
    for path in (str(tmp_path / "missing"), __file__, None, 3, ""):
        with pytest.raises(ConfigError, match=r"DiskCacheTierConfig\.path must be an existing directory, not "):
            DiskCacheTierConfig(1, path)  # type: ignore[arg-type]


def test_workload() -> None:
    with pytest.raises(ConfigError, match="history_length must be at most the capacity 4, not 5"):
        KVCacheDesc(4, 5)
    for capacity, history in ((-1, 0), (0, -1), (True, 0), (2.0, 0), (2**31, 0)):
        with pytest.raises(ConfigError):
            KVCacheDesc(capacity, history)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="system_prompt_length must be .*, not -1"):
        BatchDesc([], -1)
    with pytest.raises(ConfigError, match=r"kv_caches\[0\]"):
        BatchDesc([(1, 0)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"constraints\[0\]"):
        config(constraints=[KVCacheDesc(1, 0)])
    with pytest.raises(ConfigError, match="typical_step"):
        config(typical_step=[KVCacheDesc(1, 0)])
    with pytest.raises(ConfigError, match="swa_scratch_reuse"):
        config(swa_scratch_reuse=True)


@pytest.mark.parametrize("value", [0, -0.1, 1.1, math.nan, math.inf, -math.inf, True, "0.9", None, 10**400], ids=str)
def test_max_util_for_resume(value: Any) -> None:  # scenario 73
    with pytest.raises(ConfigError, match=r"max_util_for_resume must be in \(0, 1\], not "):
        config(max_util_for_resume=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rebalance_min_sampled_kv_caches", -1),
        ("rebalance_cooldown_secs", -0.5),
        ("rebalance_cooldown_secs", math.inf),
        ("rebalance_cooldown_secs", math.nan),
        ("rebalance_target_ratio_update_interval", 0),
        ("rebalance_ratio_threshold", 1.0),
        ("rebalance_ratio_threshold", math.inf),
        ("rebalance_moving_average_decay", 0.0),
        ("rebalance_moving_average_decay", 1.0),
        ("rebalance_moving_average_decay", math.nan),
    ],
)
def test_rebalance_values(field: str, value: Any) -> None:  # scenario 98
    with pytest.raises(AssertionError, match=f"{field} must be .*, not {value}"):
        config(**{field: value})


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        ([0.5], "must have one entry per layer group, not 1"),
        ([0.2, 0.3, 0.5], "not 3"),
        ([], "not 0"),
        ([0.0, 1.0], r"initial_pool_ratio\[0\] must be .*, not 0.0"),
        ([1.5, -0.5], r"initial_pool_ratio\[1\] must be .*, not -0.5"),
        ([math.nan, 1.0], r"\[0\] must be .*, not nan"),
        ([math.inf, 1.0], r"\[0\] must be .*, not inf"),
        ([True, 1.0], r"\[0\] must be .*, not True"),
        ([0.5, 0.50001], "must sum to 1"),
        (0.5, "must be None or a list"),
    ],
)
def test_initial_pool_ratio(ratio: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        config(initial_pool_ratio=ratio, layers=[layer(), layer(1, 64)])
    assert isinstance(caught.value, ValueError)


def test_switches() -> None:
    for field in (
        "enable_partial_reuse",
        "commit_min_snapshot",
        "enable_stats",
        "text_only",
        "merge_equal_pools",
        "retain_window_tails",
    ):
        for value in (1, 0, None, "yes"):
            with pytest.raises(ConfigError, match=f"{field} must be True or False, not {value!r}"):
                config(**{field: value})
    with pytest.raises(ConfigError, match="'planned' or 'elastic'"):
        config(pool_sizing="breathing")
    for value in ("shortest", "", None, 1):
        with pytest.raises(
            ConfigError, match=rf"KVCacheManagerConfig\.match_policy must be 'longest' or 'reference', not {value!r}"
        ):
            config(match_policy=value)


def test_errors_are_value_and_assertion_errors() -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind):
            GpuCacheTierConfig(0)


# -- at the manager ----------------------------------------------------------------------------------------------------


def test_manager_checks_again(backend: str) -> None:
    made = config()
    made.layers[0].buffers[1].role = "key"
    with pytest.raises(ConfigError, match="role 'key' twice"):
        KVCacheManager(made, backend=backend, device="virtual")
    made = config(layers=[layer(0), layer(1)])
    made.layers[1].layer_id = 0
    with pytest.raises(ConfigError, match="layer_id 0 twice"):
        KVCacheManager(made, backend=backend, device="virtual")
    made = config()
    made.tokens_per_block = 0
    with pytest.raises(ConfigError, match="tokens_per_block must be .*not 0"):
        KVCacheManager(made, backend=backend, device="virtual")


def test_manager_copies_the_configuration(backend: str) -> None:
    made = config(cache_tiers=[GpuCacheTierConfig(64 << 20)])
    with KVCacheManager(made, backend=backend, device="virtual") as manager:
        made.tokens_per_block = 8
        made.layers[0].buffers[0].size = 1
        made.cache_tiers[0].quota = 5
        assert manager.tokens_per_block == 32
        assert manager.init_config.layers[0].buffers[0].size == 4096
        assert manager.get_quota(0) == 64 << 20


def test_init_config_is_in_order_of_ids(backend: str) -> None:
    layers = [layer(2, 64), layer(0), layer(1, 128)]
    with KVCacheManager(config(layers=layers), backend=backend, device="virtual") as manager:
        assert [one.layer_id for one in manager.init_config.layers] == [0, 1, 2]
        assert list(manager.layer_ids) == [2, 0, 1]
        assert [list(group) for group in manager.layer_grouping] == [[2], [0], [1]]
    with KVCacheManager(config(layers=[layer(5), layer(2)]), backend=backend, device="virtual") as manager:
        assert [one.layer_id for one in manager.init_config.layers] == [5, 2]


def test_not_built_yet(backend: str, tmp_path: Path) -> None:
    host = config(cache_tiers=[GPU, HostCacheTierConfig(1 << 20)])
    disk = config(cache_tiers=[GPU, DiskCacheTierConfig(1 << 20, str(tmp_path))])
    for made in (host, disk):
        with pytest.raises(UnsupportedError, match="cold tiers are not built yet"):
            KVCacheManager(made, backend=backend, device="virtual")
    with pytest.raises(UnsupportedError, match="elastic"):
        KVCacheManager(config(pool_sizing="elastic"), backend=backend, device="virtual")
    with pytest.raises(UnsupportedError, match="events"):
        KVCacheManager(config(), object(), backend=backend, device="virtual")
    with pytest.raises(UnsupportedError, match="cold_page_codec"):
        KVCacheManager(config(), cold_page_codec=object(), backend=backend, device="virtual")
    with pytest.raises(TypeError, match="KVCacheManagerConfig"):
        KVCacheManager({"tokens_per_block": 32}, backend=backend)  # type: ignore[arg-type]
