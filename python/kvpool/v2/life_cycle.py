"""Life cycles: the rule for which blocks of a sequence stay live. One life cycle is one layer group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvpool.v2._checks import arg_bool, arg_int
from kvpool.v2.types import HalfOpenRange, LifeCycleId


@dataclass(frozen=True, slots=True)
class AttnLifeCycle:
    """Attention: full (``window_size`` None), or the sinks and a trailing window (tokens).

    ``optional``: its layers' reuse policy is OPTIONAL, so that it never shortens a prefix match.
    """

    window_size: int | None
    num_sink_blocks: int
    optional: bool = False

    @staticmethod
    def make(
        window_size: int | None, num_sink_tokens: int | None, tokens_per_block: int, optional: bool = False
    ) -> AttnLifeCycle:
        """The life cycle of a layer; sinks are counted in whole blocks.

        Raises TypeError or ArgumentError: window ≤ 0, negative sinks, sinks without a window, tokens_per_block ≤ 0.
        """
        block = arg_int("tokens_per_block", tokens_per_block, 1)
        window = None if window_size is None else arg_int("window_size", window_size, 1)
        sinks = arg_int("num_sink_tokens", num_sink_tokens or 0, 0, 0 if window is None else 2**31 - 1)
        return AttnLifeCycle(window, -(-sinks // block), arg_bool("optional", optional))

    def get_stale_range(self, history_length: int, tokens_per_block: int) -> HalfOpenRange:
        """Block ordinals without live data once ``history_length`` tokens are done.

        The token in flight at position ``history_length`` is inside the window, so the live window is
        ``[history + 1 - window, history]``.
        """
        history = arg_int("history_length", history_length)
        block = arg_int("tokens_per_block", tokens_per_block, 1)
        beg = min(-(-history // block), self.num_sink_blocks)
        if self.window_size is None:
            return HalfOpenRange(beg, beg)
        return HalfOpenRange(beg, max(beg, (history + 1 - self.window_size) // block))


@dataclass(frozen=True, slots=True)
class SsmLifeCycle:
    """Recurrent state: one slot per beam, rewritten every step. All state layers share this life cycle."""

    def get_stale_range(self, history_length: int, tokens_per_block: int) -> HalfOpenRange:
        """Every whole block of the history: the state stands for all of them."""
        history = arg_int("history_length", history_length)
        return HalfOpenRange(0, history // arg_int("tokens_per_block", tokens_per_block, 1))


LifeCycle: TypeAlias = AttnLifeCycle | SsmLifeCycle


class LifeCycleRegistry:
    """The life cycles of a manager by id."""

    __slots__ = ("_life_cycles",)

    def __init__(self, life_cycles: Sequence[LifeCycle]) -> None:
        self._life_cycles = tuple(life_cycles)

    def get_life_cycle(self, life_cycle_id: LifeCycleId) -> LifeCycle:
        return self._life_cycles[life_cycle_id]

    def __len__(self) -> int:
        return len(self._life_cycles)
