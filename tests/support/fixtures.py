"""Fixtures of the suites that build managers; a folder takes them with ``from tests.support.fixtures import …``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.arms import ARMS, Maker


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    """``v2py`` or ``v2cpp``; the latter is skipped where the extension is not built."""
    return request.param


@pytest.fixture
def make(arm: str) -> Iterator[Maker]:
    """``make(config, device="virtual")`` builds a manager of this arm; each is audited, closed and shut down at the end."""
    maker = Maker(arm)
    yield maker
    maker.finish()


@pytest.fixture(params=["host", "virtual", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
