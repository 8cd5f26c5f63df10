"""The configuration of a replay and the longest sequence that it promises."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

from kvpool.errors import ConfigError
from kvpool.models import get_model
from kvpool.sim.config import executor_config, longest_constructible, typical_length
from kvpool.sim.demand import RequestDemand
from kvpool.sim.requests import TraceRequest
from kvpool.v2 import KVCacheManager


def make(memory: int, name: str = "gpt-oss-120b"):
    model = get_model(name)
    return lambda longest: executor_config(
        model, memory=memory, tokens_per_block=32, max_seq_len=longest, max_num_tokens=8192
    )


def test_gpt_oss_at_4_gib(backend: str) -> None:
    assert longest_constructible(make(4 * 2**30), 32, 131_072, backend) == 110_528


def test_longest_is_the_edge(backend: str) -> None:
    config = make(300 * 2**20, "gemma-3-4b")
    longest = longest_constructible(config, 32, 131_072, backend)
    assert longest % 32 == 0
    KVCacheManager(config(longest), backend=backend, device="virtual").shutdown()
    with pytest.raises(ConfigError):
        KVCacheManager(config(longest + 32), backend=backend, device="virtual")


def test_wanted_maximum_is_cut_to_whole_blocks(backend: str) -> None:
    assert longest_constructible(make(2**36), 32, 1000, backend) == 992
    with pytest.raises(ConfigError, match="at least one block"):
        longest_constructible(make(2**36), 32, 31, backend)


def test_too_little_for_a_block_names_the_floors(backend: str) -> None:
    with pytest.raises(ConfigError, match="floor"):
        longest_constructible(make(2**20), 32, 131_072, backend)


def test_windows_of_the_whole_length_are_full_attention() -> None:
    windows = {layer.sliding_window_size for layer in make(2**36, "gemma-3-27b")(1024).layers}
    assert windows == {None}
    windows = {layer.sliding_window_size for layer in make(2**36, "gemma-3-27b")(1056).layers}
    assert windows == {None, 1024}


def test_constraints_and_resume_limit() -> None:
    config = make(2**36)(4096)
    batches = [[(d.capacity, d.history_length) for d in batch.kv_caches] for batch in config.constraints]
    assert batches == [[(4096, 4095)], [(4096, 0)]]
    assert config.max_util_for_resume == 0.95
    assert config.swa_scratch_reuse is None


def test_typical_length_is_of_the_requests_that_run() -> None:
    requests = [TraceRequest(0, 0, 10, 5), TraceRequest(1, 0, 20, 6), TraceRequest(2, 0, 1000, 1)]
    assert typical_length(requests, 100) == 20  # (15 + 26) // 2
    assert typical_length(requests, 2000) == 347
    assert typical_length(requests, 5) == 347


def test_largest_chunk_is_what_the_pools_hold(backend: str) -> None:
    """GPT-OSS at its longest: prompt chunks near the end can't be whole, for window pages of a chunk exist together."""
    manager = KVCacheManager(make(4 * 2**30)(110_528), backend=backend, device="virtual")
    demand = RequestDemand(manager)
    total = manager.pool_group_descs[0].num_slots
    done = 102_336
    chunk = demand.largest_chunk(done, 8192)
    assert 0 < chunk < 8192
    cache = manager.create_kv_cache()
    cache.stop_committing()
    assert cache.resume(None)
    assert cache.resize(done, done)
    assert cache.resize(done + chunk, done)
    assert total - manager.get_storage_statistics()[0].free == demand.slots(done + chunk, done)[0] <= total
    assert not demand.fits(done + chunk + 1, done)
    cache.close()
    manager.shutdown()
