"""Numbers of one run, collected while it goes and condensed at its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvpool.sim.lanes import Running
from kvpool.sim.result import Percentiles, PoolSample, Spread

if TYPE_CHECKING:
    from kvpool.v2 import KVCacheManager

MAX_SAMPLES = 512


@dataclass(slots=True)
class CallTime:
    """Measured nanoseconds inside the manager's calls, of the step that is going on."""

    ns: int = 0


@dataclass(slots=True)
class Counters:
    """What the executor counts. Times in simulated seconds unless said."""

    steps: int = 0
    scheduled: int = 0  # requests, summed over the steps
    batch_peak: int = 0
    makespan: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0  # of requests that ran, each once
    reused_tokens: int = 0  # of those, matched at the first admission
    rehit_tokens: int = 0  # matched after a pause
    recompute_pauses: int = 0
    recomputed_tokens: int = 0
    manager_ns: array[int] = field(default_factory=lambda: array("q"))  # measured, one entry a step
    finished: list[Running] = field(default_factory=list)
    refused: list[Running] = field(default_factory=list)


class PoolSamples:
    """Live bytes of every pool group at evenly spaced steps, at most 512 of them, the last one included."""

    __slots__ = ("_live", "_manager", "_slot_bytes", "_steps", "stride")

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._slot_bytes = [sum(desc.slot_desc.slot_size_list) for desc in manager.pool_group_descs]
        self._steps: list[int] = []
        self._live: list[list[int]] = []
        self.stride = 1
        """Distance of the samples; doubles when there are too many."""

    def take(self, step: int) -> None:
        """A sample after ``step``, which is a multiple of the stride."""
        if len(self._steps) == MAX_SAMPLES - 1:  # one place stays free for the last step
            self._steps, self._live = self._steps[1::2], self._live[1::2]
            self.stride *= 2
            if step % self.stride:
                return
        self._append(step)

    def finish(self, step: int) -> None:
        """The last step's sample."""
        if step and (not self._steps or self._steps[-1] != step):
            self._append(step)

    def _append(self, step: int) -> None:
        self._steps.append(step)
        self._live.append([total.total - total.available for total in self._manager.get_storage_statistics()])

    def of_group(self, group: int, pool_bytes: int) -> list[PoolSample]:
        """The samples of one pool group."""
        slot_bytes = self._slot_bytes[group]
        return [
            PoolSample(step=step, live_bytes=live[group] * slot_bytes, pool_bytes=pool_bytes)
            for step, live in zip(self._steps, self._live, strict=True)
        ]


def spread(values: Sequence[float]) -> Spread:
    """Mean, median and 99th percentile; nothing of nothing."""
    if not values:
        return Spread(mean=None, p50=None, p99=None)
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return Spread(mean=float(np.mean(values)), p50=p50, p99=p99)


def percentiles(values: Sequence[float]) -> Percentiles:
    """Median and 99th percentile."""
    of = spread(values)
    return Percentiles(p50=of.p50, p99=of.p99)


def ttft_ms(request: Running) -> float | None:
    """From the arrival to the end of the step that yielded token 1."""
    return None if request.first_token is None else (request.first_token - request.arrival) * 1e3


def tpot_ms(request: Running) -> float | None:
    """Mean gap between tokens after the first; None with fewer than two."""
    if request.first_token is None or request.spec.output_tokens < 2:
        return None
    return (request.last_token - request.first_token) * 1e3 / (request.spec.output_tokens - 1)
