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
    generated: int = 0  # tokens yielded; exact while not decoding, else see Lanes.left
    target: int = 0  # prompt of this admission: the prompt itself and what had been generated before a pause
    done: int = 0  # of it, computed
    chunk: int = 0  # of it, in this step
    row: int = -1
    admissions: int = 0
    first_token: float | None = None  # simulated seconds
    last_token: float = 0.0
    state: str = "waiting"  # waiting, finished or refused in the end
    cache: KVCache | None = field(default=None, repr=False)


class Lanes:
    """Arrays of at most ``size`` lanes; the manager's batch step gets slices of them."""

    __slots__ = ("_views", "generating", "handles", "left", "requests", "rows", "state")

    def __init__(self, size: int) -> None:
        self.requests: list[Running] = []
        self.generating = 0
        self.handles: npt.NDArray[np.int64] = np.zeros(size, np.int64)
        self.rows: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        self.state: npt.NDArray[np.int32] = np.zeros((5, size), np.int32)
        self.left: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        """Tokens that a decoding lane has still to yield."""
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
                self.left[:count],
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

    def set_chunk(self, lane: int, history: int, capacity: int) -> None:
        """Lengths that a prefilling lane asks for in this step."""
        self.state[HISTORY, lane] = history
        self.state[CAPACITY, lane] = capacity

    def start_decoding(self) -> None:
        """The oldest prefilling lane has all of its prompt: its next step feeds the token that it just yielded."""
        lane = self.generating
        request = self.requests[lane]
        self.state[:, lane] = (DECODE, request.spec.index, 0, request.target - 1, request.target)
        self.left[lane] = request.spec.output_tokens - request.generated
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
        for array in (self.handles, self.rows, self.left):
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
    left: npt.NDArray[np.int32]
