"""From a device name to a device."""

from __future__ import annotations

from kvpool._py.device.device import Device
from kvpool._py.device.host_device import HostDevice
from kvpool._py.device.sim_device import SimDevice
from kvpool._py.device.virtual_device import VirtualDevice
from kvpool.errors import ConfigError, UnsupportedError

DEVICE_NAMES = ("auto", "host", "virtual", "sim", "cuda")


def make_device(name: str) -> Device:
    """Device called ``name``; ``auto`` is ``host`` until a CUDA device is built.

    Raises ConfigError for a name that is not legal, UnsupportedError for ``cuda``.
    """
    if name in ("auto", "host"):
        return HostDevice()
    if name == "virtual":
        return VirtualDevice()
    if name == "sim":
        return SimDevice()
    if name == "cuda":
        raise UnsupportedError("device 'cuda' is not built yet; use 'host', 'virtual' or 'sim'")
    raise ConfigError(f"device {name!r} is not one of {', '.join(DEVICE_NAMES)}")
