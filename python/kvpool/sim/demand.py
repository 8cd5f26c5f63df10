"""How many slots one request owns at given lengths, by the life cycles that the manager publishes.

The executor uses it for one question: can this prefill chunk fit at all?  What fits *now* only the manager knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.v2 import AttnLifeCycle, SsmLifeCycle

if TYPE_CHECKING:
    from kvpool.v2 import KVCacheManager


def live_blocks(cycle: AttnLifeCycle | SsmLifeCycle, capacity: int, history: int, tokens_per_block: int) -> int:
    """Pages of one request with ``capacity`` tokens, ``history`` of them done, in one layer group."""
    if not isinstance(cycle, AttnLifeCycle):
        return 1
    blocks = -(-capacity // tokens_per_block)
    stale = cycle.get_stale_range(history, tokens_per_block)
    return blocks - max(0, min(stale.end, blocks) - stale.beg)


class RequestDemand:
    """Slots of one request per pool group, and the largest chunk that fits an otherwise empty manager."""

    __slots__ = ("_groups", "_tokens_per_block", "_totals")

    def __init__(self, manager: KVCacheManager) -> None:
        self._tokens_per_block = manager.tokens_per_block
        descs = manager.pool_group_descs
        self._totals = [desc.num_slots for desc in descs]
        cycles = manager._life_cycles
        self._groups = [
            [cycles.get_life_cycle(variant.layer_group_id) for variant in desc.slot_desc.variants] for desc in descs
        ]

    def slots(self, capacity: int, history: int) -> list[int]:
        """Slots per pool group of a request that holds ``capacity`` tokens, ``history`` of them done."""
        block = self._tokens_per_block
        return [sum(live_blocks(cycle, capacity, history, block) for cycle in group) for group in self._groups]

    def fits(self, capacity: int, history: int) -> bool:
        """Whether one request of these lengths fits when nothing else is held."""
        return all(need <= total for need, total in zip(self.slots(capacity, history), self._totals, strict=True))

    def largest_chunk(self, history: int, tokens: int) -> int:
        """The largest chunk of at most ``tokens`` after ``history`` that fits alone; 0 when not even one token does."""
        if self.fits(history + tokens, history):
            return tokens
        fits, fails = 0, tokens
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.fits(history + middle, history):
                fits = middle
            else:
                fails = middle
        return fits
