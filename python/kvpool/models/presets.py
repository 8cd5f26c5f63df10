"""Named models: the rows of data/presets.json."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.data import load
from kvpool.models.geometry import ModelGeometry
from kvpool.models.hardware import published_parameters
from kvpool.models.layers import AttentionLayer, CompressedLayer, Layer, MlaLayer, NoCacheLayer, StateLayer

__all__ = ["HOW_TO_DESCRIBE", "PRESETS", "expand_pattern", "get_model", "preset_of"]

_FILE = "presets.json"

PRESETS: tuple[str, ...] = tuple(sorted(load(_FILE)["models"]))
"""Names of all presets, sorted."""

HOW_TO_DESCRIBE = (
    "describe its layers by hand: kvpool.models.ModelGeometry('mine', max_position_embeddings=32768, "
    "layers=(AttentionLayer(kv_heads=8, head_dim=128, window=1024), AttentionLayer(kv_heads=8, head_dim=128)) * 16)"
)
"""The tail of every error about a model that kvpool does not know."""

_KINDS: Mapping[str, Callable[..., Layer]] = {
    "attention": AttentionLayer,
    "mla": MlaLayer,
    "compressed": CompressedLayer,
    "mamba2": StateLayer.mamba2,
    "gdn": StateLayer.gdn,
    "kda": StateLayer.kda,
    "none": NoCacheLayer,
}
_REPEAT = re.compile(r"\(([^()]+)\)x(\d+)|([^()\d\s])(?:x(\d+))?")


def expand_pattern(pattern: str) -> str:
    """One letter per layer: ``"Fss(sF)x2"`` is ``"FsssFsF"``, ``"Fx3"`` is ``"FFF"``."""
    letters, end = [], 0
    for match in _REPEAT.finditer(pattern):
        if match.start() != end:
            break
        group, times, letter, letter_times = match.groups()
        letters.append(group * int(times) if group else letter * int(letter_times or 1))
        end = match.end()
    if end != len(pattern):
        raise ConfigError(f"layer pattern {pattern!r} is not understood from {pattern[end:]!r} on")
    return "".join(letters)


def _row(name: str) -> Mapping[str, Any]:
    models: dict[str, dict[str, Any]] = load(_FILE)["models"]
    row = models[name]
    return {**models[row["same_as"]], **row} if "same_as" in row else row


@cache
def _preset(name: str) -> ModelGeometry:
    row = _row(name)
    kinds: dict[str, Layer] = {}
    for letter, kind in row["kinds"].items():
        arguments = dict(kind)
        kinds[letter] = _KINDS[arguments.pop("type")](**arguments)
    return ModelGeometry(
        name=name,
        max_position_embeddings=row["max_position_embeddings"],
        layers=tuple(kinds[letter] for letter in expand_pattern(row["layers"])),
        draft_kind=kinds[row["draft"]] if "draft" in row else None,
        published_draft_layers=row.get("draft_layers", 0),
        parameters=published_parameters(name),
        source=f"{row['hf'][0]}: {load(_FILE)['sources'][row['source']]}",
    )


@cache
def _hub_names() -> Mapping[str, str]:
    return {hub.lower(): name for name, row in load(_FILE)["models"].items() for hub in row["hf"]}


def preset_of(name: str) -> ModelGeometry | None:
    """The preset with this name or Hugging Face id (``org/model`` or ``org--model``, any case); None without one."""
    key = name.lower()
    key = _hub_names().get(key.replace("--", "/", 1), key)
    return _preset(key) if key in PRESETS else None


def get_model(name_or_path: str | Path, *, mtp_layers: int = 0) -> ModelGeometry:
    """A preset by name or Hugging Face id, or the model of a config.json (or of a folder that holds one).

    ``mtp_layers`` adds draft layers on the last pipeline rank.  ConfigError for an unknown name: near names, and how to
    pass a config.json or describe layers by hand.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise TypeError(f"a model is a preset name or a path, not {type(name_or_path).__name__}")
    model = preset_of(str(name_or_path))
    if model is None:
        model = _from_path(name_or_path)
    return model.with_draft_layers(mtp_layers) if mtp_layers else model


def _from_path(name_or_path: str | Path) -> ModelGeometry:
    from kvpool.models.hf import from_hf_config

    path, name = Path(name_or_path), str(name_or_path)
    if name and (path.suffix == ".json" or path.exists()):
        return from_hf_config(path)
    near = difflib.get_close_matches(name.lower(), PRESETS, n=5, cutoff=0.5)
    near += [p for p in PRESETS if name and p not in near and name.lower() in p][: 5 - len(near)]
    hint = f"near: {', '.join(near)}" if near else f"presets: {', '.join(PRESETS)}"
    raise ConfigError(f"unknown model {name!r} ({hint}); pass the path of its config.json, or {HOW_TO_DESCRIBE}")
