from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

from kvpool.sim.arrivals import parse_arrival, with_arrivals
from kvpool.sim.requests import TraceRequest
from kvpool.sim.usage import UsageError
from kvpool.sim.workloads import make_workload

REQUESTS = [TraceRequest(0, 0.5, 10, 1), TraceRequest(1, 0.0, 10, 1), TraceRequest(2, 0.5, 10, 1)]


@pytest.mark.parametrize("text", ["", "later", "0", "-1", "nan", "inf", "1/s"])
def test_no_arrival(text: str) -> None:
    with pytest.raises(UsageError, match="--arrival"):
        parse_arrival(text)


def test_trace_times_are_kept_and_put_in_order() -> None:
    assert [r.index for r in with_arrivals(REQUESTS, "trace", 0)] == [1, 0, 2]


def test_now() -> None:
    assert {r.arrival for r in with_arrivals(REQUESTS, "now", 0)} == {0.0}


def test_rate_is_seeded() -> None:
    many = [TraceRequest(i, 0.0, 1, 1) for i in range(4000)]
    rate = parse_arrival("4")
    first = with_arrivals(many, rate, 7)
    assert first == with_arrivals(many, rate, 7)
    assert first != with_arrivals(many, rate, 8)
    assert first[0].arrival == 0.0
    assert first[-1].arrival == pytest.approx(1000, rel=0.1)


def test_workloads() -> None:
    made = make_workload("1k8k", 3)
    assert [(r.index, r.arrival, r.prompt_tokens, r.output_tokens) for r in made] == [
        (i, 0.0, 1024, 8192) for i in range(3)
    ]
    with pytest.raises(UsageError, match="multiturn is not built yet; legal: 1k1k, 1k8k, 8k1k"):
        make_workload("multiturn", 1)
    with pytest.raises(UsageError, match="'2k2k' is unknown"):
        make_workload("2k2k", 1)
