"""Sharding, storage types, layers of a cache configuration, live bytes, bad input."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.models import (
    PRESETS,
    ROLES,
    AttentionLayer,
    CompressedLayer,
    MlaLayer,
    ModelGeometry,
    ModelParameters,
    NoCacheLayer,
    StateLayer,
    config_for,
    get_model,
)
from kvpool.v2.config import AttentionLayerConfig, BatchDesc, KVCacheDesc, KVCacheManagerConfig, SsmLayerConfig

GIB = 1 << 30


def sizes(config: AttentionLayerConfig | SsmLayerConfig) -> dict[str, int]:
    return {buffer.role: buffer.size for buffer in config.buffers}


# ---- tensor parallelism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "sliding", "full"), [(1, 16384, 8192), (2, 8192, 4096), (4, 4096, 2048), (8, 2048, 2048)]
)
def test_gemma_4_31b_ratio_changes_with_tp(tp: int, sliding: int, full: int) -> None:
    model = get_model("gemma-4-31b").shard(tp=tp)
    assert model.bytes_per_token() == 50 * sliding + 10 * full
    configs = model.layer_configs(32)
    assert sum(sizes(configs[0]).values()) == sliding * 32
    assert sum(sizes(configs[5]).values()) == full * 32


def test_gemma_4_heads_at_tp_8() -> None:
    layers = get_model("gemma-4-31b").shard(tp=8).layers
    assert [layer.kv_heads for layer in layers[4:6]] == [2, 1]  # type: ignore[union-attr]
    for name in ("gpt-oss-120b", "gemma-3-27b"):
        assert {layer.kv_heads for layer in get_model(name).shard(tp=16).layers} == {1}  # type: ignore[union-attr]


@pytest.mark.parametrize(("heads", "tp"), [(8, 3), (6, 4), (3, 8), (4, 6)])
def test_heads_that_do_not_divide(heads: int, tp: int) -> None:
    model = ModelGeometry("m", 1024, (AttentionLayer(heads, 64),))
    with pytest.raises(ConfigError, match=f"{heads} KV heads .* tp={tp}"):
        model.shard(tp=tp)
    assert model.shard(tp=tp, attention_dp=True).bytes_per_token() == model.bytes_per_token()


def test_latents_are_replicated() -> None:
    for name in ("deepseek-v3", "deepseek-v3.2", "deepseek-v4-flash", "glm-5"):
        model = get_model(name)
        assert model.shard(tp=8).bytes_per_token() == model.bytes_per_token()


def test_states_are_divided() -> None:
    qwen = get_model("qwen3.5-35b-a3b")
    assert qwen.shard(tp=4).state_bytes_per_sequence() * 4 == qwen.state_bytes_per_sequence()
    assert qwen.shard(tp=4).bytes_per_token() == 10 * 1024  # 2 heads, one replicated
    assert qwen.shard(tp=32).layers[0] == StateLayer("gdn", ((1, 256), (1, 128)), 4, (1, 128, 128))
    assert qwen.shard(tp=4, attention_dp=True).state_bytes_per_sequence() == qwen.state_bytes_per_sequence()
    nano = get_model("nemotron-3-nano-30b-a3b").shard(tp=16).layers[0]
    assert isinstance(nano, StateLayer)
    assert nano.conv_dim == 4 * 64 + 2 * 1 * 128  # 8 groups, replicated
    with pytest.raises(ConfigError, match=r"96 state heads .* tp=64"):
        get_model("kimi-k3").shard(tp=64)


# ---- pipeline parallelism ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("pp", [1, 3, 8])
def test_pipeline_ranks_cover_the_model(name: str, pp: int) -> None:
    model = get_model(name, mtp_layers=1)
    ranks = [model.shard(pp=pp, pp_rank=rank) for rank in range(pp)]
    assert [i for rank in ranks for i in rank.global_layer_ids] == list(range(model.num_layers + 1))
    assert tuple(layer for rank in ranks for layer in rank.layers) == model.layers
    assert [len(rank.draft_layers) for rank in ranks] == [0] * (pp - 1) + [1]
    assert sum(rank.bytes_per_token() for rank in ranks) == model.bytes_per_token()
    assert sum(rank.state_bytes_per_sequence() for rank in ranks) == model.state_bytes_per_sequence()
    block = model.default_tokens_per_block
    ids = [c.layer_id for rank in ranks for c in rank.layer_configs(block, global_ids=True)]
    assert ids == [c.layer_id for c in model.layer_configs(block)] == list(range(len(ids)))
    for rank in ranks:
        configs = rank.layer_configs(block)
        assert [c.layer_id for c in configs] == [ref.layer_id for ref in rank.cache_layers()]
        assert [c.layer_id for c in configs] == list(range(len(configs)))


def test_uneven_and_empty_ranks() -> None:
    model = get_model("qwen3-8b")
    assert [model.shard(pp=5, pp_rank=r).num_layers for r in range(5)] == [8, 7, 7, 7, 7]
    assert [model.shard(pp=3, pp_rank=r, pp_layers=[30, 0, 6]).num_layers for r in range(3)] == [30, 0, 6]
    empty = ModelGeometry("m", 1024, (AttentionLayer(1, 64),) * 2).shard(pp=4, pp_rank=3)
    assert empty.layer_configs(32) == []
    assert empty.bytes_per_token() == empty.state_bytes_per_sequence() == empty.kv_read_bytes(100) == 0
    assert config_for(empty, quota=GIB).layers == []
    for bad in ([36], [36, 1, 0], [37, 0, -1], [12, 12, 11]):
        with pytest.raises(ConfigError, match="pp_layers"):
            model.shard(pp=3, pp_layers=bad)


def test_pattern_longer_than_the_rank() -> None:  # B006: only groups with a local layer exist
    model = get_model("gemma-3-27b").shard(pp=15, pp_rank=1, pp_layers=[6, 4, *[4] * 13])
    configs = model.layer_configs(32)
    assert {c.sliding_window_size for c in configs} == {1024}  # type: ignore[union-attr]
    assert len(config_for(model, quota=GIB).life_cycles()) == 1


@pytest.mark.parametrize(
    "arguments", [{"tp": 0}, {"tp": 2, "tp_rank": 2}, {"pp": 0}, {"pp": 2, "pp_rank": 2}, {"tp_rank": -1}]
)
def test_ranks_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tp|pp"):
        get_model("qwen3-8b").shard(**arguments)


def test_shard_once() -> None:
    model = get_model("qwen3-8b").shard(tp=2, tp_rank=1)
    assert model.sharding is not None
    assert model.sharding.tp_rank == 1
    with pytest.raises(ConfigError, match="already sharded"):
        model.shard(tp=2)
    with pytest.raises(ConfigError, match="before shard"):
        model.with_draft_layers(1)
    with pytest.raises(TypeError, match="tp must be an integer"):
        get_model("qwen3-8b").shard(tp=True)


# ---- storage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2048), ("float16", 2048), ("float32", 4096), ("fp8", 1024), ("nvfp4", 576)]
)
def test_kv_dtypes(dtype: str, size: int) -> None:
    model = get_model("gpt-oss-120b")
    assert model.bytes_per_token(kv_dtype=dtype) == 36 * size
    assert sum(sizes(model.layer_configs(32, kv_dtype=dtype)[0]).values()) == size * 32


def test_nvfp4_scales_are_buffers() -> None:
    config = get_model("qwen3-8b").layer_configs(32, kv_dtype="nvfp4")[0]
    assert sizes(config) == {
        "key": 512 * 32,
        "value": 512 * 32,
        "key_block_scale": 64 * 32,
        "value_block_scale": 64 * 32,
    }
    with pytest.raises(ConfigError, match="multiple of 16"):
        ModelGeometry("m", 1024, (AttentionLayer(1, 24),)).layer_configs(32, kv_dtype="nvfp4")


def test_index_keys() -> None:
    model = get_model("deepseek-v3.2")
    assert sizes(model.layer_configs(64)[0]) == {"key": 1152 * 64, "index_key": 256 * 64}
    assert sizes(model.layer_configs(64, kv_dtype="fp8")[0]) == {"key": 576 * 64, "index_key": 132 * 64}
    assert model.bytes_per_token(store_index_keys=False) == 61 * 1152
    minimax = get_model("minimax-m3")
    assert minimax.bytes_per_token() == 60 * 2048
    assert minimax.bytes_per_token(store_index_keys=True) == 60 * 2048 + 57 * 256


def test_shared_keys_and_values() -> None:
    model = get_model("gemma-4-31b")
    assert model.bytes_per_token(store_shared_kv=True) == 50 * 16384 + 10 * 4096
    assert list(sizes(model.layer_configs(32, store_shared_kv=True)[5])) == ["key"]
    assert list(sizes(model.layer_configs(32)[5])) == ["key", "value"]
    assert get_model("gemma-4-26b-a4b").bytes_per_token(store_shared_kv=True) == 25 * 8192 + 5 * 2048


def test_asymmetric_heads() -> None:
    sliding, whole = get_model("mimo-v2-flash").layer_configs(32)[1::-1]
    assert sizes(sliding) == {"key": 8 * 192 * 2 * 32, "value": 8 * 128 * 2 * 32}
    assert sizes(whole) == {"key": 4 * 192 * 2 * 32, "value": 4 * 128 * 2 * 32}


@pytest.mark.parametrize("name", PRESETS)
def test_roles_are_documented(name: str) -> None:
    for config in get_model(name).layer_configs(128, kv_dtype="nvfp4", store_index_keys=True):
        assert sizes(config).keys() <= ROLES.keys()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype='int4' is unknown; legal: bfloat16, float16, float32, fp8, nvfp4"),
        ({"state_dtype": "nvfp4"}, "state_dtype='nvfp4'"),
        ({"conv_dtype": ""}, "conv_dtype=''"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"kernel_tokens_per_block": 24}, "kernel_tokens_per_block=24 must divide"),
    ],
)
def test_bad_storage(call: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        get_model("qwen3-next-80b-a3b").layer_configs(32, **call)


def test_bad_block() -> None:
    model = get_model("qwen3-8b")
    with pytest.raises(ConfigError, match="tokens_per_block=0"):
        model.layer_configs(0)
    with pytest.raises(TypeError, match="tokens_per_block"):
        model.layer_configs(32.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kv_dtype"):
        model.layer_configs(32, kv_dtype=2)  # type: ignore[arg-type]


# ---- windows, states, compressed layers ----------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "groups"), [(None, 2), (129, 2), (128, 1), (64, 1)])
def test_window_of_max_seq_len_is_full(limit: int | None, groups: int) -> None:
    configs = get_model("gpt-oss-20b").layer_configs(32, max_seq_len=limit)
    assert len({c.sliding_window_size for c in configs}) == groups  # type: ignore[union-attr]


def test_state_is_not_inflated() -> None:  # B016: 12 tokens take one block of 192 KiB and 46.8 MiB of state
    config = config_for("nemotron-3-nano-30b-a3b", quota=GIB)
    attention = [layer for layer in config.layers if isinstance(layer, AttentionLayerConfig)]
    states = [layer for layer in config.layers if isinstance(layer, SsmLayerConfig)]
    assert config.tokens_per_block == 32
    assert sum(b.size for layer in attention for b in layer.buffers) == 192 << 10
    assert [sum(b.size for b in layer.buffers) for layer in states] == [2134016] * 23
    assert sizes(states[0]) == {"conv_state": 6144 * 3 * 2, "ssm_state": 64 * 64 * 128 * 4}
    assert config.commit_min_snapshot


def test_layer_references() -> None:
    model = get_model("nemotron-3-nano-30b-a3b")
    refs = model.cache_layers()
    assert [ref.layer_id for ref in refs] == list(range(29))
    assert [ref.model_layer for ref in refs[:4]] == [0, 2, 4, 5]
    assert [ref.part for ref in refs[:4]] == ["state", "state", "state", "kv"]


def test_deepseek_v4_layers() -> None:
    model = get_model("deepseek-v4-flash")
    configs = model.layer_configs(128)
    assert [(r.model_layer, r.part) for r in model.cache_layers()[:5]] == [
        (0, "window"),
        (1, "window"),
        (2, "window"),
        (2, "compressed"),
        (3, "window"),
    ]
    assert len(configs) == 43 + 41
    windows = [c.sliding_window_size for c in configs[:6]]  # type: ignore[union-attr]
    assert windows == [128, 128, 128, None, 128, None]
    assert sizes(configs[0]) == {"key": 128 * 1024}
    assert sizes(configs[3]) == {"key": 32 * 1024, "index_key": 32 * 256}
    assert sizes(configs[5]) == {"key": 1024}
    assert sizes(model.layer_configs(256, kv_dtype="fp8")[5]) == {"key": 2 * 584}
    assert sizes(model.layer_configs(128, kv_dtype="fp8")[3]) == {"key": 32 * 584, "index_key": 32 * 132}
    assert model.bytes_per_token(kv_dtype="fp8") == 43 * 584 + 21 * (584 + 132) / 4 + 20 * 584 / 128
    for wrong in (32, 64, 192):
        with pytest.raises(ConfigError, match=f"tokens_per_block={wrong} must be a multiple of 128"):
            model.layer_configs(wrong)
    with pytest.raises(ConfigError, match="kernel_tokens_per_block=64 must be a multiple of 128"):
        model.layer_configs(128, kernel_tokens_per_block=64)


def test_block_size_is_equal_on_all_ranks() -> None:
    model = get_model("deepseek-v4-flash", mtp_layers=1)
    ranks = [model.shard(pp=4, pp_rank=rank, pp_layers=[2, 1, 0, 40]) for rank in range(4)]
    assert [rank.default_tokens_per_block for rank in ranks] == [128] * 4
    three = ModelGeometry("m", 1024, (CompressedLayer(3, 128, 64), CompressedLayer(4, 128, 64)))
    assert three.default_tokens_per_block == 36
    assert sizes(three.layer_configs(24)[1]) == {"key": 8 * 128}


def test_kernel_pages_inside_a_block() -> None:  # B166: 33 kernel pages of 16 tokens in a block of 528
    config = get_model("nemotron-3-nano-30b-a3b").layer_configs(528, kernel_tokens_per_block=16)
    attention = next(c for c in config if isinstance(c, AttentionLayerConfig))
    assert all(b.tokens_per_block_override == 16 for b in attention.buffers)
    assert sizes(attention) == {"key": 512 * 16, "value": 512 * 16}
    state = next(c for c in config if isinstance(c, SsmLayerConfig))
    assert all(b.tokens_per_block_override is None for b in state.buffers)


def test_live_bytes() -> None:
    model = get_model("gpt-oss-120b")
    assert model.kv_read_bytes(0) == 0
    assert model.kv_read_bytes(100) == 100 * 36 * 2048
    assert model.kv_read_bytes(1000) == (18 * 1000 + 18 * 128) * 2048
    assert get_model("llama-4-scout").kv_read_bytes(10000) == (36 * 8192 + 12 * 10000) * 4096
    qwen = get_model("qwen3-next-80b-a3b")
    assert qwen.kv_read_bytes(10) == 10 * 12 * 2048 + 36 * 2146304
    assert qwen.kv_read_bytes(10, include_state=False) == 10 * 12 * 2048
    flash = get_model("deepseek-v4-flash")
    assert flash.kv_read_bytes(1000) == 43 * 128 * 1024 + 21 * 250 * 1280 + 20 * 7 * 1024
    with pytest.raises(ConfigError, match="context"):
        model.kv_read_bytes(-1)


# ---- configuration -------------------------------------------------------------------------------------------------


def test_config_for() -> None:
    config = config_for(
        "gpt-oss-120b",
        quota=4 * GIB,
        max_seq_len=8192,
        typical=(1536, 1535),
        constraints=[(8192, 8191), BatchDesc([KVCacheDesc(8192, 0)])],
        max_util_for_resume=0.95,
    )
    assert isinstance(config, KVCacheManagerConfig)
    assert config.cache_tiers[0].quota == 4 * GIB
    assert config.typical_step == BatchDesc([KVCacheDesc(1536, 1535)])
    assert config.constraints == [BatchDesc([KVCacheDesc(8192, 8191)]), BatchDesc([KVCacheDesc(8192, 0)])]
    assert config.max_util_for_resume == 0.95
    assert not config.commit_min_snapshot
    assert config_for("deepseek-v4-pro", quota=GIB).tokens_per_block == 128
    assert config_for(get_model("qwen3-8b").shard(tp=2), quota=GIB, tokens_per_block=64).tokens_per_block == 64


def test_pool_ratio_is_keyed_by_group() -> None:  # B011: full gets 0.9 whichever layer comes first
    sliding, whole = AttentionLayer(8, 64, window=128), AttentionLayer(8, 64)
    for layers, ratio in (((sliding, whole), [0.1, 0.9]), ((whole, sliding), [0.9, 0.1])):
        model = ModelGeometry("m", 4096, layers * 4)
        config = config_for(model, quota=GIB, pool_ratio={None: 0.9, 128: 0.1})
        assert config.initial_pool_ratio == ratio
    with pytest.raises(ConfigError, match=r"pool_ratio has keys \[None\]; the layer groups are \[None, 128\]"):
        config_for(model, quota=GIB, pool_ratio={None: 1.0})
    with pytest.raises(ConfigError, match="not both"):
        config_for(model, quota=GIB, pool_ratio={None: 0.9, 128: 0.1}, initial_pool_ratio=[0.9, 0.1])
    hybrid = config_for("qwen3-next-80b-a3b", quota=GIB, pool_ratio={None: 0.25, "ssm": 0.75})
    assert hybrid.initial_pool_ratio == [0.75, 0.25]


# ---- descriptions by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: AttentionLayer(0, 64), ConfigError, "kv_heads=0"),
        (lambda: AttentionLayer(8, 64, window=0), ConfigError, "window=0"),
        (lambda: AttentionLayer(8, 64, window=1, chunk=1), ConfigError, "not both"),
        (lambda: AttentionLayer(8, 64, 32, shared_kv=True), ConfigError, "shared_kv"),
        (lambda: AttentionLayer(8, 64.0), TypeError, "head_dim"),  # type: ignore[arg-type]
        (lambda: MlaLayer(0, 64), ConfigError, "latent_dim"),
        (lambda: MlaLayer(512, 64, -1), ConfigError, "index_dim"),
        (lambda: CompressedLayer(-1, 128, 512), ConfigError, "ratio"),
        (lambda: CompressedLayer(4, 128, 32, 64), ConfigError, "rope_dim"),
        (lambda: StateLayer.kda(0, 128), ConfigError, "conv heads"),
        (lambda: StateLayer("x", ((1, 1),), 4, (1, 1)), ConfigError, "recurrent"),  # type: ignore[arg-type]
        (lambda: StateLayer("x", ((1, 1),), 4, (1, 1, 1), "nvfp4"), ConfigError, "state_dtype"),
        (lambda: ModelGeometry("m", 0, ()), ConfigError, "max_position_embeddings"),
        (lambda: ModelGeometry(3, 1, ()), TypeError, "name"),  # type: ignore[arg-type]
        (lambda: ModelGeometry("m", 1, ("full",)), TypeError, "layers"),  # type: ignore[arg-type]
        (lambda: ModelGeometry("m", 1, (), global_layer_ids=(1,)), ConfigError, "global_layer_ids"),
        (lambda: ModelParameters(1.0, 2.0, 2.0, ""), ConfigError, "active"),
        (lambda: ModelParameters(1.0, 1.0, 0.0, ""), ConfigError, "bytes_per_parameter"),
    ],
)
def test_bad_descriptions(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_layers_without_a_cache() -> None:
    model = ModelGeometry("m", 1024, [AttentionLayer(1, 64), NoCacheLayer(), AttentionLayer(1, 64)])  # type: ignore[arg-type]
    assert model.num_layers == 3
    assert [c.layer_id for c in model.layer_configs(32)] == [0, 1]
    assert [r.model_layer for r in model.cache_layers()] == [0, 2]
