"""Wrong use is answered in one line on stderr, with exit code 2: no usage text, no box, no traceback."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from kvpool.errors import ConfigError
from kvpool.sim.usage import UsageError

EXIT_CHECK_FAILED = 1
EXIT_WRONG_USE = 2


class OneLineGroup(TyperGroup):
    """A command group whose errors are one line each."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command and, unless ``standalone_mode`` is False, leaves the process with its exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except UsageError as error:
            code = _complain(str(error), EXIT_WRONG_USE)
        except ConfigError as error:
            code = _complain(str(error), EXIT_WRONG_USE)
        except typer.Abort:
            code = _complain("aborted", 130)
        except Exception as error:
            message = getattr(error, "format_message", None)  # the framework's own: a wrong option, a bad number
            if message is None:
                raise
            code = _complain(f"{_problem(error, message())}; legal: {_legal(error)}", getattr(error, "exit_code", 2))
        code = code if isinstance(code, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code


def _problem(error: Exception, message: str) -> str:
    """The framework's message in the form of ours: the option first."""
    if "valid integer" in message:
        option = re.search(r"--[\w-]+", message)
        if option is not None:
            return f"{option.group()}: not an integer"
    return message.rstrip(".")


def _legal(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands:
        return ", ".join(commands)
    if "valid integer" in str(error):
        return "an integer"
    return f"what {getattr(context, 'command_path', 'kvpool')} --help lists"


def _complain(text: str, code: int) -> int:
    print("kvpool: " + " ".join(text.split()), file=sys.stderr)
    return code
