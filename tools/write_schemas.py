"""Writes docs/schemas/*.json, the JSON schemas of the files that the command line writes, from the classes that write them.

Run it after a change of those classes: ``python tools/write_schemas.py`` (with kvpool importable).
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from kvpool.sim.bench import BenchResult
from kvpool.sim.doctor import DoctorResult
from kvpool.sim.plan import PlanResult
from kvpool.sim.result import ReplayResult, RequestLine

FOLDER = Path(__file__).resolve().parent.parent / "docs/schemas"
FILES: dict[str, type[BaseModel]] = {
    "replay": ReplayResult,
    "replay_requests": RequestLine,
    "plan": PlanResult,
    "doctor": DoctorResult,
    "bench": BenchResult,
}


def schema_of(model: type[BaseModel]) -> dict[str, object]:
    """As written: field names by alias, and every field present."""
    return model.model_json_schema(by_alias=True, mode="serialization")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, model in FILES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(schema_of(model), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
