"""When requests arrive: as the file says, all at once, or at a rate with exponential gaps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

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

    The gaps of a rate come from Python's own generator, whose stream for a seed is the same in every version.
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
            clock += -math.log(1.0 - draw()) / arrival
    return sorted(timed, key=lambda request: (request.arrival, request.index))
