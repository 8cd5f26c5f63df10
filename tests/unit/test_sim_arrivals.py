from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

from kvpool.sim.arrivals import Arrivals, parse_arrival, with_arrivals
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
    with pytest.raises(UsageError, match="mix is not built yet; legal: 1k1k, 1k8k, 8k1k, multiturn, agent"):
        make_workload("mix", 1)
    with pytest.raises(UsageError, match="'2k2k' is unknown"):
        make_workload("2k2k", 1)


def test_multiturn() -> None:
    made = make_workload("multiturn", 19)
    assert [r.index for r in made] == list(range(19))
    assert [r.prompt_tokens for r in made[:8]] == [1280 + 768 * turn for turn in range(8)]
    assert {(r.output_tokens, r.system, r.system_tokens) for r in made} == {(512, 0, 1024)}
    assert [r.follows for r in made] == [None, *range(7), None, *range(8, 15), None, 16, 17]


def test_agent_is_seeded_and_skewed() -> None:
    made = make_workload("agent", 3000, 5)
    assert made == make_workload("agent", 3000, 5)
    assert made != make_workload("agent", 3000, 6)
    lengths = {r.system: r.system_tokens for r in made}
    assert set(lengths) == set(range(32))
    assert all(4096 <= length <= 16384 for length in lengths.values())
    assert len(set(lengths.values())) > 25
    assert {(r.prompt_tokens - r.system_tokens, r.output_tokens) for r in made} == {(512, 182)}
    counts = [sum(r.system == system for r in made) for system in (0, 1, 3)]
    share = 1 / sum((rank + 1) ** -1.1 for rank in range(32))
    assert counts == pytest.approx([3000 * share, 3000 * share / 2**1.1, 3000 * share / 4**1.1], rel=0.15)


def test_followers_get_no_gap_of_a_rate() -> None:
    made = with_arrivals(make_workload("multiturn", 32), 1.0, 3)
    starts = [r.arrival for r in made if r.follows is None]
    singles = with_arrivals([TraceRequest(i, 0.0, 1, 1) for i in range(4)], 1.0, 3)
    assert starts == [r.arrival for r in singles]


def test_arrivals_hand_out_in_order_of_time() -> None:
    arrivals = Arrivals([TraceRequest(0, 0.0, 1, 1), TraceRequest(1, 2.0, 1, 1), TraceRequest(2, 0.0, 1, 1, follows=0)])
    (first,) = arrivals.due(0.0)
    assert (first.spec.index, first.arrival, arrivals.next_time()) == (0, 0.0, 2.0)
    arrivals.ended(first, 1.0)
    assert [(r.spec.index, r.arrival) for r in arrivals.due(3.0)] == [(2, 1.0), (1, 2.0)]
    assert arrivals.next_time() is None
    assert list(arrivals.due(9.0)) == []
    assert arrivals.without(first, 9.0) is None
