"""Bytes in ordinary host memory; every call acts at once, so every event is complete."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool._py.core.math import round_up
from kvpool._py.device.device import PAGE_BYTES, CopyTask, ImmediateDevice
from kvpool.errors import HostOOMError, LogicError

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class HostArena:
    """An anonymous private mapping with huge pages; the kernel gives memory at first touch."""

    __slots__ = ("_map", "_skip", "address", "committed_bytes", "size")

    def __init__(self, size: int) -> None:
        self.size = round_up(max(size, 1), PAGE_BYTES)
        try:
            # One page more than needed, because mmap aligns to 4 KiB and a huge page wants 2 MiB.
            mapping = mmap.mmap(-1, self.size + PAGE_BYTES, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, OverflowError, ValueError) as error:
            raise HostOOMError(f"{self.size} bytes of host memory could not be mapped: {error}") from error
        self._map: mmap.mmap | None = mapping
        start = int(np.frombuffer(mapping, np.uint8, count=1).ctypes.data)
        self.address = round_up(start, PAGE_BYTES)
        self._skip = self.address - start
        self.committed_bytes = 0
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without huge pages serves ordinary ones
            if error.errno != errno.EINVAL:
                raise

    def commit(self, offset: int, size: int) -> None:
        """Count the range as committed: the kernel backs it at first touch."""
        self._check(offset, size)
        self.committed_bytes += size

    def decommit(self, offset: int, size: int) -> None:
        """Give the pages of the range back to the kernel."""
        self._check(offset, size)
        self._mapping().madvise(mmap.MADV_DONTNEED, self._skip + offset, size)
        self.committed_bytes -= size

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Writable bytes; the mapping lives as long as the view."""
        return np.frombuffer(self._mapping(), np.uint8, count=size, offset=self._skip + offset)

    def release(self) -> None:
        """Drop our reference; the kernel unmaps with the last view."""
        self._map = None
        self.committed_bytes = 0

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            raise LogicError("the memory of this arena has been released")
        return self._map

    def _check(self, offset: int, size: int) -> None:
        if offset % PAGE_BYTES or size % PAGE_BYTES or not 0 <= offset <= offset + size <= self.size:
            raise LogicError(f"[{offset}, {offset + size}) is no whole part of an arena of {self.size} bytes")


class HostDevice(ImmediateDevice):
    """The embedded default without a GPU."""

    name = "host"
    has_bytes = True

    def reserve(self, size: int) -> HostArena:
        """A new mapping."""
        return HostArena(size)

    def copy(self, stream: int, tasks: Sequence[CopyTask]) -> None:
        """Copy now."""
        for destination, source, size in tasks:
            ctypes.memmove(destination, source, size)
