"""``kvpool bench``: micro-benchmarks of the manager."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Help = typer.Option


def bench(
    filter: Annotated[str | None, Help(help="A part of the names to run, or a pattern such as 'a.*'.")] = None,  # noqa: A002
    json: Annotated[Path | None, Help(help="Write the rows as JSON.")] = None,
) -> None:
    """Time the manager's calls on this machine, for every backend that exists."""
    from rich.table import Table

    from kvpool.cli.output import check_writable, console, write_text
    from kvpool.sim.bench import as_result, run_bench

    check_writable("--json", json)
    table = Table("case", "backend", "median", "min", "max", "unit", "n")
    rows = []
    for row in run_bench(filter):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"{row.name} {row.backend}: {row.median:.2f} {row.unit}", file=sys.stderr)
        table.add_row(
            row.name, row.backend, f"{row.median:,.2f}", f"{row.min:,.2f}", f"{row.max:,.2f}", row.unit, str(row.n)
        )
    console().print(table)
    write_text("--json", json, as_result(rows).model_dump_json(by_alias=True, indent=1) + "\n")
