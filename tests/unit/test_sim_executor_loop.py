"""The executor loop: its steps by hand, its policy, and that everything ends with the same tokens whatever the memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic")

from kvpool.models import ModelGeometry
from kvpool.sim.executor_loop import ExecutorLoop
from kvpool.sim.metrics import tpot_ms, ttft_ms
from kvpool.sim.options import ReplayOptions, prepare
from kvpool.sim.replay import run_replay
from kvpool.sim.requests import TraceRequest
from kvpool.sim.step_model import ReadCost, StepModel
from kvpool.v2 import KVCacheManager
from tests.support.arms import AVAILABLE, BACKEND_OF
from tests.unit.sim_cases import LAYERS, MIB, MODEL, Recorder, job, requests_of, run


def record(requests: list[TraceRequest], **limits: int) -> tuple[ExecutorLoop, Recorder]:
    made = job(requests)
    from kvpool.sim.config import executor_config

    config = executor_config(MODEL, memory=64 * MIB, tokens_per_block=16, max_seq_len=400, max_num_tokens=64)
    with KVCacheManager(config, backend="python", device="virtual") as manager:
        recorder = Recorder(manager)
        sizes = {"max_seq_len": 400, "max_batch_size": 8, "max_num_tokens": 64, **limits}
        loop = ExecutorLoop(
            recorder,  # type: ignore[arg-type]
            requests,
            step_model=StepModel(made.settings.step_model),
            read_cost=ReadCost.of_layers(config.layers, 16),
            **sizes,
        )
        loop.run()
        manager.audit()
        assert manager.num_layers == 2
        return loop, recorder


def test_next_token_convention() -> None:
    """3 prompt tokens, 3 outputs: one prompt step, two decode steps, 5 tokens written."""
    loop, recorder = record(requests_of((3, 3)))
    assert recorder.calls == [[(0, 0, 3)], [(0, 3, 4)], [(0, 4, 5)]]
    assert loop.counters.steps == 3
    assert loop.counters.generated_tokens == 3


def test_one_output_token_ends_with_the_prompt() -> None:
    loop, recorder = record(requests_of((3, 1)))
    assert recorder.calls == [[(0, 0, 3)]]
    assert tpot_ms(loop.counters.finished[0]) is None


def test_generation_first_then_chunks_in_order() -> None:
    """Budget 64: 20 tokens of prompt 0 and 44 of prompt 1; then a token and 63; then two tokens and prompt 2."""
    _, recorder = record(requests_of((20, 3), (110, 2), (5, 1)))
    assert recorder.calls == [
        [(0, 0, 20), (1, 0, 44)],
        [(0, 20, 21), (1, 44, 107)],
        [(0, 21, 22), (1, 107, 110), (2, 0, 5)],
        [(1, 110, 111)],
    ]


def test_a_freed_row_is_taken_again_and_the_batch_is_bounded() -> None:
    _, recorder = record(requests_of((4, 2), (4, 1), (4, 1)), max_batch_size=2)
    assert recorder.calls == [[(0, 0, 4), (1, 0, 4)], [(0, 4, 5), (1, 0, 4)]]


def test_token_budget_below_the_batch_serves_the_oldest() -> None:
    """Three decode under a budget of 2: the third waits until one of the others has ended."""
    _, recorder = record(requests_of((1, 3), (1, 3), (1, 3)), max_num_tokens=2)
    assert recorder.calls[0] == [(0, 0, 1), (1, 0, 1)]
    assert all(len(call) <= 2 for call in recorder.calls)
    assert sum(len(call) for call in recorder.calls) == 9


def test_times_follow_the_model_and_the_arrivals() -> None:
    requests = [TraceRequest(0, 0.0, 8, 3), TraceRequest(1, 5.0, 8, 1)]
    loop, recorder = record(requests)
    assert [len(call) for call in recorder.calls] == [1, 1, 1, 1]
    first, second = loop.counters.finished
    assert loop.counters.makespan == second.last_token > 5.0
    assert ttft_ms(second) == pytest.approx(0.5 + (5.13e9 * 0.53 + 8 * 2 * 32768) / 8e9, rel=1e-3)
    assert first.last_token - first.first_token == pytest.approx(2 * (0.0005 + 5.13e9 * 0.53 / 8e12), rel=1e-2)


def test_longer_than_promised_is_refused() -> None:
    outcome = run(job(requests_of((300, 100), (300, 101), (10, 10))))
    for arm in outcome.result.arms.values():
        assert (arm.max_seq_len_effective, arm.requests_refused) == (384, 2)
        assert arm.prompt_tokens == 10
    assert [line.state for line in outcome.requests][:3] == ["refused", "refused", "finished"]
    assert outcome.requests[0].ttft_ms is None


def test_nothing_fits_and_nothing_runs() -> None:
    outcome = run(job(requests_of((5000, 10))))
    for arm in outcome.result.arms.values():
        assert arm.steps == 0
        assert arm.throughput_tokens_per_s is None
        assert arm.ttft_ms.mean is None
        assert arm.pools[0].samples == []


def test_short_memory_pauses_and_yields_the_same_tokens() -> None:
    requests = requests_of(*[(8 + 7 * i, 150) for i in range(10)])
    tight = run(job(requests, memory=40 * MIB, device="host"))
    ample = run(job(requests, memory=2048 * MIB, device="host"))
    for name in tight.result.arms:
        short, roomy = tight.result.arms[name], ample.result.arms[name]
        assert short.recompute_pauses > 0
        assert short.recomputed_tokens > 0
        assert short.suspensions == 0
        assert roomy.recompute_pauses == 0
        assert short.token_digest == roomy.token_digest
        assert short.decision_digest != roomy.decision_digest
        assert short.content_errors == roomy.content_errors == 0
        assert short.prompt_tokens == roomy.prompt_tokens == sum(r.prompt_tokens for r in requests)


def test_same_decisions_twice_and_without_bytes() -> None:
    requests = requests_of(*[(8 + 7 * i, 150) for i in range(10)])
    host = run(job(requests, memory=40 * MIB, device="host")).result.arms
    virtual = run(job(requests, memory=40 * MIB, repeat=2)).result.arms
    assert {arm.decision_digest for arm in [*host.values(), *virtual.values()]} == {host["v2py"].decision_digest}
    assert virtual["v2py"].content_checks is None
    assert virtual["v2py"].repeats == 2


def test_samples_are_at_most_512_even_and_include_the_last_step() -> None:
    arm = run(job(requests_of((8, 370), *[(4, 300)] * 5), max_batch_size=1)).result.arms["v2py"]
    assert arm.steps > 1800
    steps = [sample.step for sample in arm.pools[0].samples]
    assert 200 < len(steps) <= 512
    assert steps[-1] == arm.steps
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert len(gaps) == 1


def test_arms_agree_on_the_tiny_traces() -> None:
    for name in ("mooncake_tiny.jsonl", "azure_tiny.csv"):
        path = Path(__file__).resolve().parent.parent / "data" / name
        outcome = run_replay(prepare(ReplayOptions(trace=path, memory="64MiB", device="host")))
        assert outcome.failures == []
        assert list(outcome.result.arms) == [arm for arm in ("v2cpp", "v2py") if arm in AVAILABLE]
        for arm_name, arm in outcome.result.arms.items():
            assert arm.backend == BACKEND_OF[arm_name]
            assert arm.content_checks
            assert arm.content_errors == 0


@pytest.mark.parametrize("arrival", ["trace", "now"])
def test_arms_agree_on_a_public_trace(data_dir: Path, arrival: str) -> None:
    trace = data_dir / "mooncake_conversation_trace.jsonl"
    outcome = run_replay(prepare(ReplayOptions(trace=trace, memory="60GiB", limit=150, arrival=arrival)))
    assert outcome.failures == []
    for arm in outcome.result.arms.values():
        assert (arm.requests_finished, arm.max_seq_len_effective) == (150, 131_072)


@settings(max_examples=12)
@given(
    layers=LAYERS,
    lengths=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 120)), min_size=1, max_size=14),
    arrivals=st.sampled_from([0.0, 0.003]),
    block=st.sampled_from([1, 4, 16, 32]),
    max_batch_size=st.sampled_from([2, 5, 64]),
    max_num_tokens=st.sampled_from([1, 3, 7, 32, 200, 8192]),
    memory=st.sampled_from([24, 32, 48, 96]),
    reuse=st.booleans(),
)
def test_everything_ends_with_the_same_tokens(
    layers, lengths, arrivals, block, max_batch_size, max_num_tokens, memory, reuse
) -> None:
    """No dead-lock, no refusal but of what is too long, no wrong byte; memory changes when tokens come, never which."""
    model = ModelGeometry("random", max_position_embeddings=240, layers=tuple(layers))
    requests = [TraceRequest(i, arrivals * i, prompt, output) for i, (prompt, output) in enumerate(lengths)]
    options = {
        "device": "host",
        "tokens_per_block": block,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "reuse": reuse,
    }
    digests = set()
    for size in (memory * MIB, 4096 * MIB):
        outcome = run(job(requests, model, size, **options))
        for arm in outcome.result.arms.values():
            too_long = sum(r.total_tokens > arm.max_seq_len_effective for r in requests)
            assert arm.requests_refused == too_long
            if not too_long:
                digests.add(arm.token_digest)
    assert len(digests) <= 1
