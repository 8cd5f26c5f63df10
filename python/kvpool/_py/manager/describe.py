"""The storage layout in the shape that the facade reads."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool._py.storage.layout import StorageLayout
from kvpool.v2._backend import BufferInfo, Layout, LifeCycleInfo, PoolGroupInfo


def describe_layout(layout: StorageLayout, floors: Sequence[int], grain: int) -> Layout:
    """``floors`` are slots per pool group, ``grain`` is bytes."""
    life_cycles = [
        LifeCycleInfo(
            lc.is_ssm,
            lc.window,
            lc.sink_blocks,
            list(lc.layers),
            lc.pool_group,
            lc.scratch_fraction,
            [(part.single_size, list(part.buffers)) for part in lc.coalesced],
            lc.optional,
        )
        for lc in layout.life_cycles
    ]
    pool_groups = [
        PoolGroupInfo(list(group.life_cycles), list(group.slot_sizes), floor)
        for group, floor in zip(layout.pool_groups, floors, strict=True)
    ]
    buffers = {
        key: BufferInfo(
            place.life_cycle,
            place.pool,
            place.offset,
            place.size,
            place.expansion,
            place.scale,
            place.layer_util,
        )
        for key, place in layout.buffers.items()
    }
    return Layout(life_cycles, pool_groups, buffers, grain)
