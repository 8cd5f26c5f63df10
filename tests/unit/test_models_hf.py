"""config.json files: the published ones where KVPOOL_DATA names them, small ones of our own, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.models import (
    ARCHITECTURES,
    AttentionLayer,
    CompressedLayer,
    Layer,
    MlaLayer,
    NoCacheLayer,
    StateLayer,
    from_hf_config,
    get_model,
)

PUBLISHED = {
    "Qwen--Qwen3-8B": "qwen3-8b",
    "Qwen--Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "XiaomiMiMo--MiMo-V2-Flash": "mimo-v2-flash",
    "deepseek-ai--DeepSeek-V3": "deepseek-v3",
    "deepseek-ai--DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai--DeepSeek-V4-Flash": "deepseek-v4-flash",
    "google--gemma-4-26B-A4B": "gemma-4-26b-a4b",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "meta-llama--Meta-Llama-3.1-8B": "llama-3.1-8b",
    "mistralai--Mixtral-8x7B-v0.1": None,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "openai--gpt-oss-120b": "gpt-oss-120b",
    "openai--gpt-oss-20b": "gpt-oss-20b",
}
FULL = AttentionLayer(2, 16)


@pytest.fixture
def configs(data_dir: Path) -> Path:
    return data_dir / "hf_configs"


def test_every_published_file_is_expected(configs: Path) -> None:
    assert {path.stem for path in configs.glob("*.json")} == PUBLISHED.keys()


@pytest.mark.parametrize("stem", PUBLISHED)
def test_published_file(configs: Path, stem: str) -> None:
    path = configs / f"{stem}.json"
    model, preset = from_hf_config(path), PUBLISHED[stem]
    assert get_model(str(path)) == model
    content = json.loads(path.read_text())
    assert from_hf_config(content).layers == model.layers
    if preset is None:
        assert model.layers == (AttentionLayer(8, 128),) * 32
        assert model.parameters is not None
        assert model.parameters.total == pytest.approx(46.7, rel=0.02)
        assert model.parameters.active == pytest.approx(12.9, rel=0.02)
        return
    expected = get_model(preset)
    assert model.name == preset
    assert model.layers == expected.layers
    assert model.max_position_embeddings == expected.max_position_embeddings
    assert model.published_draft_layers == expected.published_draft_layers
    assert model.parameters == expected.parameters
    assert model.bytes_per_token() == expected.bytes_per_token()
    assert model.state_bytes_per_sequence() == expected.state_bytes_per_sequence()
    block = expected.default_tokens_per_block
    assert model.layer_configs(block) == expected.layer_configs(block)
    with_draft = from_hf_config(path, mtp_layers=1)
    assert with_draft.draft_layers == expected.with_draft_layers(1).draft_layers


@pytest.mark.parametrize("stem", [s for s, p in PUBLISHED.items() if p])
def test_estimated_parameters(configs: Path, stem: str) -> None:
    content = json.loads((configs / f"{stem}.json").read_text())
    estimate = from_hf_config(content, name="nameless").parameters
    published = get_model(str(PUBLISHED[stem])).parameters
    assert estimate is not None
    assert published is not None
    assert estimate.source.startswith("estimated")
    assert estimate.total == pytest.approx(published.total, rel=0.06)
    assert estimate.active == pytest.approx(published.active, rel=0.2)
    assert estimate.bytes_per_parameter == published.bytes_per_parameter


def small(architecture: str, **fields: Any) -> dict[str, Any]:
    base = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return {"architectures": [architecture], "max_position_embeddings": 4096, **base, **fields}


MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
SLIDE = AttentionLayer(2, 16, window=64)
CHUNK = AttentionLayer(2, 16, chunk=64)
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4}
KDA = {"num_heads": 4, "head_dim": 8, "full_attn_layers": [2, 4]}
V4 = {"qk_rope_head_dim": 8, "index_head_dim": 8, "sliding_window": 64, "compress_ratios": [0, 4, 128, 1, 0]}
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32, "num_kv_shared_layers": 1}
TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}

CASES: list[tuple[dict[str, Any], Sequence[Layer]]] = [
    (small("LlamaForCausalLM"), [FULL] * 4),
    (small("LlamaForCausalLM", head_dim=None, hidden_size=64, num_key_value_heads=None), [AttentionLayer(4, 16)] * 4),
    (small("MistralForCausalLM", sliding_window=64), [SLIDE] * 4),
    (small("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=False, max_window_layers=2), [FULL] * 4),
    (
        small("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=True, max_window_layers=2),
        [FULL, FULL, SLIDE, SLIDE],
    ),
    (small("Gemma2ForCausalLM", sliding_window=64), [SLIDE, FULL] * 2),
    (small("Gemma3ForCausalLM", sliding_window=64, sliding_window_pattern=3), [SLIDE, SLIDE, FULL, SLIDE]),
    (small("GptOssForCausalLM", **TYPES), [SLIDE, FULL] * 2),
    (
        small("Gemma4ForCausalLM", **TYPES, **SHARED),
        [SLIDE, AttentionLayer(1, 32, shared_kv=True), SLIDE, NoCacheLayer()],
    ),
    (small("Llama4ForCausalLM", attention_chunk_size=64), [CHUNK, CHUNK, CHUNK, FULL]),
    (small("Llama4ForCausalLM", attention_chunk_size=64, no_rope_layers=[0, 1, 0, 1]), [FULL, CHUNK] * 2),
    (small("KimiK25ForConditionalGeneration", **MLA), [MlaLayer(32, 8)] * 4),
    (small("GlmMoeDsaForCausalLM", **MLA, index_head_dim=16), [MlaLayer(32, 8, 16)] * 4),
    (
        small("DeepseekV4ForCausalLM", **V4),
        [
            CompressedLayer(0, 64, 16, 8),
            CompressedLayer(4, 64, 16, 8, index_dim=8),
            CompressedLayer(128, 64, 16, 8),
            CompressedLayer(0, 64, 16, 8),
        ],
    ),
    (
        small("Qwen3NextForCausalLM", **GDN, full_attention_interval=4),
        [StateLayer.gdn(2, 4, 8, 8)] * 3 + [FULL],
    ),
    (
        small("NemotronHForCausalLM", **MAMBA, hybrid_override_pattern="M-*E"),
        [StateLayer.mamba2(4, 8, 16, 2), NoCacheLayer(), FULL, NoCacheLayer()],
    ),
    (
        small("NemotronHForCausalLM", **MAMBA, layers_block_type=["mamba", "moe", "attention", "mlp"]),
        [StateLayer.mamba2(4, 8, 16, 2), NoCacheLayer(), FULL, NoCacheLayer()],
    ),
    (
        small("KimiK3ForConditionalGeneration", **MLA, linear_attn_config=KDA),
        [StateLayer.kda(4, 8), MlaLayer(32, 8)] * 2,
    ),
    (
        small("MiniMaxM3SparseForCausalLM", sparse_attention_config={"sparse_index_dim": 8}),
        [FULL] * 3 + [AttentionLayer(2, 16, index_dim=8)],
    ),
]


@pytest.mark.parametrize(
    ("config", "layers"), CASES, ids=lambda x: x["architectures"][0] if isinstance(x, dict) else ""
)
def test_small_file(config: dict[str, Any], layers: Sequence[Layer]) -> None:
    assert from_hf_config(config).layers == tuple(layers)
    architectures = config.pop("architectures")
    for key in ("text_config", "language_config"):
        assert from_hf_config({"architectures": architectures, key: config}).layers == tuple(layers)


def test_names_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small("LlamaForCausalLM")))
    assert get_model(folder) == get_model(str(folder / "config.json")) == from_hf_config(folder)
    assert get_model(folder).name == "my-model"
    assert from_hf_config(folder, name="Other").name == "other"
    assert get_model(folder, mtp_layers=2).draft_layers == (FULL, FULL)
    assert get_model(folder).parameters is None  # no hidden_size: nothing to estimate from
    fields = {"hidden_size": 64, "vocab_size": 100, "intermediate_size": 128}
    parameters = from_hf_config(small("LlamaForCausalLM", **fields)).parameters
    assert parameters is not None
    attention, mlp = 64 * (64 + 4 * 16) + 64 * 64, 3 * 64 * 128
    assert parameters.total * 1e9 == pytest.approx(2 * 6400 + 4 * (attention + mlp))


def test_a_preset_name_with_other_layers_is_not_the_preset() -> None:
    model = from_hf_config(small("LlamaForCausalLM"), name="qwen3-8b")
    assert model.parameters is None


def test_state_dtype_of_the_file() -> None:
    config = small("Qwen3NextForCausalLM", **GDN, full_attention_interval=4, mamba_ssm_dtype="bfloat16")
    layer = from_hf_config(config).layers[0]
    assert isinstance(layer, StateLayer)
    assert layer.state_dtype == "bfloat16"


@pytest.mark.parametrize("names", [["FooForCausalLM"], [], None, "LlamaForCausalLM", [3]])
def test_unknown_architecture(names: Any) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf_config({"architectures": names})
    text = str(error.value)
    assert repr(names) in text
    assert all(known in text for known in ARCHITECTURES)
    assert "ModelGeometry(" in text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (small("LlamaForCausalLM", num_hidden_layers=None), "num_hidden_layers"),
        (small("LlamaForCausalLM", max_position_embeddings="8k"), "max_position_embeddings"),
        (small("LlamaForCausalLM", num_key_value_heads=0), "kv_heads"),
        (small("GptOssForCausalLM", layer_types=["full_attention"]), "layer_types"),
        (small("GptOssForCausalLM", layer_types="full"), "layer_types"),
        (small("GptOssForCausalLM", layer_types=["odd_attention"] * 4), "odd_attention"),
        (small("GptOssForCausalLM", layer_types=["sliding_attention"] * 4), "sliding_attention"),
        (small("Gemma4ForCausalLM", sliding_window=64), "layer_types"),
        (small("DeepseekV3ForCausalLM"), "kv_lora_rank"),
        (small("DeepseekV4ForCausalLM"), "compress_ratios"),
        (small("DeepseekV4ForCausalLM", **{**V4, "compress_ratios": ["a"] * 4}), "compression ratio"),
        (small("MiMoV2FlashForCausalLM", sliding_window=64), "hybrid_layer_pattern"),
        (small("NemotronHForCausalLM", **MAMBA), "hybrid_override_pattern"),
        (small("NemotronHForCausalLM", **MAMBA, hybrid_override_pattern="MX*E"), "'X'"),
        (small("NemotronHForCausalLM", **MAMBA, hybrid_override_pattern="M*"), "names 2 layers"),
        (small("KimiLinearForCausalLM", **MLA), "linear_attn_config"),
    ],
)
def test_broken_fields(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_hf_config(config)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json can not be read"):
        get_model(str(tmp_path / "nowhere.json"))
    path = tmp_path / "config.json"
    for content, text in (("{", "is not JSON"), ("[1]", "must hold a JSON object")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=text):
            from_hf_config(path)
    with pytest.raises(TypeError, match="mapping or a path"):
        from_hf_config(3)  # type: ignore[arg-type]
