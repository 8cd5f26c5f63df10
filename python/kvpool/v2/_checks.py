"""How the facade checks values: configuration fields (always ``ConfigError``) and call arguments
(``TypeError`` for a wrong type, ``ArgumentError`` for a value out of range).

Any ``numbers.Integral`` counts as an integer, so numpy's integers do; a bool does not.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvpool.errors import ArgumentError, ConfigError
from kvpool.v2.types import PageIndexMode

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
BYTES_MAX = 2**62
"""No byte count may exceed this, so that the sums of a layout stay far from the end of int64."""

T = TypeVar("T")


def is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def config_int(where: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    """``value`` as an int of [low, high]; ConfigError naming ``where`` otherwise."""
    if is_integer(value) and low <= value <= high:
        return int(value)
    raise ConfigError(f"{where} must be an integer from {low} to {high}, not {value!r}")


def config_bytes(where: str, value: Any) -> int:
    return config_int(where, value, 1, BYTES_MAX)


def config_real(where: str, value: Any, legal: str, is_legal: Callable[[float], bool]) -> float:
    """``value`` as a float for which ``is_legal`` holds; ``legal`` says in words what that means."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if is_legal(number):
            return number
    raise ConfigError(f"{where} must be {legal}, not {value!r}")


def config_bool(where: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise ConfigError(f"{where} must be True or False, not {value!r}")


def config_list(where: str, value: Any, kinds: tuple[type[T], ...]) -> list[T]:
    """``value`` (a list or tuple of the given classes) as a list."""
    names = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} must be a list of {names}, not {value!r}")
    for position, item in enumerate(value):
        if not isinstance(item, kinds):
            raise ConfigError(f"{where}[{position}] must be {names}, not {item!r}")
    return value if type(value) is list else list(value)


def config_optional(where: str, value: Any, kind: type[T]) -> T | None:
    if value is None or isinstance(value, kind):
        return value
    raise ConfigError(f"{where} must be None or {kind.__name__}, not {value!r}")


def arg_int(name: str, value: Any, low: int = 0, high: int = INT32_MAX) -> int:
    """``value`` as an int of [low, high]."""
    if type(value) is not int and not is_integer(value):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not low <= number <= high:
        raise ArgumentError(f"{name} must be from {low} to {high}, not {number}")
    return number


def arg_index_mode(value: Any) -> PageIndexMode:
    """``value`` as a PageIndexMode; its number will do."""
    number = arg_int("index mode", value, min(PageIndexMode), max(PageIndexMode))
    return PageIndexMode(number)


def arg_bool(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {type(value).__name__}")
