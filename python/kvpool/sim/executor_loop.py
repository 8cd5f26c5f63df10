"""The executor: continuous batching with chunked prefill over one manager, in simulated time.

One step, in the convention of the next token:

1. Requests that have arrived join the waiting queue; one longer than ``max_seq_len`` (prompt + output) is refused, and with it
   those that follow it.
2. Every decoding request feeds the token that it yielded last: with ``n`` tokens so far its lengths become capacity ``n``,
   history ``n - 1``; it will yield the next one.  At most ``max_num_tokens`` of them, the oldest first.
3. The rest of the token budget goes to prompts in age order: (capacity, history) = (done + chunk, done).  A waiting request
   is created, which with reuse matches its prompt, and resumed, which is the manager's gate; the first that is refused, or
   deferred because a running prompt computes its first new block, ends the scan, and so does a chunk that leaves its prompt
   unfinished.  No more than ``max_batch_size`` requests run.
4. One batch call grows all of them.  A prompt chunk that does not fit now ends the scan: a request that has got nothing yet
   is closed and waits again, one in the middle of its prompt keeps what it has.  A decoding request that does not fit makes
   the policy's victim pause: closed, its generated tokens kept as a prompt to compute again, first in the waiting queue.
5. The clock advances by the step model.  The step that completes a prompt of P tokens yields token 1, so a request of O
   tokens ends O - 1 decode steps later, with P + O - 1 tokens written: its last token is never fed.
6. With reuse, the chunks that have run are committed, and what has ended commits the rest (:mod:`kvpool.sim.paging`).

A chunk is cut to what the pools can hold for that request alone (a window's pages of the chunk and of the history before it
exist together), so that no chunk can wait for ever.  Decisions depend on the requests and the configuration alone.
Why it is so: docs/adr/0009-executor-loop.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.sim import digest as codes
from kvpool.sim.arrivals import Arrivals
from kvpool.sim.demand import RequestDemand
from kvpool.sim.digest import DecisionDigest
from kvpool.sim.lanes import Lanes, Running
from kvpool.sim.metrics import CallTime, Counters, PoolSamples
from kvpool.sim.paging import Paging, PrefixReuse
from kvpool.sim.policy_max_utilization import next_admission, victim
from kvpool.sim.requests import TraceRequest
from kvpool.sim.sequences import Sequences
from kvpool.sim.step_model import ReadCost, StepModel

if TYPE_CHECKING:
    from kvpool.sim.content import ContentCheck
    from kvpool.v2 import KVCacheManager


class ExecutorLoop:
    """Runs requests, sorted by arrival, over a manager to their end. ``run`` once; the counters are its result.

    ``reuse``: prefixes are matched and committed. ``seed``: of token ids. ``content``: stamps and checks real bytes.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        requests: Sequence[TraceRequest],
        *,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int,
        step_model: StepModel,
        read_cost: ReadCost,
        reuse: bool = False,
        seed: int = 0,
        content: ContentCheck | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._manager = manager
        self._arrivals = Arrivals(requests)
        self._max_seq_len = max_seq_len
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._step_model = step_model
        self._read_cost = read_cost
        self._content = content
        self._progress = progress
        self.on_admit: Callable[[Running, Lanes], None] | None = None
        """Called with a request that has been admitted and the lanes that run already; for those who watch."""
        self.counters = Counters()
        self.digest = DecisionDigest()
        self.samples = PoolSamples(manager)
        self._demand = RequestDemand(manager)
        longest = max((r.total_tokens for r in requests if r.total_tokens <= max_seq_len), default=1)
        blocks = -(-longest // manager.tokens_per_block)
        size = min(max_batch_size, len(requests))
        self.table: npt.NDArray[np.int32] = np.full((len(manager.layer_grouping), size, blocks), -1, np.int32)
        width = blocks * manager.tokens_per_block
        self._lanes = Lanes(size, width)
        self._free_rows = list(range(size))
        self._waiting: deque[Running] = deque()
        self._clock = 0.0
        self._call_time = CallTime()
        # sums over the decoding lanes, kept up by one a step until the lanes change
        self._counted = -1  # lanes that the sums cover, -1: count again
        self._capacity_sum = 0
        self._capacity_min = 0
        self._steps_to_finish = 0
        sequences = None
        if reuse or content is not None:
            sequences = Sequences(size, width, requests, seed, made_up=content is None)
        if reuse and sequences is not None:
            self._paging: Paging = PrefixReuse(manager, self._lanes, self._call_time, sequences)
        else:
            self._paging = Paging(manager, self._lanes, self._call_time, sequences)
        if content is not None and sequences is not None:
            content.attach(manager, self.table, sequences.rows)

    def run(self) -> Counters:
        """Every request to its end."""
        counters = self.counters
        while True:
            for request in self._arrivals.due(self._clock):
                if self._never_fits(request.spec):
                    self._refuse(request)
                else:
                    self._waiting.append(request)
            if self._waiting or self._lanes.requests:
                self._step()
                continue
            next_time = self._arrivals.next_time()
            if next_time is None:
                break
            self._clock = next_time
        counters.makespan = self._clock - self._arrivals.first
        self.samples.finish(counters.steps)
        return counters

    def _never_fits(self, spec: TraceRequest) -> bool:
        """Longer than promised, or more pages at its end than a pool group has (a limit that the pools don't keep)."""
        written = spec.total_tokens - 1
        return spec.total_tokens > self._max_seq_len or not self._demand.fits(written, written - 1)

    def _step(self) -> None:
        lanes = self._lanes
        self._call_time.ns = 0
        decode = min(lanes.generating, self._max_num_tokens)
        if decode:
            arguments = lanes.arguments(decode)
            if self._paging.commits_each_step:
                lengths, fed = arguments.all_lengths, arguments.fed
                fed += 1
            else:
                lengths = arguments.lengths
            lengths += 1
        contexts = 0
        budget = self._max_num_tokens - decode
        if budget and (self._waiting or len(lanes.requests) > lanes.generating):
            contexts = self._schedule_contexts(budget)
        if decode + contexts == 0:
            return  # the only candidate was refused for good
        arguments = lanes.arguments(decode + contexts)
        tokens = self._paging.step_tokens(decode, decode + contexts)
        start = perf_counter_ns()
        result = self._manager.step(
            arguments.handles, arguments.rows, arguments.capacities, arguments.histories, self.table, tokens
        )
        self._call_time.ns += perf_counter_ns() - start
        ok = result.ok
        self.digest.call(arguments.state, ok, result.dirty, self.table)
        if not ok.all():
            decode, contexts = self._settle(ok.copy(), decode, contexts)
            if decode + contexts == 0:
                return
        self._execute(decode, contexts)

    # who takes part

    def _schedule_contexts(self, budget: int) -> int:
        """Prompt chunks for the budget, in age order; how many lanes behind the decoding ones take part."""
        lanes, count = self._lanes, 0
        if len(lanes.requests) > lanes.generating:
            request = lanes.requests[lanes.generating]
            if not self._set_chunk(lanes.generating, request, budget):
                self._give_up(lanes.generating)
                return 0
            count, budget = 1, budget - request.chunk
            if request.done + request.chunk < request.target:
                return count
        while budget and len(lanes.requests) < self._max_batch_size:
            waiting = next_admission(self._waiting)
            if waiting is None or self._defers(waiting) or not self._admit(waiting):
                break
            if not self._set_chunk(len(lanes.requests) - 1, waiting, budget):
                self._give_up(len(lanes.requests) - 1)
                continue
            count, budget = count + 1, budget - waiting.chunk
            if waiting.done + waiting.chunk < waiting.target:
                break
        return count

    def _set_chunk(self, lane: int, request: Running, budget: int) -> int:
        request.chunk = self._demand.largest_chunk(request.done, min(budget, request.target - request.done))
        committed = request.done if self._paging.shares else 0
        self._lanes.set_chunk(lane, committed, request.done, request.done + request.chunk)
        return request.chunk

    def _defers(self, request: Running) -> bool:
        """Whether the head of the queue waits for a running prompt that computes its first new block."""
        request.target = request.spec.prompt_tokens + request.generated
        if not self._paging.defers(request):
            return False
        self.digest.event(codes.DEFER, request.spec.index, 0, 0)
        return True

    def _admit(self, request: Running) -> bool:
        """The head of the queue becomes the youngest lane; False when the manager's gate is shut."""
        cache = self._paging.open(request, alone=not self._lanes.requests)
        if cache is None:
            self.digest.event(codes.HOLD, request.spec.index, 0, 0)
            return False
        self._waiting.popleft()
        request.cache = cache
        request.row = heapq.heappop(self._free_rows)
        matched = request.matched = request.done = cache.num_committed_tokens
        if self.on_admit is not None:
            self.on_admit(request, self._lanes)
        self._lanes.append(request, cache.handle)
        self.digest.event(codes.ADMIT, request.spec.index, matched, matched, matched)
        self._paging.entered(request)
        if self._content is not None:
            self._content.admit(request)
        return True

    # what could not grow

    def _settle(self, ok: npt.NDArray[np.bool_], decode: int, contexts: int) -> tuple[int, int]:
        """Undoes or repeats what the batch call refused; how many decoding and prefilling lanes remain in the step."""
        lanes = self._lanes
        refused = np.flatnonzero(~ok).tolist()
        failing = [lane for lane in refused if lane < decode]
        first = next((lane for lane in refused if lane >= decode), None)
        if first is not None:
            contexts = first - decode
            withdrawn = self._withdraw(first + 1)
            # with reuse those held the prefixes that they matched, so what failed is tried again, the oldest first
            if failing:
                withdrawn += self._withdraw(first)
                if withdrawn and self._paging.shares:
                    failing = self._retry(failing)
            elif withdrawn and self._paging.shares and not self._retry([first]):
                contexts += 1
            elif first == 0:
                self._give_up(0)  # served first, with nothing else held: it never fits
            else:
                self._withdraw(first)
        while failing:
            lane = victim(lanes.requests)
            if failing[-1] == lane:
                failing.pop()
            if lane == 0:
                self._give_up(0)
                return 0, 0
            decode, contexts = min(decode, lane), max(0, min(contexts, lane - lanes.generating))
            generating = lane < lanes.generating
            self._take_back(codes.WITHDRAW if lanes.requests[lane].fresh and not generating else codes.PAUSE)
            failing = self._retry(failing)
        return decode, contexts

    def _withdraw(self, lanes: int) -> int:
        """Undoes the admissions that have got nothing yet, behind so many lanes; how many."""
        count = 0
        while len(self._lanes.requests) > lanes and self._lanes.requests[-1].fresh:
            self._take_back(codes.WITHDRAW)
            count += 1
        return count

    def _retry(self, failing: list[int]) -> list[int]:
        """Another batch call for some decoding lanes, or a prefilling one; those that are refused again."""
        if not failing:
            return failing
        lanes = self._lanes
        state = np.ascontiguousarray(lanes.state[:, failing])
        tokens = self._paging.tokens_of(failing)
        start = perf_counter_ns()
        result = self._manager.step(lanes.handles[failing], lanes.rows[failing], state[4], state[3], self.table, tokens)
        self._call_time.ns += perf_counter_ns() - start
        self.digest.call(state, result.ok, result.dirty, self.table)
        return [lane for lane, good in zip(failing, result.ok.tolist(), strict=True) if not good]

    def _take_back(self, code: int) -> None:
        """The youngest lane back to the head of the queue: nothing of it is kept but the tokens that it has yielded."""
        lanes = self._lanes
        decoding = len(lanes.requests) == lanes.generating
        request = lanes.pop()
        written = request.spec.prompt_tokens + request.generated - 1 if decoding else request.done
        if self._content is not None and decoding:
            self._content.keep_last_token(request, written)
        if code == codes.PAUSE:
            self.counters.recompute_pauses += 1
            self.counters.recomputed_tokens += written
            request.lost = written
            self._paging.pause(request, written)
        else:
            self._paging.withdraw(request)
        heapq.heappush(self._free_rows, request.row)
        self._waiting.appendleft(request)
        self.digest.event(code, request.spec.index, written, written)
        self._counted = -1

    def _give_up(self, lane: int) -> None:
        """The youngest lane can't go on even alone: it is refused, so that nothing waits for ever."""
        request = self._lanes.pop()
        assert lane == len(self._lanes.requests)
        self._paging.close(request)
        heapq.heappush(self._free_rows, request.row)
        self._refuse(request)
        self._counted = -1

    def _refuse(self, request: Running) -> None:
        """The request, and those that follow it, will never run."""
        refused: Running | None = request
        while refused is not None:
            refused.state = "refused"
            self.counters.refused.append(refused)
            self.digest.event(codes.REFUSE, refused.spec.index, 0, 0)
            self._paging.forget(refused)
            refused = self._arrivals.without(refused, self._clock)

    # what the step does

    def _execute(self, decode: int, contexts: int) -> None:
        lanes, counters = self._lanes, self.counters
        tokens, read = decode, self._decode_reads(decode)
        chunks = lanes.requests[decode : decode + contexts]
        for request in chunks:
            tokens += request.chunk
            read += self._read_cost.chunk_bytes(request.done + request.chunk, request.done)
            if request.fresh:
                self._count_match(request)
        self._clock += self._step_model.seconds(tokens, read)
        counters.steps += 1
        counters.scheduled += decode + contexts
        if decode + contexts > counters.batch_peak:
            counters.batch_peak = decode + contexts
        if self._content is not None:
            self._content.step(lanes, decode, contexts)
        if decode:
            left = lanes.arguments(decode).left
            left -= 1
            lanes.has_fed[:decode] = True
            self._steps_to_finish -= 1
        finishing = decode > 0 and self._steps_to_finish <= 0
        if contexts and self._end_chunks(contexts):
            finishing = True
        finished = lanes.take_finished() if finishing else []
        if self._content is not None:  # before a commit changes what the page table says
            for request in finished:
                self._content.keep_last_token(request, request.spec.total_tokens - 1)
        for request in chunks:
            self._paging.commit_chunk(request)
        if finished:
            self._finish(finished)
        counters.manager_ns.append(self._call_time.ns)
        if counters.steps % self.samples.stride == 0:
            self.samples.take(counters.steps)

    def _count_match(self, request: Running) -> None:
        """The first chunk of an admission runs, so its match counts: as reuse the first time, later as a rehit."""
        counters = self.counters
        if request.ran:
            request.rehit_tokens += request.matched
            counters.rehit_tokens += request.matched
            counters.recomputed_tokens -= min(request.matched, request.lost)
        else:
            request.ran = True
            request.reused_tokens = request.matched
            counters.prompt_tokens += request.spec.prompt_tokens
            counters.reused_tokens += request.matched

    def _decode_reads(self, decode: int) -> float:
        """Cache bytes that the decoding lanes read, from sums that follow the lanes without touching them."""
        if decode == 0:
            return 0.0
        arguments = self._lanes.arguments(decode)
        if self._counted == decode:
            self._capacity_sum += decode
            self._capacity_min += 1
        else:
            self._counted = decode
            self._capacity_sum = int(arguments.capacities.sum())
            self._capacity_min = int(arguments.capacities.min())
            self._steps_to_finish = int(arguments.left.min())
        cost = self._read_cost
        read = cost.full_bytes_per_token * self._capacity_sum + float(cost.state_bytes * decode)
        for window, per_token in cost.windows:
            if self._capacity_min >= window:
                read += per_token * (window * decode)
            else:
                read += per_token * int(np.minimum(arguments.capacities, window).sum())
        return read

    def _end_chunks(self, contexts: int) -> bool:
        """Books the prompt chunks; whether a request with a one-token output is done."""
        lanes, done_at_once = self._lanes, False
        for request in lanes.requests[lanes.generating : lanes.generating + contexts]:
            request.done += request.chunk
            if request.done < request.target:
                break
            request.generated += 1
            if request.first_token is None:
                request.first_token = self._clock
            done_at_once = done_at_once or request.generated == request.spec.output_tokens
            lanes.start_decoding(self._paging.committed_before_decode(request))
            self._counted = -1
        return done_at_once

    def _finish(self, finished: list[Running]) -> None:
        for request in finished:
            spec = request.spec
            request.generated = spec.output_tokens
            request.last_token = self._clock
            request.state = "finished"
            written = spec.total_tokens - 1
            self._paging.end(request, written)
            heapq.heappush(self._free_rows, request.row)
            self.counters.finished.append(request)
            self.counters.generated_tokens += request.generated
            self.digest.event(codes.FINISH, spec.index, written, written)
            self._arrivals.ended(request, self._clock)
        self._counted = -1
        if self._progress is not None:
            self._progress(len(self.counters.finished) + len(self.counters.refused))
