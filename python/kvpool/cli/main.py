"""The application of the console script ``kvpool``: one module per command, each of which loads what it needs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool import __version__
from kvpool.cli.bench import bench
from kvpool.cli.doctor import doctor
from kvpool.cli.one_line import OneLineGroup
from kvpool.cli.plan import plan
from kvpool.cli.replay import replay

app = typer.Typer(
    name="kvpool",
    cls=OneLineGroup,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvpool {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Version.")] = False,
) -> None:
    """A KV-cache manager for LLM inference executors.

    Exit codes: 0 done; 1 a check failed; 2 wrong use, with one line that says what is legal. Sizes take KiB, MiB, GiB
    and TiB.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(replay)
app.command()(plan)
app.command()(doctor)
app.command()(bench)
