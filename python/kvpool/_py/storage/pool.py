"""Equal slots in one address range."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool._py.core.math import round_up
from kvpool._py.device.device import Device


class Pool:
    """``num_slots`` slots of ``slot_bytes`` bytes; slot i begins at ``address + i * slot_bytes``."""

    __slots__ = ("_arena", "num_slots", "slot_bytes")

    def __init__(self, device: Device, num_slots: int, slot_bytes: int, grain: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        size = round_up(num_slots * slot_bytes, grain)
        self._arena = device.reserve(size)
        try:
            self._arena.commit(0, size)
        except BaseException:
            self._arena.release()
            raise

    @property
    def address(self) -> int:
        """Base; never changes."""
        return self._arena.address

    @property
    def mapped_bytes(self) -> int:
        """Bytes that have memory: whole grains."""
        return self._arena.committed_bytes

    def slot_address(self, slot: int) -> int:
        """Where a slot begins."""
        return self._arena.address + slot * self.slot_bytes

    def memory(self) -> npt.NDArray[np.uint8]:
        """All slots as writable bytes; the view keeps the memory alive."""
        return self._arena.view(0, self.num_slots * self.slot_bytes)

    def release(self) -> None:
        """Give the memory back."""
        self._arena.release()
