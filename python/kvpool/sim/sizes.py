"""Byte sizes as people write them: ``80GiB``, ``512 MiB``, ``1.5TiB``, or a plain number of bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from kvpool.sim.usage import UsageError

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LEGAL = "bytes or a number with KiB, MiB, GiB or TiB, such as 80GiB"
_PATTERN = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", re.ASCII)
_LARGEST = 2**62


def parse_size(argument: str, text: str, *, zero: bool = False) -> int:
    """Bytes of ``text``; UsageError naming ``argument`` unless it is a whole, positive (or zero) number of bytes."""
    match = _PATTERN.fullmatch(text.strip())
    unit = None if match is None else UNITS.get(match[2])
    if match is None or unit is None:
        raise UsageError(argument, f"{text!r} is not a size", _LEGAL)
    exact = Fraction(match[1]) * unit
    if exact.denominator != 1 or exact > _LARGEST:
        raise UsageError(argument, f"{text!r} is not a whole number of bytes up to 4194304TiB", _LEGAL)
    if exact == 0 and not zero:
        raise UsageError(argument, "0 is too small", _LEGAL)
    return int(exact)


def format_size(size: int) -> str:
    """The largest unit that leaves at least one, three significant digits."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[name]:
            return f"{size / UNITS[name]:.3g} {name}" if size < 1000 * UNITS[name] else f"{size // UNITS[name]} {name}"
    return f"{size} B"
