"""From base page indices (slot ids) to the page indices of one layer and role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.errors import ArgumentError
from kvpool.v2.types import BAD_PAGE_INDEX, PageIndexMode, ScratchDesc


@dataclass(frozen=True, slots=True)
class PageIndexConverter:
    """A constant affine map: ``index = (slot * scale + layer_offset) * expansion + i`` for ``i`` of [0, expansion).

    ``scale``: sub-pages per slot. ``expansion``: this buffer's own pages per block. ``layer_offset``: the sub-page of
    this buffer, part of the index in PER_LAYER mode and of the base address in SHARED mode.
    ``scratch_pages_per_block``: sub-pages of one layer in a slot.  Calling it is the reference of what kernels do.
    """

    scale: int
    expansion: int
    layer_offset: int
    scratch_pages_per_block: int

    def __call__(
        self,
        base_indices: Iterable[int],
        index_mode: PageIndexMode | None = None,
        scratch: ScratchDesc | None = None,
    ) -> list[int]:
        """``expansion`` page indices per block; BAD_PAGE_INDEX stays bad.

        ``index_mode`` None is SHARED, but must be given with ``scratch``: the blocks of its range take their pages
        from its slots, whatever ``base_indices`` says. Raises ArgumentError when it is not given, or when the scratch
        slots are too few.
        """
        if index_mode is None:
            if scratch is not None:
                raise ArgumentError("index_mode must be given explicitly together with scratch")
            index_mode = PageIndexMode.SHARED
        offset = self.layer_offset if PageIndexMode(index_mode) == PageIndexMode.PER_LAYER else 0
        indices: list[int] = []
        for ordinal, base in enumerate(base_indices):
            if scratch is not None and scratch.range.beg <= ordinal < scratch.range.end:
                page = self._scratch_page(ordinal - scratch.range.beg, offset, scratch)
            elif base == BAD_PAGE_INDEX:
                indices.extend([BAD_PAGE_INDEX] * self.expansion)
                continue
            else:
                page = int(base) * self.scale + offset
            indices.extend(range(page * self.expansion, (page + 1) * self.expansion))
        return indices

    def _scratch_page(self, position: int, offset: int, scratch: ScratchDesc) -> int:
        """The rotation keeps every layer inside the same bytes of the slot while it runs."""
        slot, page = divmod(position * self.scratch_pages_per_block, self.scale)
        if slot >= len(scratch.slot_ids):
            raise ArgumentError(f"scratch has {len(scratch.slot_ids)} slots: block {position} of its range needs more")
        return int(scratch.slot_ids[slot]) * self.scale + (page + offset) % self.scale
