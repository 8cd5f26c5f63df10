"""Prefix reuse in the executor loop: what is matched, when a request is deferred, and that the bytes are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic")

from benchmarks.prefix_oracle import PrefixOracle
from kvpool.models import ModelGeometry
from kvpool.sim.config import executor_config
from kvpool.sim.executor_loop import ExecutorLoop
from kvpool.sim.options import ReplayOptions, prepare
from kvpool.sim.paging import common_prefix
from kvpool.sim.replay import run_replay
from kvpool.sim.requests import TraceRequest
from kvpool.sim.sequences import Sequences
from kvpool.sim.step_model import ReadCost, StepModel
from kvpool.sim.toy_tokens import prompt_tokens
from kvpool.sim.workloads import make_workload
from kvpool.v2 import KVCacheManager
from tests.support.arms import AVAILABLE
from tests.unit.sim_cases import FULL, LAYERS, MIB, MODEL, STATE, Recorder, job, requests_of, run

HYBRID = ModelGeometry("hybrid", max_position_embeddings=400, layers=(FULL, STATE))


def reused(outcome, arm: str = "v2py") -> list[tuple[int, int]]:
    """Per request, by index, what was matched first and after pauses."""
    return [(line.reused_tokens, line.rehit_tokens) for line in outcome.requests if line.arm == arm]


def sharing(*prompts: tuple[int, int, int], output: int = 8, gap: float = 0.0) -> list[TraceRequest]:
    """(system prompt, its tokens, tokens of the whole prompt), one after the other."""
    return [
        TraceRequest(i, gap * i, tokens, output, system=system, system_tokens=shared)
        for i, (system, shared, tokens) in enumerate(prompts)
    ]


@pytest.fixture(params=AVAILABLE)
def record(request: pytest.FixtureRequest) -> Callable[..., tuple[ExecutorLoop, Recorder]]:
    """Runs requests on blocks of 16 and a budget of 64 tokens a step; the loop and what it asked for."""

    def make(
        requests: list[TraceRequest], model: ModelGeometry = MODEL, **limits: int
    ) -> tuple[ExecutorLoop, Recorder]:
        config = executor_config(model, memory=64 * MIB, tokens_per_block=16, max_seq_len=400, max_num_tokens=64)
        backend = {"v2py": "python", "v2cpp": "cpp"}[request.param]
        with KVCacheManager(config, backend=backend, device="virtual") as manager:
            recorder = Recorder(manager)
            sizes = {"max_seq_len": 400, "max_batch_size": 8, "max_num_tokens": 64, **limits}
            loop = ExecutorLoop(
                recorder,  # type: ignore[arg-type]
                requests,
                step_model=StepModel(job(requests).settings.step_model),
                read_cost=ReadCost.of_layers(config.layers, 16),
                reuse=True,
                **sizes,
            )
            loop.run()
            manager.audit()
            return loop, recorder

    return make


def test_prefill_begins_where_the_match_ends(record) -> None:
    """A block of 16 is shared by the second request, and 4 tokens of the next one."""
    requests = sharing((0, 20, 30), (0, 20, 50), gap=1.0)
    loop, recorder = record(requests)
    first, second = loop.counters.finished
    assert (first.reused_tokens, second.reused_tokens) == (0, 20)
    assert recorder.calls[0] == [(0, 0, 30)]
    assert recorder.calls[8] == [(0, 20, 50)]
    counters = loop.counters
    assert (counters.prompt_tokens, counters.reused_tokens, counters.rehit_tokens) == (80, 20, 0)


def test_a_known_prompt_computes_its_last_token(record) -> None:
    requests = [TraceRequest(i, float(i), 48, 3, hash_ids=(7,)) for i in range(2)]
    loop, recorder = record(requests)
    assert [r.reused_tokens for r in loop.counters.finished] == [0, 47]
    assert recorder.calls[3][0] == (0, 47, 48)


def test_answers_are_matched_too() -> None:
    """The next turn finds the prompt and all of the answer but its last token, which was never fed."""
    requests = [TraceRequest(0, 0.0, 30, 20), TraceRequest(1, 0.0, 80, 1, follows=0)]
    outcome = run(job(requests, device="host"))
    for arm in outcome.result.arms:
        assert reused(outcome, arm) == [(0, 0), (49, 0)]
        assert outcome.result.arms[arm].content_errors == 0


def test_same_step_same_prefix_is_deferred(record) -> None:
    """Two requests that share 32 tokens arrive at once: the second waits one step, the third behind it as well."""
    requests = [*sharing((0, 32, 40), (0, 32, 50)), TraceRequest(2, 0.0, 5, 1)]
    loop, recorder = record(requests)
    assert recorder.calls[0] == [(0, 0, 40)]
    assert recorder.calls[1] == [(0, 40, 41), (1, 32, 50), (2, 0, 5)]
    assert [r.reused_tokens for r in sorted(loop.counters.finished, key=lambda r: r.spec.index)] == [0, 32, 0]


def test_less_than_a_block_in_common_defers_nobody(record) -> None:
    _, recorder = record(sharing((0, 15, 40), (0, 15, 20)))
    assert recorder.calls[0] == [(0, 0, 40), (1, 0, 20)]


def test_a_prefix_that_is_cached_already_defers_nobody(record) -> None:
    """The two that come later share 32 tokens, all of them known by then; what differs they compute in one step."""
    requests = [
        replace(r, arrival=min(r.arrival, 1.0)) for r in sharing((0, 32, 33), (0, 32, 50), (0, 32, 60), gap=1.0)
    ]
    _, recorder = record(requests)
    assert [(row, history) for row, history, _ in recorder.calls[8]] == [(0, 32), (1, 32)]


def test_deferred_while_the_prompt_is_in_pieces(record) -> None:
    """A prompt of three chunks; one that shares most of it is admitted only when the last chunk has run, and hits.

    Not the 4 tokens in the last block: a block is shared when it is full or its request has ended.
    """
    requests = sharing((0, 180, 190), (0, 180, 200))
    loop, recorder = record(requests)
    assert [call[0] for call in recorder.calls[:3]] == [(0, 0, 64), (0, 64, 128), (0, 128, 190)]
    assert all(len(call) == 1 for call in recorder.calls[:3])
    assert recorder.calls[3] == [(0, 190, 191), (1, 176, 200)]
    assert [r.reused_tokens for r in sorted(loop.counters.finished, key=lambda r: r.spec.index)] == [0, 176]


def test_states_are_matched_where_a_chunk_ended(record) -> None:
    """A recurrent state can be gone on from only where it was kept: at the ends of chunks and of requests."""
    requests = [
        *sharing((0, 120, 130), (0, 120, 140), gap=1.0),
        TraceRequest(2, 2.0, 3, 1),
        TraceRequest(3, 0.0, 150, 1, follows=0),
    ]
    loop, _ = record(requests, HYBRID)
    by_index = {r.spec.index: r.reused_tokens for r in loop.counters.finished}
    assert by_index == {0: 0, 1: 64, 2: 0, 3: 137}
    assert all(r.spec.index != 1 or r.matched == 64 for r in loop.counters.finished)


def test_refused_turn_refuses_the_rest() -> None:
    requests = [TraceRequest(0, 0.0, 100, 50), TraceRequest(1, 0.0, 300, 90, follows=0)]
    requests += [TraceRequest(2, 0.0, 20, 5, follows=1), TraceRequest(3, 0.0, 20, 5, follows=2)]
    outcome = run(job(requests))
    for arm in outcome.result.arms.values():
        assert (arm.requests_finished, arm.requests_refused) == (1, 3)
        assert arm.prompt_tokens == 100
    assert [line.state for line in outcome.requests][:4] == ["finished", *["refused"] * 3]


def test_multiturn_hits_all_that_was_fed() -> None:
    """Two conversations and a bit: the first begins cold, the others with the system prompt, every turn with the last one."""
    outcome = run_replay(prepare(ReplayOptions(workload="multiturn", limit=19, memory="16GiB")))
    assert outcome.failures == []
    turns = [0, *[1280 + 768 * turn + 511 for turn in range(7)]]
    for arm in outcome.result.arms:
        found = [tokens for tokens, _ in reused(outcome, arm)]
        assert found == [*turns, 1024, *turns[1:], 1024, *turns[1:3]]
        assert outcome.result.arms[arm].requests_finished == 19


def test_multiturn_arrives_when_the_turn_before_has_ended() -> None:
    outcome = run_replay(prepare(ReplayOptions(workload="multiturn", limit=8, memory="16GiB", arms="v2py")))
    arm = outcome.result.arms["v2py"]
    assert arm.batch.peak == 1
    assert arm.ttft_ms.p99 < 20  # from its own arrival


def oracle_of(requests: list[TraceRequest], seed: int = 0) -> list[int]:
    """What each request, in order, could match at most of those before it."""
    tokens_of = lru_cache(64)(lambda index: prompt_tokens(requests[index], seed))
    oracle = PrefixOracle(tokens_of)
    found = []
    for request in requests:
        prompt = tokens_of(request.index)
        found.append(min(oracle.longest(prompt), request.prompt_tokens - 1))
        oracle.add(request.index, prompt)
    return found


def test_agent_equals_the_oracle() -> None:
    """With room for everything, every request finds what those before it computed, token by token."""
    outcome = run_replay(prepare(ReplayOptions(workload="agent", limit=60, memory="400GiB")))
    assert outcome.failures == []
    expected = oracle_of(make_workload("agent", 60))
    assert sum(expected) > 100_000
    for arm in outcome.result.arms:
        assert [tokens for tokens, _ in reused(outcome, arm)] == expected


def test_trace_equals_the_oracle(data_dir: Path) -> None:
    """A public trace at its own times with room for everything, request by request."""
    trace = data_dir / "mooncake_conversation_trace.jsonl"
    made = prepare(ReplayOptions(trace=trace, limit=250, memory="1TiB"))
    outcome = run_replay(made)
    assert outcome.failures == []
    expected = oracle_of(made.requests)
    for arm in outcome.result.arms:
        assert [tokens for tokens, _ in reused(outcome, arm)] == expected


def test_oracle_is_the_longest_common_prefix() -> None:
    rng = np.random.default_rng(0)
    sequences: list[np.ndarray] = []
    oracle = PrefixOracle(sequences.__getitem__)
    for number in range(300):
        stem = sequences[rng.integers(number)] if number else np.zeros(0, np.int32)
        new = np.concatenate((stem[: rng.integers(len(stem) + 1)], rng.integers(0, 3, rng.integers(1, 6)))).astype(
            np.int32
        )
        assert oracle.longest(new) == max((common_prefix(new, old) for old in sequences), default=0)
        sequences.append(new)
        oracle.add(number, new)


def test_common_prefix() -> None:
    one = np.asarray([1, 2, 3], np.int32)
    assert common_prefix(one, one) == 3
    assert common_prefix(one, one[:2]) == 2
    assert common_prefix(one, np.asarray([1, 2, 4, 3], np.int32)) == 2
    assert common_prefix(one, np.asarray([5], np.int32)) == 0
    assert common_prefix(one[:0], one) == 0


def test_sequences_hold_what_runs_and_what_is_followed() -> None:
    requests = [TraceRequest(0, 0.0, 10, 4), TraceRequest(1, 0.0, 20, 2, follows=0)]
    sequences = Sequences(1, 32, requests, 0, made_up=True)
    from kvpool.sim.lanes import Running

    first, second = (Running(request, row=0) for request in requests)
    sequences.enter(first)
    whole = sequences.of(first).copy()
    sequences.end(first)
    assert first.tokens is None
    assert sequences.of(second)[:14].tolist() == whole.tolist()
    sequences.forget(second)
    assert second.tokens is None


def test_a_pause_commits_and_hits_again() -> None:
    """Short memory: paused requests find a part of what they had; tokens and bytes stay right."""
    requests = requests_of(*[(8 + 7 * i, 150) for i in range(10)])
    tight = run(job(requests, memory=40 * MIB, device="host"))
    without = run(job(requests, memory=40 * MIB, device="host", reuse=False))
    for name, arm in tight.result.arms.items():
        assert arm.recompute_pauses > 0
        assert arm.rehit_tokens > 0
        assert arm.reused_tokens == 0
        assert arm.rehit_tokens == sum(rehit for _, rehit in reused(tight, name))
        assert arm.recomputed_tokens >= 0
        assert arm.token_digest == without.result.arms[name].token_digest
        assert arm.content_errors == 0
        assert without.result.arms[name].rehit_tokens == 0


def test_an_admission_that_holds_its_match_gives_way_to_an_older_request() -> None:
    """48 pages: the younger request comes back after a pause, matches 26 of them, and the older one needs one more."""
    model = ModelGeometry("tight", max_position_embeddings=240, layers=(FULL,) * 4)
    requests = requests_of((17, 73), (70, 36))
    tight = {"memory": 24 * MIB, "device": "host", "tokens_per_block": 4, "max_batch_size": 2, "max_num_tokens": 3}
    for arm in run(job(requests, model, **tight)).result.arms.values():
        assert arm.requests_finished == 2
        assert arm.recompute_pauses > 0
        assert arm.rehit_tokens > 0


def test_same_decisions_with_and_without_bytes() -> None:
    requests = sharing(*[(i % 3, 50 + 7 * (i % 3), 70 + 5 * i) for i in range(14)], output=40)
    host = run(job(requests, memory=48 * MIB, device="host")).result.arms
    virtual = run(job(requests, memory=48 * MIB)).result.arms
    assert {arm.decision_digest for arm in [*host.values(), *virtual.values()]} == {host["v2py"].decision_digest}


def test_corruption_is_found_with_reuse() -> None:
    requests = sharing((0, 60, 70), (0, 60, 80), output=5, gap=1.0)
    outcome = run_replay(job(requests, device="host", inject_corruption=True))
    assert outcome.failures
    for arm in outcome.result.arms.values():
        assert arm.content_errors > 0


TEXT = st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(1, 60), st.integers(1, 60), st.booleans())


@settings(max_examples=25)
@given(
    layers=LAYERS,
    texts=st.lists(TEXT, min_size=2, max_size=14),
    gap=st.sampled_from([0.0, 0.003, 1.0]),
    block=st.sampled_from([1, 4, 16, 32]),
    max_batch_size=st.sampled_from([1, 5, 64]),
    max_num_tokens=st.sampled_from([3, 32, 200, 8192]),
    memory=st.sampled_from([24, 32, 48, 96, 4096]),
)
def test_shared_bytes_are_right(layers, texts, gap, block, max_batch_size, max_num_tokens, memory) -> None:
    """Any sharing, any memory: both arms decide alike, all requests end, and every byte that a request can see is its own."""
    model = ModelGeometry("random", max_position_embeddings=600, layers=tuple(layers))
    requests: list[TraceRequest] = []
    for i, (system, shared, own, output, follows) in enumerate(texts):
        before = requests[-1] if requests and follows else None
        if before is not None:
            request = TraceRequest(i, 0.0, before.total_tokens + own, output, follows=i - 1)
        else:
            request = TraceRequest(i, gap * i, shared + own, output, system=system, system_tokens=shared)
        requests.append(request)
    options = {"tokens_per_block": block, "max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens}
    outcome = run(job(requests, model, memory * MIB, device="host", **options))
    for arm in outcome.result.arms.values():
        assert arm.content_errors == 0
        assert 0 <= arm.reused_tokens <= arm.prompt_tokens
    for line in outcome.requests:
        assert line.reused_tokens < line.prompt_tokens
