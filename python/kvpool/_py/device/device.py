"""The seam between the manager and a device.

Everything above it is device-free.  A *stream* orders work; an *event* marks a point of a stream, 0 is an event that is
complete already.  Nothing here blocks but ``synchronize``.  ``reserve``, ``commit``, ``record``, ``wait`` and ``copy``
may fail (``CuOOMError``, ``HostOOMError``, ``CuError``); a call that fails has done nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import NO_EVENT

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
"""Granularity of every device we have so far: 2 MiB, also the alignment of an arena."""

CopyTask = tuple[int, int, int]
"""Destination address, source address, bytes."""


class Arena(Protocol):
    """A reserved address range whose base never changes; parts of it have memory (are committed)."""

    address: int
    size: int  # bytes, a multiple of the device's granularity
    committed_bytes: int

    def commit(self, offset: int, size: int) -> None:
        """Give ``[offset, offset + size)`` memory; both are multiples of the granularity."""

    def decommit(self, offset: int, size: int) -> None:
        """Take the memory of ``[offset, offset + size)`` away; its content is lost."""

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Writable bytes; a living view keeps the memory.  ``UnsupportedError`` when the device has no bytes."""

    def release(self) -> None:
        """Forget the arena; its memory goes with the last view."""


class Device(Protocol):
    """What the manager needs of a device."""

    name: str
    granularity: int  # bytes
    has_bytes: bool

    def own_stream(self) -> int:
        """The stream that ``resume(None)`` uses."""

    def reserve(self, size: int) -> Arena:
        """Reserve ``size`` bytes (rounded up to the granularity) of addresses without memory."""

    def record(self, stream: int) -> int:
        """Event that completes when the work now in ``stream`` has; 0 when there is nothing to wait for."""

    def wait(self, stream: int, event: int) -> None:
        """Hold back later work of ``stream`` until ``event`` is complete."""

    def query(self, event: int) -> bool:
        """Whether ``event`` is complete."""

    def synchronize_event(self, event: int) -> None:
        """Block until ``event`` is complete."""

    def synchronize(self) -> None:
        """Block until all work of all streams is done."""

    def copy(self, stream: int, tasks: Sequence[CopyTask]) -> None:
        """Queue copies that do not overlap, in one batch."""


class ImmediateDevice:
    """The part of a device whose every call acts at once: one stream, and every event is complete."""

    granularity = PAGE_BYTES

    def own_stream(self) -> int:
        """Stream 0."""
        return 0

    def record(self, stream: int) -> int:
        """Always complete."""
        return NO_EVENT

    def wait(self, stream: int, event: int) -> None:
        """Nothing to wait for."""

    def query(self, event: int) -> bool:
        """Always complete."""
        return True

    def synchronize_event(self, event: int) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""
