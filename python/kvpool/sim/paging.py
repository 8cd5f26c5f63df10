"""How the executor's requests use the manager: plainly, or sharing prefixes.

:class:`Paging` opens caches that never commit.  :class:`PrefixReuse` matches, commits and defers:

- A request is created with all tokens that are known of it but the last, which has to be computed to yield the next one; its
  prefill begins where the match ends.
- A prompt chunk is committed as soon as it has run, before the next admission.  The token that a decoding request fed is
  committed by its next batch call, the last one at its end.  Under ``commit_min_snapshot`` every commit takes a snapshot, so
  there the answer is committed once, at the end.  A pause commits what has been computed before it closes.
- A request whose first new block is in the uncommitted part of a running prompt is deferred.  Prompts tell this by
  themselves: block k is the same block where the tokens of the blocks 0 … k are equal.

Calls into the manager are timed in ``call_time``.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from kvpool.errors import NeverFitsError
from kvpool.sim.lanes import Lanes, Running
from kvpool.sim.metrics import CallTime
from kvpool.sim.sequences import Sequences
from kvpool.sim.toy_tokens import Ids

if TYPE_CHECKING:
    from kvpool.v2 import KVCache, KVCacheManager

StepTokens = tuple[Ids, Ids]
"""Values and offsets, as :meth:`KVCacheManager.step` takes them."""


class Paging:
    """Nothing is shared. The tokens are kept only for who checks contents."""

    shares = False
    """Whether prefixes are matched."""
    commits_each_step = False
    """Whether decoding requests commit in every step."""

    def __init__(self, manager: KVCacheManager, lanes: Lanes, call_time: CallTime, sequences: Sequences | None) -> None:
        self._manager = manager
        self._lanes = lanes
        self._time = call_time
        self._sequences = sequences

    def defers(self, request: Running) -> bool:
        """Whether a running prompt is about to compute the first block that ``request`` would have to compute."""
        return False

    def open(self, request: Running, *, alone: bool) -> KVCache | None:
        """An ACTIVE cache, with the longest cached prefix if prefixes are shared; None when the manager's gate is shut.

        ``alone``: nobody else runs, so nobody will give pages back.
        """
        start = perf_counter_ns()
        cache = self._manager.create_kv_cache()
        cache.stop_committing()
        granted = cache.resume(None)
        if not granted:
            cache.close()
        self._time.ns += perf_counter_ns() - start
        return cache if granted else None

    def entered(self, request: Running) -> None:
        """The request got a row."""
        if self._sequences is not None:
            self._sequences.enter(request)

    def step_tokens(self, decode: int, count: int) -> StepTokens | None:
        """What ``decode`` decoding lanes, followed by prefilling ones up to ``count``, commit in this step's call."""
        return None

    def tokens_of(self, lanes: list[int]) -> StepTokens | None:
        """The same for some lanes."""
        return None

    def committed_before_decode(self, request: Running) -> int:
        """Committed tokens of a request in the step that ends its prompt, as :attr:`Lanes.state` has them."""
        return 0

    def commit_chunk(self, request: Running) -> None:
        """The chunk that ended at ``request.done`` has run."""

    def pause(self, request: Running, computed: int) -> None:
        """The request has computed so many tokens and will come again; close it."""
        self._leave(request)

    def end(self, request: Running, computed: int) -> None:
        """The request is done; close it."""
        if self._sequences is not None:
            self._sequences.end(request)
        self.close(request)

    def withdraw(self, request: Running) -> None:
        """The request has computed nothing in this admission; close it."""
        self._leave(request)

    def forget(self, request: Running) -> None:
        """The request will not run."""
        if self._sequences is not None:
            self._sequences.forget(request)

    def close(self, request: Running) -> None:
        """Gives everything back."""
        cache = request.cache
        assert cache is not None
        start = perf_counter_ns()
        cache.close()
        self._time.ns += perf_counter_ns() - start
        request.cache = None

    def _leave(self, request: Running) -> None:
        if self._sequences is not None:
            self._sequences.leave(request)
        self.close(request)


class PrefixReuse(Paging):
    """Prefixes are matched and committed."""

    shares = True

    def __init__(self, manager: KVCacheManager, lanes: Lanes, call_time: CallTime, sequences: Sequences) -> None:
        super().__init__(manager, lanes, call_time, sequences)
        self._tokens = sequences
        self._flat = sequences.rows.reshape(-1)
        self._block = manager.tokens_per_block
        self.commits_each_step = not manager.commit_min_snapshot
        size = len(lanes.handles)
        self._one_each: Ids = np.arange(size + 1, dtype=np.int32)
        self._offsets: Ids = np.zeros(size + 1, np.int32)

    # before a request runs

    def defers(self, request: Running) -> bool:
        prefilling = self._lanes.requests[self._lanes.generating :]
        overlaps = [overlap for overlap in (self._overlap(running, request) for running in prefilling) if overlap]
        if not overlaps:
            return False
        start = perf_counter_ns()
        matched = self._manager.probe_reuse(None, self._known(request))
        self._time.ns += perf_counter_ns() - start
        first_new = matched // self._block
        return any(first_new in overlap for overlap in overlaps)

    def open(self, request: Running, *, alone: bool) -> KVCache | None:
        tokens, length = self._known(request), request.spec.prompt_tokens
        start = perf_counter_ns()
        cache = self._manager.create_kv_cache(None, tokens, expected_prompt_length=length)
        try:
            granted = cache.resume(None)
        except NeverFitsError:  # the matched pages and their private copies together
            granted, alone = False, True
        if not granted:
            cache.close()
            if alone:  # the match must not be what stands in the way
                cache = self._manager.create_kv_cache(None, expected_prompt_length=length)
                granted = cache.resume(None)
                if not granted:
                    cache.close()
        self._time.ns += perf_counter_ns() - start
        return cache if granted else None

    def _known(self, request: Running) -> Ids:
        return self._tokens.of(request)[: request.target - 1]

    def _overlap(self, running: Running, request: Running) -> range:
        """Whole blocks that ``request`` shares with the uncommitted part of a running prompt."""
        other = self._tokens.rows[running.row, : running.target]
        shared = common_prefix(self._known(request), other) // self._block
        return range(running.done // self._block, shared)

    # while it runs

    def step_tokens(self, decode: int, count: int) -> StepTokens | None:
        if not (decode and self.commits_each_step):
            return None
        lanes = self._lanes
        fed, has_fed = lanes.fed[:decode], lanes.has_fed[:decode]
        if np.count_nonzero(has_fed) == decode == count:
            return self._flat.take(fed), self._one_each[: count + 1]
        offsets = self._offsets[: count + 1]
        np.cumsum(has_fed, dtype=np.int32, out=offsets[1 : decode + 1])
        offsets[decode + 1 :] = offsets[decode]
        return self._flat.take(fed[has_fed]), offsets

    def tokens_of(self, lanes: list[int]) -> StepTokens | None:
        if not (self.commits_each_step and lanes[0] < self._lanes.generating):
            return None
        has_fed = self._lanes.has_fed[lanes]
        offsets = np.zeros(len(lanes) + 1, np.int32)
        np.cumsum(has_fed, dtype=np.int32, out=offsets[1:])
        return self._flat.take(self._lanes.fed[lanes][has_fed]), offsets

    def committed_before_decode(self, request: Running) -> int:
        return request.target - 1 if self.commits_each_step else request.target

    def commit_chunk(self, request: Running) -> None:
        assert request.cache is not None
        chunk = self._tokens.rows[request.row, request.done - request.chunk : request.done]
        start = perf_counter_ns()
        request.cache.commit(chunk)
        self._time.ns += perf_counter_ns() - start

    def pause(self, request: Running, computed: int) -> None:
        self._commit_rest(request, computed)
        super().pause(request, computed)

    def end(self, request: Running, computed: int) -> None:
        self._commit_rest(request, computed)
        super().end(request, computed)

    def _commit_rest(self, request: Running, computed: int) -> None:
        """Everything computed that is not committed yet: the token fed last, or the whole answer."""
        cache = request.cache
        assert cache is not None
        row = self._tokens.rows[request.row]
        start = perf_counter_ns()
        rest = row[cache.num_committed_tokens : computed]
        if len(rest):
            if not self.commits_each_step:  # a snapshot wants the history to be where it is taken
                cache.resize(None, computed)
            cache.commit(rest, is_end=True)
        self._time.ns += perf_counter_ns() - start


def common_prefix(first: Ids, second: Ids) -> int:
    """How many leading tokens are equal."""
    count = min(len(first), len(second))
    differing = first[:count] != second[:count]
    at = int(differing.argmax()) if count else 0
    return at if count and differing[at] else count
