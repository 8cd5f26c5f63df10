"""What every test may rely on: markers, Hypothesis profiles, the public data files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
HAVE_NATIVE = importlib.util.find_spec("kvpool._native") is not None

settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sanitized", settings.get_profile("default"), max_examples=10, stateful_step_count=20)
settings.register_profile(
    "long", settings.get_profile("default"), derandomize=False, max_examples=2000, print_blob=True
)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked ``native`` needs the extension, one marked ``gpu`` a CUDA device; they skip with the reason."""
    skip_native = pytest.mark.skip(reason="kvpool._native is not built (KVPOOL_NATIVE=OFF)")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device and kvpool's cuda device, which is not built yet")
    for item in items:
        if not HAVE_NATIVE and item.get_closest_marker("native"):
            item.add_marker(skip_native)
        if item.get_closest_marker("gpu"):
            item.add_marker(skip_gpu)


@pytest.fixture(params=["cpp", "python"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each V2 backend in turn."""
    if request.param == "cpp" and not HAVE_NATIVE:
        pytest.skip("kvpool._native is not built (KVPOOL_NATIVE=OFF)")
    return str(request.param)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the public traces and model configurations, named by KVPOOL_DATA."""
    name = os.environ.get("KVPOOL_DATA")
    if not name:
        pytest.skip("KVPOOL_DATA is not set (README: public traces)")
    path = Path(name)
    assert path.is_dir(), f"KVPOOL_DATA={name} is no directory"
    return path


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT
