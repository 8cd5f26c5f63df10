"""No bytes at all: addresses and accounting, for planning at a scale this machine does not have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool._py.core.math import round_up
from kvpool._py.device.device import PAGE_BYTES, CopyTask, ImmediateDevice
from kvpool.errors import CuOOMError, UnsupportedError

_FIRST_ADDRESS = 1 << 40  # far above what a small program maps, so that a stray use faults
_END_ADDRESS = _FIRST_ADDRESS + (1 << 56)


class VirtualArena:
    """A range of addresses that nobody may touch."""

    __slots__ = ("address", "committed_bytes", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.committed_bytes = 0

    def commit(self, offset: int, size: int) -> None:
        """Account for the bytes."""
        self.committed_bytes += size

    def decommit(self, offset: int, size: int) -> None:
        """Account for the bytes."""
        self.committed_bytes -= size

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Refused: there are no bytes."""
        raise UnsupportedError("the virtual device has no memory; use device='host' to see bytes")

    def release(self) -> None:
        """Nothing to give back; addresses are not reused."""
        self.committed_bytes = 0


class VirtualDevice(ImmediateDevice):
    """Decides exactly as the others do, at the cost of a counter."""

    name = "virtual"
    has_bytes = False

    def __init__(self) -> None:
        self._next_address = _FIRST_ADDRESS

    def reserve(self, size: int) -> VirtualArena:
        """The next addresses, 2 MiB aligned, upward from 2**40; CuOOMError when 2**56 bytes of them are used up."""
        arena = VirtualArena(self._next_address, round_up(max(size, 1), PAGE_BYTES))
        if self._next_address + arena.size > _END_ADDRESS:
            raise CuOOMError(f"the virtual device has no {arena.size} bytes of addresses left")
        self._next_address += arena.size
        return arena

    def copy(self, stream: int, tasks: Sequence[CopyTask]) -> None:
        """Nothing to copy: a copy of pages without bytes has no effect."""
