"""What the CUDA driver of this machine says, asked through ``dlopen``; nothing here links to it or needs it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

LIBRARY = "libcuda.so.1"
_ATTRIBUTE_VMM, _ATTRIBUTE_FABRIC = 102, 128


class DriverReport(BaseModel):
    """The driver: whether it answers, its version (``major.minor`` of the CUDA it serves), else why not."""

    ok: bool
    version: str | None
    reason: str | None


class DeviceReport(BaseModel):
    """One device. ``vmm``, ``fabric``: what the driver claims; null when it does not say."""

    index: int
    name: str
    memory_bytes: int
    vmm: bool | None
    fabric: bool | None


class _Failed(Exception):
    """A driver call that did not answer 0, or is missing."""


def probe_driver() -> tuple[DriverReport, list[DeviceReport]]:
    """The driver and the devices that it names. Never raises."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return DriverReport(ok=False, version=None, reason=f"{LIBRARY} can't be loaded: {error}"), []
    version = None
    try:
        number = ctypes.c_int(0)
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        _call(library, "cuInit", 0)
        return DriverReport(ok=True, version=version, reason=None), _devices(library)
    except _Failed as error:
        return DriverReport(ok=False, version=version, reason=str(error)), []


def _devices(library: ctypes.CDLL) -> list[DeviceReport]:
    count = ctypes.c_int(0)
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        device = ctypes.c_int(0)
        _call(library, "cuDeviceGet", ctypes.byref(device), index)
        name = ctypes.create_string_buffer(256)
        _call(library, "cuDeviceGetName", name, len(name), device)
        size = ctypes.c_size_t(0)
        _call(library, "cuDeviceTotalMem_v2", ctypes.byref(size), device)
        found.append(
            DeviceReport(
                index=index,
                name=name.value.decode(errors="replace"),
                memory_bytes=size.value,
                vmm=_attribute(library, _ATTRIBUTE_VMM, device),
                fabric=_attribute(library, _ATTRIBUTE_FABRIC, device),
            )
        )
    return found


def _attribute(library: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> bool | None:
    value = ctypes.c_int(0)
    try:
        _call(library, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    except _Failed:
        return None
    return value.value != 0


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    function: Callable[..., int] | None = getattr(library, name, None)
    if function is None:
        raise _Failed(f"{LIBRARY} has no {name}")
    code = function(*arguments)
    if code:
        raise _Failed(f"{name} answered error {code}")
