"""Layout descriptors: where the bytes of a layer and role lie. All are values; addresses never change.

Block with slot id ``i`` of a pool lies at ``base_address + i * slot_bytes``; inside it every coalesced buffer is a run
of equal sub-pages, in the order of ``buffer_ids``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.v2.types import DataRole, LayerGroupId, LayerId, MemAddress, PoolGroupIndex, PoolIndex


class BufferId(NamedTuple):
    """One layer's bytes of one role."""

    layer_id: LayerId
    role: DataRole


@dataclass(frozen=True, slots=True)
class PoolDesc:
    """Equal slots in one address range."""

    pool_index: PoolIndex
    base_address: MemAddress
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class CoalescedBuffer:
    """Buffers of equal expanded size side by side; the k-th lies at ``k * single_buffer_size`` in the slot."""

    single_buffer_size: int
    buffer_ids: Sequence[BufferId]

    @property
    def num_buffers(self) -> int:
        return len(self.buffer_ids)

    @property
    def size(self) -> int:
        """Bytes of all of them: the slot's size in this pool."""
        return self.single_buffer_size * len(self.buffer_ids)


@dataclass(frozen=True, slots=True)
class SlotDescVariant:
    """What a slot holds for one layer group; the i-th coalesced buffer lies in the pool group's i-th pool."""

    coalesced_buffers: Sequence[CoalescedBuffer]
    layer_group_id: LayerGroupId

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        return tuple(buffer.size for buffer in self.coalesced_buffers)


@dataclass(frozen=True, slots=True)
class SlotDesc:
    """One variant per layer group that draws from the pool group; all have the same sizes."""

    variants: Sequence[SlotDescVariant]

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        return self.variants[0].slot_size_list


@dataclass(frozen=True, slots=True)
class PoolGroupDesc:
    """Pools that share slot ids, with their number of slots now."""

    pool_group_index: PoolGroupIndex
    num_slots: int
    slot_desc: SlotDesc
    pools: Sequence[PoolDesc]


@dataclass(frozen=True, slots=True)
class ExpandedBuffer:
    """A buffer and how many of its own pages make one block."""

    id: BufferId
    expansion: int


@dataclass(frozen=True, slots=True)
class AggregatedPageDesc:
    """A run of adjacent buffers, for transfers: block with slot ``i`` is at ``base + stride * i + [0, size)``."""

    base: MemAddress
    size: int
    stride: int
    layer_group_id: LayerGroupId
    buffers: Sequence[ExpandedBuffer]


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """Slots of one pool group at one level. ``free``: owned by nobody. ``evictable``: cached only."""

    slot_sizes: list[int]
    total: int
    free: int
    evictable: int

    @property
    def slot_size(self) -> list[int]:
        """Older name of ``slot_sizes``."""
        return self.slot_sizes

    @property
    def available(self) -> int:
        return self.free + self.evictable

    @property
    def unavailable(self) -> int:
        return self.total - self.available
