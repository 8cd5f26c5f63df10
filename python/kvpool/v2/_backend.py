"""The narrow interface between the V2 facade and its two backends.

Everything below the facade speaks integers: a cache is a handle (``generation << 32 | index``), a layer group is a life
cycle id, a page is a slot id.  Arguments are already of the right type when they arrive here; what depends on state or
layout is checked by the backend.  ``kvpool._py.manager.manager.Manager`` is the readable specification,
``kvpool._native.Manager`` its twin: equal inputs give equal answers, slot ids, errors and snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    optional: bool = False  # reuse_policy OPTIONAL: never shortens a match


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


Scope = tuple[int | None, int | None]
"""LoRA id and salt: what a prefix is shared within. 64-bit unsigned each; None is not 0."""

Ids = npt.NDArray[np.int32]
"""Tokens, one-dimensional and C-contiguous: an id from 0, or ``-1 - j`` for the j-th of the digests that come along."""


class ReuseStatus(NamedTuple):
    """What one attention layer group holds of the matched prefix, at creation."""

    group_id: int
    optional: bool
    complete: bool  # every block that is live at the end point is covered
    endpoint: int  # tokens matched
    coverage: list[tuple[int, int]]  # token ranges, ascending, that neither touch nor overlap


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

    # reuse
    def probe_reuse(self, scope: Scope, ids: Ids, digests: Sequence[bytes]) -> int: ...
    def probe_first_new_block_key(self, scope: Scope, ids: Ids, digests: Sequence[bytes]) -> bytes | None: ...
    def clear_reusable_blocks(self) -> None: ...
    def drop_planned(self, plan: int) -> bool: ...  # False: no such plan (any more); ids are never given twice
    def match_pages(
        self, scope: Scope, ids: Ids, digests: Sequence[bytes], life_cycle: int, partial: bool
    ) -> tuple[int, list[tuple[int, int] | None]]:
        """Tokens matched by the walk alone (no legality), and per block the (slot, coverage) of the group's page."""

    def all_tree_pages_droppable(self) -> bool: ...  # nobody owns a page of the tree
    def page_is_linked(self, handle: int, ordinal: int, life_cycle: int) -> bool | None:
        """Whether the cache's page belongs to a node of the tree; None without a page."""

    def debug_insert_block(self, scope: Scope, ids: Ids, digests: Sequence[bytes], coverage: Sequence[int]) -> None:
        """Test hook: insert the last block of ``ids`` (the blocks before are in the tree), with cached pages that cover
        ``coverage[life cycle]`` tokens; 0: no page.
        """

    def debug_set_coverage(
        self, scope: Scope, ids: Ids, digests: Sequence[bytes], life_cycle: int, coverage: int
    ) -> None:
        """Test hook: the page of the last block of ``ids`` covers so many tokens from now on; 0 removes it."""

    # caches
    def create(
        self,
        scope: Scope = (None, None),
        ids: Ids | None = None,
        digests: Sequence[bytes] = (),
        prompt_length: int = 0,
        text_only: bool = False,
        priorities: list[list[int]] | None = None,
    ) -> int:
        """A SUSPENDED cache that owns the longest legal cached prefix of ``ids`` (None: no look-up).

        ``priorities``: per life cycle, of the blocks 0, 1, …; the last one goes on for ever; None, or an empty list: 35.
        """

    def extend_priorities(self, handle: int, priorities: list[list[int]]) -> None:
        """Append to the lists given at creation."""

    def resume(self, handle: int, stream: int | None, optional_groups: Sequence[int] | None = None) -> bool:
        """``optional_groups``: ascending, each once."""

    def commit(self, handle: int, ids: Ids, digests: Sequence[bytes], is_end: bool) -> None: ...
    def suspend(self, handle: int) -> None: ...
    def close(self, handle: int) -> None: ...
    def resize(self, handle: int, capacity: int | None, history: int | None) -> bool: ...
    def stop_committing(self, handle: int) -> None: ...
    def commit_allowed(self, handle: int) -> bool: ...
    def committed_tokens(self, handle: int) -> tuple[Ids, list[bytes]]: ...  # fresh; digests numbered by first use
    def block_keys(self, handle: int) -> npt.NDArray[np.uint8]:
        """Chain keys of the full committed blocks: [blocks, 32], fresh."""

    def match_depths(self, handle: int) -> tuple[int, int]:
        """At creation: raw walk depth ("divergence"), and the legal prefix of the attention groups alone ("hybrid")."""

    def reuse_status(self, handle: int) -> list[ReuseStatus]: ...
    def plan_drop(self, handle: int) -> int | None:
        """Id of a plan that covers the window tail of the committed prefix; None when it is not whole any more."""

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
        tokens: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None,
        stream: int | None = None,
    ) -> StepResult:
        """One call for a whole batch; the facade exposes this very method, so it checks its arguments itself."""
