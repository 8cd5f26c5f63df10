"""Instructions of look-ups and commits as the tree grows, counted by callgrind; `benchmarks.prefix --instructions` prints it.

Trees of 10³ to 10⁶ nodes with at most two children each, and one node with 2 to 10⁵ children.  Counted are, per call:
`probe` (probe_reuse of a cached prompt and 8 new tokens), `create` (match and ownership, then close), `branch` (a new request
that leaves a cached block in its middle: match, private copies, resize, commit of two blocks, close).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from benchmarks.flatness import build

QUERIES = 64
CALLS = ("probe", "create", "branch")
NODES = (1_000, 10_000, 100_000, 1_000_000)
CHILDREN = (2, 10, 100, 1_000, 10_000, 100_000)
BAR = 1.5
"""The most that the largest tree may cost over the smallest: look-ups may grow with the logarithm of the children."""


def instructions(program: Path, kind: str, count: int) -> dict[str, float]:
    """Instructions of each call."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--collect-atstart=no"]
        command += [f"--toggle-collect=timed_{call}" for call in CALLS]
        subprocess.run([*command, str(program), kind, str(count)], check=True, capture_output=True)
        shown = subprocess.run(
            ["callgrind_annotate", "--inclusive=yes", "--threshold=100", "--show-percs=no", str(out)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = {}
    for call in CALLS:
        line = re.search(rf"^\s*([\d,]+)\s.*\btimed_{call}\b", shown, re.M)
        if line is None:
            raise RuntimeError(f"no count of timed_{call} in callgrind's output")
        found[call] = int(line[1].replace(",", "")) / QUERIES
    return found


def table() -> tuple[list[str], str | None]:
    """Markdown, and what is wrong: a ratio above the bar."""
    lines = [
        "| tree | " + " | ".join(f"{call}, ratio to the first" for call in CALLS) + " |",
        "|---|" + "---|" * len(CALLS),
    ]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), "kvpool_prefix_instructions")
        for kind, counts in (("nodes", NODES), ("children", CHILDREN)):
            first: dict[str, float] = {}
            for count in counts:
                found = instructions(program, kind, count)
                first = first or found
                ratios = {call: found[call] / first[call] for call in CALLS}
                worst = max(worst, *ratios.values())
                cells = [f"{found[call]:,.0f} ({ratios[call]:.3f})" for call in CALLS]
                lines.append(f"| {count:,} {kind} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    return lines, None if worst <= BAR else f"a ratio of {worst:.3f} is above {BAR}"
