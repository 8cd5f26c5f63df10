"""What models cache: presets, config.json files, sharding, and layers for a cache configuration.

``get_model("gpt-oss-120b").shard(tp=2).layer_configs(32)`` gives the layers of a V2 configuration for one rank;
:func:`config_for` the whole configuration; :func:`hardware` the constants of a GPU.
"""

from __future__ import annotations

from kvpool.models.configure import config_for
from kvpool.models.geometry import CacheLayerRef, ModelGeometry, ModelParameters, Sharding
from kvpool.models.hardware import GPUS, GpuSpec, hardware
from kvpool.models.hf import ARCHITECTURES, from_hf_config
from kvpool.models.layers import (
    ROLES,
    AttentionLayer,
    CachePart,
    CompressedLayer,
    Layer,
    MlaLayer,
    NoCacheLayer,
    StateLayer,
    Storage,
    Tensor,
)
from kvpool.models.presets import PRESETS, get_model

__all__ = [
    "ARCHITECTURES",
    "GPUS",
    "PRESETS",
    "ROLES",
    "AttentionLayer",
    "CacheLayerRef",
    "CachePart",
    "CompressedLayer",
    "GpuSpec",
    "Layer",
    "MlaLayer",
    "ModelGeometry",
    "ModelParameters",
    "NoCacheLayer",
    "Sharding",
    "StateLayer",
    "Storage",
    "Tensor",
    "config_for",
    "from_hf_config",
    "get_model",
    "hardware",
]
