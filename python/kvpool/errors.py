"""Every exception kvpool raises, for both backends.

The classes derive from the built-in errors that callers of comparable managers already catch, so one ``except`` clause
written for those keeps working here.  "Not now" is never an exception: ``resize`` and ``resume`` answer ``False``.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ConfigError",
    "CorruptedError",
    "CuError",
    "CuOOMError",
    "DiskOOMError",
    "HostOOMError",
    "LogicError",
    "NeverFitsError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "ResourceBusyError",
    "UnknownBufferError",
    "UnsupportedError",
]


class ConfigError(ValueError, AssertionError):
    """A configuration that can not work; the message names the field and what is legal."""


class UnknownBufferError(ConfigError, KeyError):
    """A layer, role or layer group that the configuration does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class ArgumentError(ValueError, AssertionError):
    """An argument of the right type but out of its legal range."""


class LogicError(RuntimeError, AssertionError):
    """A call that the object's state does not allow (use after close, wrong order, two threads in one cache)."""


class UnsupportedError(NotImplementedError):
    """A legal request that this build or device can not serve; the message says what would."""


class OutOfMemoryError(MemoryError):
    """Memory of some kind ran out."""


class OutOfPagesError(OutOfMemoryError):
    """A pool group has not enough free slots now; the same call may succeed later."""


class NeverFitsError(OutOfPagesError):
    """More slots than the pool group has in all: waiting does not help."""


class HostOOMError(OutOfMemoryError):
    """Host memory could not be had."""


class DiskOOMError(OutOfMemoryError):
    """Disk space could not be had."""


class CuOOMError(OutOfMemoryError):
    """Device memory could not be had."""


class CuError(Exception):
    """A driver call failed; ``error_code`` is the driver's number."""

    def __init__(self, error_code: int, message: str = "") -> None:
        super().__init__(message or f"driver error {error_code}")
        self.error_code = error_code

    def __reduce__(self) -> tuple[type[CuError], tuple[int, str]]:
        return type(self), (self.error_code, str(self))


class ResourceBusyError(Exception):
    """The resource is in use by someone else."""


class CorruptedError(Exception):
    """An internal invariant was found broken: this manager must not be used any further."""
