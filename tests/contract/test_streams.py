"""Binding a cache to streams (C4): setter, resume, hand-over. Byte order on the sim device is proved in tests/stream."""

from __future__ import annotations

import pytest

from tests.support.configs import full


def test_c4_set_then_resume_with_the_same(make, device) -> None:
    manager = make(full(8), device)
    cache = make.track(manager.create_kv_cache())
    stream = stream_of(manager)
    cache.cuda_stream = stream
    assert cache.cuda_stream == stream
    assert cache.resume(stream) is True
    assert cache.resize(64)
    cache.suspend()
    assert cache.resume(stream) is True
    cache.suspend()
    assert cache.resume() is True
    assert cache.cuda_stream == stream


def stream_of(manager) -> int:
    return manager.device_handle.create_stream() if manager.device == "sim" else 7


def test_none_is_the_devices_own_stream(make, device) -> None:
    manager = make(full(8), device)
    cache = make.track(manager.create_kv_cache())
    assert cache.resume(None) is True
    assert cache.cuda_stream == 0


def test_another_stream_rebinds(make, device) -> None:
    manager = make(full(8), device)
    first, second = stream_of(manager), stream_of(manager) if device == "sim" else 9
    cache = make.track(manager.create_kv_cache())
    assert cache.resume(first)
    assert cache.resize(64)
    cache.cuda_stream = second  # ACTIVE
    assert cache.cuda_stream == second
    cache.suspend()
    assert cache.resume(first) is True
    assert cache.cuda_stream == first
    cache.suspend()
    cache.cuda_stream = second
    assert cache.resume() is True
    assert cache.cuda_stream == second


def test_bad_streams(make) -> None:
    manager = make(full(8))
    cache = make.track(manager.create_kv_cache())
    for bad, error in ((-1, ValueError), (2**64, ValueError), ("0", TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="(?i)stream"):
            cache.resume(bad)
        with pytest.raises(error, match="(?i)stream"):
            cache.cuda_stream = bad
    assert cache.status == cache.Status.SUSPENDED
    assert cache.resume()


def test_synchronize_is_a_call_on_every_device(make, device) -> None:
    manager = make(full(8), device)
    cache = make.open(manager)
    assert cache.resize(96)
    cache.close()
    manager.synchronize()
