"""SHA-256 over every decision of a run: equal digests mean equal decisions, slot id by slot id.

The hashed stream is little-endian int32 words, in the order in which things happen:

- per batch call: ``CALL, n, k``; then for its n requests in order the actions, indices, committed, history and capacity
  lengths (five runs of n words) and the outcomes (n words, 1 granted); then k times layer group, row, first block, end
  block of a changed stretch of the page table; then the slot ids of those stretches.
- per event outside a call: its code, the request's index, its committed, history and capacity lengths.  An admission's are
  those of its match.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

CALL, ADMIT, HOLD, WITHDRAW, PAUSE, FINISH, REFUSE, DEFER = range(101, 109)
"""Codes of the stream; HOLD: the resume gate refused an admission, WITHDRAW: an admission got nothing and was undone, DEFER:
a running request computes the first block that is new in this one."""
_BUFFER_WORDS = 1 << 18


class DecisionDigest:
    """Collects words in one buffer and hashes it when full."""

    __slots__ = ("_buffer", "_hash", "_used")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._buffer: npt.NDArray[np.int32] = np.empty(_BUFFER_WORDS, "<i4")
        self._used = 0

    def event(self, code: int, index: int, history: int, capacity: int, committed: int = 0) -> None:
        """Something that happened to one request outside a batch call."""
        at = self._reserve(5)
        self._buffer[at : at + 5] = (code, index, committed, history, capacity)

    def call(
        self,
        state: npt.NDArray[np.int32],
        ok: npt.NDArray[np.bool_],
        dirty: npt.NDArray[np.int32],
        table: npt.NDArray[np.int32],
    ) -> None:
        """One batch call: ``state`` int32 [5, n] as in :class:`~kvpool.sim.lanes.Lanes`, and its result."""
        count = state.shape[1]
        changed = len(dirty)
        at = self._reserve(3 + 6 * count)
        buffer = self._buffer
        buffer[at] = CALL
        buffer[at + 1] = count
        buffer[at + 2] = changed
        at += 3
        buffer[at : at + 5 * count].reshape(5, count)[:] = state
        at += 5 * count
        buffer[at : at + count] = ok
        if changed:
            self._stretches(dirty, table)

    def _stretches(self, dirty: npt.NDArray[np.int32], table: npt.NDArray[np.int32]) -> None:
        self._words(dirty.ravel())
        lengths = dirty[:, 3] - dirty[:, 2]
        if len(dirty) > 4 and int(lengths.max()) == 1 == int(lengths.min()):
            self._words(table[dirty[:, 0], dirty[:, 1], dirty[:, 2]])
            return
        for group, row, first, end in dirty.tolist():
            self._words(table[group, row, first:end])

    def _words(self, words: npt.NDArray[np.int32]) -> None:
        if len(words) > _BUFFER_WORDS:
            self._flush()
            self._hash.update(np.ascontiguousarray(words, "<i4").data)
            return
        at = self._reserve(len(words))
        self._buffer[at : at + len(words)] = words

    def _reserve(self, words: int) -> int:
        """Room for so many words; the place where they go."""
        if self._used + words > len(self._buffer):
            self._flush()
            if words > len(self._buffer):
                self._buffer = np.empty(words, "<i4")
        at = self._used
        self._used += words
        return at

    def _flush(self) -> None:
        self._hash.update(self._buffer[: self._used].data)
        self._used = 0

    def hexdigest(self) -> str:
        """The digest of everything so far."""
        self._flush()
        return self._hash.hexdigest()
