"""A device that does everything as late as it may, in the worst order that events permit, and fails on request.

Bytes are host bytes.  Work waits in its stream until something forces it (a synchronisation, a read), so a missing event
wait shows as wrong content.  The test interface is the second half of :class:`SimDevice`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import NO_EVENT
from kvpool._py.device.device import PAGE_BYTES, CopyTask
from kvpool._py.device.host_device import HostArena
from kvpool.errors import ArgumentError, CorruptedError, CuError, CuOOMError, LogicError

_UNKNOWN_ERROR = 999  # CUDA_ERROR_UNKNOWN
_MASK64 = (1 << 64) - 1


class SimArena(HostArena):
    """A host arena that knows which of its pages have memory and counts its fallible calls."""

    __slots__ = ("_device", "_has_memory")

    def __init__(self, device: SimDevice, size: int) -> None:
        super().__init__(size)
        self._device = device
        self._has_memory = bytearray(self.size // PAGE_BYTES)

    def commit(self, offset: int, size: int) -> None:
        """Give the range memory; may fail."""
        self._device.count_call("commit")
        super().commit(offset, size)
        self._mark(offset, size, b"\1")

    def decommit(self, offset: int, size: int) -> None:
        """Take the range's memory; later accesses are found."""
        super().decommit(offset, size)
        self._mark(offset, size, b"\0")

    def release(self) -> None:
        """Later accesses are found."""
        super().release()
        self._has_memory = bytearray(len(self._has_memory))

    def covers(self, address: int, size: int) -> bool:
        """Whether ``[address, address + size)`` lies in this arena and has memory."""
        begin = address - self.address
        end = begin + size
        if begin < 0 or end > self.size:
            return False
        return 0 not in self._has_memory[begin // PAGE_BYTES : -(-end // PAGE_BYTES)]

    def _mark(self, offset: int, size: int, value: bytes) -> None:
        first, last = offset // PAGE_BYTES, (offset + size) // PAGE_BYTES
        self._has_memory[first:last] = value * (last - first)


class _Operation:
    """One thing a stream will do."""

    __slots__ = ("event", "is_wait", "order", "run")

    def __init__(
        self, order: int, run: Callable[[], None] | None, event: int = NO_EVENT, is_wait: bool = False
    ) -> None:
        self.order = order  # position among all operations ever queued
        self.run = run  # None for record and wait
        self.event = event
        self.is_wait = is_wait


class SimDevice:
    """Deterministic stand-in for a GPU.  Events are numbered from 1, streams from 1 (0 is the device's own)."""

    name = "sim"
    granularity = PAGE_BYTES
    has_bytes = True

    def __init__(self) -> None:
        self._arenas: list[SimArena] = []
        self._queues: dict[int, deque[_Operation]] = {0: deque()}
        self._pending_events: dict[int, int] = {}  # event -> the stream that will reach it
        self._next_event = 1
        self._next_order = 0
        self._next_ticket = 1
        self._read_streams: dict[int, int] = {}  # ticket -> stream, until it has run
        self._read_results: dict[int, bytes] = {}
        self._clock = 0
        self._calls = 0
        self._fail_at: int | None = None
        self._failure = "oom"

    # ------------------------------------------------------------------------------------------- the device seam

    def own_stream(self) -> int:
        """Stream 0."""
        return 0

    def reserve(self, size: int) -> SimArena:
        """Host memory that counts as uncommitted; may fail."""
        self.count_call("reserve")
        arena = SimArena(self, size)
        self._arenas.append(arena)
        return arena

    def record(self, stream: int) -> int:
        """A new event behind all work of ``stream``; may fail."""
        self.count_call("record")
        event = self._next_event
        self._next_event += 1
        self._pending_events[event] = stream
        self._queue(stream, None, event)
        return event

    def wait(self, stream: int, event: int) -> None:
        """Hold ``stream`` back until ``event``; may fail."""
        if event == NO_EVENT:
            return
        if not 0 < event < self._next_event:
            raise LogicError(f"event {event} was never recorded")
        self.count_call("wait")
        self._queue(stream, None, event, is_wait=True)

    def query(self, event: int) -> bool:
        """Whether ``event`` has been reached; runs nothing."""
        return event not in self._pending_events

    def synchronize_event(self, event: int) -> None:
        """Run exactly what ``event`` depends on."""
        while event in self._pending_events:
            self._force_one(self._pending_events[event])

    def synchronize(self) -> None:
        """Run everything, in the worst order."""
        self.run_all()

    def copy(self, stream: int, tasks: Sequence[CopyTask]) -> None:
        """Queue a batch of copies as one operation; may fail."""
        self.count_call("copy")
        batch = list(tasks)

        def run() -> None:
            for destination, source, size in batch:
                self._bytes(destination, size)[:] = self._bytes(source, size)

        self._queue(stream, run)

    # ---------------------------------------------------------------------------------------- the test interface

    def create_stream(self) -> int:
        """A new stream; younger streams run first in the adverse order."""
        stream = max(self._queues) + 1
        self._queues[stream] = deque()
        return stream

    def enqueue_write(self, stream: int, address: int, data: bytes) -> None:
        """Queue a write of ``data`` at ``address``."""
        content = np.frombuffer(bytes(data), np.uint8)

        def run() -> None:
            self._bytes(address, len(content))[:] = content

        self._queue(stream, run)

    def enqueue_copy(self, stream: int, destination: int, source: int, size: int) -> None:
        """Queue a copy of ``size`` bytes as a kernel of the executor would do it (no call of the manager: never fails)."""

        def run() -> None:
            self._bytes(destination, size)[:] = self._bytes(source, size)

        self._queue(stream, run)

    def enqueue_read(self, stream: int, address: int, size: int) -> int:
        """Queue a read of ``size`` bytes; the answer is a ticket for :meth:`read_result`."""
        if size < 0:
            raise ArgumentError(f"size must not be negative, not {size}")
        ticket = self._next_ticket
        self._next_ticket += 1
        self._read_streams[ticket] = stream

        def run() -> None:
            self._read_results[ticket] = self._bytes(address, size).tobytes()
            del self._read_streams[ticket]

        self._queue(stream, run)
        return ticket

    def read_result(self, ticket: int) -> bytes:
        """What the read saw; runs what it depends on.  A result can be had once."""
        while ticket in self._read_streams:
            self._force_one(self._read_streams[ticket])
        if ticket not in self._read_results:
            raise ArgumentError(f"ticket {ticket} is unknown or was read already")
        return self._read_results.pop(ticket)

    def run_all(self, order: str = "adverse", seed: int = 0) -> None:
        """Run all queued work.

        ``fifo``: in the order it was queued.  ``adverse``: of the streams that may run, always the youngest; with a
        ``seed`` other than 0, one drawn by splitmix64 (``value % count`` among those, youngest first).
        """
        if order not in ("adverse", "fifo"):
            raise ArgumentError(f"order {order!r} is not one of adverse, fifo")
        random = seed & _MASK64
        while True:
            ready = [stream for stream in sorted(self._queues, reverse=True) if self._can_run(stream)]
            if not ready:
                return
            chosen = ready[0]
            if order == "fifo":
                chosen = min(ready, key=lambda stream: self._queues[stream][0].order)
            elif seed:
                random, value = _splitmix64(random)
                chosen = ready[value % len(ready)]
            self._run_head(chosen)

    def pending(self) -> int:
        """Operations queued and not run."""
        return sum(len(queue) for queue in self._queues.values())

    def calls(self) -> int:
        """Fallible calls so far: reserve, commit, record, wait, copy."""
        return self._calls

    def fail_call(self, n: int | None, error: str = "oom") -> None:
        """Let the n-th fallible call from now fail, once: ``oom`` is a CuOOMError, ``cu`` a CuError.  None: none."""
        if error not in ("oom", "cu"):
            raise ArgumentError(f"error {error!r} is not one of oom, cu")
        if n is not None and n < 1:
            raise ArgumentError(f"n must be at least 1, not {n}")
        self._fail_at = None if n is None else self._calls + n
        self._failure = error

    def clock(self) -> int:
        """Virtual time: operations run so far."""
        return self._clock

    # ------------------------------------------------------------------------------------------------- inside

    def count_call(self, what: str) -> None:
        """Count one fallible call; raise when it is the one that was asked to fail."""
        self._calls += 1
        if self._calls != self._fail_at:
            return
        self._fail_at = None
        if self._failure == "oom":
            raise CuOOMError(f"{what} failed on request")
        raise CuError(_UNKNOWN_ERROR, f"{what} failed on request")

    def _queue(self, stream: int, run: Callable[[], None] | None, event: int = NO_EVENT, is_wait: bool = False) -> None:
        self._queues.setdefault(stream, deque()).append(_Operation(self._next_order, run, event, is_wait))
        self._next_order += 1

    def _can_run(self, stream: int) -> bool:
        queue = self._queues[stream]
        return bool(queue) and not (queue[0].is_wait and queue[0].event in self._pending_events)

    def _force_one(self, stream: int) -> None:
        """Run one operation that the head of ``stream`` needs, or that head."""
        while not self._can_run(stream):  # an event is recorded before anyone waits for it, so this ends
            stream = self._pending_events[self._queues[stream][0].event]
        self._run_head(stream)

    def _run_head(self, stream: int) -> None:
        operation = self._queues[stream].popleft()
        self._clock += 1
        if operation.run is not None:
            operation.run()
        elif not operation.is_wait:
            del self._pending_events[operation.event]

    def _bytes(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        for arena in self._arenas:
            if arena.covers(address, size):
                return arena.view(address - arena.address, size)
        raise CorruptedError(f"{size} bytes at {address:#x} have no memory")


def _splitmix64(state: int) -> tuple[int, int]:
    """Next state and value of the splitmix64 generator."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    value = state
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state, value ^ (value >> 31)
