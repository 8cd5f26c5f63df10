"""The V2 KV-cache manager: layers grouped by attention window, pools sized by what the groups need.

The names, signatures and semantics are those that executors of comparable managers call.  Ours, and additive:
``backend=``, ``device=``, ``manager.backend``, ``device``, ``device_handle``, ``step``, ``get_buffers``, ``synchronize``,
``snapshot``, ``audit``, ``mapped_bytes``, ``KVCache.handle``, ``KVCache.get_page_levels``, ``with`` statements, the
configuration fields ``pool_sizing`` and ``merge_equal_pools``, ``KVCacheManagerConfig.validate`` and ``life_cycles``, and
the whole exception tree; for reuse ``ReusePolicy``, ``ReuseStatus``, ``KVCache.block_keys`` and the fields
``match_policy``, ``retain_window_tails``, ``window_tail_slack`` and ``window_tail_interval``.

``BACKEND`` and ``_cpp_introspection`` are computed at every access from ``TLLM_KV_CACHE_MANAGER_V2_BACKEND``: the backend
that a manager made now would run on, and the introspection module if that is "cpp" (else None).
"""

from __future__ import annotations

from typing import Any

from kvpool.errors import (
    ArgumentError,
    ConfigError,
    CorruptedError,
    CuError,
    CuOOMError,
    DiskOOMError,
    HostOOMError,
    LogicError,
    NeverFitsError,
    OutOfMemoryError,
    OutOfPagesError,
    ResourceBusyError,
    UnknownBufferError,
    UnsupportedError,
)
from kvpool.v2._backend import StepResult
from kvpool.v2.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    LayerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kvpool.v2.converter import PageIndexConverter
from kvpool.v2.descriptors import (
    AggregatedPageDesc,
    BufferId,
    CoalescedBuffer,
    ExpandedBuffer,
    PoolDesc,
    PoolGroupDesc,
    SlotDesc,
    SlotDescVariant,
    StorageStatistics,
)
from kvpool.v2.keys import gen_multimodal_cache_key_tokens, sequence_to_blockchain_keys
from kvpool.v2.kv_cache import KVCache
from kvpool.v2.life_cycle import AttnLifeCycle, SsmLifeCycle
from kvpool.v2.manager import KVCacheManager
from kvpool.v2.planned_drop import PlannedDropHandle
from kvpool.v2.step_method import StepMethod
from kvpool.v2.types import (
    BAD_PAGE_INDEX,
    CACHE_LEVEL1,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    NDEBUG,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    BeamIndex,
    CacheLevel,
    CacheTier,
    CudaStream,
    DataRole,
    HalfOpenRange,
    IndexSeq,
    KvCacheStatus,
    LayerGroupId,
    LayerId,
    LayerType,
    LifeCycleId,
    MemAddress,
    MmItemContext,
    PageIndexMode,
    PageStatus,
    PoolGroupIndex,
    PoolIndex,
    Priority,
    ReusePolicy,
    ReuseScope,
    ReuseStatus,
    ScratchDesc,
    SlidingWindowSize,
    TokenId,
    TokenIdExt,
    _Status,
    exact_div,
    typed_range,
)

_KVCache = KVCache

BACKEND: str
_cpp_introspection: Any

__all__ = [
    "BAD_PAGE_INDEX",
    "CACHE_LEVEL1",
    "DEFAULT_BEAM_INDEX",
    "GPU_LEVEL",
    "NDEBUG",
    "PRIORITY_DEFAULT",
    "PRIORITY_MAX",
    "PRIORITY_MIN",
    "AggregatedPageDesc",
    "ArgumentError",
    "AttentionLayerConfig",
    "AttnLifeCycle",
    "BatchDesc",
    "BeamIndex",
    "BufferConfig",
    "BufferId",
    "CacheLevel",
    "CacheTier",
    "CacheTierConfig",
    "CoalescedBuffer",
    "ConfigError",
    "CorruptedError",
    "CuError",
    "CuOOMError",
    "CudaStream",
    "DataRole",
    "DiskCacheTierConfig",
    "DiskOOMError",
    "ExpandedBuffer",
    "GpuCacheTierConfig",
    "HalfOpenRange",
    "HostCacheTierConfig",
    "HostOOMError",
    "IndexSeq",
    "KVCache",
    "KVCacheDesc",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "KvCacheStatus",
    "LayerConfig",
    "LayerGroupId",
    "LayerId",
    "LayerType",
    "LifeCycleId",
    "LogicError",
    "MemAddress",
    "MmItemContext",
    "NeverFitsError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PageIndexConverter",
    "PageIndexMode",
    "PageStatus",
    "PlannedDropHandle",
    "PoolDesc",
    "PoolGroupDesc",
    "PoolGroupIndex",
    "PoolIndex",
    "Priority",
    "ResourceBusyError",
    "ReusePolicy",
    "ReuseScope",
    "ReuseStatus",
    "ScratchDesc",
    "SlidingWindowSize",
    "SlotDesc",
    "SlotDescVariant",
    "SsmLayerConfig",
    "SsmLifeCycle",
    "StepMethod",
    "StepResult",
    "StorageStatistics",
    "SwaScratchReuseConfig",
    "TokenId",
    "TokenIdExt",
    "UnknownBufferError",
    "UnsupportedError",
    "_KVCache",
    "_Status",
    "exact_div",
    "gen_multimodal_cache_key_tokens",
    "sequence_to_blockchain_keys",
    "typed_range",
]


def __getattr__(name: str) -> Any:
    if name in ("BACKEND", "_cpp_introspection"):
        from kvpool.v2.backend_choice import choose_backend

        backend = choose_backend()
        if name == "BACKEND":
            return backend
        if backend != "cpp":
            return None
        from kvpool.v2 import _introspection

        return _introspection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
