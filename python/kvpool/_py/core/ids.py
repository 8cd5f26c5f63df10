"""Ids and handles.

Ids are plain integers: a life cycle (= layer group), a pool group, a slot, a stream, an event.  A cache is named by a
*handle*, ``generation << 32 | index``: the index is reused after a close, the generation makes the old handle stale.
"""

from __future__ import annotations

BAD_PAGE_INDEX = -1
"""No page: outside the sequence, stale, scratch, held or suspended."""

NO_EVENT = 0
"""The event that is complete from the start."""

MAX_INT32 = 2**31 - 1
"""Largest page index and largest capacity: kernels index pages and tokens with int32."""


def make_handle(generation: int, index: int) -> int:
    """Handle of the ``generation``-th cache (from 1) that lives at ``index``."""
    return generation << 32 | index


def handle_index(handle: int) -> int:
    """Index part of a handle."""
    return handle & 0xFFFFFFFF
