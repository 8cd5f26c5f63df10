"""kvpool: a KV-cache manager for LLM inference executors.

``kvpool.v2`` is the V2 manager on two interchangeable backends, ``kvpool.errors`` holds every exception.  Sub-packages
are loaded when they are first used, so that ``import kvpool`` itself costs next to nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kvpool._version import __version__

__all__ = ["__version__", "errors", "v2"]

_SUBMODULES = frozenset({"errors", "v2"})


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
