"""The scripts in examples/, the code in docs/python.md and the picture in docs/prefix_reuse.md do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.v2 import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
)
from kvpool.v2 import _introspection as introspection

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


def test_multi_turn(backend: str) -> None:
    environment = {**os.environ, "TLLM_KV_CACHE_MANAGER_V2_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/multi_turn.py")], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    table = [tuple(map(int, line.split())) for line in lines[1:]]
    assert [(turn, user) for turn, user, *_ in table] == [(turn, user) for turn in (1, 2, 3, 4) for user in (1, 2, 3)]
    system, grown = 300, 40 + 80
    for turn, user, prompt, reused, computed in table:
        assert prompt == reused + computed == system + (turn - 1) * grown + 40
        # The system prompt from whoever came first, then all that was committed: the last token of an answer is not fed.
        assert reused == (system + (turn - 1) * grown - 1 if turn > 1 else system * (user > 1))
    assert re.fullmatch(
        rf"{backend}: 5,451 of 6,240 prompt tokens reused \(87%\), [\d,]+ keys read back, 0 wrong", last
    )
    page = (ROOT / "docs/prefix_reuse.md").read_text(encoding="utf-8")
    assert last.replace(backend, "cpp") in page
    for line in (lines[0], lines[1], lines[2], lines[4]):
        assert line in page


def test_the_picture_of_windows(backend: str) -> None:
    """docs/prefix_reuse.svg is what its tool draws, and a manager with those pages answers as it says."""
    spec = importlib.util.spec_from_file_location("draw_reuse", ROOT / "tools/draw_reuse.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.FILE.read_text(encoding="utf-8") == tool.draw()

    key = [BufferConfig("key", 16)]
    layers = [AttentionLayerConfig(0, key), AttentionLayerConfig(1, key, tool.WINDOW)]
    config = KVCacheManagerConfig(tool.BLOCK, [GpuCacheTierConfig(4 << 20)], list(layers))
    with KVCacheManager(config, backend=backend, device="virtual") as manager:
        block = None
        for number in range(tool.BLOCKS):
            tokens = list(range(tool.BLOCK * number, tool.BLOCK * (number + 1)))
            coverage = [tool.BLOCK, tool.BLOCK if number in tool.KEPT else 0]
            block = introspection.make_test_block(manager, tokens, coverage, block)
        for shared in range(1, tool.BLOCK * tool.BLOCKS + 1):
            prompt = [*range(shared), *range(9000, 9050)]
            assert manager.probe_reuse(None, prompt) == tool.longest(shared)
        assert [tool.longest(shared) for shared in tool.SHARED.values()] == [320, 128]


def test_python_page(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_KV_CACHE_MANAGER_V2_BACKEND", backend)
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    construct, share, read = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"np": np, "heads": 4, "head_dim": 64, "row": 0, "position": 999}
    exec(construct.replace("8 << 30", "2 << 30"), names)
    manager: KVCacheManager = names["manager"]
    assert manager.backend == backend
    for names["prompt"], reused in (([*range(100)], 0), ([*range(100)], 99), ([*range(80), *range(7)], 80)):
        exec(share, names)
        assert (names["done"], names["cache"].num_committed_tokens) == (reused, len(names["prompt"]))
        names["cache"].close()
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
