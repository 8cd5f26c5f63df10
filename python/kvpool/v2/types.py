"""Constants, aliases, enums and small value types of the V2 API.

The id aliases are plain ``int`` and ``str``: callers may write ``LayerId(3)`` or just ``3``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

BAD_PAGE_INDEX = -1
"""No page; every index transform passes it through."""
DEFAULT_BEAM_INDEX = 0
GPU_LEVEL = 0
"""The hottest cache level."""
CACHE_LEVEL1 = 1
"""The first cold level."""
PRIORITY_MIN = 0
PRIORITY_MAX = 100
PRIORITY_DEFAULT = 35
NDEBUG = not os.environ.get("TLLM_DEBUG_MODE", "").startswith("1")
"""False iff ``TLLM_DEBUG_MODE`` starts with ``1`` when kvpool.v2 is imported."""

LayerId: TypeAlias = int
CacheLevel: TypeAlias = int
LifeCycleId: TypeAlias = int
LayerGroupId: TypeAlias = LifeCycleId
DataRole: TypeAlias = str
TokenId: TypeAlias = int
BeamIndex: TypeAlias = int
CudaStream: TypeAlias = int
MemAddress: TypeAlias = int
Priority: TypeAlias = int
PoolGroupIndex: TypeAlias = int
PoolIndex: TypeAlias = int
SlidingWindowSize: TypeAlias = int | None
IndexSeq: TypeAlias = memoryview


class CacheTier(IntEnum):
    """The medium of a cache level."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


class PageIndexMode(IntEnum):
    """Where the layer's offset inside a slot lives.

    SHARED: in the base address, so that one index array serves every layer of a group with equal scale and expansion.
    PER_LAYER: in the index; needed while scratch slots are in use.
    """

    SHARED = 0
    PER_LAYER = 1


class PageStatus(IntEnum):
    """LOCKED: pinned at level 0. HELD: owned, may move colder. DROPPABLE: only cached."""

    LOCKED = 0
    HELD = 1
    DROPPABLE = 2


class LayerType(IntEnum):
    """The kind of a layer: attention, or constant-size recurrent state."""

    ATTENTION = 0
    SSM = 1


class ReusePolicy(IntEnum):
    """Whether a prefix match needs a layer's pages.

    REQUIRED: the match ends where the layer's data is whole. OPTIONAL: the layer never shortens a match; what is
    missing of its data its executor computes again.
    """

    REQUIRED = 0
    OPTIONAL = 1


class _Status(IntEnum):
    """State of a KV cache: SUSPENDED → ACTIVE → SUSPENDED … → CLOSED."""

    SUSPENDED = 0
    ACTIVE = 1
    CLOSED = 2


KvCacheStatus: TypeAlias = _Status


@dataclass(frozen=True, slots=True)
class MmItemContext:
    """A multimodal digest token that also carries the item's uuid (metadata: never hashed or compared)."""

    digest: bytes
    uuid: str | None = None


TokenIdExt: TypeAlias = int | bytes | MmItemContext
"""A token: an id of [0, 2^31), or a 32-byte digest."""


class ReuseScope(NamedTuple):
    """Caches share prefixes only inside one scope. None differs from 0; both values are below 2^64."""

    lora_id: int | None = None
    salt: int | None = None


class ReuseStatus(NamedTuple):
    """What one layer group holds of the prefix that a cache matched when it was created."""

    group_id: LayerGroupId
    policy: ReusePolicy
    complete: bool
    """Every block that is live at the end point is covered."""
    endpoint: int
    """Tokens matched."""
    coverage: list[tuple[int, int]]
    """Half-open token ranges of the live blocks' pages, ascending; they neither touch nor overlap."""


class HalfOpenRange:
    """Block ordinals ``[beg, end)``. Falsy when empty; all empty ranges are equal; ``len`` is never negative."""

    __slots__ = ("_beg", "_end")

    def __init__(self, beg: int, end: int) -> None:
        self._beg = beg
        self._end = end

    @property
    def beg(self) -> int:
        return self._beg

    @property
    def end(self) -> int:
        return self._end

    def __len__(self) -> int:
        return max(0, self._end - self._beg)

    def __contains__(self, ordinal: object) -> bool:
        return isinstance(ordinal, int) and self._beg <= ordinal < self._end

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HalfOpenRange):
            return NotImplemented
        return (self._beg, self._end) == (other._beg, other._end) or not (self or other)

    def __hash__(self) -> int:
        return hash((self._beg, self._end) if self else ())

    def __repr__(self) -> str:
        return f"HalfOpenRange({self._beg}, {self._end})"


@dataclass(frozen=True, slots=True)
class ScratchDesc:
    """Scratch blocks of one layer group: the block ordinals and the few slots that they share.

    Valid until the next change of the cache's lengths. Falsy when the range is empty.
    """

    range: HalfOpenRange
    slot_ids: Sequence[int]

    def __bool__(self) -> bool:
        return bool(self.range)


def exact_div(x: int, y: int) -> int:
    """``x // y``; AssertionError when it leaves a remainder."""
    quotient, remainder = divmod(x, y)
    if remainder:
        raise AssertionError(f"exact_div: {x} is not a multiple of {y}")
    return quotient


def typed_range(*args: int) -> range:
    """``range`` for ids; the id types are plain integers, so it is ``range`` itself."""
    return range(*args)
