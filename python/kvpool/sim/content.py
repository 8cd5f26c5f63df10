"""Content check on a device with bytes: every token leaves a stamp in every buffer, and every step reads them all back.

A stamp is one 16-byte record of four u32 (layer, role, token, position) at the head of the token's bytes in a buffer.  A
buffer with fewer than 16 bytes per token holds the first bytes of a scrambled record instead, each of which still depends
on all four.  A state buffer has one record (layer, role, last token, number of tokens), rewritten by every step.

Before a request writes in a step, all of its readable history is compared: every written token of every block that is not
stale for the layer group, and its states.  So a page that is handed to two requests, released too early, or written through
a wrong table entry shows as an error.  The toy next token is a hash of the stamps the request can see from its next position:
all positions before it in a full layer, the last ``window - 1`` in a windowed one, its states; equal tokens in two arms
mean that both read equal memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.sim.pool_stamps import StampField, stamp_fields
from kvpool.sim.ragged import ragged
from kvpool.sim.toy_tokens import next_token

if TYPE_CHECKING:
    from kvpool.sim.lanes import Lanes, Running
    from kvpool.v2 import KVCacheManager

GATHER_BYTES = 32 * 2**20
"""How much is read back at once."""
_MASK_64 = (1 << 64) - 1


@dataclass(slots=True)
class Mismatch:
    """The first stamp that was not what had been written."""

    request: int
    group: int
    block: int
    slot: int


class ContentCheck:
    """Stamps and checks of one run; ``checks`` and ``errors`` count records."""

    def __init__(self, *, inject_corruption: bool = False) -> None:
        self.checks = 0
        self.errors = 0
        self.first_mismatch: Mismatch | None = None
        self.outputs: dict[int, list[int]] = {}
        """Request index → the tokens that it yielded."""
        self._corrupt_next_write = inject_corruption
        self._requests: dict[int, Running] = {}  # by row

    def attach(self, manager: KVCacheManager, table: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> None:
        """The memory to stamp, the page table that leads to it, and the token ids [row, position] of running requests.

        Called once, by the executor.
        """
        self._block = manager.tokens_per_block
        self._table = table
        self._fields = stamp_fields(manager)
        self._tokens = tokens
        rows, width = tokens.shape
        self._states = np.full((len(self._fields), rows), -1, np.int32)  # slot of a state group
        # per attention group: sum over its buffers of the hash of each token's stamps, accumulated along the sequence
        self._sums = [None if fields[0].is_state else np.zeros((rows, width + 1), np.uint64) for fields in self._fields]

    # called by the executor

    def admit(self, request: Running) -> None:
        """A request got a row: its prompt, and what it had yielded before a pause, are to be computed from its match on."""
        self._requests[request.row] = request
        self.outputs.setdefault(request.spec.index, [])
        assert request.cache is not None
        for group, fields in enumerate(self._fields):
            if fields[0].is_state:
                self._states[group, request.row] = request.cache.get_ssm_block_base_index(group)
            elif request.done:
                self._expect(group, request.row, request.done)

    def step(self, lanes: Lanes, decode: int, contexts: int) -> None:
        """The step's kernels: read everything back, yield the tokens to feed, write the new stamps."""
        arguments = lanes.arguments(decode + contexts)
        rows, starts = arguments.rows, arguments.histories.astype(np.int64)
        ends = arguments.capacities.astype(np.int64)
        seen = self._read(rows, starts)
        for lane in range(decode):
            self._yield_token(lanes.requests[lane], int(starts[lane]), seen[lane])
        self._write(rows, starts, ends)
        if self._corrupt_next_write:
            self._corrupt_next_write = False
            self._corrupt(int(rows[0]), int(ends[0]) - 1)

    def keep_last_token(self, request: Running, written: int) -> None:
        """Resolves the token that a decoding request has yielded but not fed, before its pages go."""
        rows = np.asarray([request.row], np.int32)
        seen = self._read(rows, np.asarray([written], np.int64))
        self._yield_token(request, written, seen[0])

    def token_digest(self) -> str:
        """SHA-256 over the output tokens of every request, by index."""
        digest = hashlib.sha256()
        for index in sorted(self.outputs):
            tokens = self.outputs[index]
            digest.update(np.asarray([index, len(tokens), *tokens], "<i4").data)
        return digest.hexdigest()

    # read

    def _yield_token(self, request: Running, position: int, seen: int) -> None:
        outputs = self.outputs[request.spec.index]
        number = position - request.spec.prompt_tokens
        if number == len(outputs):
            outputs.append(next_token(seen))
        if position < self._tokens.shape[1]:
            self._tokens[request.row, position] = outputs[number]

    def _read(self, rows: npt.NDArray[np.int32], histories: npt.NDArray[np.int64]) -> list[int]:
        """Compares the readable history of some rows; the wrapped sum of the stamps that each can see."""
        seen = [0] * len(rows)
        for group, fields in enumerate(self._fields):
            if fields[0].is_state:
                self._read_states(group, rows, histories, seen)
            else:
                self._read_blocks(group, rows, histories, seen)
        return seen

    def _read_blocks(
        self, group: int, rows: npt.NDArray[np.int32], histories: npt.NDArray[np.int64], seen: list[int]
    ) -> None:
        fields, block = self._fields[group], self._block
        sums = self._sums[group]
        assert sums is not None
        window, sinks = fields[0].window, fields[0].sink_blocks * block
        visible = np.zeros_like(histories) if window is None else np.maximum(histories + 1 - window, 0)
        sink_ends = np.minimum(sinks, visible)
        for lane, row in enumerate(rows.tolist()):
            total = int(sums[row, histories[lane]]) - int(sums[row, visible[lane]]) + int(sums[row, sink_ends[lane]])
            seen[lane] = (seen[lane] + total) & _MASK_64
        blocks = -(-histories // block)
        live = visible // block
        sink_blocks = np.minimum(-(-sink_ends // block), live)
        owners, ordinals = ragged(live, blocks - live)
        if sinks:
            sink_owners, sink_ordinals = ragged(np.zeros_like(live), sink_blocks)
            owners, ordinals = np.concatenate((owners, sink_owners)), np.concatenate((ordinals, sink_ordinals))
        for field in fields:
            piece = max(1, GATHER_BYTES // field.bytes_per_block)
            for at in range(0, len(owners), piece):
                part = slice(at, at + piece)
                self._compare(field, rows, histories, visible, sink_ends, owners[part], ordinals[part], seen)

    def _compare(
        self,
        field: StampField,
        rows: npt.NDArray[np.int32],
        histories: npt.NDArray[np.int64],
        visible: npt.NDArray[np.int64],
        sink_ends: npt.NDArray[np.int64],
        owners: npt.NDArray[np.int64],
        ordinals: npt.NDArray[np.int64],
        seen: list[int],
    ) -> None:
        """One field of some blocks, each the ``ordinals``-th of the ``owners``-th row."""
        block = self._block
        own_rows = rows[owners]
        slots = self._table[field.group, own_rows, ordinals]
        written = np.minimum(histories[owners] - ordinals * block, block)
        self.checks += int(written.sum()) * field.buffers
        if int(slots.min(initial=0)) < 0:
            lost = slots < 0
            self._report(field.group, int(owners[lost][0]), int(ordinals[lost][0]), -1, rows)
            self.errors += int(written[lost].sum()) * field.buffers
            keep = ~lost
            owners, ordinals, own_rows = owners[keep], ordinals[keep], own_rows[keep]
            slots, written = slots[keep], written[keep]
        tokens = self._tokens.reshape(len(self._tokens), -1, block)[own_rows, ordinals]
        positions = ordinals[:, None] * block + np.arange(block)
        wrong = field.differs(slots, tokens, positions)
        tail = np.flatnonzero(written < block)
        wrong[tail] &= np.arange(block) < written[tail, None, None]
        if not wrong.any():
            return
        self.errors += int(wrong.sum())
        bad_blocks, buffers, offsets = np.nonzero(wrong)
        at = int(bad_blocks[0])
        self._report(field.group, int(owners[at]), int(ordinals[at]), int(slots[at]), rows)
        # what was read instead of what had been written enters the hash of those that can see it
        read = field.hash_read(slots[bad_blocks], buffers, offsets)
        meant = field.hash_meant(buffers, tokens[bad_blocks, offsets], positions[bad_blocks, offsets])
        for owner, position, change in zip(
            owners[bad_blocks].tolist(), positions[bad_blocks, offsets].tolist(), (read - meant).tolist(), strict=True
        ):
            if position >= visible[owner] or position < sink_ends[owner]:
                seen[owner] = (seen[owner] + change) & _MASK_64

    def _read_states(
        self, group: int, rows: npt.NDArray[np.int32], histories: npt.NDArray[np.int64], seen: list[int]
    ) -> None:
        lanes = np.flatnonzero(histories > 0)
        if not len(lanes):
            return
        slots = self._states[group, rows[lanes]]
        counts = histories[lanes]
        last = self._tokens[rows[lanes], counts - 1]
        for field in self._fields[group]:
            self.checks += len(lanes) * field.buffers
            wrong = field.differs(slots, last[:, None], counts[:, None])[..., 0]
            if wrong.any():
                self.errors += int(wrong.sum())
                at = int(np.nonzero(wrong)[0][0])
                self._report(group, int(lanes[at]), -1, int(slots[at]), rows)
            every = np.arange(field.buffers)
            for at, lane in enumerate(lanes.tolist()):
                read = field.hash_read(np.repeat(slots[at], field.buffers), every, np.zeros_like(every))
                seen[lane] = (seen[lane] + int(read.sum(dtype=np.uint64))) & _MASK_64

    def _report(self, group: int, lane: int, block: int, slot: int, rows: npt.NDArray[np.int32]) -> None:
        if self.first_mismatch is None:
            index = self._requests[int(rows[lane])].spec.index
            self.first_mismatch = Mismatch(index, group, block, slot)

    # write

    def _write(self, rows: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        owners, positions = ragged(starts, ends - starts)
        own_rows = rows[owners]
        tokens = self._tokens[own_rows, positions]
        ordinals, offsets = positions // self._block, positions % self._block
        for group, fields in enumerate(self._fields):
            if fields[0].is_state:
                slots = self._states[group, rows]
                last = self._tokens[rows, ends - 1]
                for field in fields:
                    field.write(slots, np.zeros_like(slots), last, ends)
                continue
            slots = self._table[group, own_rows, ordinals]
            there = slots >= 0  # a page that is missing shows when it is read
            hashes = np.zeros(len(tokens), np.uint64)
            for field in fields:
                field.write(slots[there], offsets[there], tokens[there], positions[there])
                hashes += field.hash_of_tokens(tokens, positions)
            self._accumulate(group, rows, starts, ends, hashes)

    def _expect(self, group: int, row: int, count: int) -> None:
        """The first tokens of a row were matched: another request wrote their stamps."""
        tokens, positions = self._tokens[row, :count], np.arange(count)
        hashes = np.zeros(count, np.uint64)
        for field in self._fields[group]:
            hashes += field.hash_of_tokens(tokens, positions)
        sums = self._sums[group]
        assert sums is not None
        np.cumsum(hashes, out=sums[row, 1 : count + 1])

    def _accumulate(
        self,
        group: int,
        rows: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
    ) -> None:
        sums = self._sums[group]
        assert sums is not None
        if len(hashes) == len(rows):  # every lane wrote one token
            sums[rows, ends] = sums[rows, starts] + hashes
            return
        at = 0
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            count = end - start
            total = np.cumsum(hashes[at : at + count], dtype=np.uint64)
            sums[row, start + 1 : end + 1] = sums[row, start] + total
            at += count

    def _corrupt(self, row: int, position: int) -> None:
        """Flips a byte of the stamp that was just written there."""
        for group, fields in enumerate(self._fields):
            if fields[0].is_state:
                fields[0].flip(int(self._states[group, row]), 0)
                return
            slot = int(self._table[group, row, position // self._block])
            if slot >= 0:
                fields[0].flip(slot, position % self._block)
                return
