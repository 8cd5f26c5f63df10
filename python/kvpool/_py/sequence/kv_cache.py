"""The record of one request."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.storage.layout import LifeCycle, StorageLayout
from kvpool._py.storage.live_ranges import Range

SUSPENDED, ACTIVE, CLOSED = 0, 1, 2

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """What every request of a manager shares; constant."""

    tokens_per_block: int
    attention: tuple[LifeCycle, ...]
    windowed: tuple[LifeCycle, ...]
    ssm: tuple[LifeCycle, ...]
    num_life_cycles: int
    num_pool_groups: int
    pool_group_slots: tuple[int, ...]
    gated_pool_groups: tuple[int, ...]  # those that the resume gate looks at
    max_util_for_resume: tuple[int, int]  # as a fraction
    commit_min_snapshot: bool
    max_rewind: int | None  # None: scratch reuse is off
    scratch_free_span: int  # capacity - history below this never needs scratch

    @staticmethod
    def make(
        layout: StorageLayout,
        slot_counts: tuple[int, ...],
        max_util_for_resume: tuple[int, int],
        commit_min_snapshot: bool,
        max_rewind: int | None,
    ) -> SequenceRules:
        """Rules of a layout."""
        attention = tuple(lc for lc in layout.life_cycles if not lc.is_ssm)
        windowed = tuple(lc for lc in attention if lc.window is not None)
        span = UNBOUNDED
        if max_rewind is not None and windowed:
            # Stale at C - R ends at or before block H // tpb as long as C - R + 1 - W ≤ H.
            span = max_rewind + min(lc.window or 0 for lc in windowed)
        return SequenceRules(
            layout.tokens_per_block,
            attention,
            windowed,
            tuple(lc for lc in layout.life_cycles if lc.is_ssm),
            len(layout.life_cycles),
            len(layout.pool_groups),
            slot_counts,
            tuple(group.index for group in layout.pool_groups if not group.is_ssm_only),
            max_util_for_resume,
            commit_min_snapshot,
            max_rewind,
            span,
        )


class KVCache:
    """State of one request, as plain data.

    Invariants: committed ≤ history ≤ capacity, and every list in ``slots`` has ceil(capacity / tpb) entries.
    A live block (neither stale nor scratch) has a slot in every attention life cycle, but for beams above 0 only from
    ``beam_begin`` on.  A stale block has one only while it may still be committed: it is *held*, and not exposed.
    """

    __slots__ = (
        "beam_begin",
        "beam_width",
        "buffers",
        "busy",
        "capacity",
        "capacity_high",
        "capacity_low",
        "commit_allowed",
        "committed",
        "handle",
        "history",
        "next_history",
        "num_blocks",
        "owned",
        "row",
        "scratch",
        "scratch_enabled",
        "scratch_free_span",
        "scratch_ranges",
        "slots",
        "ssm",
        "stale",
        "status",
        "stream",
        "table_epoch",
    )

    def __init__(self, handle: int, rules: SequenceRules) -> None:
        self.handle = handle
        self.status = SUSPENDED
        self.committed = 0
        self.history = 0
        self.capacity = 0
        self.num_blocks = 0
        self.stream: int | None = None
        self.beam_width = 1
        self.beam_begin = [0]  # per beam: first ordinal with pages of its own
        self.commit_allowed = True
        self.scratch_enabled = rules.max_rewind is not None
        # [life cycle][beam][ordinal] -> slot or -1; state life cycles have no beams here.
        self.slots: list[list[list[int]]] = [[] for _ in range(rules.num_life_cycles)]
        for life_cycle in rules.attention:
            self.slots[life_cycle.index].append([])
        # [state life cycle, counted among those][beam] -> slot; -1 until the first resume.
        self.ssm = [[BAD_PAGE_INDEX] for _ in rules.ssm]
        self.scratch: list[list[int]] = [[] for _ in range(rules.num_life_cycles)]  # slots that scratch blocks share
        self.scratch_ranges: list[Range] = [(0, 0)] * rules.num_life_cycles  # blocks without pages for that reason
        self.stale: list[Range] = [(0, 0)] * rules.num_life_cycles
        self.owned = [0] * rules.num_pool_groups  # slots, of every kind
        self.buffers: dict[tuple[int, int], npt.NDArray[np.int32]] = {}  # (life cycle, beam) -> attached row
        self.busy = threading.Lock()  # taken by the one thread that is inside
        # Where the batch step writes this request: a row of the table with that epoch.
        self.row = -1
        self.table_epoch = -1
        self.refresh_limits(rules)

    def refresh_limits(self, rules: SequenceRules) -> None:
        """Work out up to which lengths nothing but the lengths changes.

        That is so for a capacity in (capacity_low, capacity_high], a history below next_history, and
        capacity - history below scratch_free_span.
        """
        tpb = rules.tokens_per_block
        self.capacity_high = self.num_blocks * tpb
        self.capacity_low = self.capacity_high - tpb
        self.next_history = UNBOUNDED
        for lc in rules.windowed:
            window = lc.window or 0
            stale_end = max((self.history + 1 - window) // tpb, lc.sink_blocks)
            self.next_history = min(self.next_history, (stale_end + 1) * tpb + window - 1)
        self.scratch_free_span = rules.scratch_free_span if self.scratch_enabled else UNBOUNDED
        if any(begin < end for begin, end in self.scratch_ranges):
            self.capacity_high = -1  # blocks without pages depend on every length: always plan

    def drop_binding(self) -> None:
        """Make the next batch step write this request's whole row."""
        self.row = -1
