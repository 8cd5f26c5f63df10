"""The Python backend's implementation of :class:`kvpool.v2._backend.ManagerCore`.

One lock per manager guards everything; :mod:`kvpool._py.manager.guard` says who may enter.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import MAX_INT32
from kvpool._py.core.math import decimal_fraction
from kvpool._py.device.factory import make_device
from kvpool._py.device.sim_device import SimDevice
from kvpool._py.manager import clamp, snapshot
from kvpool._py.manager.describe import describe_layout
from kvpool._py.manager.guard import ManagerGuard
from kvpool._py.manager.registry import CacheRegistry
from kvpool._py.manager.step import BatchStep, require_array
from kvpool._py.sequence.beams import set_beam_width
from kvpool._py.sequence.block_table import exposed_slots, fill_buffer, owned_slots
from kvpool._py.sequence.kv_cache import CLOSED, KVCache, SequenceRules
from kvpool._py.sequence.transitions import Transitions
from kvpool._py.storage.layout import LifeCycle, build_layout, check_index_range
from kvpool._py.storage.sizing import grain_for_quota, plan_slot_counts
from kvpool._py.storage.tier import Tier
from kvpool.errors import ArgumentError, LogicError, UnknownBufferError, UnsupportedError
from kvpool.v2._backend import Layout, StepResult
from kvpool.v2._checks import INT64_MAX


class Manager:
    """Caches of one rank over one tier.

    ``config`` is a validated ``KVCacheManagerConfig``, ``device`` one of auto, host, virtual, sim.  Raises ConfigError
    when the configuration can not be laid out within its quota, and what the device raises when memory lacks.  Every
    method raises LogicError in a forked child, and all but a few queries after :meth:`shutdown`.
    """

    backend = "python"

    def __init__(self, config: Any, device: str) -> None:
        self._guard = ManagerGuard()
        self._device = make_device(device)
        self.device = self._device.name
        self._layout = build_layout(config)
        grain = grain_for_quota(config.cache_tiers[0].quota, self._device.granularity)
        counts, floors = plan_slot_counts(self._layout, config, grain)
        check_index_range(self._layout, counts)
        self._description = describe_layout(self._layout, floors, grain)
        self._tier = Tier(self._device, self._layout, counts, grain)
        scratch = config.swa_scratch_reuse
        self._rules = SequenceRules.make(
            self._layout,
            tuple(counts),
            decimal_fraction(config.max_util_for_resume),
            config.commit_min_snapshot,
            None if scratch is None else scratch.max_rewind_len,
        )
        self._registry = CacheRegistry()
        self._transitions = Transitions(self._rules, self._tier, self._device)
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
        """Total, free and evictable slots per pool group; nothing is evictable without reuse."""
        with self._locked("statistics"):
            return [(allocator.capacity, allocator.num_free, 0) for allocator in self._tier.allocators]

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
            return snapshot.take_snapshot(self._tier, self._registry.all())

    def audit(self) -> None:
        """Check every invariant; CorruptedError when one does not hold.  O(n)."""
        with self._locked("audit"):
            snapshot.audit(self._rules, self._tier, self._registry.all())

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

    # --------------------------------------------------------------------------------------------------- caches

    def create(self) -> int:
        """A new SUSPENDED cache without pages; its handle."""
        with self._locked("create"):
            return self._registry.add(lambda handle: KVCache(handle, self._rules))

    def resume(self, handle: int, stream: int | None) -> bool:
        """SUSPENDED to ACTIVE; False when the pools are too full now."""
        with self._inside("resume", handle) as cache:
            return self._transitions.resume(cache, stream)

    def suspend(self, handle: int) -> None:
        """ACTIVE to SUSPENDED; pages stay."""
        with self._inside("suspend", handle) as cache:
            _kept = _buffers_of(cache)
            self._transitions.suspend(cache)

    def close(self, handle: int) -> None:
        """Give all of a cache back; its handle is stale afterwards."""
        with self._inside("close", handle) as cache:
            _kept = _buffers_of(cache)
            self._transitions.close(cache)
            self._registry.remove(handle)

    def resize(self, handle: int, capacity: int | None, history: int | None) -> bool:
        """New lengths; False when slots lack now."""
        with self._inside("resize", handle) as cache:
            return self._transitions.resize(cache, capacity, history)

    def stop_committing(self, handle: int) -> None:
        """Nothing will be committed any more."""
        with self._inside("stop_committing", handle) as cache:
            self._transitions.stop_committing(cache)

    def commit_allowed(self, handle: int) -> bool:
        """Whether blocks may still be committed."""
        with self._inside("commit_allowed", handle) as cache:
            return cache.commit_allowed

    def lengths(self, handle: int) -> tuple[int, int, int, int]:
        """Committed, history, capacity (tokens), blocks."""
        with self._inside("lengths", handle) as cache:
            return cache.committed, cache.history, cache.capacity, cache.num_blocks

    def status(self, handle: int) -> int:
        """SUSPENDED, ACTIVE, or CLOSED for a stale handle."""
        self._guard.check_process()
        cache = self._registry.find(handle)
        return CLOSED if cache is None else cache.status

    def stream(self, handle: int) -> int | None:
        """The stream a cache was last bound to."""
        with self._inside("stream", handle) as cache:
            return cache.stream

    def set_stream(self, handle: int, stream: int) -> None:
        """Hand a cache over to another stream."""
        with self._inside("set_stream", handle) as cache:
            self._transitions.set_stream(cache, stream)

    def beam_width(self, handle: int) -> int:
        """Number of beams."""
        with self._inside("beam_width", handle) as cache:
            return cache.beam_width

    def set_beam_width(self, handle: int, width: int) -> None:
        """Change the number of beams; OutOfPagesError when slots lack."""
        with self._inside("set_beam_width", handle) as cache:
            _kept = _buffers_of(cache)
            set_beam_width(self._transitions, cache, width)

    def scratch_enabled(self, handle: int) -> bool:
        """Whether stale-to-be blocks of a prefill chunk share scratch slots."""
        with self._inside("scratch_enabled", handle) as cache:
            return cache.scratch_enabled

    def set_scratch_enabled(self, handle: int, value: bool) -> None:
        """Switch scratch reuse of one cache.

        ArgumentError: False while scratch slots are in use; True when the manager is not configured for it, or when the
        present lengths would need scratch blocks at once.
        """
        with self._inside("set_scratch_enabled", handle) as cache:
            self._transitions.set_scratch_enabled(cache, value)

    def scratch_desc(self, handle: int, life_cycle: int) -> tuple[int, int, list[int]] | None:
        """Scratch blocks [begin, end) and the slots they share; None when there are none."""
        with self._inside("scratch_desc", handle) as cache:
            self._life_cycle(life_cycle)
            slots = cache.scratch[life_cycle]
            return (*cache.scratch_ranges[life_cycle], list(slots)) if slots else None

    def page_indices(self, handle: int, life_cycle: int, beam: int) -> npt.NDArray[np.int32]:
        """Exposed slots: fresh, one per block; or the whole attached row."""
        with self._inside("page_indices", handle) as cache:
            self._life_cycle(life_cycle)
            _check_beam(cache, beam)
            buffer = cache.buffers.get((life_cycle, beam))
            if buffer is not None:
                return buffer
            return np.array(exposed_slots(cache, life_cycle, beam, 0, cache.num_blocks), np.int32)

    def held_page_indices(self, handle: int, life_cycle: int, beam: int) -> npt.NDArray[np.int32]:
        """Slots of all pages a cache owns, one entry per block; fresh."""
        with self._inside("held_page_indices", handle) as cache:
            self._life_cycle(life_cycle)
            _check_beam(cache, beam)
            return np.array(owned_slots(cache, life_cycle, beam), np.int32)

    def attach_buffer(self, handle: int, beam: int, life_cycle: int, buffer: Any | None) -> None:
        """Keep the exposed slots in the caller's int32 row from now on; None lets go of it."""
        with self._inside("attach_buffer", handle) as cache:
            self._life_cycle(life_cycle)
            _check_beam(cache, beam)
            _kept = _buffers_of(cache)
            if buffer is None:
                cache.buffers.pop((life_cycle, beam), None)
                return
            row = _int32_row(buffer)
            if len(row) < cache.num_blocks:
                raise ArgumentError(
                    f"buffer: {len(row)} entries are below the {cache.num_blocks} blocks of the KV cache"
                )
            cache.buffers[life_cycle, beam] = row
            fill_buffer(cache, life_cycle, beam, row)

    def ssm_slot(self, handle: int, life_cycle: int, beam: int) -> int:
        """Slot of a state; -1 before the first resume and for an attention group."""
        with self._inside("ssm_slot", handle) as cache:
            wanted = self._life_cycle(life_cycle)
            _check_beam(cache, beam)
            return cache.ssm[self._rules.ssm.index(wanted)][beam] if wanted.is_ssm else -1

    def step(
        self,
        handles: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int32],
        capacities: npt.NDArray[np.int32],
        histories: npt.NDArray[np.int32],
        table: npt.NDArray[np.int32],
        tokens: Any | None = None,
        stream: int | None = None,
    ) -> StepResult:
        """Resize a batch in list order and bring its rows of ``table`` up to date; see :mod:`..manager.step`."""
        self._guard.check_process()
        if tokens is not None:
            raise UnsupportedError("step(): tokens need prefix reuse, which is not built yet")
        if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int)):
            raise TypeError(f"step(): stream must be an int or None, not {type(stream).__name__}")
        if stream is not None and not 0 <= stream <= INT64_MAX:
            raise ArgumentError(f"step(): stream must be from 0 to {INT64_MAX}, not {stream}")
        table = require_array(table, "table", np.int32, 3, writable=True)
        lists = [
            require_array(value, name, dtype, 1).tolist()
            for value, name, dtype in (
                (handles, "handles", np.int64),
                (rows, "rows", np.int32),
                (capacities, "capacities", np.int32),
                (histories, "histories", np.int32),
            )
        ]
        for values, name in zip(lists[1:], ("rows", "capacities", "histories"), strict=True):
            if len(values) != len(lists[0]):
                raise ArgumentError(f"step(): {name} has {len(values)} entries, handles has {len(lists[0])}")
        if table.shape[0] != self._rules.num_life_cycles:
            raise ArgumentError(
                f"step(): table has {table.shape[0]} layer groups, the manager has {self._rules.num_life_cycles}"
            )
        if max(table.shape[1:]) > MAX_INT32:
            raise ArgumentError(
                f"step(): table has {table.shape[1]} rows of {table.shape[2]} blocks; neither may exceed {MAX_INT32}"
            )
        target = self._device.own_stream() if stream is None else stream
        with self._guard.inside_all("step", self._registry, lists[0]) as caches:
            _kept = self._batch_step.held_table()
            return self._batch_step.run(caches, lists[1], lists[2], lists[3], table, target)

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


def _buffers_of(cache: KVCache) -> list[npt.NDArray[np.int32]]:
    """Attached buffers, to hold until the lock is given back: the end of one may run the caller's code."""
    return list(cache.buffers.values())


def _check_beam(cache: KVCache, beam: int) -> None:
    if not 0 <= beam < cache.beam_width:
        raise ArgumentError(f"beam {beam}: must be from 0 to {cache.beam_width - 1}")


def _int32_row(buffer: Any) -> npt.NDArray[np.int32]:
    """The caller's memory as an int32 row; the array holds its export, so it can not be resized meanwhile."""
    view = memoryview(buffer)
    if view.ndim != 1 or view.itemsize != 4 or view.format.lstrip("@=<") not in ("i", "l"):
        raise ArgumentError(f"buffer: one dimension of int32 wanted, not {view.ndim} of format {view.format!r}")
    if view.readonly or not view.c_contiguous:
        raise ArgumentError("buffer: must be writable and C-contiguous")
    row = np.frombuffer(view, np.int32) if view.nbytes else np.empty(0, np.int32)
    if not row.flags.aligned:
        raise ArgumentError("buffer: must be aligned")
    return row
