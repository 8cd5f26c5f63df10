"""The Python backend's implementation of :class:`kvpool.v2._backend.ManagerCore`.

One lock per manager guards everything; :mod:`kvpool._py.manager.guard` says who may enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import MAX_INT32
from kvpool._py.core.tokens import Ids, check_ids
from kvpool._py.manager.state import ManagerState
from kvpool._py.manager.step_arguments import StepTokens, require_array, token_arrays
from kvpool._py.sequence.adoption import adopt_match
from kvpool._py.sequence.beams import set_beam_width
from kvpool._py.sequence.block_table import exposed_slots, fill_buffer, owned_slots
from kvpool._py.sequence.closing import close
from kvpool._py.sequence.commit import commit, stop_committing
from kvpool._py.sequence.kv_cache import CLOSED, KVCache
from kvpool.errors import ArgumentError
from kvpool.v2._backend import ReuseStatus, Scope, StepResult
from kvpool.v2._checks import INT64_MAX


class Manager(ManagerState):
    """Caches of one rank over one tier.

    ``config`` is a validated ``KVCacheManagerConfig``, ``device`` one of auto, host, virtual, sim.  Raises ConfigError
    when the configuration can not be laid out within its quota, and what the device raises when memory lacks.  Every
    method raises LogicError in a forked child, and all but a few queries after :meth:`shutdown`.
    """

    backend = "python"

    # --------------------------------------------------------------------------------------------------- caches

    def create(
        self,
        scope: Scope = (None, None),
        ids: Ids | None = None,
        digests: Sequence[bytes] = (),
        prompt_length: int = 0,
        text_only: bool = False,
        priorities: list[list[int]] | None = None,
    ) -> int:
        """A new SUSPENDED cache that owns the longest legal cached prefix of ``ids`` (None: no look-up); its handle."""
        with self._locked("create"):
            if ids is not None:
                check_ids(ids, len(digests), "input_tokens")

            def make(handle: int) -> KVCache:
                own = None if priorities is None else [list(values) for values in priorities]
                cache = KVCache(handle, self._rules, scope, prompt_length, text_only, own)
                if ids is not None:
                    adopt_match(self._ground, cache, self._pages.match(scope, self._pages.query(ids, digests)))
                return cache

            with self._ground.journal.call():
                return self._registry.add(make)

    def extend_priorities(self, handle: int, priorities: list[list[int]]) -> None:
        """Append to the lists given at creation."""
        with self._inside("extend_priorities", handle) as cache:
            if cache.priorities is None:
                cache.priorities = [[] for _ in self._layout.life_cycles]
            for values, more in zip(cache.priorities, priorities, strict=True):
                values.extend(more)

    def resume(self, handle: int, stream: int | None, optional_groups: Sequence[int] | None = None) -> bool:
        """SUSPENDED to ACTIVE; False when the pools are too full now."""
        with self._inside("resume", handle) as cache:
            return self._transitions.resume(cache, stream, optional_groups)

    def commit(self, handle: int, ids: Ids, digests: Sequence[bytes], is_end: bool) -> None:
        """The tokens are final: full blocks of them may be shared from now on."""
        with self._inside("commit", handle) as cache:
            commit(self._ground, cache, ids, digests, is_end)

    def suspend(self, handle: int) -> None:
        """ACTIVE to SUSPENDED; pages stay."""
        with self._inside("suspend", handle) as cache:
            _kept = _buffers_of(cache)
            self._transitions.suspend(cache)

    def close(self, handle: int) -> None:
        """Give all of a cache back; its handle is stale afterwards."""
        with self._inside("close", handle) as cache:
            _kept = _buffers_of(cache)
            close(self._ground, cache)
            self._registry.remove(handle)

    def resize(self, handle: int, capacity: int | None, history: int | None) -> bool:
        """New lengths; False when slots lack now."""
        with self._inside("resize", handle) as cache:
            return self._transitions.resize(cache, capacity, history)

    def stop_committing(self, handle: int) -> None:
        """Nothing will be committed any more."""
        with self._inside("stop_committing", handle) as cache:
            stop_committing(self._ground, cache)

    def commit_allowed(self, handle: int) -> bool:
        """Whether blocks may still be committed."""
        with self._inside("commit_allowed", handle) as cache:
            return cache.commit_allowed

    def committed_tokens(self, handle: int) -> tuple[Ids, list[bytes]]:
        """Ids and digests, these numbered by first use; fresh."""
        with self._inside("committed_tokens", handle) as cache:
            return self._reuse.committed_tokens(cache)

    def block_keys(self, handle: int) -> npt.NDArray[np.uint8]:
        """Chain keys of the full committed blocks: [blocks, 32], fresh."""
        with self._inside("block_keys", handle) as cache:
            return self._reuse.block_keys(cache)

    def match_depths(self, handle: int) -> tuple[int, int]:
        """At creation: tokens that the tree knew, and those that attention groups alone could have served."""
        with self._inside("match_depths", handle) as cache:
            return cache.divergence, cache.hybrid

    def reuse_status(self, handle: int) -> list[ReuseStatus]:
        """What each attention group held of the matched prefix, at creation."""
        with self._inside("reuse_status", handle) as cache:
            return self._reuse.status(cache)

    def plan_drop(self, handle: int) -> int | None:
        """Id of a plan over the window tail of the committed prefix; None when it is not whole any more."""
        with self._inside("plan_committed_block_drop", handle) as cache:
            return self._reuse.plan_drop(cache)

    def page_is_linked(self, handle: int, ordinal: int, life_cycle: int) -> bool | None:
        """Whether the page belongs to a node of the tree; None without a page."""
        with self._inside("page_is_linked", handle) as cache:
            self._life_cycle(life_cycle)
            return self._reuse.page_is_linked(cache, ordinal, life_cycle)

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
            set_beam_width(self._ground, cache, width)

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
        arrays = None if tokens is None else token_arrays(tokens)
        for values, name in zip(lists[1:], ("rows", "capacities", "histories"), strict=True):
            if len(values) != len(lists[0]):
                raise ArgumentError(f"step(): {name} has {len(values)} entries, handles has {len(lists[0])}")
        chosen = None if arrays is None else StepTokens.make(*arrays, len(lists[0]))
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
            return self._batch_step.run(caches, lists[1], lists[2], lists[3], table, chosen, target)


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
