"""Every row of the geometry table: layer counts, windows, bytes, states, positions."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest

from kvpool.errors import ConfigError
from kvpool.models import (
    PRESETS,
    AttentionLayer,
    CompressedLayer,
    MlaLayer,
    ModelGeometry,
    NoCacheLayer,
    StateLayer,
    Storage,
    get_model,
    hardware,
)
from kvpool.models.presets import expand_pattern

MIB = 1 << 20


class Row(NamedTuple):
    """layers; {(kind, window, bytes per token): layers}; max positions."""

    layers: int
    kinds: dict[tuple[str, int | None, int], int]
    positions: int


def full(layers: int, size: int, positions: int, kind: str = "full") -> Row:
    return Row(layers, {(kind, None, size): layers}, positions)


def mixed(window: int, slide: tuple[int, int], whole: tuple[int, int], positions: int, kind: str = "sliding") -> Row:
    return Row(slide[0] + whole[0], {(kind, window, slide[1]): slide[0], ("full", None, whole[1]): whole[0]}, positions)


M1 = 1048576
ATTENTION = {
    "gpt-oss-120b": mixed(128, (18, 2048), (18, 2048), 131072),
    "gpt-oss-20b": mixed(128, (12, 2048), (12, 2048), 131072),
    "gemma-3-27b": mixed(1024, (52, 8192), (10, 8192), 131072),
    "gemma-3-12b": mixed(1024, (40, 8192), (8, 8192), 131072),
    "gemma-3-4b": mixed(1024, (29, 4096), (5, 4096), 131072),
    "gemma-2-27b": mixed(4096, (23, 8192), (23, 8192), 8192),
    "gemma-2-9b": mixed(4096, (21, 8192), (21, 8192), 8192),
    "gemma-4-31b": mixed(1024, (50, 16384), (10, 8192), 262144),
    "gemma-4-26b-a4b": mixed(1024, (25, 8192), (5, 4096), 262144),
    "llama-4-scout": mixed(8192, (36, 4096), (12, 4096), 10485760, "chunked"),
    "llama-4-maverick": mixed(8192, (36, 4096), (12, 4096), M1, "chunked"),
    "llama-3.1-8b": full(32, 4096, 131072),
    "llama-3.1-70b": full(80, 4096, 131072),
    "llama-3.1-405b": full(126, 4096, 131072),
    "qwen3-8b": full(36, 4096, 40960),
    "qwen3-32b": full(64, 4096, 40960),
    "qwen3-30b-a3b": full(48, 2048, 40960),
    "qwen3-235b-a22b": full(94, 2048, 40960),
    "qwen3-coder-480b-a35b": full(62, 4096, 262144),
    "mimo-v2-flash": mixed(128, (39, 5120), (9, 2560), 262144),
    "step-3.7-flash": mixed(512, (33, 4096), (12, 4096), 65536),
    "minimax-m3": full(60, 2048, M1),
    "deepseek-v3": full(61, 1152, 163840, "mla"),
    "deepseek-r1": full(61, 1152, 163840, "mla"),
    "deepseek-v3.1": full(61, 1152, 163840, "mla"),
    "deepseek-v3.2": full(61, 1152 + 256, 163840, "mla"),
    "glm-5": full(78, 1152 + 256, 202752, "mla"),
    "glm-5.1": full(78, 1152 + 256, 202752, "mla"),
    "glm-5.2": full(78, 1152 + 256, M1, "mla"),
    "kimi-k2": full(61, 1152, 131072, "mla"),
    "kimi-k2.5": full(61, 1152, 262144, "mla"),
    "kimi-k2.6": full(61, 1152, 262144, "mla"),
}


class StateRow(NamedTuple):
    layers: int
    attention: tuple[int, int]  # layers, bytes per token and layer
    state: tuple[int, int]  # layers, bytes per sequence and layer
    conv_dim: int
    recurrent: tuple[int, int, int]
    mib: float


STATES = {
    "qwen3-next-80b-a3b": StateRow(48, (12, 2048), (36, 2146304), 8192, (32, 128, 128), 73.7),
    "qwen3.5-35b-a3b": StateRow(40, (10, 2048), (30, 2146304), 8192, (32, 128, 128), 61.4),
    "qwen3.6-35b-a3b": StateRow(40, (10, 2048), (30, 2146304), 8192, (32, 128, 128), 61.4),
    "qwen3.5-27b": StateRow(64, (16, 4096), (48, 3207168), 10240, (48, 128, 128), 146.8),
    "qwen3.6-27b": StateRow(64, (16, 4096), (48, 3207168), 10240, (48, 128, 128), 146.8),
    "qwen3.5-122b-a10b": StateRow(48, (12, 2048), (36, 4268032), 12288, (64, 128, 128), 146.5),
    "qwen3.5-397b-a17b": StateRow(60, (15, 2048), (45, 4268032), 12288, (64, 128, 128), 183.2),
    "nemotron-h-8b": StateRow(52, (4, 4096), (24, 4255744), 10240, (128, 64, 128), 97.4),
    "nemotron-h-56b": StateRow(118, (10, 4096), (54, 16900096), 20480, (256, 64, 256), 870.3),
    "nemotron-3-nano-30b-a3b": StateRow(52, (6, 1024), (23, 2134016), 6144, (64, 64, 128), 46.8),
    "nemotron-3.5-lightning": StateRow(52, (6, 1024), (23, 2134016), 6144, (64, 64, 128), 46.8),
    "nemotron-3-super-120b-a12b": StateRow(88, (8, 1024), (40, 4255744), 10240, (128, 64, 128), 162.3),
    "nemotron-3-ultra-550b-a55b": StateRow(108, (12, 1024), (48, 8499200), 18432, (256, 64, 128), 389.1),
    "kimi-k3": StateRow(93, (24, 1152), (69, 6512640), 36864, (96, 128, 128), 428.6),
}
COMPRESSED = {"deepseek-v4-flash": (43, {0: 2, 4: 21, 128: 20}), "deepseek-v4-pro": (61, {4: 30, 128: 31})}


def test_every_row_is_a_preset() -> None:
    assert set(PRESETS) == ATTENTION.keys() | STATES.keys() | COMPRESSED.keys()
    assert list(PRESETS) == sorted(PRESETS)
    assert all(name == name.lower() and " " not in name and "_" not in name for name in PRESETS)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_row(name: str) -> None:
    model, row = get_model(name), ATTENTION[name]
    assert model.name == name
    assert model.num_layers == row.layers == len(model.layer_configs(32))
    assert model.max_position_embeddings == row.positions
    counts: Counter[tuple[str, int | None, int]] = Counter()
    for layer in model.layers:
        (part,) = layer.parts(Storage())
        counts[layer.kind, part.window, part.entry_bytes] += 1
    assert counts == row.kinds
    assert model.bytes_per_token() == sum(size * layers for (_, _, size), layers in row.kinds.items())
    assert model.state_bytes_per_sequence() == 0
    assert not model.has_state


@pytest.mark.parametrize("name", STATES)
def test_state_row(name: str) -> None:
    model, row = get_model(name), STATES[name]
    states = [layer for layer in model.layers if isinstance(layer, StateLayer)]
    attention = [layer for layer in model.layers if isinstance(layer, (AttentionLayer, MlaLayer))]
    assert model.num_layers == row.layers
    assert (len(attention), len(states)) == (row.attention[0], row.state[0])
    assert {(s.conv_dim, s.recurrent, s.conv_width) for s in states} == {(row.conv_dim, row.recurrent, 4)}
    assert {s.parts(Storage())[0].entry_bytes for s in states} == {row.state[1]}
    assert model.bytes_per_token() == row.attention[0] * row.attention[1]
    assert model.state_bytes_per_sequence() == row.state[0] * row.state[1]
    assert round(model.state_bytes_per_sequence() / MIB, 1) == row.mib
    assert model.has_state


def test_state_dtype_is_an_argument() -> None:
    model = get_model("qwen3-next-80b-a3b")
    assert model.state_bytes_per_sequence(state_dtype="bfloat16") == 36 * 1097728
    assert model.state_bytes_per_sequence(state_dtype="bf16") == 36 * 1097728
    assert model.state_bytes_per_sequence(conv_dtype="float32") == 36 * (2146304 + 8192 * 3 * 2)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_row(name: str) -> None:
    model = get_model(name)
    layers, ratios = COMPRESSED[name]
    assert model.num_layers == layers
    assert model.max_position_embeddings == M1
    compressed = [layer for layer in model.layers if isinstance(layer, CompressedLayer)]
    assert Counter(layer.ratio for layer in compressed) == ratios
    assert {(x.window, x.entry_dim, x.rope_dim) for x in compressed} == {(128, 512, 64)}
    assert {x.index_dim for x in compressed if x.ratio == 4} == {128}
    assert {x.index_dim for x in compressed if x.ratio != 4} == {0}
    index_and_entries = ratios[4] * (1024 + 256) // 4 + ratios[128] * 1024 // 128
    assert model.bytes_per_token() == layers * 1024 + index_and_entries
    assert model.default_tokens_per_block == 128
    assert [layer.ratio for layer in compressed[-2:]] == [128, 4]


def test_patterns() -> None:
    def windows(name: str, count: int) -> list[int | None]:
        return [c.sliding_window_size for c in get_model(name).layer_configs(32)[:count]]  # type: ignore[union-attr]

    assert windows("gpt-oss-120b", 4) == [128, None, 128, None]
    assert windows("gemma-3-4b", 7) == [1024] * 5 + [None, 1024]
    assert windows("mimo-v2-flash", 12) == [None, *[128] * 4, None, *[128] * 5, None]
    assert windows("step-3.7-flash", 5) == [None, 512, 512, 512, None]
    assert windows("llama-4-scout", 4) == [8192] * 3 + [None]
    kimi = get_model("kimi-k3").layers
    assert [i + 1 for i, x in enumerate(kimi) if isinstance(x, MlaLayer)] == [*range(4, 93, 4), 93]
    nano = get_model("nemotron-3-nano-30b-a3b").layers
    assert Counter(type(x) for x in nano) == {StateLayer: 23, NoCacheLayer: 23, AttentionLayer: 6}


@pytest.mark.parametrize(("pattern", "letters"), [("Fx3", "FFF"), ("(sF)x2s", "sFsFs"), ("M*-Ex2", "M*-EE"), ("", "")])
def test_expand_pattern(pattern: str, letters: str) -> None:
    assert expand_pattern(pattern) == letters


@pytest.mark.parametrize("pattern", ["(sF", "(sF)", "3F", "F)x2", "((s)x2F)x2"])
def test_expand_pattern_refuses(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        expand_pattern(pattern)


def test_draft_layers() -> None:
    assert get_model("deepseek-v3").published_draft_layers == 1
    assert get_model("deepseek-v3", mtp_layers=1).bytes_per_token() == 62 * 1152
    model = get_model("gpt-oss-120b", mtp_layers=1)  # B019: 18 sliding + 18 full + 1 full draft, no padding
    configs = model.layer_configs(32)
    assert [c.layer_id for c in configs] == list(range(37))
    assert model.bytes_per_token() == 37 * 2048
    assert sum(b.size for c in configs for b in c.buffers) == 37 * 2048 * 32
    assert configs[36].sliding_window_size is None  # type: ignore[union-attr]
    assert model.num_layers == 36
    assert get_model("gpt-oss-120b").draft_layers == ()
    flash = get_model("deepseek-v4-flash", mtp_layers=1)  # the published 44th ratio is 0: the window alone
    assert flash.draft_layers == (CompressedLayer(0, 128, 512, 64, fp8_row_bytes=584),)
    assert get_model("nemotron-3-super-120b-a12b", mtp_layers=1).bytes_per_token() == 9 * 1024
    with pytest.raises(ConfigError, match="draft_kind"):
        ModelGeometry("m", 1024, (StateLayer.kda(2, 16),)).with_draft_layers(1)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_and_source(name: str) -> None:
    model = get_model(name)
    assert model.parameters is not None
    assert model.parameters.source
    assert model.source
    assert model.parameters.active <= model.parameters.total
    assert model.parameters.bytes_per_parameter == (0.53 if name.startswith("gpt-oss") else 2.0)
    assert model.parameters.active_weight_bytes == pytest.approx(
        model.parameters.active * 1e9 * model.parameters.bytes_per_parameter
    )


def test_hugging_face_ids() -> None:
    assert get_model("openai/gpt-oss-120b") is get_model("gpt-oss-120b") is get_model("OpenAI--GPT-OSS-120B")


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt-oss-12b'") as error:
        get_model("gpt-oss-12b")
    assert "gpt-oss-120b" in str(error.value)
    assert "config.json" in str(error.value)
    assert "ModelGeometry(" in str(error.value)
    with pytest.raises(ConfigError, match="presets: deepseek-r1"):
        get_model("zzz")
    with pytest.raises(ConfigError, match="unknown model ''"):
        get_model("")
    with pytest.raises(TypeError):
        get_model(3)  # type: ignore[arg-type]


def test_hardware() -> None:
    b200 = hardware("b200")
    assert (b200.bandwidth_bytes_per_s, b200.bf16_flops_per_s) == (8e12, 2.25e15)
    for name in ("h100", "h200", "b200", "gb200"):
        gpu = hardware(name)
        assert gpu.host_link_bytes_per_s < gpu.bandwidth_bytes_per_s < gpu.bf16_flops_per_s
        assert 80e9 <= gpu.memory_bytes <= 192e9
        assert set(gpu.sources) == set(type(gpu).__slots__) - {"name", "sources"}
    with pytest.raises(ConfigError, match="'a100'; legal: h100, h200, b200, gb200"):
        hardware("a100")
