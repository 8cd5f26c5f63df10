"""From layers and buffers to life cycles, slots, pools and pool groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvpool._py.core.ids import MAX_INT32
from kvpool._py.core.math import div_up
from kvpool.errors import ConfigError

BufferKey = tuple[int, str]
"""Layer id and role."""

OPTIONAL = 1
"""``ReusePolicy.OPTIONAL``: the layer's pages never shorten a prefix match."""


@dataclass(frozen=True, slots=True)
class CoalescedBuffer:
    """Buffers of one life cycle with equal expanded size, back to back: its part of a slot in one pool."""

    single_size: int  # bytes, of one buffer in one block
    buffers: tuple[BufferKey, ...]

    @property
    def size(self) -> int:
        """Bytes in one slot."""
        return self.single_size * len(self.buffers)


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """A rule for which blocks stay live, and the layers that share it (a layer group)."""

    index: int
    is_ssm: bool
    window: int | None  # tokens; None: full attention, or SSM
    sink_blocks: int
    layers: tuple[int, ...]
    pool_group: int
    scratch_fraction: tuple[int, int]  # largest share of a slot that one layer uses, in lowest terms
    coalesced: tuple[CoalescedBuffer, ...]  # one per pool of the pool group
    optional: bool = False  # a prefix match does without its pages

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Identity that does not depend on the order of layers."""
        return int(self.is_ssm), -1 if self.window is None else self.window, self.sink_blocks, int(self.optional)


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """Life cycles whose slots have equal sizes in every pool: they share slot ids."""

    index: int
    life_cycles: tuple[int, ...]
    slot_sizes: tuple[int, ...]  # bytes, per pool
    is_ssm_only: bool

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot over all pools."""
        return sum(self.slot_sizes)


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer lies inside the slots of its pool."""

    life_cycle: int
    pool: int
    offset: int  # bytes
    size: int  # expanded bytes
    expansion: int
    scale: int  # buffers of that size in one slot
    layer_util: int  # how many of them belong to this layer


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """All of it; constant."""

    tokens_per_block: int
    life_cycles: tuple[LifeCycle, ...]
    pool_groups: tuple[PoolGroup, ...]
    buffers: dict[BufferKey, BufferPlace]


class _LifeCycleDraft:
    """A life cycle while layers are still being added."""

    def __init__(self, is_ssm: bool, window: int | None, sink_blocks: int, optional: bool) -> None:
        self.is_ssm = is_ssm
        self.window = window
        self.sink_blocks = sink_blocks
        self.optional = optional
        self.layers: list[int] = []
        self.by_size: dict[int, list[BufferKey]] = {}  # expanded size -> buffers in configuration order

    def coalesced(self) -> tuple[CoalescedBuffer, ...]:
        """Largest total first; equal totals in the order they were first seen (the sort is stable)."""
        parts = [CoalescedBuffer(size, tuple(buffers)) for size, buffers in self.by_size.items()]
        return tuple(sorted(parts, key=lambda part: -part.size))


def is_ssm_layer(layer: Any) -> bool:
    """State layers have no window attribute."""
    return not hasattr(layer, "sliding_window_size")


def build_layout(config: Any) -> StorageLayout:
    """Layout of a ``KVCacheManagerConfig``.  Raises ConfigError for what no layout can serve."""
    tokens_per_block: int = config.tokens_per_block
    drafts, expansions = _collect(config.layers, tokens_per_block)
    parts = [draft.coalesced() for draft in drafts]
    for draft, coalesced in zip(drafts, parts, strict=True):
        if sum(part.size for part in coalesced) <= 0:
            raise ConfigError(f"layers {draft.layers} have no buffer bytes: a life cycle needs at least one buffer")
    group_of, members = _group_pools([tuple(part.size for part in c) for c in parts], config.merge_equal_pools)
    life_cycles = tuple(
        _make_life_cycle(index, group_of[index], draft, coalesced)
        for index, (draft, coalesced) in enumerate(zip(drafts, parts, strict=True))
    )
    pool_groups = tuple(
        PoolGroup(
            index,
            tuple(lcs),
            tuple(part.size for part in parts[lcs[0]]),
            all(drafts[lc].is_ssm for lc in lcs),
        )
        for index, lcs in enumerate(members)
    )
    layout = StorageLayout(tokens_per_block, life_cycles, pool_groups, _place(life_cycles, expansions))
    if config.swa_scratch_reuse is not None:
        _check_scratch(life_cycles)
    return layout


def _make_life_cycle(
    index: int, pool_group: int, draft: _LifeCycleDraft, coalesced: tuple[CoalescedBuffer, ...]
) -> LifeCycle:
    return LifeCycle(
        index,
        draft.is_ssm,
        draft.window,
        draft.sink_blocks,
        tuple(draft.layers),
        pool_group,
        _largest_share(coalesced),
        coalesced,
        draft.optional,
    )


def check_index_range(layout: StorageLayout, slot_counts: Sequence[int]) -> None:
    """Every page index of every buffer must fit int32.  Raises ConfigError naming the first that does not."""
    for (layer, role), place in layout.buffers.items():
        num_slots = slot_counts[layout.life_cycles[place.life_cycle].pool_group]
        product = num_slots * place.scale * place.expansion
        if product - 1 > MAX_INT32:
            raise ConfigError(
                f'layer {layer}, role "{role}": page indices do not fit int32: {num_slots} slots * scale {place.scale} '
                f"* expansion {place.expansion} = {product}, at most {MAX_INT32 + 1} is legal"
            )


def _collect(layers: Iterable[Any], tokens_per_block: int) -> tuple[list[_LifeCycleDraft], dict[BufferKey, int]]:
    """Life cycles in order of first mention, and the expansion of every buffer."""
    drafts: dict[tuple[bool, int | None, int, bool], _LifeCycleDraft] = {}
    expansions: dict[BufferKey, int] = {}
    for layer in layers:
        key: tuple[bool, int | None, int, bool] = (True, None, 0, False)  # one life cycle for all state layers
        if not is_ssm_layer(layer):
            sink_blocks = div_up(layer.num_sink_tokens or 0, tokens_per_block)
            key = (False, layer.sliding_window_size, sink_blocks, layer.reuse_policy == OPTIONAL)
        draft = drafts.setdefault(key, _LifeCycleDraft(*key))
        draft.layers.append(layer.layer_id)
        for buffer in layer.buffers:
            expansion = tokens_per_block // (buffer.tokens_per_block_override or tokens_per_block)
            expansions[layer.layer_id, buffer.role] = expansion
            draft.by_size.setdefault(buffer.size * expansion, []).append((layer.layer_id, buffer.role))
    return list(drafts.values()), expansions


def _group_pools(size_lists: Sequence[tuple[int, ...]], merge: bool) -> tuple[list[int], list[list[int]]]:
    """Pool group of each life cycle, life cycles of each pool group; numbered by first life cycle."""
    group_of: list[int] = []
    members: list[list[int]] = []
    by_sizes: dict[object, int] = {}
    for life_cycle, sizes in enumerate(size_lists):
        group = by_sizes.setdefault(sizes if merge else life_cycle, len(members))
        if group == len(members):
            members.append([])
        members[group].append(life_cycle)
        group_of.append(group)
    return group_of, members


def _layer_counts(part: CoalescedBuffer) -> dict[int, int]:
    """How many buffers of a slot belong to each layer."""
    counts: dict[int, int] = {}
    for layer, _ in part.buffers:
        counts[layer] = counts.get(layer, 0) + 1
    return counts


def _largest_share(coalesced: Iterable[CoalescedBuffer]) -> tuple[int, int]:
    share = max(Fraction(count, len(part.buffers)) for part in coalesced for count in _layer_counts(part).values())
    return share.numerator, share.denominator


def _place(life_cycles: Iterable[LifeCycle], expansions: dict[BufferKey, int]) -> dict[BufferKey, BufferPlace]:
    places: dict[BufferKey, BufferPlace] = {}
    for life_cycle in life_cycles:
        for pool, part in enumerate(life_cycle.coalesced):
            counts = _layer_counts(part)
            for position, key in enumerate(part.buffers):
                places[key] = BufferPlace(
                    life_cycle.index,
                    pool,
                    position * part.single_size,
                    part.single_size,
                    expansions[key],
                    len(part.buffers),
                    counts[key[0]],
                )
    return {key: places[key] for key in expansions}  # configuration order


def _check_scratch(life_cycles: Iterable[LifeCycle]) -> None:
    """The scratch mapping maps two blocks of a layer to one place unless its buffers divide the slot evenly."""
    for life_cycle in life_cycles:
        if life_cycle.window is None:
            continue
        for pool, part in enumerate(life_cycle.coalesced):
            for layer, count in _layer_counts(part).items():
                if len(part.buffers) % count:
                    raise ConfigError(
                        f"swa_scratch_reuse: layer {layer} has {count} of the {len(part.buffers)} buffers of pool "
                        f"{pool} of layer group {life_cycle.index}; the scratch mapping would alias"
                    )
