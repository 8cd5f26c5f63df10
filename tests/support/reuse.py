"""A fake executor for prefix reuse: tokens, and requests that write and check real bytes.

What a request writes at a position depends on *all* tokens up to it, as a real model's KV does, so a page that is served
for another prefix, layer, role or position shows as wrong bytes.  A recurrent state depends on every token so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from kvpool.v2 import PageIndexMode, ReuseScope
from kvpool.v2 import _introspection as introspection
from tests.support import oracle
from tests.support.engine import RECORD, Engine

_MASK = (1 << 64) - 1


def digest(name: Any) -> bytes:
    """32 bytes, the same for the same name."""
    return hashlib.sha256(repr(name).encode()).digest()


def tokens(count: int, seed: int = 0, start: int = 0) -> list[Any]:
    """A counter in which every 100th token (id % 100 == 99) is a digest; other seeds share nothing."""
    base = seed * 1_000_000
    return [digest((seed, i)) if i % 100 == 99 else base + i for i in range(start, start + count)]


def ids(count: int, seed: int = 0) -> list[int]:
    """Plain ids only; other seeds share nothing."""
    return list(range(seed * 1_000_000, seed * 1_000_000 + count))


def words_of(sequence: Sequence[Any]) -> np.ndarray:
    """Per position 32 bits that depend on all tokens up to it; entry n belongs to the first n tokens, entry 0 to none."""
    state, found = 1, [1]
    for token in sequence:
        value = int.from_bytes(token[:8], "little") if isinstance(token, bytes) else int(token)
        state = ((state ^ value) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 29
        found.append(state & 0xFFFFFFFF)
    return np.array(found, np.uint32)


class PrefixEngine(Engine):
    """The engine with records of the prefix: where it takes a seed, give the words of the tokens."""

    @staticmethod
    def record(words: Any, layer_id: int, order: int, beam: int, positions: np.ndarray) -> np.ndarray:
        record = np.empty((positions.size, 4), dtype="<u4")
        record[:, 0] = words[positions + 1]
        record[:, 1] = layer_id
        record[:, 2] = order << 16 | beam
        record[:, 3] = positions
        return record.view(np.uint8).reshape(positions.size, RECORD)

    def check(self, cache: Any, words: Any, history: int, *, beam: int = 0) -> int:
        """Every position still needed holds its record; blocks behind a window show no page."""
        compared = 0
        for order, buffer, layer in self.buffers:
            window, sinks = layer.window_size, layer.num_sink_tokens or 0
            positions = np.arange(history)
            if window is not None:
                positions = positions[(positions < sinks) | (positions > history - window)]
            if positions.size:
                address = self.addresses(cache, buffer.layer_id, buffer.role, positions, beam)
                missing = positions[address < 0]
                assert not missing.size, f"layer {buffer.layer_id}: position {missing[:3]} is needed but has no page"
                view, where = self._records(address)
                wrong = positions[(view[where] != self.record(words, buffer.layer_id, order, beam, positions)).any(1)]
                assert not wrong.size, f"layer {buffer.layer_id} {buffer.role}: wrong bytes at positions {wrong[:5]}"
                compared += positions.size
            if cache.history_length == history:
                sink_blocks = oracle.blocks(sinks, self.tpb)
                gone = oracle.stale(history, self.tpb, window, sink_blocks) if window is not None else set()
                shown = list(cache.get_base_page_indices(self.manager.get_layer_group_id(buffer.layer_id)))
                assert all(shown[o] < 0 for o in gone), f"layer {buffer.layer_id}: a block behind the window is shown"
        if history:
            compared += self.check_state(cache, words, history)
        return compared

    def write(self, cache: Any, words: Any, begin: int, end: int, *, beam: int = 0) -> None:
        super().write(cache, words, begin, end, beam=beam)
        for where, want in self._states(cache, words, end):
            where[:] = want

    def check_state(self, cache: Any, words: Any, history: int) -> int:
        compared = 0
        for where, want in self._states(cache, words, history):
            assert (where == want).all(), f"the recurrent state is not that of the first {history} tokens"
            compared += 1
        return compared

    def _states(self, cache: Any, words: Any, history: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Of each state buffer: its bytes, and what they are after ``history`` tokens."""
        for order, buffer, _ in self.state_buffers:
            slot = cache.get_ssm_block_base_index(self.manager.get_layer_group_id(buffer.layer_id))
            assert slot >= 0
            converter = self.manager.get_page_index_converter(buffer.layer_id, buffer.role)
            stride = self.manager.get_page_stride(buffer.layer_id, buffer.role)
            base = self.manager.get_mem_pool_base_address(buffer.layer_id, buffer.role, PageIndexMode.SHARED)
            address = base + stride * converter([slot], PageIndexMode.SHARED)[0]
            view, start = self.view(address)
            want = np.zeros(stride, np.uint8)
            record = np.array([words[history], buffer.layer_id, order, history], "<u4").view(np.uint8)
            want[: stride // RECORD * RECORD] = np.tile(record, stride // RECORD)
            yield view[address - start : address - start + stride], want


class Lab:
    """One manager and the requests on it. On a device with bytes each request writes and checks them."""

    def __init__(self, make: Any, config: Any, device: str = "host") -> None:
        self.make = make
        self.manager = make(config, device)
        self.tpb = self.manager.tokens_per_block
        self.engine = PrefixEngine(self.manager) if device == "host" else None

    # requests
    def create(self, sequence: Any, lookup: int | None = None, scope: ReuseScope | None = None, **fields: Any) -> Turn:
        """A request that looks up its first ``lookup`` tokens (all); still SUSPENDED."""
        prefix = sequence if lookup is None else sequence[:lookup]
        cache = self.make.track(self.manager.create_kv_cache(scope, prefix, **fields))
        assert cache.num_committed_tokens == cache.history_length == cache.capacity
        return Turn(self, cache, sequence)

    def open(
        self,
        sequence: Any,
        lookup: int | None = None,
        scope: ReuseScope | None = None,
        stream: int | None = None,
        **fields: Any,
    ) -> Turn:
        turn = self.create(sequence, lookup, scope, **fields)
        assert turn.cache.resume(stream)
        turn.check()
        return turn

    def run(
        self,
        sequence: Any,
        *ends: int,
        lookup: int | None = None,
        scope: ReuseScope | None = None,
        is_end: bool = False,
        **fields: Any,
    ) -> int:
        """A whole request: compute and commit up to each of ``ends`` (its length), close. Returns what was reused."""
        turn = self.open(sequence, lookup, scope, **fields)
        for number, end in enumerate(ends or (len(sequence),), 1):
            turn.advance(end, is_end=is_end and number == len(ends or (0,)))
        turn.close()
        return turn.reused

    # questions
    def probe(self, sequence: Any, scope: ReuseScope | None = None) -> int:
        return self.manager.probe_reuse(scope, sequence)

    def reused(self, sequence: Any, scope: ReuseScope | None = None) -> int:
        """What a request would reuse, by probe, by create, and with the bytes checked."""
        probed = self.probe(sequence, scope)
        turn = self.open(sequence, scope=scope)
        turn.cache.close()
        assert turn.reused == probed == self.probe(sequence, scope)
        return probed

    def pages(
        self, sequence: Any, group: int, scope: ReuseScope | None = None, partial: bool = True
    ) -> list[int | None]:
        """Per block of the walk the coverage of the group's page in the tree, None without one."""
        _, found = introspection.reuse_match_pages(self.manager, scope, sequence, group, partial)
        return [None if page is None else page[1] for page in found]

    def held(self) -> list[int]:
        """Slots per pool group that some cache owns."""
        return [info.unavailable for info in self.manager.get_storage_statistics()]

    def cached(self) -> list[int]:
        """Slots per pool group that only the tree keeps."""
        return [info.evictable for info in self.manager.get_storage_statistics()]

    def free(self) -> list[int]:
        return [info.free for info in self.manager.get_storage_statistics()]

    def nodes(self) -> int:
        """Nodes of all trees, without the roots."""
        return sum(1 for node in self.manager.snapshot()["tree"] if node[2])


class Turn:
    """One request."""

    def __init__(self, lab: Lab, cache: Any, sequence: Any) -> None:
        self.lab, self.cache, self.sequence = lab, cache, sequence
        self.words = words_of(sequence)
        self.reused: int = cache.num_committed_tokens
        self.done = self.reused  # tokens computed

    def check(self) -> int:
        """The bytes of everything computed so far that a layer still needs."""
        engine = self.lab.engine
        return 0 if engine is None else engine.check(self.cache, self.words, self.done)

    def compute(self, end: int, capacity: int | None = None) -> None:
        """Space for ``capacity`` tokens (``end``); check what is there, write the tokens up to ``end``."""
        assert self.cache.resize(max(end, capacity or 0, self.cache.capacity), None)
        self.check()
        if self.lab.engine is not None:
            self.lab.engine.write(self.cache, self.words, self.done, end)
        self.done = end

    def commit(self, end: int, *, is_end: bool = False) -> None:
        self.cache.commit(self.sequence[self.cache.num_committed_tokens : end], is_end=is_end)
        assert self.cache.num_committed_tokens == end

    def advance(self, end: int, *, is_end: bool = False) -> None:
        """Compute up to ``end``, commit it, check."""
        if end > self.done:
            self.compute(end)
        self.commit(end, is_end=is_end)
        if not is_end:
            self.check()

    def close(self) -> None:
        self.cache.close()


# what is refused
def refused(lab: Lab, call: Callable[[], Any], error: Any, match: str) -> None:
    before = lab.manager.snapshot()
    with pytest.raises(error, match=match):
        call()
    assert lab.manager.snapshot() == before
    lab.manager.audit()


def _unaligned(count: int) -> np.ndarray:
    return np.ndarray((count,), np.int32, buffer=bytearray(4 * count + 1), offset=1)


WRONG_ARRAYS = {
    "int64": np.arange(4, dtype=np.int64),
    "uint32": np.arange(4, dtype=np.uint32),
    "int16": np.arange(4, dtype=np.int16),
    "float": np.arange(4.0),
    "bool": np.array([True, False]),
    "object": np.array([1, 2], dtype=object),
    "foreign byte order": np.arange(4, dtype=">i4"),
    "two-dimensional": np.zeros((2, 2), np.int32),
    "no dimension": np.array(3, np.int32),
    "strided": np.arange(8, dtype=np.int32)[::2],
    "reversed": np.arange(8, dtype=np.int32)[::-1],
    "a column": np.zeros((4, 2), np.int32)[:, 0],
    "unaligned": _unaligned(4),
    "empty int64": np.empty(0, np.int64),
}
