"""From what the user wrote to what will run: every option checked, every default filled in.

All complaints are UsageErrors; nothing is opened or allocated here but the trace and the model's description.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.models import GPUS, get_model, hardware
from kvpool.sim.arms import check_arms
from kvpool.sim.arrivals import parse_arrival, with_arrivals
from kvpool.sim.policy_max_utilization import NAME as MAX_UTILIZATION
from kvpool.sim.requests import TraceRequest
from kvpool.sim.settings import (
    DEFAULT_MODEL,
    DEFAULT_WORKLOAD,
    DEVICES,
    MAX_UTIL_FOR_RESUME,
    POLICIES,
    STEP_OVERHEAD_S,
    UNBUILT_DEVICES,
    UNBUILT_POLICIES,
    ReplaySettings,
    StepModelSettings,
)
from kvpool.sim.sizes import format_size, parse_size
from kvpool.sim.traces import read_trace
from kvpool.sim.usage import UsageError, choose
from kvpool.sim.workloads import make_workload

if TYPE_CHECKING:
    from kvpool.models import ModelGeometry

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of ``kvpool replay`` as they were given; None: not given."""

    trace: Path | None = None
    workload: str | None = None
    model: str = DEFAULT_MODEL
    memory: str = "80GiB"
    arms: str | None = None
    device: str = "virtual"
    limit: int = 200
    arrival: str | None = None
    tokens_per_block: int | None = None
    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    reuse: bool = True
    policy: str = "auto"
    host_memory: str = "0"
    pool_sizing: str = "planned"
    tp: int = 1
    gpu: str = "b200"
    repeat: int = 1
    seed: int = 0
    inject_corruption: bool = False
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """Everything a replay needs."""

    settings: ReplaySettings
    model: ModelGeometry
    requests: list[TraceRequest] = field(repr=False)


def prepare(options: ReplayOptions) -> ReplayJob:
    """Checks the options and reads the requests; UsageError for the first thing that is wrong."""
    _refuse_unbuilt(options)
    _check_counts(options)
    memory = parse_size("--memory", options.memory)
    device = choose("--device", options.device, DEVICES, UNBUILT_DEVICES)
    if device == "host":
        _check_ram(memory)
    elif options.inject_corruption:
        raise UsageError("--inject-corruption", f"the {device} device has no bytes to corrupt", "with --device host")
    arms = check_arms(options.arms)
    model = load_model(options.model, options.tp)
    block = options.tokens_per_block or model.default_tokens_per_block
    check_block(model, block)
    longest = options.max_seq_len or model.max_position_embeddings
    if longest < block:
        raise UsageError("--max-seq-len", f"{longest} is shorter than a block", f"at least {block} tokens")
    requests, arrival = _requests(options)
    return ReplayJob(
        ReplaySettings(
            trace=None if options.trace is None else str(options.trace),
            workload=None if options.trace is not None else options.workload or DEFAULT_WORKLOAD,
            model=model.name,
            memory=memory,
            arms=arms,
            device=device,
            limit=options.limit,
            arrival=arrival,
            tokens_per_block=block,
            max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens,
            max_seq_len=longest,
            reuse=options.reuse,
            policy=dict.fromkeys(arms, MAX_UTILIZATION),
            host_memory=0,
            pool_sizing="planned",
            tp=options.tp,
            gpu=options.gpu,
            repeat=options.repeat,
            seed=options.seed,
            inject_corruption=options.inject_corruption,
            max_util_for_resume=MAX_UTIL_FOR_RESUME,
            step_model=_step_model(model, options),
        ),
        model,
        requests,
    )


def load_model(name: str, tp: int) -> ModelGeometry:
    """One rank's geometry of a preset or a config.json."""
    try:
        model = get_model(name)
    except (ConfigError, OSError, ValueError) as error:
        raise UsageError("--model", str(error)) from None
    try:
        return model.shard(tp=tp)
    except ConfigError as error:
        raise UsageError("--tp", str(error), ", ".join(map(str, _legal_tp(model)))) from None


def _legal_tp(model: ModelGeometry, most: int = 64) -> list[int]:
    """The rank counts up to ``most`` that divide the model."""
    legal = []
    for tp in range(1, most + 1):
        try:
            model.shard(tp=tp)
        except ConfigError:
            continue
        legal.append(tp)
    return legal


def check_block(model: ModelGeometry, tokens_per_block: int) -> None:
    """UsageError unless the model's layers can be cut into blocks of so many tokens."""
    multiple = model.block_multiple
    if tokens_per_block < 1 or tokens_per_block % multiple:
        raise UsageError(
            "--tokens-per-block", f"{tokens_per_block} does not suit {model.name}", f"n × {multiple}, n ≥ 1"
        )


def available_ram() -> int:
    """Bytes that new allocations can have without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_ram(memory: int) -> None:
    available = available_ram()
    if memory > available:
        raise UsageError(
            "--memory",
            f"{format_size(memory)} with --device host is more than the RAM that is available",
            f"up to {format_size(available)} here, or --device virtual",
        )


def _refuse_unbuilt(options: ReplayOptions) -> None:
    choose("--policy", options.policy, POLICIES, UNBUILT_POLICIES)
    if parse_size("--host-memory", options.host_memory, zero=True):
        raise UsageError("--host-memory", "a host tier is not built yet", "0")
    choose("--pool-sizing", options.pool_sizing, ("planned",), ("elastic",))
    if options.report is not None:
        raise UsageError("--report", "the HTML report is not built yet", "--json OUT.json")
    choose("--gpu", options.gpu, GPUS)


def _check_counts(options: ReplayOptions) -> None:
    counts = {
        "--limit": options.limit,
        "--tokens-per-block": options.tokens_per_block,
        "--max-batch-size": options.max_batch_size,
        "--max-num-tokens": options.max_num_tokens,
        "--max-seq-len": options.max_seq_len,
        "--tp": options.tp,
        "--repeat": options.repeat,
    }
    for name, value in counts.items():
        if value is not None and not 1 <= value <= MOST_TOKENS:
            raise UsageError(name, f"{value} is out of range", f"an integer from 1 to {MOST_TOKENS}")
    if not 0 <= options.seed < 2**63:
        raise UsageError("--seed", f"{options.seed} is out of range", "an integer from 0 to 9223372036854775807")


def _requests(options: ReplayOptions) -> tuple[list[TraceRequest], str | float]:
    if options.trace is not None and options.workload is not None:
        raise UsageError("--workload", "a trace is given too", "either --trace or --workload")
    arrival = parse_arrival(options.arrival or ("now" if options.trace is None else "trace"))
    if options.trace is not None:
        requests = read_trace(options.trace, options.limit)
    else:
        if arrival == "trace":
            raise UsageError("--arrival", "a workload has no arrival times", "now, a rate, or trace with --trace FILE")
        requests = make_workload(options.workload or DEFAULT_WORKLOAD, options.limit, options.seed)
    return with_arrivals(requests, arrival, options.seed), arrival


def _step_model(model: ModelGeometry, options: ReplayOptions) -> StepModelSettings:
    gpu = hardware(options.gpu)
    parameters = model.parameters
    return StepModelSettings(
        gpu=gpu.name,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        flops_per_s=gpu.bf16_flops_per_s,
        link_bytes_per_s=gpu.host_link_bytes_per_s,
        total_parameters=None if parameters is None else parameters.total * 1e9,
        active_parameters=0.0 if parameters is None else parameters.active * 1e9,
        bytes_per_parameter=0.0 if parameters is None else parameters.bytes_per_parameter,
        active_weight_bytes=0.0 if parameters is None else parameters.active_weight_bytes,
        ranks=options.tp,
        overhead_s=STEP_OVERHEAD_S,
        source="unknown: the cache alone is counted" if parameters is None else parameters.source,
    )
