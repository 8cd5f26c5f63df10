"""Shows that a decode step costs the same at any context length and pool size, in instructions (callgrind).

Builds benchmarks/cpp and counts 64 steps of 256 requests: contexts of 2k to 128k tokens with 2·10⁶ slots, and pools of
2·10⁴ to 2·10⁶ slots at 2k tokens.  The bar is a ratio of at most 1.1.

    python -m benchmarks.flatness [--markdown OUT.md]      (needs cmake, g++ and valgrind)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine

ROOT = Path(__file__).parent.parent
STEPS = 64
BAR = 1.1
CONTEXTS = [(context, 2_000_000) for context in (2048, 8192, 32768, 131072)]
POOLS = [(2048, slots) for slots in (20_000, 200_000, 2_000_000)]


def build(folder: Path, target: str) -> Path:
    """Compiles a program of benchmarks/cpp as a release build; returns its path."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVPOOL_BENCHMARKS=ON", "-DKVPOOL_BINDINGS=OFF"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *options], check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", str(folder), "--target", target, "-j2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "benchmarks" / "cpp" / target


def instructions(program: Path, context: int, slots: int) -> float:
    """Instructions of one step."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"]
    command += ["--toggle-collect=timed_steps", str(program), str(context), str(slots), str(STEPS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if not found:
        raise RuntimeError(f"no count in: {done.stderr}")
    return int(found[1]) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = ["| requests | context | slots | instructions a step | ratio to the first |", "|---|---|---|---|---|"]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), "kvpool_step_instructions")
        for series in (CONTEXTS, POOLS):
            first = 0.0
            for context, slots in series:
                count = instructions(program, context, slots)
                first = first or count
                worst = max(worst, count / first)
                lines.append(f"| 256 | {context:,} | {slots:,} | {count:,.0f} | {count / first:.3f} |")
                print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text(f"{machine.describe()}\n\n" + "\n".join(lines) + "\n")
    sys.exit(0 if worst <= BAR else f"a ratio of {worst:.3f} is above {BAR}")


if __name__ == "__main__":
    main()
