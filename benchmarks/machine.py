"""Describes the machine a table was measured on, so that a figure is never quoted without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np


def cpu_model() -> str:
    """The processor's own name, from /proc/cpuinfo where that exists."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Physical memory in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe() -> str:
    """One line: processor, cores, memory, system, Python, numpy."""
    return (
        f"{cpu_model()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB, {platform.system()} {platform.release()}, "
        f"CPython {platform.python_version()}, numpy {np.__version__}; a shared virtual machine, no GPU"
    )
