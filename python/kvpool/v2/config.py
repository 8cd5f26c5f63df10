"""Configuration of the V2 manager: plain dataclasses that check themselves.

Every class checks its fields when it is made and raises ``ConfigError`` naming the field, its value and what is legal.
All but the workload descriptions are mutable, so the manager checks its own deep copy once more
(:meth:`KVCacheManagerConfig.validate`).  Sizes are bytes, lengths tokens.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from kvpool.errors import ConfigError
from kvpool.v2._checks import (
    BYTES_MAX,
    config_bool,
    config_bytes,
    config_int,
    config_list,
    config_optional,
    config_real,
    is_integer,
)
from kvpool.v2.life_cycle import AttnLifeCycle, LifeCycle, SsmLifeCycle
from kvpool.v2.types import CacheTier, DataRole, LayerId, LayerType, ReusePolicy


@dataclass(slots=True)
class GpuCacheTierConfig:
    """Level 0 (or a cold level on a GPU): ``quota`` bytes, a hard cap."""

    quota: int
    tier: ClassVar[CacheTier] = CacheTier.GPU_MEM

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        self.quota = config_bytes("GpuCacheTierConfig.quota", self.quota)


@dataclass(slots=True)
class HostCacheTierConfig:
    """A cold level in host memory: ``quota`` bytes."""

    quota: int
    tier: ClassVar[CacheTier] = CacheTier.HOST_MEM

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        self.quota = config_bytes("HostCacheTierConfig.quota", self.quota)


@dataclass(slots=True)
class DiskCacheTierConfig:
    """A cold level in files of the existing directory ``path``: ``quota`` bytes."""

    quota: int
    path: str
    tier: ClassVar[CacheTier] = CacheTier.DISK

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        self.quota = config_bytes("DiskCacheTierConfig.quota", self.quota)
        if isinstance(self.path, os.PathLike):
            self.path = os.fspath(self.path)
        if not isinstance(self.path, str) or not os.path.isdir(self.path):
            raise ConfigError(f"DiskCacheTierConfig.path must be an existing directory, not {self.path!r}")


CacheTierConfig: TypeAlias = GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig


@dataclass(slots=True)
class BufferConfig:
    """One layer's bytes of one role ("key", "value", …).

    ``size`` is the bytes of one page of this buffer at its own tokens per block: ``tokens_per_block_override``, which
    must divide the manager's, or the manager's.
    """

    role: DataRole
    size: int
    tokens_per_block_override: int | None = None

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        if not isinstance(self.role, str):
            raise ConfigError(f"BufferConfig.role must be a string, not {self.role!r}")
        name = f"BufferConfig({self.role!r})"
        self.size = config_bytes(f"{name}.size", self.size)
        if self.tokens_per_block_override is not None:
            self.tokens_per_block_override = config_int(
                f"{name}.tokens_per_block_override", self.tokens_per_block_override, 1
            )


def _check_buffers(layer: AttentionLayerConfig | SsmLayerConfig) -> None:
    name = type(layer).__name__
    layer.layer_id = config_int(f"{name}.layer_id", layer.layer_id, 0)
    layer.buffers = config_list(f"{name}({layer.layer_id}).buffers", layer.buffers, (BufferConfig,))
    seen: set[str] = set()
    for buffer in layer.buffers:
        buffer.assert_valid()
        if buffer.role in seen:
            raise ConfigError(f"{name}({layer.layer_id}).buffers: role {buffer.role!r} twice; roles must be unique")
        seen.add(buffer.role)


@dataclass(slots=True)
class AttentionLayerConfig:
    """An attention layer: full, or with a trailing window (tokens) and optional sink tokens that never leave.

    ``reuse_policy``: whether a prefix match needs this layer's pages.
    """

    layer_id: LayerId
    buffers: list[BufferConfig]
    sliding_window_size: int | None = None
    num_sink_tokens: int | None = None
    reuse_policy: ReusePolicy = ReusePolicy.REQUIRED  # ours
    layer_type: ClassVar[LayerType] = LayerType.ATTENTION

    def __post_init__(self) -> None:
        self.assert_valid()

    @property
    def window_size(self) -> int | None:
        """The same as ``sliding_window_size``."""
        return self.sliding_window_size

    def assert_valid(self) -> None:
        _check_buffers(self)
        name = f"AttentionLayerConfig({self.layer_id})"
        if self.sliding_window_size is not None:
            self.sliding_window_size = config_int(f"{name}.sliding_window_size", self.sliding_window_size, 1)
        if self.num_sink_tokens is not None:
            self.num_sink_tokens = config_int(f"{name}.num_sink_tokens", self.num_sink_tokens, 0)
            if self.num_sink_tokens and self.sliding_window_size is None:
                raise ConfigError(
                    f"{name}.num_sink_tokens must be None or 0 without a sliding_window_size, not {self.num_sink_tokens}"
                )
        if not is_integer(self.reuse_policy) or self.reuse_policy not in tuple(ReusePolicy):
            raise ConfigError(
                f"{name}.reuse_policy must be ReusePolicy.REQUIRED or ReusePolicy.OPTIONAL, not {self.reuse_policy!r}"
            )
        self.reuse_policy = ReusePolicy(self.reuse_policy)


@dataclass(slots=True)
class SsmLayerConfig:
    """A recurrent layer: state of constant size, one slot per beam. It has no window attribute."""

    layer_id: LayerId
    buffers: list[BufferConfig]
    layer_type: ClassVar[LayerType] = LayerType.SSM

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        _check_buffers(self)
        for buffer in self.buffers:
            if buffer.tokens_per_block_override is not None:
                raise ConfigError(
                    f"SsmLayerConfig({self.layer_id}): BufferConfig({buffer.role!r}).tokens_per_block_override "
                    f"must be None (state does not belong to blocks), not {buffer.tokens_per_block_override}"
                )


LayerConfig: TypeAlias = AttentionLayerConfig | SsmLayerConfig


@dataclass(frozen=True, slots=True)
class KVCacheDesc:
    """One request of a workload, in tokens: ``0 <= history_length <= capacity``."""

    capacity: int
    history_length: int

    def __post_init__(self) -> None:
        capacity = config_int("KVCacheDesc.capacity", self.capacity, 0)
        history = config_int("KVCacheDesc.history_length", self.history_length, 0)
        if history > capacity:
            raise ConfigError(f"KVCacheDesc.history_length must be at most the capacity {capacity}, not {history}")
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "history_length", history)


@dataclass(frozen=True, slots=True)
class BatchDesc:
    """Requests that run together; all share their first ``system_prompt_length`` tokens (0: no reuse)."""

    kv_caches: list[KVCacheDesc]
    system_prompt_length: int = 0

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        object.__setattr__(self, "kv_caches", config_list("BatchDesc.kv_caches", self.kv_caches, (KVCacheDesc,)))
        length = config_int("BatchDesc.system_prompt_length", self.system_prompt_length, 0)
        object.__setattr__(self, "system_prompt_length", length)


@dataclass(slots=True)
class SwaScratchReuseConfig:
    """Windowed layers share scratch slots during prefill; the last ``max_rewind_len`` tokens are kept out of it."""

    max_rewind_len: int = 0

    def __post_init__(self) -> None:
        self.assert_valid()

    def assert_valid(self) -> None:
        self.max_rewind_len = config_int("SwaScratchReuseConfig.max_rewind_len", self.max_rewind_len, 0)


@dataclass(slots=True)
class KVCacheManagerConfig:
    """Everything a manager is built from; see the specification of each field beside it."""

    tokens_per_block: int
    cache_tiers: list[CacheTierConfig]  # index = level; the first is the GPU
    layers: list[LayerConfig]  # unique layer ids; the order numbers the layer groups
    max_util_for_resume: float = 0.97  # (0, 1]
    enable_partial_reuse: bool = True
    reuse_match_backoff: int = 0  # tokens trimmed off every match
    constraints: list[BatchDesc] = field(default_factory=list)  # batches that must always fit
    typical_step: BatchDesc | None = None  # the batch that the initial split follows
    initial_pool_ratio: list[float] | None = None  # a positive byte share per layer group, sum 1
    swa_scratch_reuse: SwaScratchReuseConfig | None = None
    commit_min_snapshot: bool = False  # must be True with state layers
    enable_stats: bool = True
    text_only: bool = False  # promise: no digest tokens
    rebalance_min_sampled_kv_caches: int = 2000
    rebalance_cooldown_secs: float = 120.0
    rebalance_target_ratio_update_interval: int = 100
    rebalance_ratio_threshold: float = 1.25
    rebalance_moving_average_decay: float = 0.9999
    pool_sizing: str = "planned"  # ours: "planned" or "elastic"
    merge_equal_pools: bool = True  # ours: layer groups with equal slot sizes share a pool group
    match_policy: str = "longest"  # ours: "longest" legal end point of a match, or the one that "reference" prunes to
    retain_window_tails: bool = True  # ours: the window behind each likely end point is evicted late
    window_tail_slack: int = 512  # ours: tokens before the end of a prompt where a match may still end
    window_tail_interval: int | None = None  # ours: tokens between windows kept at regular points; None: 16 windows

    def __post_init__(self) -> None:
        self.validate()

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        return self.swa_scratch_reuse is not None

    def life_cycles(self) -> list[LifeCycle]:
        """The life cycles in order of first mention: index = layer group id."""
        seen: dict[LifeCycle, None] = {}
        for layer in self.layers:
            if isinstance(layer, SsmLayerConfig):
                seen[SsmLifeCycle()] = None
            else:
                window, sinks = layer.sliding_window_size, layer.num_sink_tokens
                optional = layer.reuse_policy == ReusePolicy.OPTIONAL
                seen[AttnLifeCycle.make(window, sinks, self.tokens_per_block, optional)] = None
        return list(seen)

    def validate(self) -> None:
        """Check every field and every rule between fields; ConfigError for the first that is broken."""
        self._check_tiers()
        self.tokens_per_block = config_int(_where("tokens_per_block"), self.tokens_per_block, 1)
        self._check_layers()
        self._check_workload()
        self._check_switches()
        self._check_rebalance()
        self._check_ratio()

    def _check_tiers(self) -> None:
        self.cache_tiers = config_list(
            _where("cache_tiers"), self.cache_tiers, (GpuCacheTierConfig, HostCacheTierConfig, DiskCacheTierConfig)
        )
        if not self.cache_tiers or self.cache_tiers[0].tier != CacheTier.GPU_MEM:
            raise ConfigError(
                f"{_where('cache_tiers')} must not be empty, and the first must be a GpuCacheTierConfig, "
                f"not {self.cache_tiers!r}"
            )
        for tier in self.cache_tiers:
            tier.assert_valid()

    def _check_layers(self) -> None:
        self.layers = config_list(_where("layers"), self.layers, (AttentionLayerConfig, SsmLayerConfig))
        seen: set[int] = set()
        block_bytes = 0
        for layer in self.layers:
            layer.assert_valid()
            if layer.layer_id in seen:
                raise ConfigError(f"{_where('layers')}: layer_id {layer.layer_id} twice; ids must be unique")
            seen.add(layer.layer_id)
            if not layer.buffers:
                raise ConfigError(f"{_where('layers')}: layer {layer.layer_id} has no buffers; leave it out")
            block_bytes += sum(buffer.size * self._expansion(layer, buffer) for buffer in layer.buffers)
        if block_bytes > BYTES_MAX:
            raise ConfigError(f"{_where('layers')}: {block_bytes} bytes per block; must be at most {BYTES_MAX}")

    def _expansion(self, layer: LayerConfig, buffer: BufferConfig) -> int:
        own = buffer.tokens_per_block_override
        if own is None:
            return 1
        if self.tokens_per_block % own:
            raise ConfigError(
                f"{_where('layers')}: layer {layer.layer_id}, BufferConfig({buffer.role!r}).tokens_per_block_override "
                f"must divide tokens_per_block = {self.tokens_per_block}, not {own}"
            )
        return self.tokens_per_block // own

    def _check_workload(self) -> None:
        self.constraints = config_list(_where("constraints"), self.constraints, (BatchDesc,))
        self.typical_step = config_optional(_where("typical_step"), self.typical_step, BatchDesc)
        for batch in (*self.constraints, *([] if self.typical_step is None else [self.typical_step])):
            batch.assert_valid()  # frozen, but its list is not
        scratch = config_optional(_where("swa_scratch_reuse"), self.swa_scratch_reuse, SwaScratchReuseConfig)
        if scratch is not None:
            scratch.assert_valid()
        self.max_util_for_resume = config_real(
            _where("max_util_for_resume"), self.max_util_for_resume, "in (0, 1]", lambda x: 0 < x <= 1
        )

    def _check_switches(self) -> None:
        for name in ("enable_partial_reuse", "commit_min_snapshot", "enable_stats", "text_only", *_OUR_SWITCHES):
            setattr(self, name, config_bool(_where(name), getattr(self, name)))
        self.reuse_match_backoff = config_int(_where("reuse_match_backoff"), self.reuse_match_backoff, 0)
        self.window_tail_slack = config_int(_where("window_tail_slack"), self.window_tail_slack, 0)
        if self.window_tail_interval is not None:
            self.window_tail_interval = config_int(_where("window_tail_interval"), self.window_tail_interval, 0)
        for name, one, other in (("pool_sizing", "planned", "elastic"), ("match_policy", "longest", "reference")):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in (one, other):
                raise ConfigError(f"{_where(name)} must be {one!r} or {other!r}, not {value!r}")
        if not self.commit_min_snapshot and any(isinstance(layer, SsmLayerConfig) for layer in self.layers):
            raise ConfigError(f"{_where('commit_min_snapshot')} must be True with SSM layers, not False")

    def _check_rebalance(self) -> None:
        self.rebalance_min_sampled_kv_caches = config_int(
            _where("rebalance_min_sampled_kv_caches"), self.rebalance_min_sampled_kv_caches, 0
        )
        self.rebalance_target_ratio_update_interval = config_int(
            _where("rebalance_target_ratio_update_interval"), self.rebalance_target_ratio_update_interval, 1
        )
        self.rebalance_cooldown_secs = config_real(
            _where("rebalance_cooldown_secs"),
            self.rebalance_cooldown_secs,
            "finite and at least 0",
            lambda x: 0 <= x < math.inf,
        )
        self.rebalance_ratio_threshold = config_real(
            _where("rebalance_ratio_threshold"),
            self.rebalance_ratio_threshold,
            "finite and above 1",
            lambda x: 1 < x < math.inf,
        )
        self.rebalance_moving_average_decay = config_real(
            _where("rebalance_moving_average_decay"),
            self.rebalance_moving_average_decay,
            "in (0, 1)",
            lambda x: 0 < x < 1,
        )

    def _check_ratio(self) -> None:
        where = _where("initial_pool_ratio")
        if self.initial_pool_ratio is None:
            return
        if not isinstance(self.initial_pool_ratio, (list, tuple)):
            raise ConfigError(f"{where} must be None or a list of numbers, not {self.initial_pool_ratio!r}")
        ratio = [
            config_real(f"{where}[{i}]", value, "finite and above 0", lambda x: 0 < x < math.inf)
            for i, value in enumerate(self.initial_pool_ratio)
        ]
        groups = self.life_cycles()
        if len(ratio) != len(groups):
            raise ConfigError(
                f"{where} must have one entry per layer group, not {len(ratio)}; the groups are, in order, {groups}"
            )
        if ratio and abs(math.fsum(ratio) - 1) > 1e-6:
            raise ConfigError(f"{where} must sum to 1 (within 1e-6), not {math.fsum(ratio)!r}: {ratio}")
        self.initial_pool_ratio = ratio


_OUR_SWITCHES = ("merge_equal_pools", "retain_window_tails")


def _where(name: str) -> str:
    return f"KVCacheManagerConfig.{name}"


def ordered_by_id(config: KVCacheManagerConfig) -> KVCacheManagerConfig:
    """The same configuration with ``layers[layer_id]`` in place, where the ids are exactly 0 … n-1."""
    layers = sorted(config.layers, key=lambda layer: layer.layer_id)
    if [layer.layer_id for layer in layers] != list(range(len(layers))):
        return config
    return dataclasses.replace(config, layers=layers)
