"""Where stamps lie: one strided view per layer group and coalesced buffer over the memory of a pool.

With the expected record split into two 64-bit words, ``first`` depends on the buffer alone (layer, role) and ``second`` on
the token alone (token, position), so that a comparison is two broadcasts and no expected record is ever built.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpool.sim.toy_tokens import U64, combine, mix
from kvpool.v2 import AttnLifeCycle

if TYPE_CHECKING:
    from kvpool.v2 import CoalescedBuffer, KVCacheManager

RECORD_BYTES = 16
_HASH_PIECE = 1 << 17  # hashes at once
_HIGH = np.uint64(32)
_SECOND_WORD = np.uint64(0xD6E8FEB86659FD93)


@dataclass(slots=True)
class StampField:
    """Stamps of the buffers of one coalesced buffer: ``view`` is [slot, buffer, token, byte or word]."""

    group: int
    is_state: bool
    window: int | None
    sink_blocks: int
    first: U64  # [buffer]
    view: npt.NDArray[Any]
    plain: bool  # the record itself as two words, else its scrambled first bytes

    @property
    def buffers(self) -> int:
        """Buffers side by side in one slot."""
        return len(self.first)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that are gathered for one slot."""
        return int(np.prod(self.view.shape[1:])) * self.view.itemsize

    def differs(
        self, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """[slot, buffer, token]: where memory is not what writing ``tokens`` at ``positions`` [slot, token] left."""
        if self.plain:
            found = self.view[slots]
            wrong: npt.NDArray[np.bool_] = found[..., 0] != self.first[:, None]
            wrong |= found[..., 1] != second_word(tokens, positions)[:, None, :]
            return wrong
        meant = self._scrambled(self.first[None, :, None], second_word(tokens, positions)[:, None, :])
        differing: npt.NDArray[np.bool_] = (self.view[slots] != meant).any(axis=-1)
        return differing

    def write(
        self,
        slots: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
    ) -> None:
        """Stamps tokens, each at the ``offsets``-th place of a slot, in every buffer."""
        second = second_word(tokens, positions)
        if self.plain:
            self.view[slots, :, offsets, 0] = self.first
            self.view[slots, :, offsets, 1] = second[:, None]
        else:
            self.view[slots, :, offsets] = self._scrambled(self.first[None, :], second[:, None])

    def hash_of_tokens(self, tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> U64:
        """Per token the wrapped sum over the buffers of its stamps' hashes."""
        second = second_word(tokens, positions)
        total: U64 = np.zeros(len(tokens), np.uint64)
        if self.plain:
            piece = max(1, _HASH_PIECE // max(1, len(tokens)))
            for at in range(0, self.buffers, piece):
                total += combine(self.first[at : at + piece, None], second[None, :]).sum(axis=0, dtype=np.uint64)
            return total
        for buffer in range(self.buffers):
            total += combine(*_as_words(self._scrambled(self.first[buffer : buffer + 1], second)))
        return total

    def hash_meant(
        self, buffers: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> U64:
        """The hash of the stamp that was written, for each (buffer, token, position)."""
        first, second = self.first[buffers], second_word(tokens, positions)
        if self.plain:
            return combine(first, second)
        return combine(*_as_words(self._scrambled(first, second)))

    def hash_read(
        self, slots: npt.NDArray[np.int32], buffers: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
    ) -> U64:
        """The hash of what memory holds, for each (slot, buffer, place)."""
        found = self.view[slots, buffers, offsets]
        if self.plain:
            return combine(found[:, 0], found[:, 1])
        return combine(*_as_words(found))

    def flip(self, slot: int, offset: int) -> None:
        """Inverts a byte of the first buffer's stamp, in a plain record one of its token."""
        if self.plain:
            self.view[slot, 0, offset, 1] ^= np.uint64(0xFF)
        else:
            self.view[slot, 0, offset, 0] ^= np.uint8(0xFF)

    def _scrambled(self, first: U64, second: U64) -> npt.NDArray[np.uint8]:
        word = combine(first, second)
        words = np.stack((word, mix(word ^ _SECOND_WORD)), axis=-1)
        whole = words.astype("<u8", copy=False).view(np.uint8)
        return whole[..., : self.view.shape[-1]]


def second_word(tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> U64:
    """Token in the low half, position in the high one."""
    word: U64 = tokens.astype(np.uint64) | (positions.astype(np.uint64) << _HIGH)
    return word


def _as_words(found: npt.NDArray[np.uint8]) -> tuple[U64, U64]:
    whole = np.zeros((*found.shape[:-1], RECORD_BYTES), np.uint8)
    whole[..., : found.shape[-1]] = found
    words = whole.view("<u8").astype(np.uint64, copy=False)
    return words[..., 0], words[..., 1]


def stamp_fields(manager: KVCacheManager) -> list[list[StampField]]:
    """Per layer group its fields. The views are valid as long as the manager is open."""
    roles = {role: number for number, role in enumerate(sorted({role for _, role in manager.all_buffer_ids}))}
    fields: list[list[StampField]] = [[] for _ in manager.layer_grouping]
    for desc in manager.pool_group_descs:
        memory = [_memory(pool.base_address, desc.num_slots * pool.slot_bytes) for pool in desc.pools]
        for variant in desc.slot_desc.variants:
            group = variant.layer_group_id
            cycle = manager._life_cycles.get_life_cycle(group)
            attention = cycle if isinstance(cycle, AttnLifeCycle) else None
            for pool, coalesced in enumerate(variant.coalesced_buffers):
                first = [layer | roles[role] << 32 for layer, role in coalesced.buffer_ids]
                tokens = 1 if attention is None else manager.tokens_per_block
                view, plain = _strided(memory[pool], desc.pools[pool].slot_bytes, desc.num_slots, coalesced, tokens)
                if view is not None:
                    window = None if attention is None else attention.window_size
                    sinks = 0 if attention is None else attention.num_sink_blocks
                    words = np.asarray(first, np.uint64)
                    fields[group].append(StampField(group, attention is None, window, sinks, words, view, plain))
    return fields


def _memory(address: int, size: int) -> npt.NDArray[np.uint8]:
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _strided(
    memory: npt.NDArray[np.uint8], slot_bytes: int, slots: int, coalesced: CoalescedBuffer, tokens: int
) -> tuple[npt.NDArray[Any] | None, bool]:
    """The view, and whether whole records fit at aligned places; None where a token has not even one byte."""
    per_token = coalesced.single_buffer_size // tokens
    if per_token == 0:
        return None, False
    plain = per_token >= RECORD_BYTES and all(
        number % 8 == 0 for number in (per_token, coalesced.single_buffer_size, slot_bytes, memory.ctypes.data)
    )
    shape = (slots, len(coalesced.buffer_ids), tokens, 2 if plain else min(per_token, RECORD_BYTES))
    strides = (slot_bytes, coalesced.single_buffer_size, per_token, 8 if plain else 1)
    kind: Any = np.dtype("<u8") if plain else np.dtype(np.uint8)
    return np.ndarray(shape, kind, memory.data, 0, strides), plain
