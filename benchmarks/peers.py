"""The decode step beside other managers, in one run on one machine.

Runs the peers' own scripts (found by `KVPOOL_PEERS`, see the README there; `run.sh setup` makes their environments) and
ours in turn, and prints the ratios that matter: ours against vLLM, SGLang and the C++ floor.

    KVPOOL_PEERS=… python -m benchmarks.peers [--block 32] [--markdown OUT.md]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from benchmarks.decode_step import Row, measure

DECODE = "b.decode256@2k"
PEERS = ("floor", "sglang", "vllm")


def run_peer(home: Path, peer: str, out: Path) -> list[dict[str, object]]:
    """Runs one peer's script and returns the rows it appended."""
    done = out.read_text().count("\n") if out.exists() else 0
    subprocess.run(["bash", str(home / "run.sh"), peer], env={**os.environ, "PEER_OUT": str(out)}, check=True)
    return [json.loads(line) for line in out.read_text().splitlines()[done:]]


def decode_row(rows: list[dict[str, object]], block: int) -> dict[str, object]:
    """The peer's batched decode row: with caching on where it tells (its default), the fastest otherwise."""
    mine = [r for r in rows if str(r["case"]).startswith(DECODE) and r["block"] == block]
    return min(mine, key=lambda r: float(str(r["median"])))


def table(ours: list[Row], theirs: dict[str, dict[str, object]]) -> str:
    """Markdown: a line a manager, and how many times the fastest of ours it takes."""
    lines = [
        "| manager | what is timed | median µs | mean µs | p99 µs | × v2cpp | × v2py |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {row.peer: row.median for row in ours}
    for row in ours:
        lines.append(
            f"| {row.peer} | {row.case} | {row.median:.2f} | {row.mean:.2f} | {row.p99:.2f} "
            f"| {row.median / base['kvpool v2cpp']:.2f} | {row.median / base['kvpool v2py']:.2f} |"
        )
    for name, row in theirs.items():
        median = float(str(row["median"]))
        mean = f"{float(str(row['mean'])):.2f}" if "mean" in row else ""
        lines.append(
            f"| {row['peer']} ({name}) | {row['case']}: {row['method']} | {median:.2f} | {mean} | "
            f"| {median / base['kvpool v2cpp']:.2f} | {median / base['kvpool v2py']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    home = os.environ.get("KVPOOL_PEERS")
    if not home:
        sys.exit("KVPOOL_PEERS is not set: it names the folder with the peers' run.sh")
    ours: list[Row] = []
    theirs: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peers.jsonl"
        for peer in PEERS:
            theirs[peer] = decode_row(run_peer(Path(home), peer, out), options.block)
    for backend in ("cpp", "python"):
        ours.append(measure(backend, options.block, options.steps))
    text = f"{machine.describe()}\n\n{table(ours, theirs)}\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
