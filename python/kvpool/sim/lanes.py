"""The running requests as a struct of arrays, in age order: what one batch step reads, without any loop per request.

Lane i is the i-th oldest running request.  Lanes ``[0, generating)`` decode, those behind still prefill; admission is in
age order and a chunk ends only with its prompt or with the step's token budget, so at most the youngest lane is in the
middle of its prompt between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.sim.requests import TraceRequest

if TYPE_CHECKING:
    from kvpool.v2 import KVCache

DECODE, CONTEXT = 1, 2
"""Actions of a lane in a step."""
ACTION, INDEX, COMMITTED, HISTORY, CAPACITY = range(5)
"""Rows of :attr:`Lanes.state`."""


@dataclass(slots=True, eq=False)
class Running:
    """What the executor knows of one request from its arrival to its end. Lengths are tokens."""

    spec: TraceRequest
    arrival: float = 0.0  # simulated seconds
    generated: int = 0  # tokens yielded; exact while not decoding, else see Lanes.left
    target: int = 0  # prompt of this admission: the prompt itself and what had been generated before a pause
    matched: int = 0  # of it, found in the cache
    done: int = 0  # of it, computed or matched
    chunk: int = 0  # of it, in this step
    lost: int = 0  # tokens that the last pause gave up
    row: int = -1
    ran: bool = False  # a chunk of it has been computed, in any admission
    reused_tokens: int = 0
    rehit_tokens: int = 0
    first_token: float | None = None  # simulated seconds
    last_token: float = 0.0
    state: str = "waiting"  # waiting, finished or refused in the end
    cache: KVCache | None = field(default=None, repr=False)
    tokens: npt.NDArray[np.int32] | None = field(default=None, repr=False)  # see Sequences

    @property
    def fresh(self) -> bool:
        """Nothing has been computed in this admission."""
        return self.done == self.matched


class Lanes:
    """Arrays of at most ``size`` lanes; the manager's batch step gets slices of them."""

    __slots__ = ("_views", "fed", "generating", "handles", "has_fed", "left", "requests", "rows", "state", "width")

    def __init__(self, size: int, width: int = 0) -> None:
        self.requests: list[Running] = []
        self.generating = 0
        self.width = width
        """Tokens of a row of :class:`~kvpool.sim.sequences.Sequences`."""
        self.handles: npt.NDArray[np.int64] = np.zeros(size, np.int64)
        self.rows: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        self.state: npt.NDArray[np.int32] = np.zeros((5, size), np.int32)
        self.left: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        """Tokens that a decoding lane has still to yield."""
        self.fed: npt.NDArray[np.int64] = np.zeros(size, np.int64)
        """Where the token lies that the lane's last decode step fed: row · width + position."""
        self.has_fed: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        """Whether there was one; not in a lane's first decode step."""
        self._views: dict[int, StepArguments] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def arguments(self, count: int) -> StepArguments:
        """Views of the first ``count`` lanes; the same objects every time."""
        found = self._views.get(count)
        if found is None:
            state = self.state
            found = self._views[count] = StepArguments(
                self.handles[:count],
                self.rows[:count],
                state[CAPACITY, :count],
                state[HISTORY, :count],
                state[:, :count],
                state[HISTORY : CAPACITY + 1, :count],
                state[COMMITTED : CAPACITY + 1, :count],
                self.left[:count],
                self.fed[:count],
            )
        return found

    def append(self, request: Running, handle: int) -> None:
        """The youngest lane, prefilling."""
        lane = len(self.requests)
        self.requests.append(request)
        self.handles[lane] = handle
        self.rows[lane] = request.row
        self.state[:, lane] = (CONTEXT, request.spec.index, 0, 0, 0)

    def pop(self) -> Running:
        """Takes the youngest lane away."""
        request = self.requests.pop()
        if self.generating > len(self.requests):
            self.generating = len(self.requests)
            request.generated = request.spec.output_tokens - int(self.left[self.generating])
        return request

    def set_chunk(self, lane: int, committed: int, history: int, capacity: int) -> None:
        """Lengths that a prefilling lane asks for in this step."""
        self.state[COMMITTED:, lane] = (committed, history, capacity)

    def start_decoding(self, committed: int) -> None:
        """The oldest prefilling lane has all of its prompt: its next step feeds the token that it just yielded.

        ``committed`` is the row's value before that step.
        """
        lane = self.generating
        request = self.requests[lane]
        target = request.target
        self.state[:, lane] = (DECODE, request.spec.index, committed, target - 1, target)
        self.left[lane] = request.spec.output_tokens - request.generated
        self.fed[lane] = request.row * self.width + target - 2
        self.has_fed[lane] = False
        self.generating += 1

    def take_finished(self) -> list[Running]:
        """Removes the decoding lanes with nothing left to yield; the others keep their order."""
        count, generating = len(self.requests), self.generating
        gone = np.flatnonzero(self.left[:generating] <= 0).tolist()
        if not gone:
            return []
        keep = np.ones(count, np.bool_)
        keep[gone] = False
        kept = count - len(gone)
        for array in (self.handles, self.rows, self.left, self.fed, self.has_fed):
            array[:kept] = array[:count][keep]
        self.state[:, :kept] = self.state[:, :count][:, keep]
        finished = [self.requests[lane] for lane in gone]
        self.requests = [request for lane, request in enumerate(self.requests) if keep[lane]]
        self.generating -= len(gone)
        return finished


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Views of the first lanes."""

    handles: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    capacities: npt.NDArray[np.int32]
    histories: npt.NDArray[np.int32]
    state: npt.NDArray[np.int32]  # [5, n]
    lengths: npt.NDArray[np.int32]  # [2, n]: histories and capacities
    all_lengths: npt.NDArray[np.int32]  # [3, n]: committed ones first
    left: npt.NDArray[np.int32]
    fed: npt.NDArray[np.int64]
