"""Geometry from a Hugging Face ``config.json``: one parser per family, chosen by the architecture's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.estimate import estimate_parameters
from kvpool.models.geometry import ModelGeometry
from kvpool.models.layers import AttentionLayer, CompressedLayer, Layer, MlaLayer, NoCacheLayer, StateLayer
from kvpool.models.presets import HOW_TO_DESCRIBE, preset_of

__all__ = ["ARCHITECTURES", "from_hf_config"]

_NESTED = ("text_config", "language_config", "llm_config")

DSV4_INDEX_RATIO = 4
"""The DeepSeek-V4 layers of this ratio have an indexer; those of ratio 128 read all their few entries."""
DSV4_FP8_ROW_BYTES = 584
"""448 fp8 + 64 bfloat16 rope elements + 8 scale bytes (SGLang, vLLM)."""


class _Config:
    """Fields of the text part of a config.json, checked as they are read."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self.fields = fields
        self.architecture = architecture

    def get(self, name: str) -> Any:
        """The raw value, None without one."""
        return self.fields.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer field; ConfigError naming it when it is missing without a default, or is something else."""
        value = self.fields.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json of {self.architecture}: field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config.json of {self.architecture}: field {name!r} = {value!r} must be an integer")
        return value

    def sequence(self, name: str, length: int | None) -> Sequence[Any] | None:
        """A list field of at least ``length`` entries; None without it."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence) or (length is not None and len(value) < length):
            raise ConfigError(f"config.json of {self.architecture}: field {name!r} must list {length or 'its'} layers")
        return value

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        return self.integer("hidden_size") // self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", self.fields.get("num_attention_heads"))

    def bad(self, what: str) -> ConfigError:
        return ConfigError(f"config.json of {self.architecture}: {what}; {HOW_TO_DESCRIBE}")


@dataclass(frozen=True)
class _Parsed:
    layers: tuple[Layer, ...]
    draft_kind: Layer | None = None
    drafts: int = 0


_Parser = Callable[[_Config], _Parsed]


def _by_type(config: _Config, kinds: Mapping[str, Layer | None], types: Sequence[Any]) -> _Parsed:
    layers = []
    for name in types[: config.layers]:
        layer = kinds.get(name) if isinstance(name, str) else None
        if layer is None:
            raise config.bad(f"layer type {name!r} is not known, or its fields are missing")
        layers.append(layer)
    return _Parsed(tuple(layers))


def _with_drafts(config: _Config, parsed: _Parsed, kind: Layer) -> _Parsed:
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    drafts = next((config.integer(name) for name in names if config.get(name)), 0)
    return replace(parsed, draft_kind=kind if drafts else None, drafts=drafts)


def _transformer(config: _Config) -> _Parsed:
    """Uniform KV heads; full layers, and sliding ones where ``layer_types`` or a window says so."""
    full = AttentionLayer(config.kv_heads, config.head_dim)
    window = config.get("sliding_window")
    sliding = replace(full, window=config.integer("sliding_window")) if window is not None else None
    types = config.sequence("layer_types", config.layers)
    if types is None:
        types = ["full_attention"] * config.layers if window is None else _implied_types(config)
    parsed = _by_type(config, {"full_attention": full, "sliding_attention": sliding}, types)
    return _with_drafts(config, parsed, full)


def _implied_types(config: _Config) -> list[str]:
    """Which layers slide when there is a window but no ``layer_types`` (older files)."""
    count = config.layers
    if config.architecture.startswith("Gemma"):
        period = config.integer("sliding_window_pattern", 2 if config.architecture.startswith("Gemma2") else 6)
        return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]
    if config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    first = config.integer("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return ["full_attention" if i < first else "sliding_attention" for i in range(count)]


def _gemma4(config: _Config) -> _Parsed:
    """Full layers with their own heads and dimension, keys as values; the last layers may share others' caches."""
    sliding = AttentionLayer(config.kv_heads, config.head_dim, window=config.integer("sliding_window"))
    full = AttentionLayer(
        config.integer("num_global_key_value_heads", config.kv_heads),
        config.integer("global_head_dim", config.head_dim),
        shared_kv=bool(config.get("attention_k_eq_v")),
    )
    types = config.sequence("layer_types", config.layers)
    if types is None:
        raise config.bad("field 'layer_types' is missing")
    parsed = _by_type(config, {"full_attention": full, "sliding_attention": sliding}, types)
    own = config.layers - config.integer("num_kv_shared_layers", 0)
    return _Parsed(parsed.layers[:own] + (NoCacheLayer(),) * (config.layers - own))


def _llama4(config: _Config) -> _Parsed:
    """Chunked layers with rope, full ones without: ``no_rope_layers`` (0 = full), else every 4th."""
    full = AttentionLayer(config.kv_heads, config.head_dim)
    chunked = replace(full, chunk=config.integer("attention_chunk_size"))
    types = config.sequence("layer_types", config.layers)
    if types is None:
        flags = config.sequence("no_rope_layers", None)
        if not flags:
            interval = config.integer("no_rope_layer_interval", 4)
            flags = [(i + 1) % interval != 0 for i in range(config.layers)]
        types = ["chunked_attention" if flag else "full_attention" for flag in flags]
    return _by_type(config, {"full_attention": full, "chunked_attention": chunked}, types)


def _mimo(config: _Config) -> _Parsed:
    """Full and sliding layers with heads of their own; ``hybrid_layer_pattern`` 1 = sliding."""
    full = AttentionLayer(config.kv_heads, config.head_dim, config.integer("v_head_dim", config.head_dim))
    sliding = AttentionLayer(
        config.integer("swa_num_key_value_heads", config.kv_heads),
        config.integer("swa_head_dim", full.head_dim),
        config.integer("swa_v_head_dim", full.v_head_dim),
        window=config.integer("sliding_window"),
    )
    flags = config.sequence("hybrid_layer_pattern", config.layers)
    if flags is None:
        raise config.bad("field 'hybrid_layer_pattern' is missing")
    return _Parsed(tuple(sliding if flag else full for flag in flags[: config.layers]))


def _minimax_m3(config: _Config) -> _Parsed:
    """Grouped-query attention whose layers from the 4th on select blocks with a replicated index key."""
    full = AttentionLayer(config.kv_heads, config.head_dim)
    sparse = config.get("sparse_attention_config")
    inner = _Config(sparse if isinstance(sparse, Mapping) else {}, f"{config.architecture}.sparse_attention_config")
    index = inner.integer("sparse_index_dim", 128)
    flags = inner.sequence("sparse_attention_freq", config.layers) or [i >= 3 for i in range(config.layers)]
    return _Parsed(tuple(replace(full, index_dim=index) if flag else full for flag in flags[: config.layers]))


def _mla_layer(config: _Config) -> MlaLayer:
    return MlaLayer(
        config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"), config.integer("index_head_dim", 0)
    )


def _mla(config: _Config) -> _Parsed:
    """Latent attention in every layer, with an indexer where ``index_head_dim`` is given."""
    layer = _mla_layer(config)
    return _with_drafts(config, _Parsed((layer,) * config.layers), layer)


def _deepseek_v4(config: _Config) -> _Parsed:
    """``compress_ratios`` per layer (0 and 1: the window alone), the draft layers' after the model's."""
    ratios = config.sequence("compress_ratios", config.layers)
    if ratios is None:
        raise config.bad("field 'compress_ratios' is missing")

    def layer(ratio: Any) -> CompressedLayer:
        if isinstance(ratio, bool) or not isinstance(ratio, int):
            raise config.bad(f"compression ratio {ratio!r} is not an integer")
        return CompressedLayer(
            ratio=0 if ratio <= 1 else ratio,
            window=config.integer("sliding_window"),
            entry_dim=config.head_dim,
            rope_dim=config.integer("qk_rope_head_dim"),
            index_dim=config.integer("index_head_dim") if ratio == DSV4_INDEX_RATIO else 0,
            fp8_row_bytes=DSV4_FP8_ROW_BYTES if config.head_dim == 512 else None,
        )

    draft = layer(ratios[config.layers] if len(ratios) > config.layers else 0)
    return _with_drafts(config, _Parsed(tuple(layer(r) for r in ratios[: config.layers])), draft)


def _qwen_hybrid(config: _Config) -> _Parsed:
    """Gated delta nets with full attention every ``full_attention_interval`` layers."""
    full = AttentionLayer(config.kv_heads, config.head_dim)
    state = StateLayer.gdn(
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
    )
    state = _state_dtype(state, config.get("mamba_ssm_dtype"))
    types = config.sequence("layer_types", config.layers)
    if types is None:
        interval = config.integer("full_attention_interval")
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(config.layers)]
    parsed = _by_type(config, {"full_attention": full, "linear_attention": state}, types)
    return _with_drafts(config, parsed, full)


_NEMOTRON_LETTERS = MappingProxyType(
    {
        "M": "M",
        "*": "*",
        "-": "-",
        "E": "E",
        "mamba": "M",
        "linear_attention": "M",
        "attention": "*",
        "full_attention": "*",
        "mlp": "-",
        "moe": "E",
    }
)


def _nemotron_h(config: _Config) -> _Parsed:
    """Mamba-2 (M), attention (*), MLP (-) and expert (E) layers from ``hybrid_override_pattern``."""
    attention = AttentionLayer(config.kv_heads, config.head_dim)
    state = StateLayer.mamba2(
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("ssm_state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
    )
    state = _state_dtype(state, config.get("mamba_ssm_cache_dtype"))
    pattern = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    if not pattern:
        raise config.bad("field 'hybrid_override_pattern' is missing")
    kinds: dict[str, Layer] = {"M": state, "*": attention, "-": NoCacheLayer(), "E": NoCacheLayer()}
    layers = []
    for name in pattern:
        letter = _NEMOTRON_LETTERS.get(name) if isinstance(name, str) else None
        if letter is None:
            raise config.bad(f"layer {name!r} of hybrid_override_pattern is not known")
        layers.append(kinds[letter])
    if len(layers) != config.integer("num_hidden_layers", len(layers)):
        raise config.bad(f"hybrid_override_pattern names {len(layers)} layers, num_hidden_layers {config.layers}")
    return _with_drafts(config, _Parsed(tuple(layers)), attention)


def _state_dtype(layer: StateLayer, dtype: Any) -> StateLayer:
    return replace(layer, state_dtype=dtype) if dtype is not None else layer


def _kimi_linear(config: _Config) -> _Parsed:
    """Kimi delta attention, latent attention in the layers (counted from 1) of ``full_attn_layers``."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise config.bad("field 'linear_attn_config' is missing")
    inner = _Config(linear, f"{config.architecture}.linear_attn_config")
    state = StateLayer.kda(
        inner.integer("num_heads"), inner.integer("head_dim"), inner.integer("short_conv_kernel_size", 4)
    )
    full = set(inner.sequence("full_attn_layers", None) or ())
    mla = _mla_layer(config)
    return _Parsed(tuple(mla if i + 1 in full else state for i in range(config.layers)))


ARCHITECTURES: Mapping[str, _Parser] = MappingProxyType(
    {
        "LlamaForCausalLM": _transformer,
        "MistralForCausalLM": _transformer,
        "MixtralForCausalLM": _transformer,
        "Qwen2ForCausalLM": _transformer,
        "Qwen2MoeForCausalLM": _transformer,
        "Qwen3ForCausalLM": _transformer,
        "Qwen3MoeForCausalLM": _transformer,
        "GptOssForCausalLM": _transformer,
        "Gemma2ForCausalLM": _transformer,
        "Gemma3ForCausalLM": _transformer,
        "Gemma3ForConditionalGeneration": _transformer,
        "Step3p7FlashForCausalLM": _transformer,
        "Gemma4ForCausalLM": _gemma4,
        "Gemma4ForConditionalGeneration": _gemma4,
        "Llama4ForCausalLM": _llama4,
        "Llama4ForConditionalGeneration": _llama4,
        "MiMoV2FlashForCausalLM": _mimo,
        "MiniMaxM3SparseForCausalLM": _minimax_m3,
        "MiniMaxM3SparseForConditionalGeneration": _minimax_m3,
        "DeepseekV2ForCausalLM": _mla,
        "DeepseekV3ForCausalLM": _mla,
        "DeepseekV32ForCausalLM": _mla,
        "GlmMoeDsaForCausalLM": _mla,
        "KimiK2ForCausalLM": _mla,
        "KimiK25ForConditionalGeneration": _mla,
        "DeepseekV4ForCausalLM": _deepseek_v4,
        "KimiLinearForCausalLM": _kimi_linear,
        "KimiK3ForCausalLM": _kimi_linear,
        "KimiK3ForConditionalGeneration": _kimi_linear,
        "Qwen3NextForCausalLM": _qwen_hybrid,
        "Qwen3_5ForCausalLM": _qwen_hybrid,
        "Qwen3_5ForConditionalGeneration": _qwen_hybrid,
        "Qwen3_5MoeForCausalLM": _qwen_hybrid,
        "Qwen3_5MoeForConditionalGeneration": _qwen_hybrid,
        "NemotronHForCausalLM": _nemotron_h,
    }
)
"""Parser of each architecture that is understood."""


def from_hf_config(
    config: Mapping[str, Any] | str | Path, *, name: str | None = None, mtp_layers: int = 0
) -> ModelGeometry:
    """The geometry of a ``config.json``: its content, its path, or the folder that holds it.

    ``name`` defaults to the file's (or folder's) name.  Where that names a preset with the same geometry, the parameter
    counts are the published ones, else an estimate.  ConfigError for a field that is missing or wrong, and for an
    architecture that is not understood: it lists those that are and says how to describe layers by hand.
    """
    source = "a mapping"
    if isinstance(config, (str, Path)):
        config, path = _read(Path(config))
        source = path.name
        name = name or (path.parent.name if path.name == "config.json" else path.stem)
    if not isinstance(config, Mapping):
        raise TypeError(f"a configuration is a mapping or a path, not {type(config).__name__}")
    architecture, parser = _dispatch(config)
    fields = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), config)
    text = _Config({**fields, "quantization_config": config.get("quantization_config")}, architecture)
    parsed = parser(text)
    name = name or str(config.get("_name_or_path") or "") or str(config.get("model_type") or architecture)
    geometry = ModelGeometry(
        name=name.lower(),
        max_position_embeddings=text.integer("max_position_embeddings"),
        layers=parsed.layers,
        draft_kind=parsed.draft_kind,
        published_draft_layers=parsed.drafts,
        source=f"{source} ({architecture})",
    )
    preset = preset_of(name)
    if preset is not None and preset.layers == geometry.layers:
        geometry = replace(geometry, name=preset.name, parameters=preset.parameters)
    else:
        geometry = replace(geometry, parameters=estimate_parameters(text.fields, parsed.layers))
    return geometry.with_draft_layers(mtp_layers) if mtp_layers else geometry


def _read(path: Path) -> tuple[Mapping[str, Any], Path]:
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content, path


def _dispatch(config: Mapping[str, Any]) -> tuple[str, _Parser]:
    names = config.get("architectures")
    if isinstance(names, (list, tuple)):
        for name in names:
            if isinstance(name, str) and name in ARCHITECTURES:
                return name, ARCHITECTURES[name]
    raise ConfigError(
        f"architectures = {names!r} in config.json: none is known; known: {', '.join(ARCHITECTURES)}; {HOW_TO_DESCRIBE}"
    )
