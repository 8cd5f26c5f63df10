"""Policy ``max_utilization``: admit as long as anything fits, take the youngest back when growth fails.

- Waiting requests are served in age order and never overtake each other: the first that is refused stops the scan.  So the
  head of the queue can't be starved by smaller ones behind it; it waits at most until those running have finished.
- When a decoding request can't grow, the youngest running one, prefilling ones included, is recompute-paused and the growth
  is tried again, until it succeeds or the request that needs it is itself the youngest.

Both together keep every running request older than every waiting one, and the oldest is never paused for another.  Alone it
always fits (longer ones were refused up front), so each step brings the oldest request at least one token nearer to its
end: there is no dead-lock and no starvation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvpool.sim.lanes import Running

NAME = "max_utilization"


def next_admission(waiting: deque[Running]) -> Running | None:
    """The only waiting request that may be admitted now."""
    return waiting[0] if waiting else None


def victim(running: Sequence[Running]) -> int:
    """The lane to pause when a decoding request can't grow."""
    return len(running) - 1
