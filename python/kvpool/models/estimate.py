"""Parameter counts from the fields of a config.json, for models without published ones.

Counts the matrices of attention, dense and expert feed-forward layers and the embeddings; norms, biases, indexers and
vision towers are left out.  Within a few percent for the usual transformers, rougher for hybrids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.models.geometry import ModelParameters
from kvpool.models.layers import Layer, NoCacheLayer, StateLayer

__all__ = ["estimate_parameters"]

SOURCE = "estimated from the fields of config.json"
BYTES_MXFP4 = 0.53
"""Bytes per parameter of a checkpoint with MXFP4 experts (GPT-OSS)."""
BYTES_DEFAULT = 2.0


def _first(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def estimate_parameters(config: Mapping[str, Any], layers: tuple[Layer, ...]) -> ModelParameters | None:
    """Total and active parameters in billions; None when the fields that it needs are missing."""
    hidden = _first(config, "hidden_size")
    vocabulary = _first(config, "vocab_size")
    if not (hidden and vocabulary and layers):
        return None
    tied = bool(config.get("tie_word_embeddings", False))
    total = active = hidden * vocabulary * (1 if tied else 2)
    separate = any(isinstance(layer, NoCacheLayer) for layer in layers)  # a mixer or a feed-forward, not both
    for index, layer in enumerate(layers):
        mixer = _mixer(config, layer, hidden)
        total += mixer
        active += mixer
        if separate and not isinstance(layer, NoCacheLayer):
            continue
        stored, used = _feed_forward(config, index, hidden)
        total += stored
        active += used
    method = (config.get("quantization_config") or {}).get("quant_method")
    return ModelParameters(total / 1e9, active / 1e9, BYTES_MXFP4 if method == "mxfp4" else BYTES_DEFAULT, SOURCE)


def _mixer(config: Mapping[str, Any], layer: Layer, hidden: int) -> int:
    """Weights of attention, or of a state layer's projections."""
    if isinstance(layer, NoCacheLayer):
        return 0
    if isinstance(layer, StateLayer):
        return hidden * (layer.conv_dim + 2 * layer.recurrent[0] * layer.recurrent[1])
    heads = _first(config, "num_attention_heads", default=1)
    latent, rope = _first(config, "kv_lora_rank"), _first(config, "qk_rope_head_dim")
    q_rank = _first(config, "q_lora_rank")
    if latent:
        key = _first(config, "qk_nope_head_dim") + rope
        value = _first(config, "v_head_dim")
        query = hidden * q_rank + q_rank * heads * key if q_rank else hidden * heads * key
        return query + hidden * (latent + rope) + latent * heads * (key - rope + value) + heads * value * hidden
    head = _first(config, "head_dim", default=hidden // heads)
    if q_rank and _first(config, "o_lora_rank"):  # DeepSeek-V4: low-rank queries and outputs, one shared latent
        out = _first(config, "o_lora_rank")
        low = hidden * (q_rank + head + _first(config, "o_groups", default=1) * out)
        return low + heads * head * (q_rank + out)
    value = _first(config, "v_head_dim", default=head)
    kv_heads = _first(config, "num_key_value_heads", default=heads)
    return hidden * (heads * head + kv_heads * (head + value)) + heads * value * hidden


def _feed_forward(config: Mapping[str, Any], index: int, hidden: int) -> tuple[int, int]:
    """(stored, used per token) weights of the feed-forward part of layer ``index``."""
    activation = config.get("mlp_hidden_act") or config.get("hidden_act") or "silu"
    matrices = 2 if activation == "relu2" else 3
    dense = matrices * hidden * _first(config, "intermediate_size_mlp", "intermediate_size")
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts")
    if not experts or not _is_sparse(config, index):
        return dense, dense
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    expert = matrices * hidden * width
    used = _first(config, "num_experts_per_tok", "experts_per_token", "top_k_experts", default=1)
    shared = _first(config, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = shared or _first(config, "n_shared_experts") * width
    if "llama4" in str(config.get("model_type", "")):
        shared = shared or width
    always = matrices * hidden * shared + (dense if config.get("enable_moe_block") else 0)
    return experts * expert + always, used * expert + always


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    if index < _first(config, "first_k_dense_replace") or index in (config.get("mlp_only_layers") or ()):
        return False
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, (list, tuple)):
        return index >= len(frequency) or bool(frequency[index])
    step = _first(config, "interleave_moe_layer_step", default=1)
    return (index + 1) % step == 0 if step > 1 else True
