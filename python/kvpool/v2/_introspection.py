"""For tests and triage: how pools were divided. Not synchronised with calls of other threads.

The ``grains_*`` and ``ratio_*`` functions need no manager: they run on the sizing code of the backend that
``TLLM_KV_CACHE_MANAGER_V2_BACKEND`` chooses.  Sizes are bytes, counts slots.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import ModuleType

from kvpool.errors import ArgumentError
from kvpool.v2._checks import BYTES_MAX, arg_int
from kvpool.v2.backend_choice import choose_backend, native_module
from kvpool.v2.config import BatchDesc
from kvpool.v2.descriptors import StorageStatistics
from kvpool.v2.manager import KVCacheManager
from kvpool.v2.types import GPU_LEVEL, CacheLevel, LifeCycleId, PoolGroupIndex

__all__ = [
    "attention_life_cycle_ids",
    "compute_slots_for_batch",
    "current_gpu_ratio",
    "grains_for_slots",
    "grains_to_slots",
    "life_cycle_pool_group_indices",
    "ratio_to_slot_count_list",
    "ssm_life_cycle_id",
    "storage_statistics",
    "storage_utilization",
    "swa_life_cycle_ids",
]


def storage_statistics(manager: KVCacheManager, cache_level: CacheLevel = GPU_LEVEL) -> list[StorageStatistics]:
    """Per pool group of the level."""
    return manager.get_storage_statistics(cache_level)


def storage_utilization(manager: KVCacheManager, cache_level: CacheLevel = GPU_LEVEL) -> list[float]:
    """Unavailable slots / all slots, per pool group of the level."""
    return [info.unavailable / info.total for info in manager.get_storage_statistics(cache_level)]


def life_cycle_pool_group_indices(manager: KVCacheManager, cache_level: CacheLevel = GPU_LEVEL) -> list[PoolGroupIndex]:
    """The pool group of each life cycle at the level."""
    return manager.get_life_cycle_pool_group_indices(cache_level)


def current_gpu_ratio(manager: KVCacheManager) -> list[float]:
    """Share of level 0's slot bytes, per pool group; the sum is 1."""
    sizes = [info.total * sum(info.slot_sizes) for info in manager.get_storage_statistics()]
    return [size / sum(sizes) for size in sizes]


def attention_life_cycle_ids(manager: KVCacheManager) -> list[LifeCycleId]:
    """Life cycles of attention layers, windowed or not."""
    return [index for index, info in enumerate(manager._static().life_cycles) if not info.is_ssm]


def swa_life_cycle_ids(manager: KVCacheManager) -> list[LifeCycleId]:
    """Life cycles with a window."""
    return [index for index, info in enumerate(manager._static().life_cycles) if info.window is not None]


def ssm_life_cycle_id(manager: KVCacheManager) -> LifeCycleId | None:
    """The life cycle of recurrent state; None without one."""
    for index, info in enumerate(manager._static().life_cycles):
        if info.is_ssm:
            return index
    return None


def grains_for_slots(num_slots: int, slot_sizes: Sequence[int], granularity: int) -> int:
    """Grains that hold ``num_slots`` slots in every pool of a group: ``Σ ceil(num_slots * size / granularity)``."""
    count = arg_int("num_slots", num_slots, 0, BYTES_MAX)
    grains = _sizing().grains_for_slots(count, _sizes("slot_sizes", slot_sizes), _grain(granularity))
    return int(grains)


def grains_to_slots(grains: int, slot_sizes: Sequence[int], granularity: int) -> tuple[int, int]:
    """The most slots that ``grains`` hold, and the grains that these really use."""
    count = arg_int("grains", grains, 0, BYTES_MAX)
    slots, used = _sizing().grains_to_slots(count, _sizes("slot_sizes", slot_sizes), _grain(granularity))
    return int(slots), int(used)


def ratio_to_slot_count_list(
    quota: int,
    slot_size_lists: Sequence[Sequence[int]],
    ratios: Sequence[float],
    granularity: int,
    min_slots: Sequence[int],
) -> list[int]:
    """Slot counts per pool group for byte shares ``ratios`` (each above 0), at least ``min_slots``, within ``quota``.

    ConfigError when the minimum alone exceeds the quota, ArgumentError for lists of unequal length.
    """
    sizes = [_sizes("slot_size_lists", one) for one in slot_size_lists]
    if not len(sizes) == len(ratios) == len(min_slots):
        raise ArgumentError("slot_size_lists, ratios and min_slots must have one entry per pool group each")
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise ArgumentError(f"ratios must be finite and above 0, not {list(ratios)}")
    share_need = importlib.import_module("kvpool._py.storage.sizing").share_need
    weights = [int(ratio / math.fsum(ratios) * 1e9 + 0.5) for ratio in ratios]
    needs = [share_need(weight, sum(one)) for weight, one in zip(weights, sizes, strict=True)]
    floors = [arg_int("min_slots", floor, 0, BYTES_MAX) for floor in min_slots]
    keys = [(0, -1, group) for group in range(len(sizes))]
    limit = arg_int("quota", quota, 1, BYTES_MAX)
    return list(_sizing().solve_slot_counts(limit, _grain(granularity), sizes, floors, needs, keys))


def compute_slots_for_batch(manager: KVCacheManager, batch: BatchDesc) -> list[int]:
    """Slots that all requests of ``batch`` need at once, per life cycle; by the Python twin for both backends."""
    if not isinstance(batch, BatchDesc):
        raise TypeError(f"batch must be a BatchDesc, not {type(batch).__name__}")
    demand = importlib.import_module("kvpool._py.storage.demand")
    layout = importlib.import_module("kvpool._py.storage.layout")
    config = manager._config
    scratch = config.swa_scratch_reuse
    max_rewind = None if scratch is None else scratch.max_rewind_len
    return list(demand.batch_demand(layout.build_layout(config), batch, max_rewind))


def _sizing() -> ModuleType:
    """The sizing code of the backend that the environment chooses; equal names in both."""
    if choose_backend() == "cpp":
        return native_module()
    return importlib.import_module("kvpool._py.storage.sizing")


def _sizes(name: str, slot_sizes: Sequence[int]) -> list[int]:
    if not slot_sizes:
        raise ArgumentError(f"{name} must name at least one pool")
    return [arg_int(name, size, 1, BYTES_MAX) for size in slot_sizes]


def _grain(granularity: int) -> int:
    return arg_int("granularity", granularity, 1, BYTES_MAX)
