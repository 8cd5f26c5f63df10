"""The four replays that both backends must decide alike, timed as whole processes.

    KVPOOL_DATA=… python -m benchmarks.replay [--pure PYTHON] [--only 1,3] [--markdown OUT.md]

`--pure` names the interpreter of an environment whose kvpool was built with KVPOOL_NATIVE=OFF: its v2py arm must give the
same digest.
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
from pathlib import Path

from benchmarks import machine

TRACE = "mooncake_conversation_trace.jsonl"
CASES: dict[int, list[str]] = {
    1: ["--trace", TRACE, "--model", "gpt-oss-120b", "--memory", "60GiB", "--limit", "2000", "--arrival", "trace"],
    2: ["--trace", TRACE, "--model", "gpt-oss-120b", "--memory", "60GiB", "--limit", "2000", "--arrival", "now"],
    3: ["--workload", "1k8k", "--limit", "256", "--memory", "10GiB"],
    4: ["--trace", TRACE, "--model", "gemma-3-27b", "--memory", "60GiB", "--arrival", "now", "--limit", "300"],
}


@dataclass(frozen=True)
class Run:
    """One arm of one case in a process of its own."""

    case: int
    arm: str
    seconds: float
    record: dict[str, object]


def run(python: str, case: int, arm: str) -> Run:
    """Replays one case with one arm; seconds are the whole process's."""
    data = Path(os.environ["KVPOOL_DATA"])
    words = [str(data / word) if word == TRACE else word for word in CASES[case]]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-m", "kvpool.cli", "replay", *words, "--no-reuse", "--arms", arm, "--json", str(out)]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        return Run(case, arm, seconds, json.loads(out.read_text())["arms"][arm])


def line(run: Run, label: str) -> str:
    """One Markdown row."""
    r = run.record
    manager = r["manager_us_per_step"]
    assert isinstance(manager, dict)
    return (
        f"| {run.case} | {label} | {run.seconds:.1f} | {r['steps']} | {r['requests_finished']} | {r['recompute_pauses']} "
        f"| {manager['p50']:.1f} / {manager['p99']:.1f} | {float(str(r['throughput_tokens_per_s'])):.0f} "
        f"| `{str(r['decision_digest'])[:16]}…` |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pure", help="interpreter of a KVPOOL_NATIVE=OFF environment")
    parser.add_argument("--only", default="1,2,3,4")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not os.environ.get("KVPOOL_DATA"):
        sys.exit("KVPOOL_DATA is not set: it names the folder with the public traces")
    lines = [
        machine.describe(),
        "",
        (
            "| case | arm | process s | steps | finished | recompute pauses | manager µs/step p50 / p99 "
            "| tokens/s (simulated) | digest |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    equal = True
    for case in map(int, options.only.split(",")):
        runs = [(run(sys.executable, case, "v2cpp"), "v2cpp"), (run(sys.executable, case, "v2py"), "v2py")]
        if options.pure:
            runs.append((run(options.pure, case, "v2py"), "v2py, built with KVPOOL_NATIVE=OFF"))
        equal &= len({r.record["decision_digest"] for r, _ in runs}) == 1
        lines += [line(r, label) for r, label in runs]
        print(*lines[-len(runs) :], sep="\n", flush=True)
    lines += ["", *(f"{n}: `kvpool replay {' '.join(words)}`  " for n, words in CASES.items())]
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    sys.exit(0 if equal else "the digests differ")


if __name__ == "__main__":
    main()
