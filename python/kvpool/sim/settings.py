"""The effective options of a replay, as they are written into its result."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

ARM_BACKENDS = {"v2cpp": "cpp", "v2py": "python"}
"""Arms that are built, in the order in which they run, and the backend of each."""
UNBUILT_ARMS = ("v1",)
DEVICES = ("virtual", "host")
UNBUILT_DEVICES = ("cuda",)
POLICIES = ("auto", "max_utilization")
UNBUILT_POLICIES = ("guaranteed_no_evict", "adaptive")
DEFAULT_WORKLOAD = "1k1k"
DEFAULT_MODEL = "gpt-oss-120b"
MAX_UTIL_FOR_RESUME = 0.95
STEP_OVERHEAD_S = 0.0005


class StepModelSettings(BaseModel):
    """Constants of the step model, all of the whole model and one GPU; see :mod:`kvpool.sim.step_model`."""

    model_config = ConfigDict(frozen=True)

    gpu: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float  # tier moves; no tier is built yet
    total_parameters: float | None
    active_parameters: float
    bytes_per_parameter: float
    active_weight_bytes: float
    ranks: int
    overhead_s: float
    formula: str = (
        "max((active_weight_bytes / ranks + live KV bytes read) / bandwidth_bytes_per_s, "
        "2 * active_parameters / ranks * tokens / flops_per_s) + overhead_s"
    )
    source: str = ""


class ReplaySettings(BaseModel):
    """Every effective option of ``kvpool replay``. Sizes in bytes, lengths in tokens."""

    model_config = ConfigDict(frozen=True)

    trace: str | None
    workload: str | None
    model: str
    memory: int
    arms: list[str]
    device: str
    limit: int
    arrival: str | float
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int  # the longest that was asked for; each arm reports max_seq_len_effective
    reuse: bool
    policy: dict[str, str]  # arm → policy that drives it
    host_memory: int
    pool_sizing: str
    tp: int
    gpu: str
    repeat: int
    seed: int
    inject_corruption: bool
    max_util_for_resume: float
    step_model: StepModelSettings

    @property
    def trace_path(self) -> Path | None:
        """The trace as a path."""
        return None if self.trace is None else Path(self.trace)
