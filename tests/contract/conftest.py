from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:  # pytest's importlib mode leaves the path alone
    sys.path.insert(0, ROOT)

from tests.support.fixtures import arm, device, fast_switching, lab, make  # noqa: E402, F401
