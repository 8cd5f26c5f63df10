"""Replays that both backends must decide alike, timed as whole processes, and reuse against an oracle.

    KVPOOL_DATA=… python -m benchmarks.replay [--pure PYTHON] [--only 1,3] [--reuse yes,no] [--markdown OUT.md]
    KVPOOL_DATA=… python -m benchmarks.replay --oracle [--markdown OUT.md]

`--pure` names the interpreter of an environment whose kvpool was built with KVPOOL_NATIVE=OFF: its v2py arm must give the
same digest.  `--oracle`: the whole conversation trace at its own times with room for everything (v2py: the first 2,000
requests); every request must have reused exactly the longest common token prefix (`benchmarks/prefix_oracle.py`) with all
that requests before it had computed, at most all but its own last token.  Of a request that has ended that is every token, of
one that still runs its full blocks: the unfinished one belongs to it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.prefix_oracle import PrefixOracle
from kvpool.sim.lanes import COMMITTED, Lanes, Running
from kvpool.sim.metrics import percentiles
from kvpool.sim.options import ReplayOptions, prepare
from kvpool.sim.paging import common_prefix
from kvpool.sim.replay import open_arm
from kvpool.sim.requests import TraceRequest
from kvpool.sim.toy_tokens import prompt_tokens

TRACE = "mooncake_conversation_trace.jsonl"
CASES: dict[int, list[str]] = {
    1: ["--trace", TRACE, "--model", "gpt-oss-120b", "--memory", "60GiB", "--limit", "2000", "--arrival", "trace"],
    2: ["--trace", TRACE, "--model", "gpt-oss-120b", "--memory", "60GiB", "--limit", "2000", "--arrival", "now"],
    3: ["--workload", "1k8k", "--limit", "256", "--memory", "10GiB"],
    4: ["--trace", TRACE, "--model", "gemma-3-27b", "--memory", "60GiB", "--arrival", "now", "--limit", "300"],
    5: ["--workload", "multiturn", "--limit", "512", "--memory", "20GiB"],
    6: ["--workload", "agent", "--limit", "512", "--memory", "60GiB"],
    7: ["--workload", "agent", "--limit", "256", "--memory", "60GiB", "--model", "qwen3-next-80b-a3b"],
}
ROOM_FOR_ALL = "8TiB"


@dataclass(frozen=True)
class Run:
    """One arm of one replay in a process of its own."""

    label: str
    seconds: float
    record: dict[str, Any]
    reused: list[int]  # per request

    @property
    def reused_percent(self) -> float:
        """Of the prompt tokens."""
        return float(100 * self.record["reused_tokens"] / max(1, self.record["prompt_tokens"]))


def run(python: str, words: list[str], arm: str, label: str) -> Run:
    """Replays with one arm; seconds are the whole process's."""
    data = Path(os.environ["KVPOOL_DATA"])
    words = [str(data / word) if word == TRACE else word for word in words]
    with tempfile.TemporaryDirectory() as folder:
        out, lines = Path(folder) / "out.json", Path(folder) / "requests.jsonl"
        command = [
            python,
            "-m",
            "kvpool.cli",
            "replay",
            *words,
            "--arms",
            arm,
            "--json",
            str(out),
            "--requests",
            str(lines),
        ]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        reused = [json.loads(line)["reused_tokens"] for line in lines.read_text().splitlines()]
        return Run(label, seconds, json.loads(out.read_text())["arms"][arm], reused)


HEAD = [
    (
        "| case | reuse | arm | process s | steps | finished | reused | rehit tokens | recompute pauses "
        "| manager µs/step p50 / p99 | tokens/s (simulated) | digest |"
    ),
    "|" + "---|" * 12,
]


def line(case: object, reuse: str, run: Run) -> str:
    """One Markdown row."""
    r, manager = run.record, run.record["manager_us_per_step"]
    return (
        f"| {case} | {reuse} | {run.label} | {run.seconds:.1f} | {r['steps']} | {r['requests_finished']} "
        f"| {run.reused_percent:.2f} % | {r['rehit_tokens']:,} | {r['recompute_pauses']} "
        f"| {manager['p50']:.1f} / {manager['p99']:.1f} | {r['throughput_tokens_per_s']:.0f} "
        f"| `{r['decision_digest'][:16]}…` |"
    )


def alike(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The table of the cases, and whether the digests of each are equal."""
    lines, equal = list(HEAD), True
    for case in map(int, options.only.split(",")):
        for reuse in options.reuse.split(","):
            words = [*CASES[case], "--reuse" if reuse == "yes" else "--no-reuse"]
            runs = [run(sys.executable, words, "v2cpp", "v2cpp"), run(sys.executable, words, "v2py", "v2py")]
            if options.pure:
                runs.append(run(options.pure, words, "v2py", "v2py, built with KVPOOL_NATIVE=OFF"))
            equal &= len({r.record["decision_digest"] for r in runs}) == 1
            lines += [line(case, reuse, r) for r in runs]
            print(*lines[-len(runs) :], sep="\n", flush=True)
    lines += ["", *(f"{n}: `kvpool replay {' '.join(words)}`  " for n, words in CASES.items())]
    return lines, equal


class Oracle:
    """Follows a loop's admissions and says what each may match; knows tokens and who runs, nothing of the manager."""

    def __init__(self, requests: list[TraceRequest], block: int) -> None:
        self._tokens_of = lru_cache(128)(lambda index: prompt_tokens(requests[index], 0))
        self._ended = PrefixOracle(self._tokens_of)
        self._open: set[int] = set()
        self._seen: set[int] = set()
        self._block = block
        self.timeless = PrefixOracle(self._tokens_of)
        self.timeless_tokens = 0
        """The sum over all requests if all that was computed could be matched at once."""
        self.wrong: list[tuple[int, int, int]] = []
        """Requests that matched something else: index, matched, expected."""

    def admitted(self, request: Running, lanes: Lanes) -> None:
        """A request was admitted while those of the lanes run."""
        index, most = request.spec.index, request.spec.prompt_tokens - 1
        if index in self._seen:
            raise RuntimeError(f"request {index} was paused: the memory is too small for this check")
        running = {other.spec.index: lane for lane, other in enumerate(lanes.requests)}
        for ended in self._open - running.keys():
            self._ended.add(ended, self._tokens_of(ended))
        self._open = {index, *running}
        prompt = self._tokens_of(index)
        best = self._ended.longest(prompt)
        for other, lane in running.items():
            committed = int(lanes.state[COMMITTED, lane]) - int(lane < lanes.generating and lanes.has_fed[lane])
            full = committed // self._block * self._block
            best = max(best, min(full, common_prefix(prompt, self._tokens_of(other))))
        if min(best, most) != request.matched:
            self.wrong.append((index, request.matched, min(best, most)))
        self._seen.add(index)
        self.timeless_tokens += min(self.timeless.longest(prompt), most)
        self.timeless.add(index, prompt)


def against_oracle() -> tuple[list[str], bool]:
    """The table of the runs with room for everything, and whether they equal the oracle."""
    lines = ["| requests | arm | s | steps | reused | oracle | without time | manager µs/step p50 / p99 | digest |"]
    lines.append("|" + "---|" * 9)
    equal = True
    trace = Path(os.environ["KVPOOL_DATA"]) / TRACE
    for arm, limit in (("v2cpp", 12_031), ("v2py", 2000)):
        job = prepare(ReplayOptions(trace=trace, memory=ROOM_FOR_ALL, limit=limit, arms=arm))
        opened = open_arm(job, arm)
        oracle = Oracle(job.requests, job.settings.tokens_per_block)
        opened.loop.on_admit = oracle.admitted
        begin = time.perf_counter()
        opened.run()
        seconds = time.perf_counter() - begin
        counters = opened.loop.counters
        per_step = percentiles([ns / 1e3 for ns in counters.manager_ns])
        opened.manager.shutdown()
        equal &= not oracle.wrong and len(counters.finished) == len(job.requests)
        verdict = (
            "equal, request by request" if not oracle.wrong else f"**{len(oracle.wrong)} differ**: {oracle.wrong[:3]}"
        )
        share, reused = 100 * counters.reused_tokens / counters.prompt_tokens, counters.reused_tokens
        lines.append(
            f"| {len(job.requests):,} | {arm} | {seconds:.1f} | {counters.steps:,} | {reused:,} ({share:.3f} %) | {verdict} "
            f"| {oracle.timeless_tokens:,} | {per_step.p50:.1f} / {per_step.p99:.1f} "
            f"| `{opened.loop.digest.hexdigest()[:16]}…` |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        f"`kvpool replay --trace {TRACE} --memory {ROOM_FOR_ALL}`, gpt-oss-120b.  ",
        "Without time: tokens that could be matched if an unfinished block were shared too. Seconds include the oracle's.",
    ]
    return lines, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pure", help="interpreter of a KVPOOL_NATIVE=OFF environment")
    parser.add_argument("--only", default=",".join(map(str, CASES)))
    parser.add_argument("--reuse", default="no,yes")
    parser.add_argument(
        "--oracle", action="store_true", help="the whole trace against the oracle, instead of the cases"
    )
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not os.environ.get("KVPOOL_DATA"):
        sys.exit("KVPOOL_DATA is not set: it names the folder with the public traces")
    lines, equal = against_oracle() if options.oracle else alike(options)
    if options.markdown:
        options.markdown.write_text("\n".join([machine.describe(), "", *lines]) + "\n")
    sys.exit(0 if equal else "the oracle differs" if options.oracle else "the digests differ")


if __name__ == "__main__":
    main()
