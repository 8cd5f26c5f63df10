"""Which backend runs: an explicit choice, never a silent fall-back.

``backend=`` wins over the environment variable ``TLLM_KV_CACHE_MANAGER_V2_BACKEND``, which is read at every
construction; without either it is ``cpp``.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import cast

from kvpool.errors import ConfigError
from kvpool.v2._backend import ManagerCore

ENVIRONMENT_VARIABLE = "TLLM_KV_CACHE_MANAGER_V2_BACKEND"
BACKENDS = ("cpp", "python")
DEVICES = ("auto", "host", "virtual", "sim", "cuda")

_REMEDY = (
    "the 'cpp' backend needs the compiled extension kvpool._native, which {problem}. Install a kvpool wheel for this "
    "platform or build it (KVPOOL_NATIVE=ON, a C++20 compiler), or ask for the Python backend: backend='python' or "
    f"{ENVIRONMENT_VARIABLE}=python"
)


def choose_backend(backend: str | None = None) -> str:
    """``"cpp"`` or ``"python"``; ConfigError naming the two for any other value."""
    origin, value = "backend", backend
    if value is None:
        origin, value = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "cpp")
    if not isinstance(value, str) or value not in BACKENDS:
        raise ConfigError(f"{origin} must be 'cpp' or 'python', not {value!r}")
    return value


def native_module() -> ModuleType:
    """``kvpool._native``; ImportError with the remedy when it is missing or does not load."""
    try:
        module = importlib.import_module("kvpool._native")
    except ModuleNotFoundError as error:
        if error.name != "kvpool._native":
            raise ImportError(_REMEDY.format(problem=f"failed to load ({error})"), name="kvpool._native") from error
        raise ImportError(_REMEDY.format(problem="is not installed"), name="kvpool._native") from error
    except ImportError as error:
        raise ImportError(_REMEDY.format(problem=f"failed to load ({error})"), name="kvpool._native") from error
    return module


def manager_core(backend: str) -> type[ManagerCore]:
    """The manager class of a backend chosen by :func:`choose_backend`."""
    if backend == "cpp":
        return cast("type[ManagerCore]", native_module().Manager)
    return cast("type[ManagerCore]", importlib.import_module("kvpool._py.manager.manager").Manager)


def check_device(device: str) -> str:
    """A legal device name; ConfigError naming the legal ones otherwise."""
    if not isinstance(device, str) or device not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, not {device!r}")
    return device
