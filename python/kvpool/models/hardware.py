"""Constants for a step model: GPUs and parameter counts, each with its source (data/step_model.json)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.data import load
from kvpool.models.geometry import ModelParameters

__all__ = ["GPUS", "GpuSpec", "hardware", "published_parameters"]

_FILE = "step_model.json"

GPUS: tuple[str, ...] = tuple(load(_FILE)["gpus"])
"""Names that :func:`hardware` knows."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU. Bandwidths are bytes/s, the host link counts one direction, FLOP/s are dense bfloat16."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops_per_s: float
    host_link_bytes_per_s: float
    sources: MappingProxyType[str, str]  # per field


def hardware(name: str) -> GpuSpec:
    """The constants of a GPU. ConfigError names the legal ones."""
    gpus: dict[str, dict[str, Any]] = load(_FILE)["gpus"]
    if name not in gpus:
        raise ConfigError(f"unknown GPU {name!r}; legal: {', '.join(gpus)}")
    row = {**gpus[name], "sources": MappingProxyType(dict(gpus[name]["sources"]))}
    return GpuSpec(name=name, **row)


def published_parameters(name: str) -> ModelParameters | None:
    """Parameter counts of a preset, None for a name that is not one."""
    row = load(_FILE)["parameters"].get(name)
    return None if row is None else ModelParameters(**row)
