"""Fixtures of the suites that build managers; a folder takes them with ``from tests.support.fixtures import …``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.arms import ARMS, Maker
from tests.support.configs import full
from tests.support.reuse import Lab, ids


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


@pytest.fixture
def lab(make: Maker) -> Lab:
    """Eight slots of full attention, in which 48 tokens are cached."""
    lab = Lab(make, full(8), "virtual")
    lab.run(ids(48))
    return lab


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Threads change places as often as the interpreter can."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(old)
