"""Short ways to write configurations, and the ones that several tests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    SsmLayerConfig,
)

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def buffers(size: int, roles: Sequence[str] = ("key", "value")) -> list[BufferConfig]:
    return [BufferConfig(role=role, size=size) for role in roles]


def attention(
    layer: int, size: int = 8192, window: int | None = None, sinks: int | None = None
) -> AttentionLayerConfig:
    return AttentionLayerConfig(
        layer_id=layer, buffers=buffers(size), sliding_window_size=window, num_sink_tokens=sinks
    )


def one(layer: int, size: int, window: int | None = None, sinks: int | None = None) -> AttentionLayerConfig:
    """A layer with a single buffer, so that its slot is ``size`` bytes."""
    return AttentionLayerConfig(
        layer_id=layer, buffers=buffers(size, ("key",)), sliding_window_size=window, num_sink_tokens=sinks
    )


def ssm(layer: int, size: int, role: str = "state") -> SsmLayerConfig:
    return SsmLayerConfig(layer_id=layer, buffers=[BufferConfig(role=role, size=size)])


def config(layers: Sequence[Any], quota: int, tpb: int = 32, **fields: Any) -> KVCacheManagerConfig:
    if any(isinstance(layer, SsmLayerConfig) for layer in layers):
        fields.setdefault("commit_min_snapshot", True)
    return KVCacheManagerConfig(
        tokens_per_block=tpb, cache_tiers=[GpuCacheTierConfig(quota=quota)], layers=list(layers), **fields
    )


def full(slots: int, tpb: int = 32, **fields: Any) -> KVCacheManagerConfig:
    """One full-attention layer and exactly ``slots`` slots of 2 MiB (quotas below 2 GiB: grain 2 MiB)."""
    return config([one(0, 2 * MIB)], slots * 2 * MIB, tpb, **fields)


def windowed(slots: int, window: int, tpb: int = 32, sinks: int | None = None, **fields: Any) -> KVCacheManagerConfig:
    """One windowed layer and exactly ``slots`` slots."""
    return config([one(0, 2 * MIB, window, sinks)], slots * 2 * MIB, tpb, **fields)


def full_and_window(
    full_slots: int, window_slots: int, window: int, tpb: int = 32, sinks: int | None = None, **fields: Any
) -> KVCacheManagerConfig:
    """Layer 0 full, layer 1 windowed, in two pool groups (2 and 4 MiB slots) with exactly these numbers of slots.

    Exact because the limit is 1 and one constraint batch per group demands just that many.
    """
    fields.setdefault("max_util_for_resume", 1.0)
    fields["initial_pool_ratio"] = ratio(full_slots * 2, window_slots * 4)
    return config(
        [one(0, 2 * MIB), one(1, 4 * MIB, window, sinks)], (full_slots * 2 + window_slots * 4) * MIB, tpb, **fields
    )


def ratio(*weights: float) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def batch(*lengths: tuple[int, int], system: int = 0) -> BatchDesc:
    return BatchDesc([KVCacheDesc(c, h) for c, h in lengths], system_prompt_length=system)


def alternating(layers: int, window: int | None, sinks: int | None, size: int, quota: int, **fields: Any) -> Any:
    """Even layers windowed, odd layers full, K and V of ``size`` bytes each: the scenarios' helper."""
    return config(
        [
            attention(i, size, window if i % 2 == 0 else None, sinks if i % 2 == 0 and window else None)
            for i in range(layers)
        ],
        quota,
        **fields,
    )


def slots(manager: Any) -> list[int]:
    return [group.num_slots for group in manager.pool_group_descs]


def used(manager: Any) -> list[int]:
    return [len(group["used"]) for group in manager.snapshot()["pool_groups"]]


def group_slot_bytes(manager: Any) -> list[int]:
    return [sum(pool.slot_bytes for pool in group.pools) for group in manager.pool_group_descs]
