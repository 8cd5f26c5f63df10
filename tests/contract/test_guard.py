"""Shutdown refuses while caches are open (scenarios 28, 29), and what remains possible afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvpool.errors import LogicError
from tests.support.arms import build
from tests.support.configs import MIB, full


@pytest.mark.parametrize("count", [1, 2, 5])
def test_scenario_28_shutdown_refuses(arm, device, count) -> None:
    manager = build(arm, full(8), device)
    caches = [manager.create_kv_cache() for _ in range(count)]
    assert caches[0].resume()
    assert caches[0].resize(40)
    before = manager.snapshot()
    with pytest.raises(LogicError, match=rf"shutdown.*\b{count} KV cache\(s\) still open"):
        manager.shutdown()
    assert manager.snapshot() == before
    late = manager.create_kv_cache()
    assert late.resume()
    assert late.resize(40)
    for cache in [*caches, late]:
        cache.close()
    manager.audit()
    manager.shutdown()
    manager.shutdown()


def test_scenario_29_open_means_not_closed(arm) -> None:
    manager = build(arm, full(8))
    caches = [manager.create_kv_cache() for _ in range(3)]
    with pytest.raises(LogicError, match=r"\b3 KV cache\(s\) still open"):
        manager.shutdown()
    caches[1].close()
    with pytest.raises(LogicError, match=r"\b2 KV cache\(s\) still open"):
        manager.shutdown()
    caches[0].close()
    caches[2].close()
    manager.shutdown()  # all closed, still referenced
    assert all(cache.status == cache.Status.CLOSED for cache in caches)


def test_dropped_references_do_not_close(arm) -> None:
    """There is no finalizer: "open" means not closed, regardless of references."""
    manager = build(arm, full(8))
    cache = manager.create_kv_cache()
    handle = cache.handle
    del cache
    gc.collect()
    with pytest.raises(LogicError, match=r"\b1 KV cache\(s\) still open"):
        manager.shutdown()
    assert [c["handle"] for c in manager.snapshot()["caches"]] == [handle]


def test_after_shutdown(arm, device) -> None:
    manager = build(arm, full(8), device)
    cache = manager.create_kv_cache()
    cache.close()
    manager.shutdown()
    with pytest.raises(LogicError, match="(?i)shut"):
        manager.create_kv_cache()
    with pytest.raises(LogicError):
        cache.resume()
    cache.close()
    assert manager.tokens_per_block == 32
    assert manager.backend in ("python", "cpp")


def test_with_statement(arm) -> None:
    with build(arm, full(8)) as manager, manager.create_kv_cache() as cache:
        assert cache.resume()
        assert cache.resize(64)
    assert cache.status == cache.Status.CLOSED
    with pytest.raises(LogicError):
        manager.create_kv_cache()


def test_no_reference_cycles(arm) -> None:
    """A manager and its caches go when the last reference goes, without the collector."""
    gc.collect()
    gc.disable()
    try:
        manager = build(arm, full(8, tpb=32), "host")
        cache = manager.create_kv_cache()
        assert cache.resume()
        assert cache.resize(64)
        probe = weakref.ref(manager)
        cache.close()
        del cache
        manager.shutdown()
        del manager
        assert probe() is None
    finally:
        gc.enable()


def test_mapped_bytes_end_at_zero(arm, device) -> None:
    manager = build(arm, full(8), device)
    assert 0 < manager.mapped_bytes <= 16 * MIB
    manager.shutdown()
    assert manager.mapped_bytes == 0
