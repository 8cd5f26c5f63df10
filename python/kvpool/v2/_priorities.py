"""The caller's priority callback, asked outside any lock; the cores get plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.v2._checks import arg_int
from kvpool.v2.life_cycle import LifeCycle, LifeCycleRegistry, SsmLifeCycle
from kvpool.v2.types import PRIORITY_MAX, PRIORITY_MIN


class BlockPriorities:
    """Asks once for each (block ordinal, life cycle), in that order of growth; what one cache has been told so far.

    Attention groups are asked for every block that a length touches; state groups for the block that follows it too,
    because the state after a whole block belongs to the next one.
    """

    __slots__ = ("_asked", "_callback", "_life_cycles", "_tokens_per_block")

    def __init__(
        self, callback: Callable[[int, LifeCycle], Any], life_cycles: LifeCycleRegistry, tokens_per_block: int
    ) -> None:
        self._callback = callback
        self._life_cycles = [life_cycles.get_life_cycle(index) for index in range(len(life_cycles))]
        self._tokens_per_block = tokens_per_block
        self._asked = [0] * len(self._life_cycles)

    def missing(self, length: int) -> list[list[int]]:
        """Per life cycle the priorities of the blocks of ``length`` tokens not yet asked for; changes nothing.

        Raises TypeError or ArgumentError for an answer that is no integer of [0, 100], and what the callback raises.
        """
        full, rest = divmod(length, self._tokens_per_block)
        return [
            [
                self._ask(ordinal, life_cycle)
                for ordinal in range(asked, full + (rest > 0 or isinstance(life_cycle, SsmLifeCycle)))
            ]
            for asked, life_cycle in zip(self._asked, self._life_cycles, strict=True)
        ]

    def told(self, priorities: list[list[int]]) -> None:
        """The core knows these answers of :meth:`missing` now."""
        for index, more in enumerate(priorities):
            self._asked[index] += len(more)

    def _ask(self, ordinal: int, life_cycle: LifeCycle) -> int:
        answer = self._callback(ordinal, life_cycle)
        if type(answer) is int and PRIORITY_MIN <= answer <= PRIORITY_MAX:
            return answer
        return arg_int(f"custom_priority_callback({ordinal}, {life_cycle})", answer, PRIORITY_MIN, PRIORITY_MAX)
