"""Which blocks of a sequence are stale, and which need scratch only (`half open ranges of ordinals`).

Words: H history length, C capacity, W window, S sink blocks, R rewind length, all in tokens but S.
"""

from __future__ import annotations

from kvpool._py.core.math import div_up

Range = tuple[int, int]
"""``[begin, end)``; empty when begin ≥ end."""


def stale_range(history: int, tokens_per_block: int, window: int | None, sink_blocks: int) -> Range:
    """Blocks that no query from position ``history`` on will read.

    The query token at position H lies in its own window, so the oldest token still read is H + 1 - W.
    """
    begin = min(div_up(history, tokens_per_block), sink_blocks)
    if window is None:
        return begin, begin
    return begin, max(begin, (history + 1 - window) // tokens_per_block)


def scratch_range(
    history: int, capacity: int, max_rewind: int, tokens_per_block: int, window: int | None, sink_blocks: int
) -> Range:
    """New blocks of this chunk that are stale once the chunk is history; ``(0, 0)`` when there are none.

    The last ``max_rewind`` tokens may be taken back, so what a shorter chunk still needs is kept out of the range.
    """
    if window is None:
        return 0, 0
    stale_begin, stale_end = stale_range(max(0, capacity - max_rewind), tokens_per_block, window, sink_blocks)
    begin = max(stale_begin, div_up(history, tokens_per_block))
    end = min(stale_end, div_up(capacity, tokens_per_block))
    return (begin, end) if begin < end else (0, 0)


def scratch_slots(num_blocks: int, fraction: tuple[int, int]) -> int:
    """Slots that ``num_blocks`` scratch blocks share when one layer uses ``fraction`` of a slot."""
    return div_up(num_blocks * fraction[0], fraction[1])


def overlap(a: Range, b: Range) -> int:
    """Length of the intersection."""
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
