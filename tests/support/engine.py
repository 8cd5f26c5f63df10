"""A fake engine: writes and checks one 16-byte record per token, layer, role and beam.

It reaches memory as a kernel does: base address + stride · index, the index made by the layer's ``PageIndexConverter``
from the cache's base page indices (and scratch description).  So what it checks is the index arithmetic, the windows
and the sharing of pages at once.  A record is four little-endian words: token, layer, role and beam, position.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvpool.v2 import PageIndexMode
from tests.support import oracle

RECORD = 16


def token_at(seed: int, position: int) -> int:
    return (seed * 1_000_003 + position * 7919 + 1) & 0xFFFFFFFF


class Engine:
    """Runs on ``host`` memory directly; for ``sim`` give the device handle and a stream per call."""

    def __init__(self, manager: Any, *, mode: PageIndexMode = PageIndexMode.PER_LAYER) -> None:
        self.manager = manager
        self.mode = mode
        self.tpb = manager.tokens_per_block
        self.pools = [
            (pool.base_address, pool.slot_bytes * group.num_slots)
            for group in manager.pool_group_descs
            for pool in group.pools
        ]
        layers = {layer.layer_id: layer for layer in manager.init_config.layers}
        self.buffers = []
        self.state_buffers = []
        for order, buffer in enumerate(manager.all_buffer_ids):
            layer = layers[buffer.layer_id]
            if hasattr(layer, "window_size"):
                self.buffers.append((order, buffer, layer))
            else:
                self.state_buffers.append((order, buffer, layer))

    # addresses -------------------------------------------------------------------------------------------------
    def indices(self, cache: Any, layer_id: int, role: str, beam: int = 0) -> np.ndarray:
        group = self.manager.get_layer_group_id(layer_id)
        converter = self.manager.get_page_index_converter(layer_id, role)
        base = [int(i) for i in cache.get_base_page_indices(group, beam)][: cache.num_blocks]
        scratch = cache.get_scratch_desc(group) if beam == 0 else None
        return np.asarray(converter(base, self.mode, scratch), dtype=np.int64)

    def addresses(self, cache: Any, layer_id: int, role: str, positions: np.ndarray, beam: int = 0) -> np.ndarray:
        """Address of each position's record; -1 where the block has no page."""
        converter = self.manager.get_page_index_converter(layer_id, role)
        expansion = converter.expansion
        stride = self.manager.get_page_stride(layer_id, role)
        base = self.manager.get_mem_pool_base_address(layer_id, role, self.mode)
        kernel_tokens = self.tpb // expansion
        token_bytes = stride // kernel_tokens
        assert token_bytes >= RECORD
        index = self.indices(cache, layer_id, role, beam)
        page = index[positions // kernel_tokens]
        address = base + stride * page + (positions % kernel_tokens) * token_bytes
        return np.where(page < 0, -1, address)

    def view(self, address: int) -> tuple[np.ndarray, int]:
        for base, size in self.pools:
            if base <= address < base + size:
                memory = (ctypes.c_uint8 * size).from_address(base)
                return np.frombuffer(memory, dtype=np.uint8), base
        raise AssertionError(f"address {address:#x} lies in no pool")

    def _records(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        view, base = self.view(int(addresses.min()))
        offsets = addresses - base
        assert offsets.max() + RECORD <= view.size, "one buffer's pages lie in two pools"
        return view, offsets[:, None] + np.arange(RECORD)

    @staticmethod
    def record(seed: int, layer_id: int, order: int, beam: int, positions: np.ndarray) -> np.ndarray:
        words = np.empty((positions.size, 4), dtype="<u4")
        words[:, 0] = (seed * 1_000_003 + positions * 7919 + 1) & 0xFFFFFFFF
        words[:, 1] = layer_id
        words[:, 2] = order << 16 | beam
        words[:, 3] = positions
        return words.view(np.uint8).reshape(positions.size, RECORD)

    # bytes -----------------------------------------------------------------------------------------------------
    def write(self, cache: Any, seed: int, begin: int, end: int, *, beam: int = 0) -> None:
        """What one step computes: tokens [begin, end) in every layer, layer after layer. Every block must have a page."""
        positions = np.arange(begin, end)
        if not positions.size:
            return
        for order, buffer, _ in self.buffers:
            address = self.addresses(cache, buffer.layer_id, buffer.role, positions, beam)
            assert (address >= 0).all(), f"layer {buffer.layer_id}: a block to write has no page"
            view, where = self._records(address)
            view[where] = self.record(seed, buffer.layer_id, order, beam, positions)

    def check(self, cache: Any, seed: int, history: int, *, beam: int = 0) -> int:
        """Every position a layer still needs at ``history`` holds its record. Returns how many records were compared."""
        compared = 0
        for order, buffer, layer in self.buffers:
            window = layer.window_size
            sinks = layer.num_sink_tokens or 0
            positions = np.asarray(
                [p for p in range(history) if oracle.needed(p, history, window, sinks)], dtype=np.int64
            )
            if not positions.size:
                continue
            address = self.addresses(cache, buffer.layer_id, buffer.role, positions, beam)
            missing = positions[address < 0]
            assert not missing.size, f"layer {buffer.layer_id}: position {missing[:3]} is needed but has no page"
            view, where = self._records(address)
            want = self.record(seed, buffer.layer_id, order, beam, positions)
            wrong = positions[(view[where] != want).any(axis=1)]
            assert not wrong.size, f"layer {buffer.layer_id} {buffer.role}: wrong bytes at positions {wrong[:5]}"
            compared += positions.size
        return compared
