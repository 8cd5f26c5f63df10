"""The result of a replay as JSON; the published schema is generated from these classes (``docs/schemas``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvpool.sim.settings import ReplaySettings

SCHEMA = 1


class Spread(BaseModel):
    """Null when nothing was measured."""

    mean: float | None
    p50: float | None
    p99: float | None


class Percentiles(BaseModel):
    """Null when nothing was measured."""

    p50: float | None
    p99: float | None


class Batch(BaseModel):
    """Requests scheduled in a step."""

    mean: float
    peak: int


class PoolSample(BaseModel):
    """One pool group after a step."""

    step: int
    live_bytes: int
    pool_bytes: int


class LayerGroup(BaseModel):
    """Layers that share a life cycle."""

    group: int
    kind: Literal["attention", "ssm"]
    window: int | None
    layers: list[int]


class PoolResult(BaseModel):
    """One pool group: its layer groups, its size, and how full it was."""

    pool_group: int
    layer_groups: list[LayerGroup]
    slots: int
    slot_bytes: int
    pool_bytes: int
    samples: list[PoolSample]


class ArmResult(BaseModel):
    """One arm. Times in the units of their names; simulated, except those of the manager, which are measured."""

    backend: str
    steps: int
    requests_finished: int
    requests_refused: int
    max_seq_len_effective: int
    throughput_tokens_per_s: float | None
    throughput_with_manager_tokens_per_s: float | None
    ttft_ms: Spread
    tpot_ms: Spread
    batch: Batch
    prompt_tokens: int
    reused_tokens: int
    rehit_tokens: int
    suspensions: int
    recompute_pauses: int
    recomputed_tokens: int
    manager_us_per_step: Percentiles
    decision_digest: str
    token_digest: str | None
    """SHA-256 over every finished request's output tokens; null where no bytes exist to make tokens of."""
    content_checks: int | None
    content_errors: int | None
    pools: list[PoolResult]
    repeats: int | None = None


class ReplayResult(BaseModel):
    """The file that ``kvpool replay --json`` writes."""

    schema_: Literal[1] = Field(alias="schema")
    kvpool: str
    settings: ReplaySettings
    arms: dict[str, ArmResult]

    def to_json(self) -> str:
        """The file's text; ``repeats`` stands in it only when there were some."""
        once = self.settings.repeat == 1
        exclude: Any = {"arms": {"__all__": {"repeats"}}} if once else None
        return self.model_dump_json(by_alias=True, exclude=exclude, indent=1) + "\n"


class RequestLine(BaseModel):
    """A line of ``kvpool replay --requests``."""

    arm: str
    index: int
    prompt_tokens: int
    reused_tokens: int
    rehit_tokens: int
    ttft_ms: float | None
    state: Literal["finished", "refused"]
