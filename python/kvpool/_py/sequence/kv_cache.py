"""The record of one request."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.reuse.radix_tree import Node
from kvpool._py.storage.layout import LifeCycle, StorageLayout
from kvpool._py.storage.live_ranges import Range

SUSPENDED, ACTIVE, CLOSED = 0, 1, 2

UNBOUNDED = 1 << 62

DEFAULT_PRIORITY = 35
"""Of pages nobody said anything about."""

Scope = tuple[int | None, int | None]
"""LoRA id and salt: what a prefix is shared within."""


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """What every request of a manager shares; constant."""

    tokens_per_block: int
    attention: tuple[LifeCycle, ...]
    windowed: tuple[LifeCycle, ...]
    ssm: tuple[LifeCycle, ...]
    num_life_cycles: int
    num_pool_groups: int
    pool_group_of: tuple[int, ...]  # life cycle -> pool group
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
            tuple(lc.pool_group for lc in layout.life_cycles),
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
    ``beam_begin`` on, and for an optional life cycle only from the first resume on.  A stale block has one only while it
    may still be committed: it is *held*, and not exposed.
    The full committed blocks are the nodes from ``last_node`` up to the root; the tokens behind them are ``tail``.
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
        "copy_pending",
        "coverage",
        "divergence",
        "handle",
        "history",
        "hybrid",
        "last_node",
        "matched",
        "next_history",
        "num_blocks",
        "opened",
        "optional_groups",
        "owned",
        "priorities",
        "prompt_length",
        "row",
        "scope",
        "scratch",
        "scratch_enabled",
        "scratch_free_span",
        "scratch_ranges",
        "slots",
        "ssm",
        "ssm_source",
        "stale",
        "status",
        "stream",
        "table_epoch",
        "tail",
        "text_only",
    )

    def __init__(
        self,
        handle: int,
        rules: SequenceRules,
        scope: Scope = (None, None),
        prompt_length: int = 0,
        text_only: bool = False,
        priorities: list[list[int]] | None = None,
    ) -> None:
        self.handle = handle
        self.status = SUSPENDED
        self.scope = scope
        self.prompt_length = prompt_length  # tokens, as announced
        self.text_only = text_only
        self.priorities = priorities  # [life cycle][ordinal]; the last one goes on for ever
        self.committed = 0
        self.history = 0
        self.capacity = 0
        self.num_blocks = 0
        self.last_node: Node | None = None  # of the last full committed block, or the root; none before it is needed
        self.tail = b""  # encoded tokens behind the last full committed block
        # What was found at creation, in tokens.
        self.matched = 0
        self.divergence = 0
        self.hybrid = 0
        self.coverage: list[tuple[bool, list[Range]]] = []  # per attention life cycle: complete, covered tokens
        self.copy_pending = False  # something was matched, and the first resume has not yet made it the request's own
        self.ssm_source = [BAD_PAGE_INDEX] * len(rules.ssm)  # matched states, until the first resume
        self.opened = False  # has been resumed
        self.optional_groups: frozenset[int] | None = None  # optional life cycles that share matched pages
        self.stream: int | None = None
        self.beam_width = 1
        self.beam_begin = [0]  # per beam: first ordinal with pages of its own
        self.commit_allowed = True
        self.scratch_enabled = rules.max_rewind is not None
        # [life cycle][beam][ordinal] -> slot or -1; state life cycles have no beams here.
        self.slots: list[list[list[int]]] = [[] for _ in range(rules.num_life_cycles)]
        for life_cycle in rules.attention:
            self.slots[life_cycle.index].append([])
        # [state life cycle, counted among those][beam] -> slot; -1 until the first resume, and for a state given away.
        self.ssm = [[BAD_PAGE_INDEX] for _ in rules.ssm]
        self.scratch: list[list[int]] = [[] for _ in range(rules.num_life_cycles)]  # slots that scratch blocks share
        self.scratch_ranges: list[Range] = [(0, 0)] * rules.num_life_cycles  # blocks without pages for that reason
        self.stale: list[Range] = [(0, 0)] * rules.num_life_cycles
        self.owned = [0] * rules.num_pool_groups  # slots of every kind, shared ones too
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

    def priority(self, life_cycle: int, ordinal: int) -> int:
        """Priority of a block's page."""
        values = self.priorities[life_cycle] if self.priorities is not None else None
        return values[min(ordinal, len(values) - 1)] if values else DEFAULT_PRIORITY

    def save(self) -> tuple[Any, ...]:
        """What a commit changes but the entries of ``slots``; for :meth:`restore`."""
        return (
            (self.committed, self.history, self.last_node, self.tail, self.commit_allowed),
            (self.capacity_low, self.capacity_high, self.next_history, self.scratch_free_span),
            [list(slots) for slots in self.scratch],
            list(self.scratch_ranges),
            list(self.stale),
            list(self.owned),
            [list(states) for states in self.ssm],
        )

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Back to what :meth:`save` saw."""
        progress, limits, self.scratch, self.scratch_ranges, self.stale, self.owned, self.ssm = saved
        self.committed, self.history, self.last_node, self.tail, self.commit_allowed = progress
        self.capacity_low, self.capacity_high, self.next_history, self.scratch_free_span = limits
