"""Who may enter a manager: one thread at a time, one call per cache, this process only, and nobody once it is corrupted.

Order of checks of an entry: process, handle, cache not in use by another thread (its flag is taken before the lock is
waited for, so misuse is found even while the lock is held elsewhere), lock, manager not corrupted, not shut down.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpool._py.manager.registry import CacheRegistry
from kvpool._py.sequence.kv_cache import CLOSED, KVCache
from kvpool.errors import ArgumentError, CorruptedError, LogicError

_fork_generation = 0


def _count_fork() -> None:
    global _fork_generation
    _fork_generation += 1


os.register_at_fork(after_in_child=_count_fork)


class ManagerGuard:
    """The lock of a manager and what bars the way to it.

    A CorruptedError that leaves an entry latches the manager: every later entry raises it again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_shut_down = False
        self._born_in = _fork_generation
        self._corruption: str | None = None
        self._owner = 0  # thread that has the lock; other threads only compare it with themselves

    def check_process(self) -> None:
        """LogicError in the child of a fork: nothing there may touch what the parent owns."""
        if self._born_in != _fork_generation:
            raise LogicError(
                "this KV cache manager was created in another process (fork); make a new one in this process"
            )

    @contextmanager
    def locked(self, call: str, even_after_shutdown: bool = False) -> Iterator[None]:
        """The manager, for this thread alone."""
        self.check_process()
        if self._owner == threading.get_ident():  # a garbage collection inside a call may run any finalizer
            raise LogicError(f"{call}(): a finalizer called the manager from inside another call of this thread")
        with self.lock:
            self._owner = threading.get_ident()
            try:
                if self._corruption is not None:
                    raise CorruptedError(self._corruption)
                if self.is_shut_down and not even_after_shutdown:
                    raise LogicError(f"{call}(): the manager is shut down")
                yield
            except CorruptedError as error:
                self._corruption = str(error)
                raise
            finally:
                self._owner = 0

    @contextmanager
    def inside(self, call: str, registry: CacheRegistry, handle: int) -> Iterator[KVCache]:
        """The cache of a handle and its manager, for this thread alone."""
        self.check_process()
        cache = registry.find(handle)
        if cache is None:
            raise stale_handle(f"{call}()", handle)
        if not cache.busy.acquire(blocking=False):
            raise LogicError("the KV cache is in use by another thread")
        try:
            if cache.status == CLOSED:  # closed between the look-up and the flag
                raise stale_handle(f"{call}()", handle)
            with self.locked(call):
                yield cache
        finally:
            cache.busy.release()

    @contextmanager
    def inside_all(self, call: str, registry: CacheRegistry, handles: Sequence[int]) -> Iterator[list[KVCache]]:
        """All caches of a batch; an error names the position of the first handle that is stale, double or in use."""
        self.check_process()
        caches: list[KVCache] = []
        find = registry.find
        try:
            for handle in handles:
                cache = find(handle)
                if cache is None or not cache.busy.acquire(blocking=False):
                    raise self._refusal(call, handles, len(caches), cache)
                caches.append(cache)
                if cache.status == CLOSED:
                    raise self._refusal(call, handles, len(caches) - 1, None)
            with self.locked(call):
                yield caches
        finally:
            for cache in caches:
                cache.busy.release()

    @staticmethod
    def _refusal(call: str, handles: Sequence[int], position: int, cache: KVCache | None) -> Exception:
        handle = handles[position]
        where = f"{call}(): request {position}"
        if cache is None:
            return stale_handle(where, handle)
        if handle in handles[:position]:
            return ArgumentError(f"{where}: handle {handle:#x} is given twice")
        return LogicError(f"{where}: handle {handle:#x} is in use by another thread")


def stale_handle(where: str, handle: int) -> LogicError:
    """The error for a handle that names no open cache."""
    return LogicError(f"{where}: handle {handle & 0xFFFFFFFFFFFFFFFF:#x} is closed or unknown")
