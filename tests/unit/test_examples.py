"""The scripts in examples/ and the code in docs/python.md do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.v2 import KVCacheManager

ROOT = Path(__file__).resolve().parents[2]


def test_decode_loop(backend: str) -> None:
    environment = {**os.environ, "TLLM_KV_CACHE_MANAGER_V2_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/decode_loop.py")], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = re.fullmatch(r"12 requests, (\w+): ([\d,]+) keys read, 0 wrong, (\d+) pauses\n", done.stdout)
    assert printed is not None, done.stdout
    assert printed[1] == backend
    assert int(printed[2].replace(",", "")) > 100_000
    assert int(printed[3]) > 0  # it is meant to show what too little memory does


def test_python_page(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_KV_CACHE_MANAGER_V2_BACKEND", backend)
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    construct, read = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"np": np, "heads": 4, "head_dim": 64, "row": 0, "position": 999}
    exec(construct.replace("8 << 30", "2 << 30"), names)
    manager: KVCacheManager = names["manager"]
    assert manager.backend == backend
    with manager, manager.create_kv_cache() as cache:
        cache.stop_committing()
        assert cache.resume()
        names["table"] = table = np.full((len(manager.layer_grouping), 1, 64), -1, np.int32)
        handles, rows = np.array([cache.handle]), np.array([0], np.int32)
        for _, capacity, history in re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE):
            capacities, histories = np.array([int(capacity)], np.int32), np.array([int(history)], np.int32)
            assert manager.step(handles, rows, capacities, histories, table).ok.all()
        assert (cache.capacity, cache.history_length) == (1002, 1001)
        exec(read.replace("keys[table", "token = keys[table"), names)
        assert names["token"].shape == (4, 64)
        assert cache.resize(1001, 1001)  # draft tokens refused
