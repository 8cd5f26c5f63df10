"""A wrong use of a command: the caller's mistake, told in one line."""

from __future__ import annotations


class UsageError(Exception):
    """An argument that is not legal; ``str()`` is one line ``argument: what is wrong; what is legal``."""

    def __init__(self, argument: str, problem: str, legal: str | None = None) -> None:
        self.argument = argument
        text = f"{argument}: {problem}" if legal is None else f"{argument}: {problem}; legal: {legal}"
        super().__init__(" ".join(text.split()))


def choose(argument: str, value: str, legal: tuple[str, ...], unbuilt: tuple[str, ...] = ()) -> str:
    """``value`` if it is one of ``legal``; UsageError that tells a value to come from an unknown one."""
    if value in legal:
        return value
    known = ", ".join(legal)
    if value in unbuilt:
        raise UsageError(argument, f"{value} is not built yet", known)
    raise UsageError(argument, f"{value!r} is unknown", known)
