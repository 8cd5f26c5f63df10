"""How many requests really fit together, for every preset and a range of lengths, against the ideal.

Each manager is planned for one length (as `kvpool plan` does); then requests are opened on the `virtual` device, each
held at its heaviest state of that length, until one is refused.  The bar is 98 % of the ideal, rounded down.

    python -m benchmarks.sizing [--memory 40] [--models a,b] [--backend cpp|python] [--markdown OUT.md]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from kvpool.errors import ConfigError
from kvpool.models import PRESETS, ModelGeometry, get_model
from kvpool.sim.layer_groups import group_sizes
from kvpool.sim.plan import plan_config
from kvpool.v2 import KVCacheManager

LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Fit:
    """Requests of one length on one model."""

    model: str
    length: int
    ideal: int
    opened: int

    @property
    def bar(self) -> int:
        return self.ideal * 98 // 100

    @property
    def ok(self) -> bool:
        return self.opened >= self.bar


def open_until_refused(manager: KVCacheManager, capacity: int) -> int:
    """How many requests at (capacity, capacity - 1) are open at once before one is refused."""
    opened = 0
    while True:
        cache = manager.create_kv_cache()
        cache.stop_committing()
        if not (cache.resume(None) and cache.resize(capacity, capacity - 1)):
            return opened
        opened += 1


def measure(model: ModelGeometry, length: int, memory: int, backend: str) -> Fit:
    """Plans for `length`, opens, counts."""
    block = model.default_tokens_per_block
    config, (capacity, history) = plan_config(model, memory=memory, tokens_per_block=block, length=length)
    need = sum(group.blocks(capacity, history) * group.slot_bytes for group in group_sizes(config))
    ideal = memory // need
    try:
        manager = KVCacheManager(config, backend=backend, device="virtual")
    except ConfigError:
        return Fit(model.name, length, ideal, 0)
    return Fit(model.name, length, ideal, open_until_refused(manager, capacity))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, default=40, help="GiB")
    parser.add_argument("--models", default=",".join(PRESETS))
    parser.add_argument("--backend", default="cpp", choices=("cpp", "python"))
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lengths = LENGTHS
    lines = [
        f"{options.memory} GiB, backend {options.backend}: requests open together / ideal, planned for each length.",
        f"Measured on {machine.describe()}.",
        "",
        "| model | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    missed: list[Fit] = []
    for name in options.models.split(","):
        model = get_model(name)
        cells = []
        for length in lengths:
            if length > model.max_position_embeddings:
                cells.append("")
                continue
            fit = measure(model, length, options.memory << 30, options.backend)
            cells.append(f"{fit.opened} / {fit.ideal}" + ("" if fit.ok else " **missed**"))
            if not fit.ok:
                missed.append(fit)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    sys.exit("\n".join(f"missed: {fit}" for fit in missed) or 0)


if __name__ == "__main__":
    main()
