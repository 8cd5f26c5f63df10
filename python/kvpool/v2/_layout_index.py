"""The constant layout of a manager, indexed for the facade's queries. Built once, never changed, read without a lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool.errors import UnknownBufferError
from kvpool.v2._backend import BufferInfo, Layout, LifeCycleInfo, PoolGroupInfo
from kvpool.v2._checks import is_integer
from kvpool.v2.config import KVCacheManagerConfig
from kvpool.v2.converter import PageIndexConverter
from kvpool.v2.descriptors import (
    AggregatedPageDesc,
    BufferId,
    CoalescedBuffer,
    ExpandedBuffer,
    PoolDesc,
    PoolGroupDesc,
    SlotDesc,
    SlotDescVariant,
)
from kvpool.v2.life_cycle import AttnLifeCycle, LifeCycle, LifeCycleRegistry, SsmLifeCycle


class LayoutIndex:
    """Layer groups, buffers and addresses by id; unknown ids raise UnknownBufferError."""

    __slots__ = (
        "_converters",
        "_group_of_layer",
        "_slot_descs",
        "addresses",
        "buffer_ids",
        "buffers",
        "grouping",
        "layer_ids",
        "life_cycles",
        "pool_groups",
        "registry",
    )

    def __init__(self, layout: Layout, addresses: Sequence[Sequence[int]], config: KVCacheManagerConfig) -> None:
        life_cycles, pool_groups, buffers, _grain = layout
        self.life_cycles = tuple(LifeCycleInfo(*info) for info in life_cycles)
        self.pool_groups = tuple(PoolGroupInfo(*info) for info in pool_groups)
        self.buffers = {(int(layer), str(role)): BufferInfo(*info) for (layer, role), info in buffers.items()}
        self.addresses = tuple(tuple(row) for row in addresses)
        self.layer_ids = tuple(layer.layer_id for layer in config.layers)
        self.buffer_ids = tuple(BufferId(layer.layer_id, b.role) for layer in config.layers for b in layer.buffers)
        self.grouping = tuple(tuple(info.layers) for info in self.life_cycles)
        self._group_of_layer = {layer: group for group, layers in enumerate(self.grouping) for layer in layers}
        self.registry = LifeCycleRegistry([_life_cycle(info) for info in self.life_cycles])
        self._slot_descs = tuple(self._slot_desc(info) for info in self.pool_groups)
        self._converters = {
            key: PageIndexConverter(info.scale, info.expansion, info.offset // info.size, info.layer_util)
            for key, info in self.buffers.items()
        }

    def buffer(self, layer_id: int, role: str) -> BufferInfo:
        info = self.buffers.get((layer_id, role))
        if info is None:
            self.group_of_layer(layer_id)
            if not isinstance(role, str):
                raise TypeError(f"data_role must be a string, not {type(role).__name__}")
            roles = [own for layer, own in self.buffers if layer == layer_id]
            raise UnknownBufferError(f"layer {layer_id} has no role {role!r}; it has {roles}")
        return info

    def group_of_layer(self, layer_id: int) -> int:
        group = self._group_of_layer.get(layer_id)
        if group is None:
            if not is_integer(layer_id):
                raise TypeError(f"layer_id must be an integer, not {type(layer_id).__name__}")
            raise UnknownBufferError(f"layer {layer_id} is not in the configuration ({len(self.layer_ids)} layers)")
        return group

    def group(self, layer_group_id: int) -> int:
        """The layer group id itself, checked."""
        if type(layer_group_id) is not int:
            if not is_integer(layer_group_id):
                raise TypeError(f"layer_group_id must be an integer, not {type(layer_group_id).__name__}")
            layer_group_id = int(layer_group_id)
        if not 0 <= layer_group_id < len(self.life_cycles):
            raise UnknownBufferError(f"layer group {layer_group_id} does not exist: there are {len(self.life_cycles)}")
        return layer_group_id

    def pool_address(self, info: BufferInfo) -> int:
        return self.addresses[self.life_cycles[info.life_cycle].pool_group][info.pool]

    def slot_bytes(self, info: BufferInfo) -> int:
        return self.pool_groups[self.life_cycles[info.life_cycle].pool_group].slot_sizes[info.pool]

    def converter(self, layer_id: int, role: str) -> PageIndexConverter:
        self.buffer(layer_id, role)
        return self._converters[layer_id, role]

    def pool_group_descs(self, slot_counts: Sequence[int]) -> tuple[PoolGroupDesc, ...]:
        return tuple(
            PoolGroupDesc(
                group,
                slot_counts[group],
                self._slot_descs[group],
                tuple(
                    PoolDesc(pool, self.addresses[group][pool], slot_bytes)
                    for pool, slot_bytes in enumerate(info.slot_sizes)
                ),
            )
            for group, info in enumerate(self.pool_groups)
        )

    def _slot_desc(self, info: PoolGroupInfo) -> SlotDesc:
        return SlotDesc(
            tuple(
                SlotDescVariant(
                    tuple(
                        CoalescedBuffer(size, tuple(BufferId(*member) for member in members))
                        for size, members in self.life_cycles[life_cycle].coalesced
                    ),
                    life_cycle,
                )
                for life_cycle in info.life_cycles
            )
        )

    def aggregated_pages(self, buffers: Iterable[tuple[int, str]]) -> list[AggregatedPageDesc]:
        """One descriptor per maximal run of buffers that touch, in order of layer group, pool and offset."""
        wanted: dict[BufferId, BufferInfo] = {}
        for pair in buffers:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"buffers must be pairs of a layer id and a role, not {pair!r}")
            wanted[BufferId(*pair)] = self.buffer(*pair)
        ordered = sorted(wanted.items(), key=lambda item: (item[1].life_cycle, item[1].pool, item[1].offset))
        runs: list[list[tuple[BufferId, BufferInfo]]] = []
        for buffer_id, info in ordered:
            if runs:
                last = runs[-1][-1][1]
                same_pool = (last.life_cycle, last.pool) == (info.life_cycle, info.pool)
                if same_pool and last.offset + last.size == info.offset:
                    runs[-1].append((buffer_id, info))
                    continue
            runs.append([(buffer_id, info)])
        return [self._aggregate(run) for run in runs]

    def _aggregate(self, run: list[tuple[BufferId, BufferInfo]]) -> AggregatedPageDesc:
        first = run[0][1]
        return AggregatedPageDesc(
            self.pool_address(first) + first.offset,
            sum(info.size for _, info in run),
            self.slot_bytes(first),
            first.life_cycle,
            tuple(ExpandedBuffer(buffer_id, info.expansion) for buffer_id, info in run),
        )


def _life_cycle(info: LifeCycleInfo) -> LifeCycle:
    return SsmLifeCycle() if info.is_ssm else AttnLifeCycle(info.window, info.sink_blocks, info.optional)
