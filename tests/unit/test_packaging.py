"""What the package promises as a package: one version, typing, a light import, documents that tell the truth."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import v2

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


# -- version, typing ---------------------------------------------------------------------------------------------------


def test_version_is_one() -> None:
    namespace: dict[str, str] = {}
    exec((ROOT / "python/kvpool/_version.py").read_text(encoding="utf-8"), namespace)
    assert kvpool.__version__ == namespace["__version__"]
    assert re.search(
        rf"^## {re.escape(kvpool.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    try:
        installed = metadata.version("kvpool")
    except metadata.PackageNotFoundError:  # run from the source tree
        return
    assert installed == kvpool.__version__


@pytest.mark.native
def test_extension_has_the_same_version() -> None:
    from kvpool import _native

    assert _native.__version__ == kvpool.__version__


def test_package_is_typed() -> None:
    package = Path(kvpool.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_native.pyi").is_file()


# -- import ------------------------------------------------------------------------------------------------------------


def test_import_loads_nothing_heavy() -> None:
    heavy = {"typer", "rich", "pydantic", "torch", "cupy", "cuda", "transformers", "matplotlib"}
    loaded = run_python(
        "import sys, kvpool, kvpool.v2; print(' '.join(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    assert not heavy & set(loaded.split())


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.skipif("KVPOOL_SANITIZED" in os.environ, reason="times mean nothing under a sanitizer")
@pytest.mark.parametrize("module", ["kvpool", "kvpool.v2"])
def test_import_costs_numpy_plus_60_ms(module: str) -> None:
    # CPU time of the process, least of several: other load on the machine must not decide.
    numpy = ours = float("inf")
    for _ in range(15):
        numpy, ours = min(numpy, cpu_seconds("import numpy")), min(ours, cpu_seconds(f"import {module}"))
        if ours <= numpy + 0.050:
            break
    assert ours <= numpy + 0.060


# -- documents ---------------------------------------------------------------------------------------------------------


def tables(document: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Each Markdown table as (heading cells, rows)."""
    lines = [*(ROOT / document).read_text(encoding="utf-8").splitlines(), ""]
    block: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif block:
            yield block[0], block[2:]
            block = []


def defaults_in_docs() -> Iterator[tuple[str, str, str]]:
    """(class, field, default) of every row in docs/configuration.md."""
    for heading, rows in tables("docs/configuration.md"):
        if heading[:2] == ["field", "default"]:
            yield from (("KVCacheManagerConfig", row[0].strip("`"), row[1]) for row in rows)
        elif heading[:3] == ["class", "field", "default"]:
            owner = ""
            for row in rows:
                owner = row[0].strip("`") or owner
                yield owner, row[1].strip("`"), row[2]


def default_of(field: dataclasses.Field[object]) -> str:
    if isinstance(field.default, enum.Enum):
        return f"`{type(field.default).__name__}.{field.default.name}`"
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`".replace("'", '"')
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def test_defaults_in_docs_are_the_codes() -> None:  # B184
    documented: dict[str, dict[str, str]] = {}
    for owner, field, default in defaults_in_docs():
        documented.setdefault(owner, {})[field] = default
    assert {"KVCacheManagerConfig", "BufferConfig", "BatchDesc"} <= documented.keys()
    for owner, fields in documented.items():
        assert fields == {f.name: default_of(f) for f in dataclasses.fields(getattr(v2, owner))}, owner


def option_defaults(command: Any) -> dict[str, str]:
    """Option → default as docs/command_line.md writes it: – for none, on or off for a switch."""
    options = {}
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        value = parameter.default
        shown = "–" if value is None else ("on" if value else "off") if isinstance(value, bool) else f"`{value}`"
        options[next(name for name in parameter.opts if name.startswith("--"))] = shown
    return options


def test_options_in_docs_are_the_programs() -> None:  # B184
    import typer.main

    from kvpool.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = (ROOT / "docs/command_line.md").read_text(encoding="utf-8")
    names = re.findall(r"^## `kvpool (\w+)`", text, re.M)
    documented = [rows for heading, rows in tables("docs/command_line.md") if heading[:2] == ["option", "default"]]
    assert set(names) == set(commands)
    for name, rows in zip(names, documented, strict=True):
        assert {row[0].strip("`"): row[1] for row in rows} == option_defaults(commands[name]), name


def shape(schema: dict[str, Any]) -> dict[str, tuple[list[str], list[str]]]:
    """Per object its fields and the required ones: what stays equal over versions of the schema's generator."""
    objects = {"": schema, **schema.get("$defs", {})}
    return {
        name: (sorted(object_["properties"]), sorted(object_.get("required", [])))
        for name, object_ in objects.items()
        if "properties" in object_
    }


def test_schemas_in_docs_are_the_codes() -> None:
    from tools.write_schemas import FILES, FOLDER, schema_of

    assert {file.stem for file in FOLDER.glob("*.json")} == set(FILES)
    for name, model in FILES.items():
        written = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert shape(written) == shape(schema_of(model)), f"{name}: run tools/write_schemas.py"


def test_readme_example_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"<!-- test: example -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert sum(1 for line in example.splitlines() if line.strip()) <= 18
    monkeypatch.setenv("TLLM_KV_CACHE_MANAGER_V2_BACKEND", backend)
    printed = run_python(example)
    assert printed.startswith("[ True  True  True  True]")


def test_links_in_docs_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


# -- source tree -------------------------------------------------------------------------------------------------------

# Layers that both cores have, and the stems that only one of them needs (docs/architecture.md says why).
TWIN_LAYERS = {"core", "device", "storage", "reuse", "page", "sequence", "manager"}


def one_sided_stems() -> dict[str, set[str]]:
    for heading, rows in tables("docs/architecture.md"):
        if heading == ["only in", "stems", "why"]:
            stems: dict[str, set[str]] = {"C++": set(), "Python": set()}
            for row in rows:
                stems[row[0]] |= set(re.findall(r"`([^`]+)`", row[1]))
            return stems
    raise AssertionError("docs/architecture.md has no table of one-sided stems")


def test_twins_share_stems() -> None:
    cpp_root, python_root = ROOT / "cpp/kvpool", ROOT / "python/kvpool/_py"
    cpp = {f.relative_to(cpp_root).with_suffix("").as_posix() for f in cpp_root.rglob("*.?pp")}
    python = {f.relative_to(python_root).with_suffix("").as_posix() for f in python_root.rglob("*.py")}
    python = {stem for stem in python if not stem.endswith("__init__")}
    assert {stem.partition("/")[0] for stem in cpp} == TWIN_LAYERS
    allowed = one_sided_stems()
    assert cpp - python == allowed["C++"]
    assert python - cpp == allowed["Python"]


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name.decode() for name in listing.split(b"\0") if name]


def test_no_machine_paths() -> None:
    # Absolute paths of somebody's machine, home folders and the like; written in parts so that this file is clean itself.
    names = (b"wor" + b"k", rb"home/\w", b"roo" + b"t", b"farm", b"tm" + b"p", b"mnt", b"Users")
    pattern = re.compile(rb"(?<![\w.])/(?:" + b"|".join(names) + rb")\b")
    for file in tracked_files():
        if file.is_file():
            found = pattern.search(file.read_bytes())
            assert found is None, f"{file.relative_to(ROOT)}: {found.group().decode()}" if found else ""
