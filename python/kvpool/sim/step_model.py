"""How long a step takes in simulated time: a roofline of weights, cache reads and arithmetic.

    seconds = max((active weight bytes + live KV bytes read) / bandwidth, 2 · active parameters · tokens / FLOPs) + 0.5 ms

Live KV bytes read: every request of the step reads, per layer, the tokens its queries can see, the step's own included:
``capacity`` tokens of a full-attention layer, at most ``window - 1`` tokens before the step's own in a windowed layer, and
its whole state in a recurrent layer.  Weights and arithmetic of one rank are the model's divided by the ranks.
Everything is a function of the step's inputs alone, so equal decisions take equal time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.v2 import AttentionLayerConfig

if TYPE_CHECKING:
    from kvpool.sim.settings import StepModelSettings
    from kvpool.v2 import SsmLayerConfig


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Bytes that one request's attention reads, by kind of layer."""

    full_bytes_per_token: float
    windows: tuple[tuple[int, float], ...]  # (window, bytes per token of all its layers)
    state_bytes: int

    @classmethod
    def of_layers(cls, layers: Sequence[AttentionLayerConfig | SsmLayerConfig], tokens_per_block: int) -> ReadCost:
        """From the layers of a manager's configuration."""
        state, full = 0, 0
        windows: dict[int, int] = {}
        for layer in layers:
            block = sum(
                b.size * (tokens_per_block // (b.tokens_per_block_override or tokens_per_block)) for b in layer.buffers
            )
            if not isinstance(layer, AttentionLayerConfig):
                state += block
            elif layer.sliding_window_size is None:
                full += block
            else:
                window = layer.sliding_window_size + (layer.num_sink_tokens or 0)
                windows[window] = windows.get(window, 0) + block
        per_token = tuple((window, block / tokens_per_block) for window, block in sorted(windows.items()))
        return cls(full / tokens_per_block, per_token, state)

    def chunk_bytes(self, capacity: int, history: int) -> float:
        """Bytes one request reads in a step from ``history`` to ``capacity`` tokens."""
        new = capacity - history
        read = self.full_bytes_per_token * capacity + self.state_bytes
        for window, per_token in self.windows:
            read += per_token * min(capacity, window - 1 + new)
        return read


class StepModel:
    """Seconds of one step; see the module."""

    __slots__ = ("_flops_per_token", "_inverse_bandwidth", "_inverse_flops", "_overhead", "_weight_bytes")

    def __init__(self, settings: StepModelSettings) -> None:
        self._weight_bytes = settings.active_weight_bytes / settings.ranks
        self._flops_per_token = 2.0 * settings.active_parameters / settings.ranks
        self._inverse_bandwidth = 1.0 / settings.bandwidth_bytes_per_s
        self._inverse_flops = 1.0 / settings.flops_per_s
        self._overhead = settings.overhead_s

    def seconds(self, tokens: int, read_bytes: float) -> float:
        """A step that computes ``tokens`` and reads ``read_bytes`` of cache."""
        memory = (self._weight_bytes + read_bytes) * self._inverse_bandwidth
        compute = self._flops_per_token * tokens * self._inverse_flops
        return max(memory, compute) + self._overhead
