"""Workloads made here: prompt and output lengths, and what prompts share.

- ``1k1k``, ``1k8k``, ``8k1k``: prompt / output tokens, nothing shared, all at once.
- ``multiturn``: conversations of 8 turns that start together.  All begin with one system prompt of 1,024 tokens; a turn adds
  256 tokens and is answered with 512, which stand in the next turn's prompt.  A turn arrives when the one before ends.  Request
  index = conversation · 8 + turn, so a limit may cut the last conversation short.
- ``agent``: 32 system prompts of 4,096 to 16,384 tokens, uniform; a request takes one by Zipf's law with exponent 1.1 (the
  first the most often), adds 512 tokens and is answered with 182.  All at once.

Draws come from Python's own generator, whose stream for a seed is the same in every version.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect

from kvpool.sim.requests import TraceRequest
from kvpool.sim.usage import choose

LENGTHS = {"1k1k": (1024, 1024), "1k8k": (1024, 8192), "8k1k": (8192, 1024)}
"""Prompt and output tokens of the workloads that share nothing."""
WORKLOADS = (*LENGTHS, "multiturn", "agent")
UNBUILT = ("mix", "ladder", "tp1_8k1k", "tp2_1k8k", "tep2_1k8k", "dep4_1k8k")

TURNS, TURN_SYSTEM, TURN_IN, TURN_OUT = 8, 1024, 256, 512
AGENT_SYSTEMS, AGENT_SHORTEST, AGENT_LONGEST, AGENT_IN, AGENT_OUT = 32, 4096, 16384, 512, 182
ZIPF_EXPONENT = 1.1


def make_workload(name: str, limit: int, seed: int = 0) -> list[TraceRequest]:
    """The first ``limit`` requests of the workload; UsageError for a name that is unknown or not built yet."""
    choose("--workload", name, WORKLOADS, UNBUILT)
    if name == "multiturn":
        return [_turn(index) for index in range(limit)]
    if name == "agent":
        return _agent(limit, seed)
    prompt, output = LENGTHS[name]
    return [TraceRequest(index, 0.0, prompt, output) for index in range(limit)]


def _turn(index: int) -> TraceRequest:
    turn = index % TURNS
    prompt = TURN_SYSTEM + TURN_IN + turn * (TURN_OUT + TURN_IN)
    follows = index - 1 if turn else None
    return TraceRequest(index, 0.0, prompt, TURN_OUT, system=0, system_tokens=TURN_SYSTEM, follows=follows)


def _agent(limit: int, seed: int) -> list[TraceRequest]:
    draw = random.Random(seed).random
    span = AGENT_LONGEST - AGENT_SHORTEST + 1
    systems = [AGENT_SHORTEST + int(draw() * span) for _ in range(AGENT_SYSTEMS)]
    weights = list(itertools.accumulate((rank + 1) ** -ZIPF_EXPONENT for rank in range(AGENT_SYSTEMS)))
    requests = []
    for index in range(limit):
        system = bisect(weights, draw() * weights[-1], hi=AGENT_SYSTEMS - 1)
        length = systems[system]
        requests.append(TraceRequest(index, 0.0, length + AGENT_IN, AGENT_OUT, system=system, system_tokens=length))
    return requests
