"""What the configuration says about reuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpool._py.core.math import div_up
from kvpool._py.storage.layout import LifeCycle, StorageLayout

ALWAYS = 1 << 62
"""More blocks than any sequence has."""

DEFAULT_GRID_WINDOWS = 16
"""``window_tail_interval`` in windows (the largest that is required) unless configured."""


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """What the configuration says about reuse; constant."""

    tokens_per_block: int
    num_life_cycles: int
    required: tuple[LifeCycle, ...]  # attention life cycles that a prefix needs
    required_windowed: tuple[LifeCycle, ...]
    windowed: tuple[LifeCycle, ...]  # optional ones too
    ssm: int  # the state life cycle; -1: none
    full_like_below: tuple[int, ...]  # per life cycle: blocks of lower ordinals are needed by all that goes on
    tail_blocks: tuple[
        int, ...
    ]  # per life cycle: blocks behind the last token whose pages an end point needs; 0: no window
    match_policy: str  # "longest" or "reference"
    partial: bool  # enable_partial_reuse
    backoff: int  # tokens
    retain_window_tails: bool
    window_tail_slack: int  # tokens
    grid_blocks: int  # window_tail_interval in blocks; 0: off

    @staticmethod
    def make(layout: StorageLayout, config: Any) -> ReuseRules:
        """Rules of a layout and a ``KVCacheManagerConfig``."""
        tpb = layout.tokens_per_block
        attention = [lc for lc in layout.life_cycles if not lc.is_ssm]
        required = tuple(lc for lc in attention if not lc.optional)
        interval = config.window_tail_interval
        if interval is None:
            interval = DEFAULT_GRID_WINDOWS * max((lc.window or 0 for lc in required), default=0)
        return ReuseRules(
            tpb,
            len(layout.life_cycles),
            required,
            tuple(lc for lc in required if lc.window is not None),
            tuple(lc for lc in attention if lc.window is not None),
            next((lc.index for lc in layout.life_cycles if lc.is_ssm), -1),
            tuple(_full_like_below(lc) for lc in layout.life_cycles),
            tuple(0 if lc.window is None else div_up(lc.window - 1, tpb) for lc in layout.life_cycles),
            config.match_policy,
            config.enable_partial_reuse,
            config.reuse_match_backoff,
            config.retain_window_tails,
            config.window_tail_slack,
            div_up(interval, tpb) if config.retain_window_tails else 0,
        )


def _full_like_below(life_cycle: LifeCycle) -> int:
    if life_cycle.is_ssm or life_cycle.optional:
        return 0
    return ALWAYS if life_cycle.window is None else life_cycle.sink_blocks
