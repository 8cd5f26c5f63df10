"""The arms of a replay: which exist here, and which run."""

from __future__ import annotations

from kvpool.sim.settings import ARM_BACKENDS, UNBUILT_ARMS
from kvpool.sim.usage import UsageError


def backend_problems() -> dict[str, str | None]:
    """Per backend why it can't be used, None when it can. A backend that fails to load is told like a missing one."""
    from kvpool.v2.backend_choice import BACKENDS, manager_core

    problems: dict[str, str | None] = {}
    for backend in BACKENDS:
        try:
            manager_core(backend)
        except (ImportError, AttributeError) as error:
            problems[backend] = " ".join(str(error).split())
        else:
            problems[backend] = None
    return problems


def check_arms(text: str | None) -> list[str]:
    """The arms to run, in their fixed order: those named (UsageError when one can't run), else all that exist."""
    problems = {arm: backend_problems()[backend] for arm, backend in ARM_BACKENDS.items()}
    existing = [arm for arm, problem in problems.items() if problem is None]
    if text is None:
        if not existing:
            raise UsageError("--arms", f"no backend can run here ({'; '.join(map(str, problems.values()))})")
        return existing
    legal = ", ".join(existing)
    named = [name.strip() for name in text.split(",")]
    for name in named:
        if name in UNBUILT_ARMS:
            raise UsageError("--arms", f"{name} is not built yet", legal)
        if name not in problems:
            raise UsageError("--arms", f"{name!r} is unknown", f"a comma-separated list of {legal}")
        if problems[name] is not None:
            raise UsageError("--arms", f"{name}: {problems[name]}", legal)
    return [arm for arm in ARM_BACKENDS if arm in named]
