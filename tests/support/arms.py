"""The arms under test and how a test gets a manager of one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvpool.v2 import KVCacheManager, KVCacheManagerConfig

BACKEND_OF = {"v2py": "python", "v2cpp": "cpp"}
NATIVE = importlib.util.find_spec("kvpool._native") is not None
needs_native = pytest.mark.skipif(not NATIVE, reason="the extension kvpool._native is not built")
ARMS = [pytest.param("v2py", id="v2py"), pytest.param("v2cpp", id="v2cpp", marks=[pytest.mark.native, needs_native])]
AVAILABLE = [arm for arm in BACKEND_OF if arm == "v2py" or NATIVE]


def build(arm: str, config: KVCacheManagerConfig, device: str = "virtual") -> Any:
    manager = KVCacheManager(config, backend=BACKEND_OF[arm], device=device)
    assert manager.backend == BACKEND_OF[arm]
    return manager


class Maker:
    """Builds managers and, at the end, audits them, closes what is open and checks that no page stayed used (I5)."""

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self._managers: list[Any] = []
        self._caches: list[Any] = []

    def __call__(self, config: KVCacheManagerConfig, device: str = "virtual") -> Any:
        manager = build(self.arm, config, device)
        self._managers.append(manager)
        return manager

    def open(self, manager: Any, *, stop: bool = True, stream: int | None = None) -> Any:
        """A new ACTIVE cache; with ``stop`` it never commits, as executors without reuse do."""
        cache = manager.create_kv_cache()
        self._caches.append(cache)
        if stop:
            cache.stop_committing()
        assert cache.resume(stream)
        return cache

    def track(self, cache: Any) -> Any:
        self._caches.append(cache)
        return cache

    def forget(self, manager: Any) -> None:
        """The test shuts this one down itself."""
        self._managers = [m for m in self._managers if m is not manager]

    def finish(self) -> None:
        for manager in self._managers:
            manager.audit()
        for cache in self._caches:
            cache.close()
        for manager in self._managers:
            if manager.snapshot()["caches"]:
                continue  # the test left one open on purpose
            for stats in manager.get_storage_statistics():
                assert stats.free + stats.evictable == stats.total
            manager.clear_reusable_blocks()
            for group in manager.snapshot()["pool_groups"]:
                assert group["used"] == []
                assert group["free"] == group["total"]
            manager.shutdown()
