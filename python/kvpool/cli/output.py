"""Where results go: a table on stdout, JSON into the file that was asked for, progress on a terminal's stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.sim.usage import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.sim.replay import Progress


def check_writable(argument: str, path: Path | None) -> None:
    """UsageError before any long work when the file can't be written."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(argument, f"{path} can't be written", "a file in an existing, writable folder")


def write_text(argument: str, path: Path | None, text: str) -> None:
    """Writes a result; UsageError when the file system refuses."""
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(argument, f"{path} can't be written ({(error.strerror or str(error)).lower()})") from None


def console() -> Console:
    """Stdout; wide enough for a table where it is not a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console()
    return Console(width=160, highlight=False)


@contextmanager
def progress_bar(total: int) -> Iterator[Progress | None]:
    """A bar per label on stderr if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as bar:

        def report(label: str, ended: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=ended)

        yield report
