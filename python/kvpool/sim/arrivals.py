"""When requests arrive: as the file says, all at once, at a rate with exponential gaps, or when the turn before has ended."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvpool.sim.lanes import Running
from kvpool.sim.requests import TraceRequest
from kvpool.sim.usage import UsageError

_LEGAL = "trace, now, or a positive number of requests per second"


def parse_arrival(text: str) -> str | float:
    """``"trace"``, ``"now"``, or the rate in requests per second; UsageError for anything else."""
    if text in ("trace", "now"):
        return text
    try:
        rate = float(text)
    except ValueError:
        raise UsageError("--arrival", f"{text!r} is unknown", _LEGAL) from None
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError("--arrival", f"{text} is no rate", _LEGAL)
    return rate


def with_arrivals(requests: Sequence[TraceRequest], arrival: str | float, seed: int) -> list[TraceRequest]:
    """The requests with their arrival times, ordered by (arrival, index).

    The gaps of a rate come from Python's own generator, whose stream for a seed is the same in every version.  A request
    that follows another arrives when that one ends: it gets no gap, and its time here means nothing.
    """
    if arrival == "trace":
        timed = list(requests)
    elif isinstance(arrival, str):
        timed = [replace(request, arrival=0.0) for request in requests]
    else:
        draw = random.Random(seed).random
        clock, timed = 0.0, []
        for request in requests:
            timed.append(replace(request, arrival=clock))
            if request.follows is None:
                clock += -math.log(1.0 - draw()) / arrival
    return sorted(timed, key=lambda request: (request.arrival, request.index))


class Arrivals:
    """Hands out requests, sorted by arrival, when their time has come; one that follows another when that one has ended."""

    __slots__ = ("_followers", "_taken", "_timed", "_turns", "first")

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._timed = [request for request in requests if request.follows is None]
        self._followers = {request.follows: request for request in requests if request.follows is not None}
        self._taken = 0
        self._turns: deque[Running] = deque()  # followers whose time has come
        self.first = self._timed[0].arrival if self._timed else 0.0
        """The first arrival."""

    def due(self, clock: float) -> Iterator[Running]:
        """Those that have arrived since the last call, in order of arrival."""
        turns = self._turns
        while True:
            spec = self._timed[self._taken] if self._taken < len(self._timed) else None
            if spec is not None and spec.arrival <= clock and not (turns and turns[0].arrival < spec.arrival):
                self._taken += 1
                yield Running(spec, arrival=spec.arrival)
            elif turns:
                yield turns.popleft()
            else:
                return

    def next_time(self) -> float | None:
        """When the next one arrives that waits for no other; None: there is none."""
        return self._timed[self._taken].arrival if self._taken < len(self._timed) else None

    def ended(self, request: Running, clock: float) -> None:
        """The request has ended: the one that follows it arrives."""
        follower = self._followers.pop(request.spec.index, None)
        if follower is not None:
            self._turns.append(Running(follower, arrival=clock))

    def without(self, request: Running, clock: float) -> Running | None:
        """The request will not run: the one that follows it, which will not run either."""
        follower = self._followers.pop(request.spec.index, None)
        return None if follower is None else Running(follower, arrival=clock)
