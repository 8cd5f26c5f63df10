"""``kvpool replay``: run a request trace through the manager's backends and compare them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpool.sim.replay import ReplayOutcome

Help = typer.Option


def replay(
    trace: Annotated[Path | None, Help(help="Mooncake .jsonl or Azure .csv file.")] = None,
    workload: Annotated[str | None, Help(help="1k1k (default), 1k8k, 8k1k, multiturn or agent.")] = None,
    model: Annotated[str, Help(help="Preset name, Hugging Face id, or the path of a config.json.")] = "gpt-oss-120b",
    memory: Annotated[str, Help(help="KV quota of one rank, without weights.")] = "80GiB",
    arms: Annotated[str | None, Help(help="Comma-separated: v2cpp, v2py. Default: all that exist.")] = None,
    device: Annotated[str, Help(help="virtual (no bytes) or host (real bytes, contents checked).")] = "virtual",
    limit: Annotated[int, Help(help="Take the first N requests.")] = 200,
    arrival: Annotated[
        str | None, Help(help="trace (default for files), now (for workloads), or requests per second.")
    ] = None,
    tokens_per_block: Annotated[int | None, Help(help="Default: the model's own, mostly 32.")] = None,
    max_batch_size: Annotated[int, Help(help="Requests that run at once.")] = 256,
    max_num_tokens: Annotated[int, Help(help="Tokens computed in one step.")] = 8192,
    max_seq_len: Annotated[int | None, Help(help="Default: the model's maximum.")] = None,
    reuse: Annotated[bool, Help("--reuse/--no-reuse", help="Match and commit prefixes.")] = True,
    policy: Annotated[str, Help(help="auto (max_utilization for V2) or max_utilization.")] = "auto",
    host_memory: Annotated[str, Help(help="Host tier; not built yet.")] = "0",
    pool_sizing: Annotated[str, Help(help="planned; elastic is not built yet.")] = "planned",
    tp: Annotated[int, Help(help="Tensor-parallel ranks; the replay is one rank's.")] = 1,
    gpu: Annotated[str, Help(help="Constants of the step model: h100, h200, b200 or gb200.")] = "b200",
    repeat: Annotated[int, Help(help="Runs of each arm; manager times are medians over them.")] = 1,
    seed: Annotated[int, Help(help="Of arrival gaps, workloads and token ids.")] = 0,
    inject_corruption: Annotated[bool, Help("--inject-corruption", help="Flip one stamped byte; must exit 1.")] = False,
    json: Annotated[Path | None, Help(help="Write the result as JSON.")] = None,
    requests: Annotated[Path | None, Help(help="Write a JSON line per arm and request.")] = None,
    report: Annotated[Path | None, Help(help="HTML report; not built yet.")] = None,
) -> None:
    """Replay requests through every backend in simulated time; decisions must be equal, manager time is measured."""
    from kvpool.cli.one_line import EXIT_CHECK_FAILED
    from kvpool.cli.output import check_writable, progress_bar, write_text
    from kvpool.sim.options import ReplayOptions, prepare
    from kvpool.sim.replay import run_replay

    check_writable("--json", json)
    check_writable("--requests", requests)
    job = prepare(
        ReplayOptions(
            trace=trace,
            workload=workload,
            model=model,
            memory=memory,
            arms=arms,
            device=device,
            limit=limit,
            arrival=arrival,
            tokens_per_block=tokens_per_block,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            reuse=reuse,
            policy=policy,
            host_memory=host_memory,
            pool_sizing=pool_sizing,
            tp=tp,
            gpu=gpu,
            repeat=repeat,
            seed=seed,
            inject_corruption=inject_corruption,
            report=report,
        )
    )
    with progress_bar(len(job.requests)) as progress:
        outcome = run_replay(job, progress)
    _print(outcome)
    write_text("--json", json, outcome.result.to_json())
    write_text("--requests", requests, "".join(line.model_dump_json() + "\n" for line in outcome.requests))
    for failure in outcome.failures:
        print(f"kvpool: {failure}", file=sys.stderr)
    if outcome.failures:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print(outcome: ReplayOutcome) -> None:
    from rich.table import Table

    from kvpool.cli.output import console
    from kvpool.sim.sizes import format_size

    settings, arms = outcome.result.settings, outcome.result.arms
    source = settings.trace or settings.workload
    table = Table(
        title=f"{settings.model}, {format_size(settings.memory)}, {settings.device}: first {settings.limit} of {source}",
        title_justify="left",
    )
    table.add_column("")
    for name, arm in arms.items():
        table.add_column(f"{name} ({arm.backend})", justify="right")
    rows: dict[str, list[str]] = {
        "requests finished / refused": [f"{a.requests_finished:,} / {a.requests_refused:,}" for a in arms.values()],
        "longest sequence, tokens": [f"{a.max_seq_len_effective:,}" for a in arms.values()],
        "steps": [f"{a.steps:,}" for a in arms.values()],
        "tokens/s": [_number(a.throughput_tokens_per_s, 0) for a in arms.values()],
        "tokens/s with manager time": [_number(a.throughput_with_manager_tokens_per_s, 0) for a in arms.values()],
        "TTFT ms, mean / p50 / p99": [_spread(a.ttft_ms.mean, a.ttft_ms.p50, a.ttft_ms.p99) for a in arms.values()],
        "TPOT ms, mean / p50 / p99": [_spread(a.tpot_ms.mean, a.tpot_ms.p50, a.tpot_ms.p99) for a in arms.values()],
        "batch, mean / peak": [f"{a.batch.mean:,.1f} / {a.batch.peak:,}" for a in arms.values()],
        "prompt tokens reused": [_share(a.reused_tokens, a.prompt_tokens) for a in arms.values()],
        "recompute pauses (tokens)": [f"{a.recompute_pauses:,} ({a.recomputed_tokens:,})" for a in arms.values()],
        "manager µs/step, p50 / p99": [
            _spread(a.manager_us_per_step.p50, a.manager_us_per_step.p99) for a in arms.values()
        ],
        "decision digest": [a.decision_digest[:16] for a in arms.values()],
        "content errors / checks": [
            "-" if a.content_checks is None else f"{a.content_errors:,} / {a.content_checks:,}" for a in arms.values()
        ],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console().print(table)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.2f} %)" if whole else "-"


def _spread(*values: float | None) -> str:
    return " / ".join(map(_number, values))
