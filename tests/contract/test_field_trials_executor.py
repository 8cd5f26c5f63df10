"""Field trials about the executor loop: what can never run is refused, everything else ends, and nothing waits for ever."""

from __future__ import annotations

import threading

import pytest

from kvpool.errors import NeverFitsError
from tests.support.configs import KIB, MIB, config, full, one, used, windowed

pytest.importorskip("pydantic")

from kvpool.sim.content import ContentCheck
from kvpool.sim.executor_loop import ExecutorLoop
from kvpool.sim.requests import TraceRequest
from kvpool.sim.settings import StepModelSettings
from kvpool.sim.step_model import ReadCost, StepModel

MODEL = StepModelSettings(
    gpu="b200",
    bandwidth_bytes_per_s=8e12,
    flops_per_s=2e15,
    link_bytes_per_s=1e11,
    total_parameters=1e9,
    active_parameters=1e9,
    bytes_per_parameter=2.0,
    active_weight_bytes=2e9,
    ranks=1,
    overhead_s=0.0005,
)


def run(manager, requests, *, max_seq_len=10**6, max_batch_size=64, max_num_tokens=8192, content=None):
    """Run to the end, at most a minute; returns the counters."""
    loop = ExecutorLoop(
        manager,
        [TraceRequest(i, 0.0, prompt, output) for i, (prompt, output) in enumerate(requests)],
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        step_model=StepModel(MODEL),
        read_cost=ReadCost.of_layers(manager.init_config.layers, manager.tokens_per_block),
        content=content,
    )
    failure: list[BaseException] = []

    def work() -> None:
        try:
            loop.run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the loop hangs"
    if failure:
        raise failure[0]
    manager.audit()
    assert sum(used(manager)) == 0
    return loop.counters


def test_B111_prompt_fits_but_prompt_and_one_do_not(make) -> None:
    """Pool 4 blocks of 16, prompt 64, 8 tokens wanted: refused."""
    manager = make(full(4, tpb=16))
    counters = run(manager, [(64, 8), (20, 4)], max_seq_len=64)
    assert [r.spec.index for r in counters.refused] == [0]
    assert [r.spec.index for r in counters.finished] == [1]


def test_B111_a_wrong_length_limit_is_an_error_not_a_wait(make) -> None:
    """The same with a limit that the pool can not hold: refused or a clear error, never a silent wait."""
    manager = make(full(4, tpb=16))
    try:
        counters = run(manager, [(64, 8), (20, 4)], max_seq_len=1000)
    except NeverFitsError as error:
        assert "5 slots" in str(error)  # noqa: PT017
    else:
        assert [r.spec.index for r in counters.refused] == [0]


def test_B111_the_exact_fit_runs(make) -> None:
    """64 tokens written are 57 of prompt and 8 yielded: the last one is never fed."""
    manager = make(full(4, tpb=16))
    counters = run(manager, [(57, 8)])
    assert len(counters.finished) == 1


def test_B119_both_need_more_and_nothing_can_be_suspended_away(make) -> None:
    manager = make(full(8))
    counters = run(manager, [(96, 100), (96, 100)])
    assert len(counters.finished) == 2
    assert counters.recompute_pauses > 0
    assert counters.refused == []


def test_B121_whole_prompt_never_fits(make) -> None:
    """Pool 10 pages, prompt of 20, chunks of 2: refused for good although the first chunks would fit."""
    manager = make(full(10))
    counters = run(manager, [(20 * 32, 4), (64, 4)], max_num_tokens=64)
    assert [r.spec.index for r in counters.refused] == [0]
    assert [r.spec.index for r in counters.finished] == [1]


def test_B212_what_admission_counts_is_what_allocation_takes(make) -> None:
    """w=48, B=16, pool 4, prompt 80: the loop cuts the one chunk to what the pool can hold, and it ends."""
    manager = make(windowed(4, 48, tpb=16, max_util_for_resume=1.0), "host")
    content = ContentCheck()
    counters = run(manager, [(80, 40)], content=content)
    assert len(counters.finished) == 1
    assert content.checks > 0
    assert content.errors == 0


def test_many_requests_in_a_tiny_pool_all_end(make) -> None:
    manager = make(config([one(0, 64 * KIB), one(1, 64 * KIB, 40)], 4 * MIB, 16), "host")
    content = ContentCheck()
    requests = [(1 + 37 * i % 300, 1 + 53 * i % 150) for i in range(40)]
    counters = run(manager, requests, content=content, max_num_tokens=256, max_batch_size=16)
    assert len(counters.finished) == 40
    assert content.errors == 0
    assert content.checks > 0


def test_a_flipped_byte_is_found(make) -> None:
    manager = make(config([one(0, 64 * KIB)], 4 * MIB, 16), "host")
    content = ContentCheck(inject_corruption=True)
    run(manager, [(50, 20)], content=content)
    assert content.errors > 0
