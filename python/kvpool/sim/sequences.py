"""The token ids of requests: made when a request comes to the head of the queue, in a row while it runs, kept for the next turn.

Never more than one prompt per running request, one at the head of the queue, and the last turn of every conversation.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpool.sim.lanes import Running
from kvpool.sim.requests import TraceRequest
from kvpool.sim.toy_tokens import Ids, made_up_tokens, prompt_tokens


class Sequences:
    """``rows`` int32 [row, position] holds the running requests, prompt and answer.

    ``made_up``: answers are known beforehand, because no memory exists to yield them from; otherwise whoever reads the
    memory writes them into ``rows``.
    """

    def __init__(self, rows: int, width: int, requests: Iterable[TraceRequest], seed: int, *, made_up: bool) -> None:
        self.rows: Ids = np.zeros((rows, width), np.int32)
        self._seed = seed
        self._made_up = made_up
        self._followed = {request.follows for request in requests}
        self._ended: dict[int, Ids] = {}

    def of(self, request: Running) -> Ids:
        """Prompt and answer of a request that waits; 0 for what it has not yielded yet."""
        if request.tokens is None:
            spec = request.spec
            before = None if spec.follows is None else self._ended.pop(spec.follows)
            prompt = prompt_tokens(spec, self._seed, before)
            request.tokens = np.zeros(spec.total_tokens, np.int32)
            request.tokens[: spec.prompt_tokens] = prompt
            if self._made_up:
                request.tokens[spec.prompt_tokens :] = made_up_tokens(prompt, spec.output_tokens)
        return request.tokens

    def enter(self, request: Running) -> None:
        """The request got a row."""
        tokens = self.of(request)
        self.rows[request.row, : len(tokens)] = tokens

    def leave(self, request: Running) -> None:
        """It gives the row back and will come again."""
        tokens = self.of(request)
        tokens[:] = self.rows[request.row, : len(tokens)]

    def end(self, request: Running) -> None:
        """It is done: its sequence stays if another request follows it."""
        self.leave(request)
        index = request.spec.index
        if index in self._followed:
            self._ended[index] = self.of(request)
        request.tokens = None

    def forget(self, request: Running) -> None:
        """A request that was refused needs no prompt."""
        request.tokens = None
        if request.spec.follows is not None:
            self._ended.pop(request.spec.follows, None)
