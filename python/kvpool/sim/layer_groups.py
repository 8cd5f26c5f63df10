"""The layer groups of a configuration, without a manager: what one request holds in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.sim.demand import live_blocks
from kvpool.v2 import AttentionLayerConfig, AttnLifeCycle, ReusePolicy, SsmLifeCycle

if TYPE_CHECKING:
    from kvpool.v2 import KVCacheManagerConfig, SsmLayerConfig


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One layer group; ``slot_bytes`` are those of one block, or of one request's state."""

    group: int
    cycle: AttnLifeCycle | SsmLifeCycle
    layers: tuple[int, ...]
    slot_bytes: int
    tokens_per_block: int

    @property
    def window(self) -> int | None:
        """Tokens that stay live; None: all, or a state."""
        return self.cycle.window_size if isinstance(self.cycle, AttnLifeCycle) else None

    @property
    def is_state(self) -> bool:
        """Whether it holds recurrent state."""
        return not isinstance(self.cycle, AttnLifeCycle)

    def blocks(self, capacity: int, history: int) -> int:
        """Slots of one request."""
        return live_blocks(self.cycle, capacity, history, self.tokens_per_block)


def group_sizes(config: KVCacheManagerConfig) -> list[GroupSize]:
    """Every layer group, in the order of their ids."""
    block = config.tokens_per_block
    cycles = config.life_cycles()
    layers: list[list[int]] = [[] for _ in cycles]
    sizes = [0] * len(cycles)
    for layer in config.layers:
        group = cycles.index(_cycle(layer, block))
        layers[group].append(layer.layer_id)
        sizes[group] += sum(b.size * (block // (b.tokens_per_block_override or block)) for b in layer.buffers)
    return [GroupSize(group, cycle, tuple(layers[group]), sizes[group], block) for group, cycle in enumerate(cycles)]


def _cycle(layer: AttentionLayerConfig | SsmLayerConfig, block: int) -> AttnLifeCycle | SsmLifeCycle:
    if isinstance(layer, AttentionLayerConfig):
        optional = layer.reuse_policy == ReusePolicy.OPTIONAL
        return AttnLifeCycle.make(layer.sliding_window_size, layer.num_sink_tokens, block, optional)
    return SsmLifeCycle()
