"""Configurations and short hands that the tests of the Python backend share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool._py.manager.manager import Manager
from kvpool.v2.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)

MIB = 1 << 20
GIB = 1 << 30


def attention(layer_id: int, window: int | None = None, size: int = 8192, sinks: int | None = None) -> Any:
    """A layer with a key and a value buffer of ``size`` bytes a block."""
    buffers = [BufferConfig(role="key", size=size), BufferConfig(role="value", size=size)]
    return AttentionLayerConfig(layer_id=layer_id, buffers=buffers, sliding_window_size=window, num_sink_tokens=sinks)


def ssm(layer_id: int, size: int = 65536) -> Any:
    return SsmLayerConfig(layer_id=layer_id, buffers=[BufferConfig(role="state", size=size)])


def batch(*requests: tuple[int, int], system: int = 0) -> BatchDesc:
    """A batch of (capacity, history)."""
    return BatchDesc([KVCacheDesc(capacity, history) for capacity, history in requests], system)


def config(layers: Sequence[Any], quota: int = 64 * MIB, tpb: int = 32, rewind: int | None = None, **more: Any) -> Any:
    return KVCacheManagerConfig(
        tokens_per_block=tpb,
        cache_tiers=[GpuCacheTierConfig(quota=quota)],
        layers=list(layers),
        swa_scratch_reuse=None if rewind is None else SwaScratchReuseConfig(rewind),
        commit_min_snapshot=more.pop("commit_min_snapshot", any(isinstance(x, SsmLayerConfig) for x in layers)),
        **more,
    )


def slots_config(layers: Sequence[Any], slots: int, **more: Any) -> Any:
    """All layers of one pool group, whose slots are 2 MiB: ``slots`` of them."""
    return config(layers, quota=slots * 2 * MIB, **more)


def one_full(slots: int, tpb: int = 32, **more: Any) -> Any:
    return slots_config([attention(0, size=MIB)], slots, tpb=tpb, **more)


def active(manager: Manager, *lengths: tuple[int, int], keep: bool = False, stream: int | None = None) -> list[int]:
    """Resumed caches of (capacity, history); they stop committing unless ``keep``."""
    handles = []
    for capacity, history in lengths:
        handle = manager.create()
        assert manager.resume(handle, stream)
        if not keep:
            manager.stop_committing(handle)
        assert manager.resize(handle, capacity, history)
        handles.append(handle)
    return handles


def pages(manager: Manager, handle: int, group: int = 0, beam: int = 0) -> list[int]:
    found: list[int] = manager.page_indices(handle, group, beam).tolist()
    return found


def free(manager: Manager) -> list[int]:
    return [free for _, free, _ in manager.statistics()]


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


class Stepper:
    """Calls ``step`` with plain lists."""

    def __init__(self, manager: Manager, rows: int, max_blocks: int) -> None:
        self.manager = manager
        self.table = np.full((len(manager.layout().life_cycles), rows, max_blocks), -7, np.int32)

    def __call__(
        self,
        handles: Sequence[int],
        rows: Sequence[int],
        capacities: Sequence[int],
        histories: Sequence[int],
        stream: int | None = None,
        texts: Sequence[Any] | None = None,
        tokens: Any = None,
    ) -> tuple[list[bool], list[tuple[int, ...]], int]:
        """``tokens``: what ``step`` takes; or ``texts``: the tokens of each request."""
        if texts is not None:
            ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
            tokens = np.array([token for text in texts for token in text], np.int32), ends
        result = self.manager.step(
            i64(*handles), i32(*rows), i32(*capacities), i32(*histories), self.table, tokens, stream
        )
        return result.ok.tolist(), [tuple(row) for row in result.dirty.tolist()], result.event

    def row(self, group: int, row: int) -> list[int]:
        found: list[int] = self.table[group, row].tolist()
        return found
