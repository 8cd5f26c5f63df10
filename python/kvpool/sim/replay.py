"""Runs every arm over the same requests and compares what they decided."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvpool import __version__
from kvpool.errors import ConfigError, HostOOMError
from kvpool.sim.config import executor_config, longest_constructible, typical_length
from kvpool.sim.content import ContentCheck
from kvpool.sim.executor_loop import ExecutorLoop
from kvpool.sim.metrics import percentiles, spread, tpot_ms, ttft_ms
from kvpool.sim.options import ReplayJob
from kvpool.sim.result import SCHEMA, ArmResult, Batch, LayerGroup, PoolResult, ReplayResult, RequestLine
from kvpool.sim.settings import ARM_BACKENDS
from kvpool.sim.step_model import ReadCost, StepModel
from kvpool.sim.usage import UsageError
from kvpool.v2 import AttnLifeCycle, KVCacheManager, KVCacheManagerConfig

Progress = Callable[[str, int], None]
"""Called with the arm (and the run of it) and how many of its requests have ended."""


@dataclass(slots=True)
class ReplayOutcome:
    """The result, the line of every request, and what a check found wrong (exit 1)."""

    result: ReplayResult
    requests: list[RequestLine] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    result: ArmResult
    requests: list[RequestLine]
    failure: str | None


def run_replay(job: ReplayJob, progress: Progress | None = None) -> ReplayOutcome:
    """Every arm in turn; UsageError when the memory is too small for one block."""
    arms: dict[str, ArmResult] = {}
    outcome = ReplayOutcome(
        ReplayResult.model_construct(schema_=SCHEMA, kvpool=__version__, settings=job.settings, arms=arms)
    )
    for arm in job.settings.arms:
        runs = []
        for number in range(job.settings.repeat):
            label = arm if job.settings.repeat == 1 else f"{arm} {number + 1}/{job.settings.repeat}"
            report = None if progress is None else _Labelled(progress, label)
            runs.append(_run_arm(job, arm, report))
        arms[arm] = _merged([run.result for run in runs])
        outcome.requests += runs[0].requests
        outcome.failures += [run.failure for run in runs if run.failure is not None]
        if len({run.result.decision_digest for run in runs}) > 1:
            outcome.failures.append(f"{arm}: decision_digest differs between its own runs")
    outcome.failures += _differences(arms)
    return outcome


@dataclass(frozen=True, slots=True)
class _Labelled:
    progress: Progress
    label: str

    def __call__(self, ended: int) -> None:
        self.progress(self.label, ended)


@dataclass(frozen=True, slots=True)
class OpenArm:
    """A manager and the executor loop over it, ready to run."""

    manager: KVCacheManager
    loop: ExecutorLoop
    max_seq_len: int
    content: ContentCheck | None

    def run(self) -> None:
        """Every request to its end."""
        with _collector_paused():
            self.loop.run()


def open_arm(job: ReplayJob, arm: str, progress: Callable[[int], None] | None = None) -> OpenArm:
    """The arm's manager, as long as the memory allows; UsageError when it is too small for one block."""
    settings, backend = job.settings, ARM_BACKENDS[arm]
    block = settings.tokens_per_block

    def config_for_length(max_seq_len: int, typical: tuple[int, int] | None = None) -> KVCacheManagerConfig:
        return executor_config(
            job.model,
            memory=settings.memory,
            tokens_per_block=block,
            max_seq_len=max_seq_len,
            max_num_tokens=settings.max_num_tokens,
            typical=typical,
            max_util_for_resume=settings.max_util_for_resume,
        )

    try:
        longest = longest_constructible(config_for_length, block, settings.max_seq_len, backend)
        typical = typical_length(job.requests, longest)
        config = config_for_length(longest, (typical, typical - 1))
        manager = KVCacheManager(config, backend=backend, device=settings.device)
    except ConfigError as error:
        raise UsageError("--memory", f"{settings.memory} bytes are too few ({error})") from None
    except HostOOMError as error:
        raise UsageError("--memory", f"{settings.memory} bytes of host memory can't be had ({error})") from None
    content = None
    if settings.device == "host":
        content = ContentCheck(inject_corruption=settings.inject_corruption)
    loop = ExecutorLoop(
        manager,
        job.requests,
        max_seq_len=longest,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        step_model=StepModel(settings.step_model),
        read_cost=ReadCost.of_layers(config.layers, block),
        reuse=settings.reuse,
        seed=settings.seed,
        content=content,
        progress=progress,
    )
    return OpenArm(manager, loop, longest, content)


def _run_arm(job: ReplayJob, arm: str, progress: Callable[[int], None] | None) -> _Run:
    opened = open_arm(job, arm, progress)
    opened.run()
    result = _arm_result(opened.manager, opened.loop, opened.max_seq_len, opened.content)
    opened.manager.shutdown()
    return _Run(result, list(_request_lines(arm, opened.loop)), _content_failure(arm, opened.content))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A run makes no cycles, and a collector that walks millions of tree records would be half of v2py's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _arm_result(manager: KVCacheManager, loop: ExecutorLoop, longest: int, content: ContentCheck | None) -> ArmResult:
    counters = loop.counters
    done = counters.finished
    manager_s = sum(counters.manager_ns) / 1e9
    steps = max(1, counters.steps)
    return ArmResult(
        backend=manager.backend,
        steps=counters.steps,
        requests_finished=len(done),
        requests_refused=len(counters.refused),
        max_seq_len_effective=longest,
        throughput_tokens_per_s=_rate(counters.generated_tokens, counters.makespan),
        throughput_with_manager_tokens_per_s=_rate(counters.generated_tokens, counters.makespan + manager_s),
        ttft_ms=spread([value for value in map(ttft_ms, done) if value is not None]),
        tpot_ms=spread([value for value in map(tpot_ms, done) if value is not None]),
        batch=Batch(mean=counters.scheduled / steps, peak=counters.batch_peak),
        prompt_tokens=counters.prompt_tokens,
        reused_tokens=counters.reused_tokens,
        rehit_tokens=counters.rehit_tokens,
        suspensions=0,
        recompute_pauses=counters.recompute_pauses,
        recomputed_tokens=counters.recomputed_tokens,
        manager_us_per_step=percentiles([ns / 1e3 for ns in counters.manager_ns]),
        decision_digest=loop.digest.hexdigest(),
        token_digest=None if content is None else content.token_digest(),
        content_checks=None if content is None else content.checks,
        content_errors=None if content is None else content.errors,
        pools=_pools(manager, loop),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _pools(manager: KVCacheManager, loop: ExecutorLoop) -> list[PoolResult]:
    grouping = manager.layer_grouping
    pools = []
    for desc in manager.pool_group_descs:
        slot_bytes = sum(desc.slot_desc.slot_size_list)
        groups = []
        for variant in desc.slot_desc.variants:
            group = variant.layer_group_id
            cycle = manager._life_cycles.get_life_cycle(group)
            window = cycle.window_size if isinstance(cycle, AttnLifeCycle) else None
            groups.append(
                LayerGroup(
                    group=group,
                    kind="attention" if isinstance(cycle, AttnLifeCycle) else "ssm",
                    window=window,
                    layers=list(grouping[group]),
                )
            )
        pool_bytes = desc.num_slots * slot_bytes
        pools.append(
            PoolResult(
                pool_group=desc.pool_group_index,
                layer_groups=groups,
                slots=desc.num_slots,
                slot_bytes=slot_bytes,
                pool_bytes=pool_bytes,
                samples=loop.samples.of_group(desc.pool_group_index, pool_bytes),
            )
        )
    return pools


def _request_lines(arm: str, loop: ExecutorLoop) -> Iterator[RequestLine]:
    ended = loop.counters.finished + loop.counters.refused
    for request in sorted(ended, key=lambda request: request.spec.index):
        finished = request.state == "finished"
        yield RequestLine(
            arm=arm,
            index=request.spec.index,
            prompt_tokens=request.spec.prompt_tokens,
            reused_tokens=request.reused_tokens,
            rehit_tokens=request.rehit_tokens,
            ttft_ms=ttft_ms(request) if finished else None,
            state="finished" if finished else "refused",
        )


def _merged(results: list[ArmResult]) -> ArmResult:
    """The first run's fields; measured times are medians over all runs."""
    first = results[0]
    with_manager = [r.throughput_with_manager_tokens_per_s for r in results]
    times = [r.manager_us_per_step for r in results]
    return first.model_copy(
        update={
            "throughput_with_manager_tokens_per_s": _median(with_manager),
            "manager_us_per_step": times[0].model_copy(
                update={"p50": _median([t.p50 for t in times]), "p99": _median([t.p99 for t in times])}
            ),
            "repeats": len(results),
        }
    )


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _content_failure(arm: str, content: ContentCheck | None) -> str | None:
    if content is None or not content.errors:
        return None
    text = f"{arm}: content_errors {content.errors} in {content.checks} checks"
    if content.first_mismatch is not None:
        at = content.first_mismatch
        text += f", first at request {at.request}, layer group {at.group}, block {at.block}, slot {at.slot}"
    return text


def _differences(arms: dict[str, ArmResult]) -> list[str]:
    """What must be equal between arms and is not."""
    failures = []
    if len({arm.decision_digest for arm in arms.values()}) > 1:
        failures.append("decision_digest differs between " + " and ".join(arms))
    if len({arm.token_digest for arm in arms.values()}) > 1:
        failures.append("token_digest differs between " + " and ".join(arms))
    return failures
