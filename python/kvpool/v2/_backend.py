"""The narrow interface between the V2 facade and its two backends.

Everything below the facade speaks integers: a cache is a handle (``generation << 32 | index``), a layer group is a life
cycle id, a page is a slot id.  Arguments are already of the right type when they arrive here; what depends on state or
layout is checked by the backend.  ``kvpool._py.manager.manager.Manager`` is the readable specification,
``kvpool._native.Manager`` its twin: equal inputs give equal answers, slot ids, errors and snapshots.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

SUSPENDED, ACTIVE, CLOSED = 0, 1, 2
"""Values of :meth:`ManagerCore.status`."""


class LifeCycleInfo(NamedTuple):
    """One life cycle, which is one layer group."""

    is_ssm: bool
    window: int | None
    sink_blocks: int
    layers: list[int]  # layer ids in configuration order
    pool_group: int
    scratch_fraction: tuple[int, int]  # numerator, denominator: largest share of a slot that one layer uses
    coalesced: list[tuple[int, list[tuple[int, str]]]]  # per pool: (single expanded size, [(layer, role), …])


class BufferInfo(NamedTuple):
    """Where one buffer lies inside the slots of its pool."""

    life_cycle: int
    pool: int
    offset: int  # bytes inside the slot
    size: int  # expanded bytes: what the buffer takes in one block
    expansion: int  # tokens_per_block / the buffer's own tokens per block
    scale: int  # sub-pages of that size in one slot
    layer_util: int  # how many of them belong to this layer


class PoolGroupInfo(NamedTuple):
    """Pools that share slot ids."""

    life_cycles: list[int]
    slot_sizes: list[int]  # bytes of a slot, per pool
    floor: int  # slots that the constraints need


class Layout(NamedTuple):
    """The whole layout; constant for the life of the manager."""

    life_cycles: list[LifeCycleInfo]
    pool_groups: list[PoolGroupInfo]
    buffers: dict[tuple[int, str], BufferInfo]
    grain: int


class StepResult(NamedTuple):
    """What one batch step did; the arrays are views, valid until the next step of the same manager."""

    ok: npt.NDArray[np.bool_]  # [n]
    dirty: npt.NDArray[np.int32]  # [k, 4]: group, row, first block, end block
    event: int  # 0: the pages may be used at once


class ManagerCore(Protocol):
    """A backend. Constructed as ``Manager(config, device)`` with a validated configuration and a device name."""

    backend: str  # "cpp" or "python"
    device: str  # "host", "virtual", "sim"

    def __init__(self, config: Any, device: str) -> None: ...

    # layout and memory
    def layout(self) -> Layout:
        """Plain tuples of the shapes above are fine; the facade wraps them."""

    def slot_counts(self) -> list[int]: ...  # per pool group
    def pool_addresses(self) -> list[list[int]]: ...  # [pool group][pool]
    def pool_memory(self, pool_group: int, pool: int) -> Any:
        """Object with a writable buffer of ``slots * slot_bytes`` bytes (uint8); it keeps the memory alive."""

    def mapped_bytes(self) -> int: ...
    def device_handle(self) -> Any: ...  # the sim device's test interface, else None
    def statistics(self) -> list[tuple[int, int, int]]: ...  # per pool group: total, free, evictable
    def clamp_max_seq_len(self, batch_size: int, token_num_upper_bound: int) -> int: ...
    def synchronize(self) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def audit(self) -> None: ...
    def num_open(self) -> int: ...
    def shutdown(self) -> None:
        """LogicError naming the API and "N KV cache(s) still open"; idempotent."""

    # caches
    def create(self) -> int: ...
    def resume(self, handle: int, stream: int | None) -> bool: ...
    def suspend(self, handle: int) -> None: ...
    def close(self, handle: int) -> None: ...
    def resize(self, handle: int, capacity: int | None, history: int | None) -> bool: ...
    def stop_committing(self, handle: int) -> None: ...
    def commit_allowed(self, handle: int) -> bool: ...
    def lengths(self, handle: int) -> tuple[int, int, int, int]: ...  # committed, history, capacity, num_blocks
    def status(self, handle: int) -> int: ...  # a stale handle is CLOSED
    def stream(self, handle: int) -> int | None: ...
    def set_stream(self, handle: int, stream: int) -> None: ...
    def beam_width(self, handle: int) -> int: ...
    def set_beam_width(self, handle: int, width: int) -> None: ...
    def scratch_enabled(self, handle: int) -> bool: ...
    def set_scratch_enabled(self, handle: int, value: bool) -> None: ...
    def scratch_desc(self, handle: int, life_cycle: int) -> tuple[int, int, list[int]] | None: ...
    def page_indices(self, handle: int, life_cycle: int, beam: int) -> npt.NDArray[np.int32]:
        """Exposed slot ids: a fresh array of num_blocks, or the attached buffer's whole row as a view."""

    def held_page_indices(self, handle: int, life_cycle: int, beam: int) -> npt.NDArray[np.int32]:
        """Slot ids of every page the cache owns (held ones included), -1 without one; fresh array."""

    def attach_buffer(self, handle: int, beam: int, life_cycle: int, buffer: Any | None) -> None: ...
    def ssm_slot(self, handle: int, life_cycle: int, beam: int) -> int: ...  # -1: none

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
        """One call for a whole batch; the facade exposes this very method, so it checks its arguments itself."""
