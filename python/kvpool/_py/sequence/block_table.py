"""Page indices as kernels see them: the exposed form of a cache's slots."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvpool._py.core.ids import BAD_PAGE_INDEX
from kvpool._py.sequence.kv_cache import ACTIVE, KVCache
from kvpool._py.storage.live_ranges import Range


def exposed_slots(cache: KVCache, life_cycle: int, beam: int, begin: int, end: int) -> list[int]:
    """Slots of blocks ``[begin, end)``, within ``num_blocks``; -1 for stale and scratch ones and unless ACTIVE."""
    beams = cache.slots[life_cycle]
    if cache.status != ACTIVE or not beams:  # a state has no blocks
        return [BAD_PAGE_INDEX] * max(0, end - begin)
    slots = beams[beam][begin:end]
    stale_begin, stale_end = cache.stale[life_cycle]
    first, last = max(stale_begin, begin), min(stale_end, end)
    if first < last:  # held pages are not exposed
        slots[first - begin : last - begin] = [BAD_PAGE_INDEX] * (last - first)
    return slots


def owned_slots(cache: KVCache, life_cycle: int, beam: int) -> list[int]:
    """Slots of all pages, held ones included; all -1 for a state life cycle."""
    beams = cache.slots[life_cycle]
    return list(beams[beam]) if beams else [BAD_PAGE_INDEX] * cache.num_blocks


def write_buffers(cache: KVCache, changes: Iterable[tuple[int, Range]]) -> None:
    """Write changed blocks, given as (life cycle, range), into the attached buffers.

    Blocks beyond ``num_blocks`` were removed and become -1.
    """
    if not cache.buffers:
        return
    for life_cycle, (begin, end) in changes:
        inside = min(end, cache.num_blocks)
        for beam in range(cache.beam_width):
            buffer = cache.buffers.get((life_cycle, beam))
            if buffer is None:
                continue
            if begin < inside:
                buffer[begin:inside] = exposed_slots(cache, life_cycle, beam, begin, inside)
            buffer[max(begin, inside) : end] = BAD_PAGE_INDEX


def fill_buffer(cache: KVCache, life_cycle: int, beam: int, buffer: npt.NDArray[np.int32]) -> None:
    """Write the whole of a buffer: exposed slots, then -1."""
    buffer[: cache.num_blocks] = exposed_slots(cache, life_cycle, beam, 0, cache.num_blocks)
    buffer[cache.num_blocks :] = BAD_PAGE_INDEX


def write_all_buffers(cache: KVCache) -> None:
    """Write every attached buffer anew."""
    for (life_cycle, beam), buffer in cache.buffers.items():
        fill_buffer(cache, life_cycle, beam, buffer)


def detach_buffers(cache: KVCache, first_beam: int = 0) -> None:
    """Let go of the buffers of beams from ``first_beam`` on; they are left full of -1."""
    for key in [key for key in cache.buffers if key[1] >= first_beam]:
        cache.buffers.pop(key)[:] = BAD_PAGE_INDEX
