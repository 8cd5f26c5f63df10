"""Workloads made here: fixed prompt and output lengths, all requests at once."""

from __future__ import annotations

from kvpool.sim.requests import TraceRequest
from kvpool.sim.usage import choose

LENGTHS = {"1k1k": (1024, 1024), "1k8k": (1024, 8192), "8k1k": (8192, 1024)}
"""Prompt and output tokens of each workload."""
UNBUILT = ("multiturn", "agent", "mix", "ladder", "tp1_8k1k", "tp2_1k8k", "tep2_1k8k", "dep4_1k8k")


def make_workload(name: str, limit: int) -> list[TraceRequest]:
    """``limit`` requests of the workload; UsageError for a name that is unknown or not built yet."""
    prompt, output = LENGTHS[choose("--workload", name, tuple(LENGTHS), UNBUILT)]
    return [TraceRequest(index, 0.0, prompt, output) for index in range(limit)]
