"""Data files of :mod:`kvpool.models`: presets.json (geometry), step_model.json (parameter counts, GPU constants)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load(name: str) -> dict[str, Any]:
    """The parsed file; read once, not to be changed."""
    with (Path(__file__).parent / name).open(encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content
