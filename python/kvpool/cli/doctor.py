"""``kvpool doctor``: what works on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpool.sim.doctor import DoctorResult

Help = typer.Option


def doctor(
    require: Annotated[list[str] | None, Help(help="cuda or fabric: exit 1 when it can't be used here.")] = None,
    peer: Annotated[bool, Help("--peer", help="Try memory between processes; not built yet.")] = False,
    model: Annotated[str | None, Help(help="Check a model on this machine; not built yet.")] = None,
    json: Annotated[Path | None, Help(help="Write the report as JSON.")] = None,
) -> None:
    """Report backends, driver, devices and fabric memory, and for each that does not work, why."""
    from kvpool.cli.one_line import EXIT_CHECK_FAILED
    from kvpool.cli.output import check_writable, write_text
    from kvpool.sim.doctor import REQUIREMENTS, examine, unmet
    from kvpool.sim.usage import UsageError, choose

    if peer:
        raise UsageError("--peer", "the check between processes is not built yet", "without --peer")
    if model is not None:
        raise UsageError("--model", "the check of a model is not built yet", "kvpool plan --model for its sizes")
    required = [choose("--require", name, REQUIREMENTS) for name in require or []]
    check_writable("--json", json)
    result = examine()
    _print(result)
    write_text("--json", json, result.model_dump_json(by_alias=True, indent=1) + "\n")
    missing = unmet(result, required)
    for line in missing:
        print(f"kvpool: {line}", file=sys.stderr)
    if missing:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print(result: DoctorResult) -> None:
    from rich.table import Table

    from kvpool.cli.output import console
    from kvpool.sim.sizes import format_size

    table = Table("", "works", "", title=f"kvpool {result.kvpool}", title_justify="left")
    for name, backend in result.backends.items():
        table.add_row(f"backend {name}", _yes(backend.ok), backend.reason or "")
    driver = result.driver
    version = "" if driver.version is None else f"CUDA {driver.version} "
    table.add_row("driver", _yes(driver.ok), version + (driver.reason or ""))
    for device in result.devices:
        table.add_row(f"device {device.index}", "", f"{device.name}, {format_size(device.memory_bytes)}")
    if not result.devices:
        table.add_row("devices", "no", "none found")
    table.add_row("fabric", _yes(result.fabric.ok), result.fabric.reason or "")
    table.add_row("device auto", "", result.device_auto)
    console().print(table)


def _yes(ok: bool) -> str:
    return "yes" if ok else "no"
