"""What a manager is made of, and the calls that are about all of it rather than about one cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._py.core.journal import Journal
from kvpool._py.core.math import decimal_fraction
from kvpool._py.core.tokens import Ids
from kvpool._py.device.factory import make_device
from kvpool._py.device.sim_device import SimDevice
from kvpool._py.manager import clamp, snapshot
from kvpool._py.manager.describe import describe_layout
from kvpool._py.manager.guard import ManagerGuard
from kvpool._py.manager.registry import CacheRegistry
from kvpool._py.manager.reuse import ReuseCalls
from kvpool._py.manager.step import BatchStep
from kvpool._py.page.prefix_cache import PrefixCache
from kvpool._py.reuse.rules import ReuseRules
from kvpool._py.sequence.ground import Ground
from kvpool._py.sequence.kv_cache import KVCache, SequenceRules
from kvpool._py.sequence.transitions import Transitions
from kvpool._py.storage.layout import LifeCycle, build_layout, check_index_range
from kvpool._py.storage.sizing import grain_for_quota, plan_slot_counts
from kvpool._py.storage.tier import Tier
from kvpool.errors import ArgumentError, LogicError, UnknownBufferError
from kvpool.v2._backend import Layout, Scope


class ManagerState:
    """The parts of a manager; see :class:`~kvpool._py.manager.manager.Manager`."""

    def __init__(self, config: Any, device: str) -> None:
        self._guard = ManagerGuard()
        self._device = make_device(device)
        self.device = self._device.name
        self._layout = build_layout(config)
        grain = grain_for_quota(config.cache_tiers[0].quota, self._device.granularity)
        counts, floors = plan_slot_counts(self._layout, config, grain)
        check_index_range(self._layout, counts)
        self._description = describe_layout(self._layout, floors, grain)
        journal = Journal()
        self._tier = Tier(self._device, self._layout, counts, grain, journal)
        self._pages = PrefixCache(self._layout, ReuseRules.make(self._layout, config), self._tier, journal)
        scratch = config.swa_scratch_reuse
        self._rules = SequenceRules.make(
            self._layout,
            tuple(counts),
            decimal_fraction(config.max_util_for_resume),
            config.commit_min_snapshot,
            None if scratch is None else scratch.max_rewind_len,
        )
        self._registry = CacheRegistry()
        self._ground = Ground(self._rules, self._tier, self._device, journal, self._pages)
        self._reuse = ReuseCalls(self._ground)
        self._transitions = Transitions(self._ground)
        self._batch_step = BatchStep(self._transitions)

    # ---------------------------------------------------------------------------------------- layout and memory

    def layout(self) -> Layout:
        """The layout; constant."""
        self._guard.check_process()
        return self._description

    def slot_counts(self) -> list[int]:
        """Slots per pool group."""
        with self._locked("slot_counts"):
            return list(self._tier.slot_counts)

    def pool_addresses(self) -> list[list[int]]:
        """Base address of every pool: [pool group][pool]."""
        with self._locked("pool_addresses"):
            return [[pool.address for pool in pools] for pools in self._tier.pools]

    def pool_memory(self, pool_group: int, pool: int) -> npt.NDArray[np.uint8]:
        """All slots of a pool as writable bytes; keeps the memory alive.  UnsupportedError without bytes."""
        with self._locked("pool_memory"):
            pools = self._tier.pools
            if not 0 <= pool_group < len(pools) or not 0 <= pool < len(pools[pool_group]):
                raise ArgumentError(f"pool_memory(): there is no pool {pool} in pool group {pool_group}")
            return pools[pool_group][pool].memory()

    def mapped_bytes(self) -> int:
        """Bytes that have memory, at most the quota."""
        with self._locked("mapped_bytes"):
            return self._tier.mapped_bytes

    def device_handle(self) -> SimDevice | None:
        """The sim device with its test interface, else None."""
        self._guard.check_process()
        return self._device if isinstance(self._device, SimDevice) else None

    def statistics(self) -> list[tuple[int, int, int]]:
        """Total, free and evictable slots per pool group; an evictable one has a page that nobody owns."""
        with self._locked("statistics"):
            return [
                (allocator.capacity, allocator.num_free, self._pages.evictable(group))
                for group, allocator in enumerate(self._tier.allocators)
            ]

    def clamp_max_seq_len(self, batch_size: int, token_num_upper_bound: int) -> int:
        """Longest sequence beside ``batch_size - 1`` of one token, at most the bound; 0 when none fits."""
        with self._locked("clamp_max_seq_len"):
            return clamp.clamp_max_seq_len(self._layout, self._tier.slot_counts, batch_size, token_num_upper_bound)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        with self._locked("synchronize"):
            self._device.synchronize()

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values."""
        with self._locked("snapshot"):
            return snapshot.take_snapshot(self._tier, self._pages, self._registry.all())

    def audit(self) -> None:
        """Check every invariant; CorruptedError when one does not hold.  O(n)."""
        with self._locked("audit"):
            snapshot.audit(self._rules, self._tier, self._pages, self._registry.all())

    def num_open(self) -> int:
        """Caches not closed."""
        self._guard.check_process()
        return len(self._registry)

    def shutdown(self) -> None:
        """Give the memory back; LogicError while caches are open; idempotent.  Living views keep their memory."""
        with self._guard.locked("shutdown", even_after_shutdown=True):
            if self._guard.is_shut_down:
                return
            if len(self._registry):
                raise LogicError(f"shutdown(): {len(self._registry)} KV cache(s) still open")
            self._guard.is_shut_down = True
            self._tier.release()

    # ---------------------------------------------------------------------------------------------------- reuse

    def probe_reuse(self, scope: Scope, ids: Ids, digests: Sequence[bytes]) -> int:
        """Tokens that a cache created now would reuse."""
        with self._locked("probe_reuse"):
            return self._reuse.probe(scope, ids, digests)

    def probe_first_new_block_key(self, scope: Scope, ids: Ids, digests: Sequence[bytes]) -> bytes | None:
        """Chain key of the first block that would not be reused whole; None when the tokens do not fill it."""
        with self._locked("probe_first_new_block_key"):
            return self._reuse.first_new_block_key(scope, ids, digests)

    def clear_reusable_blocks(self) -> None:
        """Forget every prefix; LogicError while caches are open."""
        with self._locked("clear_reusable_blocks"):
            if len(self._registry):
                raise LogicError(f"clear_reusable_blocks(): {len(self._registry)} KV cache(s) still open")
            self._reuse.clear()

    def drop_planned(self, plan: int) -> bool:
        """Carry a plan out; False when there is no such plan (any more)."""
        with self._locked("drop_planned"):
            return self._reuse.drop(plan)

    def match_pages(
        self, scope: Scope, ids: Ids, digests: Sequence[bytes], life_cycle: int, partial: bool
    ) -> tuple[int, list[tuple[int, int] | None]]:
        """Tokens that the tree knows, and per block the (slot, coverage) of the group's page."""
        with self._locked("match_pages"):
            self._life_cycle(life_cycle)
            return self._reuse.match_pages(scope, ids, digests, life_cycle, partial)

    def all_tree_pages_droppable(self) -> bool:
        """Whether nobody owns a page of the tree."""
        with self._locked("all_tree_pages_droppable"):
            return self._pages.all_cached()

    def debug_insert_block(self, scope: Scope, ids: Ids, digests: Sequence[bytes], coverage: Sequence[int]) -> None:
        """Test hook: a block with cached pages that cover so many tokens, per life cycle."""
        with self._locked("debug_insert_block"):
            self._reuse.insert_block(scope, ids, digests, coverage)

    def debug_set_coverage(
        self, scope: Scope, ids: Ids, digests: Sequence[bytes], life_cycle: int, coverage: int
    ) -> None:
        """Test hook: what the page of the last block covers; 0 removes it."""
        with self._locked("debug_set_coverage"):
            self._life_cycle(life_cycle)
            self._reuse.set_coverage(scope, ids, digests, life_cycle, coverage)

    # ---------------------------------------------------------------------------------------------------- inside

    def _locked(self, call: str) -> AbstractContextManager[None]:
        return self._guard.locked(call)

    def _inside(self, call: str, handle: int) -> AbstractContextManager[KVCache]:
        return self._guard.inside(call, self._registry, handle)

    def _life_cycle(self, life_cycle: int) -> LifeCycle:
        if not 0 <= life_cycle < len(self._layout.life_cycles):
            raise UnknownBufferError(f"layer group {life_cycle} is unknown; there are {len(self._layout.life_cycles)}")
        return self._layout.life_cycles[life_cycle]

    def _hold_lock(self, seconds: float) -> None:
        """Hold the manager's lock for a while; for tests of what other threads see."""
        self._guard.check_process()
        with self._guard.lock:
            time.sleep(seconds)
