"""The V2 manager: constant layout queries, and caches made from it. One facade over both backends."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError, LogicError, UnsupportedError
from kvpool.v2._backend import ManagerCore
from kvpool.v2._checks import INT32_MAX, arg_bool, arg_index_mode, arg_int
from kvpool.v2._layout_index import LayoutIndex
from kvpool.v2._priorities import BlockPriorities
from kvpool.v2._tokens import DEFAULT_SCOPE, NO_DIGESTS, check_reuse_scope, encode_tokens
from kvpool.v2.backend_choice import check_device, choose_backend, manager_core
from kvpool.v2.config import KVCacheManagerConfig, ordered_by_id
from kvpool.v2.converter import PageIndexConverter
from kvpool.v2.descriptors import AggregatedPageDesc, BufferId, PoolGroupDesc, StorageStatistics
from kvpool.v2.kv_cache import KVCache
from kvpool.v2.life_cycle import LifeCycle, LifeCycleRegistry
from kvpool.v2.planned_drop import PlannedDrops
from kvpool.v2.step_method import StepMethod
from kvpool.v2.types import (
    GPU_LEVEL,
    PRIORITY_DEFAULT,
    CacheLevel,
    CacheTier,
    DataRole,
    LayerGroupId,
    LayerId,
    MemAddress,
    PageIndexMode,
    PoolGroupIndex,
    Priority,
    ReuseScope,
    TokenIdExt,
)
from kvpool.v2.views import BufferPlace, make_view


def default_priority(block_ordinal: int, life_cycle: LifeCycle) -> Priority:
    """The priority of every page unless told otherwise."""
    return PRIORITY_DEFAULT


class KVCacheManager:
    """Owns the pools of one rank and the caches in them.

    ``config`` is copied; ``backend`` ("cpp" or "python", else the environment variable
    ``TLLM_KV_CACHE_MANAGER_V2_BACKEND``, else "cpp") and ``device`` ("auto", "host", "virtual", "sim", "cuda") say what
    runs. Any number of threads may use one manager; one cache belongs to one thread at a time. It has no finalizer: call
    :meth:`shutdown`, or use it in a ``with`` statement.

    Raises ConfigError (a field or rule broken, floors above the quota), ImportError (no compiled extension for "cpp"),
    UnsupportedError (something that this build does not have), OutOfMemoryError.
    """

    __slots__ = (
        "__weakref__",
        "_config",
        "_core",
        "_create",
        "_drops",
        "_init_config",
        "_layout",
        "_pid",
        "_probe",
        "_shut_down",
        "_text_only",
        "step",
    )

    step: StepMethod
    """The core's own bound method, so that nothing is added per call; :class:`StepMethod` is its manual."""

    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: Any | None = None,
        cold_page_codec: Any | None = None,
        *,
        backend: str | None = None,
        device: str = "auto",
    ) -> None:
        if not isinstance(config, KVCacheManagerConfig):
            raise TypeError(f"config must be a KVCacheManagerConfig, not {type(config).__name__}")
        core_class = manager_core(choose_backend(backend))
        check_device(device)
        self._config = copy.deepcopy(config)
        self._config.validate()
        _refuse_unbuilt(self._config, event_manager, cold_page_codec)
        self._init_config = ordered_by_id(copy.deepcopy(self._config))
        self._core: ManagerCore = core_class(self._config, device)
        self._layout = LayoutIndex(self._core.layout(), self._core.pool_addresses(), self._config)
        self._pid = os.getpid()
        self._shut_down = False
        self._text_only = self._config.text_only
        self._drops = PlannedDrops(self._core)
        # bound once: these three are called per request or per step
        self._create = self._core.create
        self._probe = self._core.probe_reuse
        self.step = self._core.step

    def __repr__(self) -> str:
        state = ", shut down" if self._shut_down else ""
        return f"<KVCacheManager backend={self.backend!r} device={self.device!r} layers={self.num_layers}{state}>"

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.shutdown()
        except LogicError:
            if kind is None:  # caches left open by an error must not hide that error
                raise

    def shutdown(self) -> None:
        """Give all memory back; idempotent. LogicError, and nothing done, while caches are open. Views stay valid."""
        self._core.shutdown()
        self._shut_down = True
        self._drops.shut_down()

    # what runs

    @property
    def backend(self) -> str:
        """What really runs: "cpp" or "python"."""
        return self._core.backend

    @property
    def device(self) -> str:
        """The device that "auto" became: "host", "virtual", "sim" …"""
        return self._core.device

    @property
    def device_handle(self) -> Any:
        """The sim device's test interface; None on the other devices."""
        return self._core.device_handle()

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes behind the pools, never above the quota; 0 after :meth:`shutdown`."""
        return 0 if self._shut_down else self._core.mapped_bytes()

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        self._core.synchronize()

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values, equal on both backends after equal calls. For tests."""
        return self._core.snapshot()

    def audit(self) -> None:
        """Check every invariant, O(state); CorruptedError for the first that is broken. For tests."""
        self._core.audit()

    # configuration and levels

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """A copy of the configuration; ``layers[layer_id]`` holds when the ids are 0 … n-1."""
        return self._init_config

    @property
    def tokens_per_block(self) -> int:
        return self._config.tokens_per_block

    @property
    def commit_min_snapshot(self) -> bool:
        return self._config.commit_min_snapshot

    @property
    def enable_partial_match(self) -> bool:
        """Whether a prefix match may end inside a block, of the configuration."""
        return self._config.enable_partial_reuse

    @property
    def allow_seq_rebasing(self) -> bool:
        """Always True: equal full blocks of two requests become one."""
        return True

    @property
    def event_manager(self) -> None:
        """The event manager of the constructor: None, as cache events are not built yet."""
        return None

    @property
    def cache_tier_list(self) -> Sequence[CacheTier]:
        """Index = cache level."""
        return tuple(tier.tier for tier in self._config.cache_tiers)

    def get_quota(self, cache_level: CacheLevel) -> int:
        """The configured bytes of a level."""
        return self._config.cache_tiers[self._level(cache_level)].quota

    def get_storage_statistics(self, cache_level: CacheLevel = GPU_LEVEL) -> list[StorageStatistics]:
        """Slots per pool group of a level."""
        self._level(cache_level)
        groups = self._static().pool_groups
        return [
            StorageStatistics(list(info.slot_sizes), total, free, evictable)
            for info, (total, free, evictable) in zip(groups, self._core.statistics(), strict=True)
        ]

    def clamp_max_seq_len_for_mem(self, batch_size: int, token_num_upper_bound: int) -> int:
        """The longest sequence (tokens) that fits beside ``batch_size - 1`` one-token sequences, 0 when none does.

        At most ``token_num_upper_bound`` and at most 2^31 - 1.
        """
        batch = arg_int("batch_size", batch_size, 1)
        bound = arg_int("token_num_upper_bound", token_num_upper_bound, 0, 2**63 - 1)
        return self._core.clamp_max_seq_len(batch, min(bound, INT32_MAX))

    # layer groups

    @property
    def layer_grouping(self) -> Sequence[Sequence[LayerId]]:
        """The layers of each layer group."""
        return self._static().grouping

    @property
    def num_layers(self) -> int:
        return len(self._layout.layer_ids)

    @property
    def layer_ids(self) -> Iterator[LayerId]:
        """In configuration order."""
        return iter(self._static().layer_ids)

    @property
    def all_buffer_ids(self) -> Iterator[BufferId]:
        """In configuration order."""
        return iter(self._static().buffer_ids)

    @property
    def _life_cycles(self) -> LifeCycleRegistry:
        return self._static().registry

    def get_layer_group_id(self, layer_id: LayerId) -> LayerGroupId:
        return self._static().group_of_layer(layer_id)

    def get_life_cycle_pool_group_indices(self, cache_level: CacheLevel = GPU_LEVEL) -> list[PoolGroupIndex]:
        """The pool group of each life cycle at a level."""
        self._level(cache_level)
        return [info.pool_group for info in self._static().life_cycles]

    # addresses and indices; UnknownBufferError for an unknown layer or role

    def supports_index_mode(self, mode: PageIndexMode) -> bool | None:
        """None: it depends on the cache (SHARED while scratch reuse is configured)."""
        if arg_index_mode(mode) == PageIndexMode.SHARED and self._config.enable_swa_scratch_reuse:
            return None
        return True

    def get_mem_pool_base_address(
        self, layer_id: LayerId, data_role: DataRole, index_mode: PageIndexMode | None = None
    ) -> MemAddress:
        """The address that page indices of ``index_mode`` count from; it never changes.

        None means SHARED; with scratch reuse configured the mode must be given (ArgumentError).
        """
        layout = self._static()
        info = layout.buffer(layer_id, data_role)
        if index_mode is None:
            if self._config.enable_swa_scratch_reuse:
                raise ArgumentError("index_mode must be given: scratch reuse is configured, which needs PER_LAYER")
            index_mode = PageIndexMode.SHARED
        shared = arg_index_mode(index_mode) == PageIndexMode.SHARED
        return layout.pool_address(info) + (info.offset if shared else 0)

    def get_page_stride(self, layer_id: LayerId, data_role: DataRole) -> int:
        """Bytes from one page index to the next: one page at the buffer's own tokens per block."""
        info = self._static().buffer(layer_id, data_role)
        return info.size // info.expansion

    def get_page_index_scale(self, layer_id: LayerId, data_role: DataRole) -> int:
        """Sub-pages of this size in one slot."""
        return self._static().buffer(layer_id, data_role).scale

    def get_page_index_upper_bound(self, layer_id: LayerId, data_role: DataRole) -> int:
        """Page indices in SHARED mode are below this."""
        layout = self._static()
        info = layout.buffer(layer_id, data_role)
        slots = self._core.slot_counts()[layout.life_cycles[info.life_cycle].pool_group]
        return (info.scale * slots - info.offset // info.size) * info.expansion

    def get_page_index_converter(self, layer_id: LayerId, data_role: DataRole) -> PageIndexConverter:
        return self._static().converter(layer_id, data_role)

    @property
    def pool_group_descs(self) -> Sequence[PoolGroupDesc]:
        """The pool groups of level 0, with their slot counts now."""
        return self._static().pool_group_descs(self._core.slot_counts())

    def get_aggregated_pages(self, buffers: Iterable[BufferId]) -> Iterator[AggregatedPageDesc]:
        """Maximal runs of the given buffers that touch inside a slot; the order given does not matter."""
        return iter(self._static().aggregated_pages(buffers))

    def get_buffers(
        self, layer_id: LayerId, role: DataRole, dtype: Any, heads: int, head_dim: int, layout: str = "NHD"
    ) -> Any:
        """All slots of one buffer as an array (numpy dtype) or a tensor (torch dtype) over the pool itself.

        Shape: ``(slots, tokens_per_block, heads, head_dim)`` for "NHD", ``(slots, heads, tokens_per_block, head_dim)``
        for "HND", with own tokens per block ``t`` and ``E = tokens_per_block / t`` ``(slots, E, heads, t, head_dim)``;
        for recurrent state ``(slots, heads, head_dim)``. The first axis is the slot id. Views support DLPack and keep
        the memory alive, after :meth:`shutdown` too.

        Raises ArgumentError when the sizes do not make the buffer's bytes (it says what would), UnsupportedError on a
        device without bytes.
        """
        index = self._static()
        info = index.buffer(layer_id, role)
        if self.device == "virtual":
            raise UnsupportedError("get_buffers: the 'virtual' device has no bytes; use device='host'")
        life_cycle = index.life_cycles[info.life_cycle]
        place = BufferPlace(
            name=f"buffer (layer {layer_id}, {role!r})",
            slots=self._core.slot_counts()[life_cycle.pool_group],
            slot_bytes=index.slot_bytes(info),
            offset=info.offset,
            page_bytes=info.size // info.expansion,
            expansion=info.expansion,
            tokens=None if life_cycle.is_ssm else self.tokens_per_block // info.expansion,
        )
        return make_view(
            self._core.pool_memory(life_cycle.pool_group, info.pool), place, dtype, heads, head_dim, layout
        )

    # caches

    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: Sequence[TokenIdExt] | npt.NDArray[np.int32] | None = None,
        id: Any = None,  # noqa: A002 - a name of the API
        custom_priority_callback: Callable[[int, LifeCycle], Priority] | None = default_priority,
        expected_prompt_length: int | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> KVCache:
        """A new SUSPENDED cache. It owns the longest cached prefix of ``input_tokens`` from which one can go on.

        All three lengths are that prefix's (:attr:`KVCache.num_committed_tokens`): 0 without a match, without tokens.
        The caller leaves out what it must compute again, usually the last token of the prompt.

        ``input_tokens``: a list or tuple of token ids and 32-byte digests, or a C-contiguous int32 array. Prefixes are
        shared inside one ``reuse_scope`` only. ``expected_prompt_length`` (tokens; None: those given) says where the
        prompt ends: what the window needs behind that end is kept longer. ``text_only`` may only tighten the manager's
        promise.

        ``custom_priority_callback(block ordinal, life cycle)`` answers 0 to 100: pages of lower priority are evicted
        first. It is called here for the blocks of the prompt and by ``resize`` for the blocks that it adds, once per
        block and life cycle and never under a lock; ``step`` goes on with the last answers. What it raises, the call
        raises, and nothing has changed. Raises TypeError, ArgumentError.
        """
        scope = DEFAULT_SCOPE if reuse_scope is None else check_reuse_scope(reuse_scope)
        promised = self._text_only if text_only is None else self._promise(text_only)
        ids, digests, prompt_length = None, NO_DIGESTS, 0
        if input_tokens is not None:
            ids, digests = encode_tokens("input_tokens", input_tokens, promised)
            prompt_length = len(ids)
        if expected_prompt_length is not None:
            prompt_length = arg_int("expected_prompt_length", expected_prompt_length)
        if enable_request_stats is not False:
            arg_bool("enable_request_stats", enable_request_stats)
        priorities = answers = None
        if custom_priority_callback is not default_priority and custom_priority_callback is not None:
            if not callable(custom_priority_callback):
                raise TypeError("custom_priority_callback must be callable or None")
            priorities = BlockPriorities(custom_priority_callback, self._layout.registry, self.tokens_per_block)
            answers = priorities.missing(prompt_length if ids is None else max(prompt_length, len(ids)))
            priorities.told(answers)
        if self._drops.posted:
            self._drops.apply_posted()
        handle = self._create(scope, ids, digests, prompt_length, self._text_only, answers)
        return KVCache(self, self._core, self._layout, handle, scope, id, promised, priorities)

    def probe_reuse(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: Sequence[TokenIdExt] | npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Tokens that :meth:`create_kv_cache` would reuse now. Takes nothing, promises nothing."""
        scope = DEFAULT_SCOPE if reuse_scope is None else check_reuse_scope(reuse_scope)
        if input_tokens is None:
            return 0
        ids, digests = encode_tokens("input_tokens", input_tokens, self._text_only)
        return self._probe(scope, ids, digests)

    def probe_first_new_block_key(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: Sequence[TokenIdExt] | npt.NDArray[np.int32] | None = None,
    ) -> bytes | None:
        """The key of the first block that :meth:`create_kv_cache` would not reuse, None when the tokens do not fill it.

        Of two requests with the same key, a scheduler lets the second wait until the first has committed that block.
        UnsupportedError where the C++ backend finds no libcrypto.
        """
        scope = DEFAULT_SCOPE if reuse_scope is None else check_reuse_scope(reuse_scope)
        if input_tokens is None:
            return None
        ids, digests = encode_tokens("input_tokens", input_tokens, self._text_only)
        return self._core.probe_first_new_block_key(scope, ids, digests)

    def clear_reusable_blocks(self) -> None:
        """Forget every cached prefix; all slots are free then. LogicError, and nothing done, while caches are open."""
        self._drops.apply_posted()
        self._core.clear_reusable_blocks()

    def _promise(self, text_only: bool) -> bool:
        """The argument, checked: what the configuration promises can not be withdrawn."""
        wanted = arg_bool("text_only", text_only)
        if self._text_only and not wanted:
            raise ArgumentError("text_only = False: the manager's configuration promises text only")
        return wanted

    def _static(self) -> LayoutIndex:
        """The layout, refused in a forked child, where the addresses mean nothing."""
        if os.getpid() != self._pid:
            raise LogicError("this manager was created in another process (fork)")
        return self._layout

    def _level(self, cache_level: CacheLevel) -> int:
        return arg_int("cache_level", cache_level, 0, len(self._config.cache_tiers) - 1)


def _refuse_unbuilt(config: KVCacheManagerConfig, event_manager: Any, cold_page_codec: Any) -> None:
    if event_manager is not None:
        raise UnsupportedError("event_manager: cache events are not built yet; leave it None")
    if cold_page_codec is not None:
        raise UnsupportedError("cold_page_codec: cold tiers are not built yet; leave it None")
    if len(config.cache_tiers) > 1:
        raise UnsupportedError(
            f"cache_tiers has {len(config.cache_tiers)} tiers: cold tiers are not built yet; give the GPU tier alone"
        )
    if config.pool_sizing != "planned":
        raise UnsupportedError(f"pool_sizing = {config.pool_sizing!r} is not built yet; use 'planned'")
