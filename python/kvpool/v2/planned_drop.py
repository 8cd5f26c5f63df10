"""Planned drops: the end of a conversation turn that will not be wanted again, forgotten on demand."""

from __future__ import annotations

import weakref
from collections import deque
from types import TracebackType

from kvpool.errors import LogicError
from kvpool.v2._backend import ManagerCore


class PlannedDrops:
    """A manager's side of its handles: the core that drops, and the plans that discarded handles have posted."""

    __slots__ = ("_core", "posted")

    def __init__(self, core: ManagerCore) -> None:
        self._core: ManagerCore | None = core
        self.posted: deque[int] = deque()
        """Appended by finalizers, in any thread and at any time; whoever changes something applies them first."""

    def drop(self, plan: int) -> None:
        if self._core is not None:
            self._core.drop_planned(plan)

    def apply_posted(self) -> None:
        """Drop what discarded handles have planned; a plan that an error stops is posted again."""
        while self.posted:
            try:
                plan = self.posted.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self.drop(plan)
            except BaseException:
                self.posted.append(plan)
                raise

    def shut_down(self) -> None:
        """All pages are gone: nothing is left to drop."""
        self._core = None
        self.posted.clear()


class PlannedDropHandle:
    """Made by :meth:`KVCache.plan_committed_block_drop` only; it outlives the cache.

    A page that several plans cover goes with the last of them, one that a cache uses stays.  A handle that is discarded
    undropped posts its plan to the manager, which drops it at its next call that changes something; ``with`` drops at
    the end of the block.  After ``clear_reusable_blocks()`` or ``shutdown()`` there is nothing left to drop.
    """

    __slots__ = ("__weakref__", "_drops", "_finalizer", "_plan")

    def __init__(self, drops: PlannedDrops, plan: int) -> None:
        self._drops = drops
        self._plan = plan
        self._finalizer = self._post_when_discarded()

    def _post_when_discarded(self) -> weakref.finalize[[int], PlannedDropHandle]:
        finalizer = weakref.finalize(self, self._drops.posted.append, self._plan)
        finalizer.atexit = False
        return finalizer

    def drop(self) -> None:
        """Forget the pages of the plan. LogicError the second time."""
        if self._finalizer.detach() is None:  # one atomic step, whatever other threads do
            raise LogicError("drop(): this plan has already been dropped")
        try:
            self._drops.drop(self._plan)
        except BaseException:
            self._finalizer = self._post_when_discarded()
            raise

    def __enter__(self) -> PlannedDropHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._finalizer.alive:
            self.drop()
