"""For tests and triage: how pools were divided, what the prefix cache holds. Not synchronised with other threads.

The ``grains_*`` and ``ratio_*`` functions need no manager: they run on the sizing code of the backend that
``TLLM_KV_CACHE_MANAGER_V2_BACKEND`` chooses.  Sizes are bytes, counts slots; ``lc`` is a life cycle id.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from kvpool.errors import ArgumentError
from kvpool.v2._backend import Ids
from kvpool.v2._checks import BYTES_MAX, arg_bool, arg_int
from kvpool.v2._tokens import check_reuse_scope, decode_tokens, encode_tokens
from kvpool.v2.backend_choice import choose_backend, native_module
from kvpool.v2.config import BatchDesc
from kvpool.v2.descriptors import StorageStatistics
from kvpool.v2.keys import sequence_to_blockchain_keys
from kvpool.v2.kv_cache import KVCache
from kvpool.v2.manager import KVCacheManager
from kvpool.v2.types import GPU_LEVEL, CacheLevel, LifeCycleId, PoolGroupIndex, ReuseScope, TokenIdExt

__all__ = [
    "TestBlock",
    "all_tree_pages_droppable",
    "attention_life_cycle_ids",
    "close_test_block",
    "committed_page_is_linked",
    "compute_slots_for_batch",
    "current_gpu_ratio",
    "grains_for_slots",
    "grains_to_slots",
    "is_commit_allowed",
    "life_cycle_pool_group_indices",
    "make_test_block",
    "ratio_to_slot_count_list",
    "reuse_match_pages",
    "reuse_match_planned_drop_counts",
    "set_test_coverage",
    "ssm_life_cycle_id",
    "storage_statistics",
    "storage_utilization",
    "swa_life_cycle_ids",
    "test_block_key",
]

# The prefix cache


@dataclass(frozen=True, slots=True)
class TestBlock:
    """A block put into the prefix cache by hand; named by its path, so it may have been evicted meanwhile."""

    __test__ = False  # no test class, whatever pytest thinks of the name

    manager: KVCacheManager
    reuse_scope: ReuseScope
    tokens: tuple[TokenIdExt, ...]
    """All tokens from the root up to and including this block's."""


def make_test_block(
    manager: KVCacheManager,
    tokens: Sequence[TokenIdExt] | Ids,
    coverage_per_lc: Sequence[int | None] | Mapping[LifeCycleId, int | None],
    parent: TestBlock | None = None,
    reuse_scope: ReuseScope | None = None,
) -> TestBlock:
    """Insert one block of 1 to tokens_per_block tokens behind ``parent`` (a full block; None: the scope's root).

    ``coverage_per_lc``: per life cycle the leading tokens that a cached page covers; 0, None or left out: no page.
    """
    own = decode_tokens(*encode_tokens("tokens", tokens, False))
    if not 1 <= len(own) <= manager.tokens_per_block:
        raise ArgumentError(f"tokens must be 1 to {manager.tokens_per_block}, not {len(own)}")
    if parent is not None and (parent.manager is not manager or len(parent.tokens) % manager.tokens_per_block):
        raise ArgumentError("parent must be a full block of the same manager")
    scope = check_reuse_scope(reuse_scope) if parent is None else parent.reuse_scope
    life_cycles = range(len(manager._static().life_cycles))
    given = coverage_per_lc if isinstance(coverage_per_lc, Mapping) else dict(enumerate(coverage_per_lc))
    if not given.keys() <= set(life_cycles):
        raise ArgumentError(f"coverage_per_lc: life cycles are 0 to {len(life_cycles) - 1}, not {list(given)}")
    coverage = [arg_int(f"coverage_per_lc[{lc}]", given.get(lc) or 0, 0, len(own)) for lc in life_cycles]
    block = TestBlock(manager, scope, (*(() if parent is None else parent.tokens), *own))
    manager._core.debug_insert_block(scope, *_path(block), coverage)
    return block


def close_test_block(block: TestBlock) -> None:
    """Remove the block's pages that are still there, and with them whatever can not be matched any more."""
    ids, digests = _path(block)
    for lc in range(len(block.manager._static().life_cycles)):
        matched, pages = block.manager._core.match_pages(block.reuse_scope, ids, digests, lc, False)
        if matched == len(ids) and pages[-1] is not None:
            block.manager._core.debug_set_coverage(block.reuse_scope, ids, digests, lc, 0)


def test_block_key(block: TestBlock) -> bytes:
    """The block's chain key."""
    *_, (_, key) = sequence_to_blockchain_keys(block.manager.tokens_per_block, block.reuse_scope, block.tokens)
    return key


test_block_key.__test__ = False  # type: ignore[attr-defined]  # the name is given; it is no test


def reuse_match_pages(
    manager: KVCacheManager,
    scope: ReuseScope | None,
    tokens: Sequence[TokenIdExt] | Ids,
    lc: LifeCycleId,
    enable_partial: bool = False,
) -> tuple[int, list[tuple[int, int] | None]]:
    """What the walk alone matches, whatever is legal: tokens, and per block the (slot, coverage) of ``lc``'s page."""
    group = manager._static().group(lc)
    query = encode_tokens("tokens", tokens, False)
    partial = arg_bool("enable_partial", enable_partial)
    matched, pages = manager._core.match_pages(check_reuse_scope(scope), *query, group, partial)
    return matched, [None if page is None else (page[0], page[1]) for page in pages]


def reuse_match_planned_drop_counts(
    manager: KVCacheManager,
    scope: ReuseScope | None,
    tokens: Sequence[TokenIdExt] | Ids,
    lc: LifeCycleId,
    enable_partial: bool = False,
) -> list[int | None]:
    """For the pages of :func:`reuse_match_pages`: by how many undropped plans each is covered; None without a page."""
    _, pages = reuse_match_pages(manager, scope, tokens, lc, enable_partial)
    plans: dict[int, int] = {}
    for node in manager.snapshot()["tree"]:
        page = node[4][lc]
        if page is not None:
            plans[page[0]] = page[4]
    return [None if page is None else plans[page[0]] for page in pages]


def set_test_coverage(
    manager: KVCacheManager,
    scope: ReuseScope | None,
    tokens: Sequence[TokenIdExt] | Ids,
    lc: LifeCycleId,
    coverage: int,
) -> None:
    """From now on ``lc``'s cached page of the last block of ``tokens`` covers so many tokens; 0 removes it."""
    query = encode_tokens("tokens", tokens, False)
    limit = (len(query[0]) - 1) % manager.tokens_per_block + 1
    wanted = arg_int("coverage", coverage, 0, limit)
    manager._core.debug_set_coverage(check_reuse_scope(scope), *query, manager._static().group(lc), wanted)


def committed_page_is_linked(kv: KVCache, ordinal: int, lc: LifeCycleId) -> bool | None:
    """Whether the cache's page of that block belongs to the prefix cache; None without a page."""
    return kv.manager._core.page_is_linked(kv.handle, arg_int("ordinal", ordinal), kv.manager._static().group(lc))


def all_tree_pages_droppable(manager: KVCacheManager) -> bool:
    """No open cache owns a page of the prefix cache."""
    return manager._core.all_tree_pages_droppable()


def is_commit_allowed(kv: KVCache) -> bool:
    """Committing has not stopped."""
    return kv.manager._core.commit_allowed(kv.handle)


def _path(block: TestBlock) -> tuple[Ids, Sequence[bytes]]:
    return encode_tokens("tokens", block.tokens, False)


# Pools


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
