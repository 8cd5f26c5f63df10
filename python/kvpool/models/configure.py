"""From a model to a V2 manager configuration in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvpool.errors import ConfigError
from kvpool.models.geometry import ModelGeometry
from kvpool.models.presets import get_model

if TYPE_CHECKING:
    from kvpool.v2.config import BatchDesc, CacheTierConfig, KVCacheManagerConfig, LayerConfig

__all__ = ["config_for"]

Batch: TypeAlias = tuple[int, int]
"""A batch of one request: (capacity, history length) in tokens."""

WindowKey: TypeAlias = int | str | None
"""A layer group by what it keeps: window in tokens, None for full attention, "ssm" for states."""


def config_for(
    model: ModelGeometry | str | Path,
    *,
    quota: int,
    tokens_per_block: int | None = None,
    max_seq_len: int | None = None,
    typical: Batch | BatchDesc | None = None,
    constraints: Iterable[Batch | BatchDesc] = (),
    pool_ratio: Mapping[WindowKey, float] | None = None,
    cold_tiers: Sequence[CacheTierConfig] = (),
    kv_dtype: str = "bfloat16",
    state_dtype: str | None = None,
    store_shared_kv: bool = False,
    store_index_keys: bool | None = None,
    **options: Any,
) -> KVCacheManagerConfig:
    """The configuration of a V2 manager for ``model`` (a preset name, a config.json, or one rank's geometry).

    ``quota``: bytes of level 0.  ``tokens_per_block``: the model's own default.  ``max_seq_len``: windows of that many
    tokens or more become full attention.  ``typical``, ``constraints``: batches, a pair being one request of (capacity,
    history).  ``pool_ratio``: byte share per layer group, keyed by window (None: full attention, "ssm": states), so that
    the order of layers does not matter.  ``options`` are further fields of ``KVCacheManagerConfig``;
    ``commit_min_snapshot`` is on where there are states.  ConfigError as the configuration raises it.
    """
    from kvpool.v2.config import GpuCacheTierConfig, KVCacheManagerConfig

    geometry = model if isinstance(model, ModelGeometry) else get_model(model)
    tokens_per_block = geometry.default_tokens_per_block if tokens_per_block is None else tokens_per_block
    layers = geometry.layer_configs(
        tokens_per_block,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        max_seq_len=max_seq_len,
        store_shared_kv=store_shared_kv,
        store_index_keys=store_index_keys,
    )
    if geometry.has_state:
        options.setdefault("commit_min_snapshot", True)
    if pool_ratio is not None:
        if "initial_pool_ratio" in options:
            raise ConfigError("give pool_ratio or initial_pool_ratio, not both")
        options["initial_pool_ratio"] = _ratio_list(layers, pool_ratio)
    return KVCacheManagerConfig(
        tokens_per_block=tokens_per_block,
        cache_tiers=[GpuCacheTierConfig(quota), *cold_tiers],
        layers=layers,
        typical_step=None if typical is None else _batch(typical),
        constraints=[_batch(batch) for batch in constraints],
        **options,
    )


def _batch(batch: Batch | BatchDesc) -> BatchDesc:
    from kvpool.v2.config import BatchDesc, KVCacheDesc

    return batch if isinstance(batch, BatchDesc) else BatchDesc([KVCacheDesc(*batch)])


def _ratio_list(layers: Iterable[LayerConfig], ratio: Mapping[WindowKey, float]) -> list[float]:
    """Shares in the order in which layers first mention their group; ConfigError when the keys are not the groups."""
    from kvpool.v2.config import SsmLayerConfig

    groups: dict[WindowKey, None] = {}
    for layer in layers:
        groups["ssm" if isinstance(layer, SsmLayerConfig) else layer.sliding_window_size] = None
    if set(groups) != set(ratio):
        raise ConfigError(f"pool_ratio has keys {list(ratio)}; the layer groups are {list(groups)}")
    return [ratio[key] for key in groups]
