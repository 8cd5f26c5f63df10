"""The public names of kvpool.v2, the choice of the backend, and how the facade treats arguments and states."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import v2
from kvpool.errors import (
    ArgumentError,
    ConfigError,
    LogicError,
    NeverFitsError,
    OutOfPagesError,
    UnknownBufferError,
    UnsupportedError,
)
from kvpool.v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    GpuCacheTierConfig,
    KVCache,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    PageIndexMode,
    ReuseScope,
    SsmLayerConfig,
    StorageStatistics,
    SwaScratchReuseConfig,
    backend_choice,
)
from kvpool.v2 import _introspection as introspection
from kvpool.v2.types import MmItemContext

MIB = 1 << 20
ENV = "TLLM_KV_CACHE_MANAGER_V2_BACKEND"


def attention(layer: int, size: int, window: int | None = None) -> AttentionLayerConfig:
    return AttentionLayerConfig(layer, [BufferConfig("key", size), BufferConfig("value", size)], window)


def config(**fields: Any) -> KVCacheManagerConfig:
    layers = [attention(0, MIB), attention(1, MIB // 2, 64), SsmLayerConfig(2, [BufferConfig("state", 4096)])]
    given = {"layers": layers, "commit_min_snapshot": True, "cache_tiers": [GpuCacheTierConfig(64 * MIB)], **fields}
    return KVCacheManagerConfig(tokens_per_block=32, **given)  # type: ignore[arg-type]


@pytest.fixture
def manager(backend: str):
    made = KVCacheManager(config(), backend=backend)
    yield made
    made.shutdown()


@pytest.fixture
def cache(manager: KVCacheManager):
    made = manager.create_kv_cache()
    made.stop_committing()
    yield made
    made.close()


# -- names -------------------------------------------------------------------------------------------------------------


def test_all_names_exist() -> None:
    assert sorted(v2.__all__) == sorted(set(v2.__all__))
    for name in v2.__all__:
        assert hasattr(v2, name), name
    assert v2._KVCache is KVCache
    assert KVCache.Status is v2._Status is v2.KvCacheStatus
    assert {member.name for member in v2._Status} == {"ACTIVE", "SUSPENDED", "CLOSED"}
    assert (v2.BAD_PAGE_INDEX, v2.DEFAULT_BEAM_INDEX, v2.GPU_LEVEL, v2.CACHE_LEVEL1) == (-1, 0, 0, 1)
    assert (v2.PRIORITY_MIN, v2.PRIORITY_DEFAULT, v2.PRIORITY_MAX) == (0, 35, 100)
    assert (v2.LayerId(3), v2.CacheLevel(1), v2.LifeCycleId(0), v2.DataRole("key")) == (3, 1, 0, "key")
    assert (v2.CacheTier.GPU_MEM, v2.CacheTier.HOST_MEM, v2.CacheTier.DISK) == (0, 1, 2)
    assert (v2.PageIndexMode.SHARED, v2.PageIndexMode.PER_LAYER) == (0, 1)
    assert (v2.LayerType.ATTENTION, v2.LayerType.SSM) == (0, 1)
    assert (v2.ReusePolicy.REQUIRED, v2.ReusePolicy.OPTIONAL) == (0, 1)
    assert isinstance(v2.NDEBUG, bool)
    assert kvpool.v2 is v2
    assert kvpool.__version__


CALLS: list[tuple[Any, list[str]]] = [
    (KVCacheManager, ["config", "event_manager", "cold_page_codec", "backend", "device"]),
    (KVCacheManager.get_mem_pool_base_address, ["self", "layer_id", "data_role", "index_mode"]),
    (KVCacheManager.get_page_stride, ["self", "layer_id", "data_role"]),
    (KVCacheManager.get_page_index_upper_bound, ["self", "layer_id", "data_role"]),
    (KVCacheManager.get_page_index_scale, ["self", "layer_id", "data_role"]),
    (KVCacheManager.get_page_index_converter, ["self", "layer_id", "data_role"]),
    (
        KVCacheManager.create_kv_cache,
        [
            "self",
            "reuse_scope",
            "input_tokens",
            "id",
            "custom_priority_callback",
            "expected_prompt_length",
            "text_only",
            "enable_request_stats",
        ],
    ),
    (KVCacheManager.get_quota, ["self", "cache_level"]),
    (KVCacheManager.get_storage_statistics, ["self", "cache_level"]),
    (KVCacheManager.get_life_cycle_pool_group_indices, ["self", "cache_level"]),
    (KVCacheManager.supports_index_mode, ["self", "mode"]),
    (KVCacheManager.get_layer_group_id, ["self", "layer_id"]),
    (KVCacheManager.get_aggregated_pages, ["self", "buffers"]),
    (KVCacheManager.clamp_max_seq_len_for_mem, ["self", "batch_size", "token_num_upper_bound"]),
    (KVCacheManager.get_buffers, ["self", "layer_id", "role", "dtype", "heads", "head_dim", "layout"]),
    (KVCacheManager.probe_reuse, ["self", "reuse_scope", "input_tokens"]),
    (KVCacheManager.probe_first_new_block_key, ["self", "reuse_scope", "input_tokens"]),
    (KVCacheManager.clear_reusable_blocks, ["self"]),
    (KVCache.commit, ["self", "accepted_input_tokens", "beam_search_indices", "is_end"]),
    (KVCache.plan_committed_block_drop, ["self"]),
    (KVCache.resume, ["self", "cuda_stream", "optional_reuse_groups"]),
    (
        v2.gen_multimodal_cache_key_tokens,
        ["id_offset", "multi_modal_data_digest", "num_tokens", "token_offset", "uuid"],
    ),
    (v2.sequence_to_blockchain_keys, ["tokens_per_block", "reuse_scope", "tokens"]),
    (KVCache.resize, ["self", "capacity", "history_length"]),
    (KVCache.set_base_page_index_buf, ["self", "beam_idx", "layer_group_id", "buf"]),
    (KVCache.get_base_page_indices, ["self", "layer_group_id", "beam_id"]),
    (KVCache.get_aggregated_page_indices, ["self", "layer_group_id", "beam_id", "valid_only"]),
    (KVCache.get_ssm_block_base_index, ["self", "layer_group_id", "beam_id"]),
    (KVCache.get_scratch_desc, ["self", "layer_group_id"]),
]


@pytest.mark.parametrize(("call", "names"), CALLS, ids=[call.__qualname__ for call, _ in CALLS])
def test_parameter_names(call: Any, names: list[str]) -> None:
    assert list(inspect.signature(call).parameters) == names


def test_everything_public_is_documented() -> None:
    for name in v2.__all__:
        value = getattr(v2, name)
        if inspect.isclass(value) and value.__module__.startswith("kvpool"):
            assert value.__doc__, name
    for owner in (KVCacheManager, KVCache):
        assert not hasattr(owner, "__del__")


def test_descriptors_are_frozen_values() -> None:
    statistics = StorageStatistics([4, 2], 10, 3, 2)
    assert (statistics.available, statistics.unavailable, statistics.slot_size) == (5, 5, [4, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.free = 1  # type: ignore[misc]
    assert v2.ReuseScope() == (None, None)
    assert v2.ReuseScope(lora_id=1, salt=2) == (1, 2)
    assert v2.BufferId(3, "key") == (3, "key")


# -- backend and device ------------------------------------------------------------------------------------------------


def test_environment_is_read_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "python")
    with KVCacheManager(config(), device="virtual") as made:
        assert made.backend == "python"
    assert v2.BACKEND == "python"
    assert v2._cpp_introspection is None
    monkeypatch.setenv(ENV, "cpp")
    assert v2.BACKEND == "cpp"
    assert v2._cpp_introspection is introspection
    monkeypatch.delenv(ENV)
    assert v2.BACKEND == "cpp"
    monkeypatch.setenv(ENV, "rust")
    with KVCacheManager(config(), backend="python", device="virtual") as made:  # the argument wins
        assert made.backend == "python"
    for value in ("rust", "", "CPP"):
        monkeypatch.setenv(ENV, value)
        with pytest.raises(ConfigError, match=f"{ENV} must be 'cpp' or 'python', not {value!r}"):
            KVCacheManager(config(), device="virtual")


def test_unknown_backend() -> None:
    for value in ("rust", "", 3):
        with pytest.raises(ConfigError, match="must be 'cpp' or 'python'"):
            KVCacheManager(config(), backend=value)  # type: ignore[arg-type]


def test_missing_extension_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpool._native", None)  # what an absent module looks like
    monkeypatch.delenv(ENV, raising=False)
    for arguments in ({}, {"backend": "cpp"}):
        with pytest.raises(ImportError, match=f"not installed.*KVPOOL_NATIVE=ON.*backend='python'.*{ENV}=python"):
            KVCacheManager(config(), device="virtual", **arguments)


def test_broken_extension_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libstdc++.so.6: version not found", name=name)

    monkeypatch.setattr(backend_choice.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"failed to load \(libstdc.*backend='python'"):
        backend_choice.native_module()


def test_python_backend_needs_no_extension() -> None:
    code = (
        "import sys; sys.modules['kvpool._native'] = None\n"
        "from tests.unit.test_v2_surface import *\n"
        "m = KVCacheManager(config(), backend='python', device='virtual')\n"
        "c = m.create_kv_cache(); assert c.resume(); assert c.resize(40, 3); c.close(); m.shutdown()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_devices(backend: str) -> None:
    for name, real in (("auto", "host"), ("host", "host"), ("virtual", "virtual"), ("sim", "sim")):
        with KVCacheManager(config(), backend=backend, device=name) as made:
            assert (made.backend, made.device) == (backend, real)
            assert (made.device_handle is not None) == (real == "sim")
            made.synchronize()
    with pytest.raises(ConfigError, match="auto, host, virtual, sim, cuda"):
        KVCacheManager(config(), backend=backend, device="tpu")
    with pytest.raises(UnsupportedError, match="not built yet"):
        KVCacheManager(config(), backend=backend, device="cuda")


# -- manager -----------------------------------------------------------------------------------------------------------


def test_queries(manager: KVCacheManager) -> None:
    assert [list(group) for group in manager.layer_grouping] == [[0], [1], [2]]
    assert (manager.num_layers, list(manager.layer_ids)) == (3, [0, 1, 2])
    assert list(manager.all_buffer_ids)[-1] == (2, "state")
    assert (manager.tokens_per_block, manager.commit_min_snapshot) == (32, True)
    assert (manager.allow_seq_rebasing, manager.enable_partial_match, manager.event_manager) == (True, True, None)
    assert list(manager.cache_tier_list) == [v2.CacheTier.GPU_MEM]
    assert manager.get_quota(v2.GPU_LEVEL) == 64 * MIB
    assert 0 < manager.mapped_bytes <= 64 * MIB
    assert manager.get_life_cycle_pool_group_indices() == [0, 1, 2]
    for statistics, group in zip(manager.get_storage_statistics(), manager.pool_group_descs, strict=True):
        assert statistics.total == statistics.free == group.num_slots
        assert statistics.slot_sizes == [pool.slot_bytes for pool in group.pools]
    assert manager._life_cycles.get_life_cycle(v2.LifeCycleId(1)) == v2.AttnLifeCycle(64, 0)
    assert isinstance(manager._life_cycles.get_life_cycle(2), v2.SsmLifeCycle)
    assert isinstance(manager.snapshot(), dict)
    assert "host" in repr(manager)
    manager.audit()


def test_unknown_ids(manager: KVCacheManager, cache: KVCache) -> None:
    for call in (
        lambda: manager.get_mem_pool_base_address(9, "key"),
        lambda: manager.get_mem_pool_base_address(0, "state"),
        lambda: manager.get_page_stride(-1, "key"),
        lambda: manager.get_page_index_converter(2, "key"),
        lambda: manager.get_page_index_scale(0, "Key"),
        lambda: manager.get_page_index_upper_bound(3, "key"),
        lambda: manager.get_layer_group_id(3),
        lambda: cache.get_base_page_indices(3),
        lambda: cache.get_base_page_indices(-1),
        lambda: cache.get_aggregated_page_indices(3),
        lambda: cache.get_scratch_desc(3),
        lambda: cache.get_ssm_block_base_index(3),
        lambda: cache.set_base_page_index_buf(0, 3, None),
    ):
        for kind in (KeyError, ConfigError):  # C13: callers catch KeyError
            with pytest.raises(kind) as caught:
                call()
            assert isinstance(caught.value, UnknownBufferError)
    with pytest.raises(UnknownBufferError, match=r"layer 0 has no role 'state'; it has \['key', 'value'\]"):
        manager.get_page_stride(0, "state")
    for wrong in ("0", None, 0.5):
        with pytest.raises(TypeError):
            manager.get_page_stride(wrong, "key")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            cache.get_base_page_indices(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        manager.get_page_stride(0, 7)  # type: ignore[arg-type]
    for level in (1, -1):
        with pytest.raises(ArgumentError, match="cache_level"):
            manager.get_quota(level)
    with pytest.raises(ValueError, match="7"):
        manager.supports_index_mode(7)  # type: ignore[arg-type]


def test_clamp_arguments(manager: KVCacheManager) -> None:
    assert manager.clamp_max_seq_len_for_mem(1, 32) == 32
    assert 0 < manager.clamp_max_seq_len_for_mem(1, 2**62) < 2**31
    for batch, bound in ((0, 1), (-1, 1), (1, -1)):
        with pytest.raises(ArgumentError):
            manager.clamp_max_seq_len_for_mem(batch, bound)
    for batch, bound in ((True, 1), (1, 1.0), ("1", 1)):
        with pytest.raises(TypeError):
            manager.clamp_max_seq_len_for_mem(batch, bound)  # type: ignore[arg-type]


def test_shutdown(backend: str) -> None:  # scenarios 28, 29
    made = KVCacheManager(config(), backend=backend, device="virtual")
    caches = [made.create_kv_cache() for _ in range(3)]
    with pytest.raises(LogicError, match=r"shutdown.*3 KV cache\(s\) still open"):
        made.shutdown()
    caches.append(made.create_kv_cache())
    assert caches[3].resume()
    for one in caches:
        one.close()
    made.shutdown()
    made.shutdown()
    with pytest.raises(LogicError):
        made.create_kv_cache()
    assert "shut down" in repr(made)
    assert made.mapped_bytes == 0


def test_with_statement(backend: str) -> None:
    with KVCacheManager(config(), backend=backend, device="virtual") as made, made.create_kv_cache() as one:
        assert one.resume()
    assert one.status == v2._Status.CLOSED
    with (
        pytest.raises(LogicError, match="1 KV cache"),
        KVCacheManager(config(), backend=backend, device="virtual") as made,
    ):
        left = made.create_kv_cache()
    left.close()
    made = KVCacheManager(config(), backend=backend, device="virtual")
    left = made.create_kv_cache()
    made.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # an open cache does not hide the error
    left.close()
    made.shutdown()


def test_step_is_the_cores_own_method(manager: KVCacheManager) -> None:
    assert manager.step is manager.step
    assert manager.step == manager._core.step


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child_is_refused(manager: KVCacheManager, cache: KVCache) -> None:
    assert cache.resume()
    child = os.fork()
    if child == 0:
        wrong = 0
        for call in (
            manager.create_kv_cache,
            lambda: manager.layer_grouping,
            lambda: manager.get_page_stride(0, "key"),
            lambda: cache.resize(32),
            lambda: cache.capacity,
            manager.shutdown,
        ):
            try:
                call()
            except LogicError as error:
                wrong += "fork" not in str(error)
            except BaseException:
                wrong += 1
            else:
                wrong += 1
        os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.resize(32)


# -- create_kv_cache ---------------------------------------------------------------------------------------------------


DIGEST = bytes(range(32))
LEGAL_TOKENS = [
    None,
    [],
    (),
    [0, 1, 2**31 - 1],
    (5, 6),
    [1, DIGEST, 2],
    [MmItemContext(DIGEST, "u"), 3],
    [np.int32(4), 5],
    np.arange(7, dtype=np.int32),
    np.arange(7, dtype=np.int32)[2:5],
    np.zeros(0, np.int32),
]
WRONG_TOKENS = [
    ("text", TypeError),
    (b"bytes", TypeError),
    (range(4), TypeError),
    ({1, 2}, TypeError),
    (7, TypeError),
    ([1, "x"], TypeError),
    ([1, None], TypeError),
    ([1, 2.0], TypeError),
    ([True, 2], TypeError),
    ([-1], ArgumentError),
    ([2**31], ArgumentError),
    ([np.int64(-1)], ArgumentError),
    ([bytes(31)], ArgumentError),
    ([MmItemContext(bytes(33))], ArgumentError),
    (np.arange(4), ArgumentError),
    (np.arange(4, dtype=np.uint32), ArgumentError),
    (np.zeros((2, 2), np.int32), ArgumentError),
    (np.arange(8, dtype=np.int32)[::2], ArgumentError),
    (np.array([3, -1], np.int32), ArgumentError),
]


@pytest.mark.parametrize("tokens", LEGAL_TOKENS, ids=repr)
def test_legal_tokens(manager: KVCacheManager, tokens: Any) -> None:
    with manager.create_kv_cache(None, tokens) as one:
        assert (one.num_committed_tokens, one.history_length, one.capacity, one.num_blocks) == (0, 0, 0, 0)
        assert one.status == v2._Status.SUSPENDED
        assert not one.is_active


@pytest.mark.parametrize(("tokens", "error"), WRONG_TOKENS, ids=[repr(tokens) for tokens, _ in WRONG_TOKENS])
def test_wrong_tokens(manager: KVCacheManager, tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="input_tokens"):
        manager.create_kv_cache(None, tokens)
    assert manager.snapshot()["caches"] == []


def test_create_arguments(manager: KVCacheManager) -> None:
    scope = ReuseScope(lora_id=1, salt=2**64 - 1)
    with manager.create_kv_cache(scope, [1, 2], id=101, enable_request_stats=True, expected_prompt_length=17) as one:
        assert (one.id, one.reuse_scope, one.manager) == (101, scope, manager)
        one.id = "other"
        assert one.id == "other"
    with manager.create_kv_cache(custom_priority_callback=None, text_only=True) as one:
        assert (one.reuse_scope, one.text_only) == (ReuseScope(), True)
        one.text_only = False
        with pytest.raises(TypeError):
            one.text_only = 1
    for arguments, error in (
        ({"reuse_scope": 3}, TypeError),
        ({"reuse_scope": (1, 2)}, TypeError),
        ({"reuse_scope": ReuseScope(salt="x")}, TypeError),
        ({"reuse_scope": ReuseScope(salt=2**64)}, ArgumentError),
        ({"reuse_scope": ReuseScope(lora_id=-1)}, ArgumentError),
        ({"custom_priority_callback": 35}, TypeError),
        ({"expected_prompt_length": -1}, ArgumentError),
        ({"expected_prompt_length": 1.5}, TypeError),
        ({"text_only": 1}, TypeError),
        ({"enable_request_stats": 1}, TypeError),
        ({"text_only": True, "input_tokens": [DIGEST]}, ArgumentError),
    ):
        with pytest.raises(error):
            manager.create_kv_cache(**arguments)  # type: ignore[arg-type]


def test_text_only_may_only_be_tightened(backend: str) -> None:
    with KVCacheManager(config(text_only=True), backend=backend, device="virtual") as made:
        with pytest.raises(ArgumentError, match="text_only = False"):
            made.create_kv_cache(text_only=False)
        with pytest.raises(ArgumentError, match="text_only was promised"):
            made.create_kv_cache(input_tokens=[DIGEST])
        with made.create_kv_cache() as one:
            assert one.text_only
            with pytest.raises(ArgumentError, match="text_only = False"):
                one.text_only = False


# -- KVCache -----------------------------------------------------------------------------------------------------------


def test_life_of_a_cache(manager: KVCacheManager, cache: KVCache) -> None:
    assert cache.tokens_per_block == 32
    assert cache.cuda_stream is None
    cache.cuda_stream = 0  # C4
    assert cache.resume(0)
    assert (cache.is_active, cache.status, cache.cuda_stream) == (True, v2._Status.ACTIVE, 0)
    assert cache.resize(None, None)  # C1
    assert cache.resize(np.int64(100), history_length=np.int32(20))
    assert (cache.capacity, cache.history_length, cache.num_blocks) == (100, 20, 4)
    assert [int(i) for i in cache.get_base_page_indices(0)] == list(cache.get_aggregated_page_indices(0))
    assert np.frombuffer(cache.get_base_page_indices(0), np.int32, count=4).min() >= 0
    assert cache.get_page_levels(0) == [0, 0, 0, 0]
    assert cache.resize(None, 99)
    assert cache.get_page_levels(1) == [-1, 0, 0, 0]  # window 64: the first block is behind it
    assert next(cache.get_aggregated_page_indices(1)) == -1
    assert len(list(cache.get_aggregated_page_indices(1, 0, valid_only=True))) == 3
    assert cache.get_ssm_block_base_index(2) >= 0
    assert [cache.get_scratch_desc(group) for group in range(3)] == [None] * 3  # C10
    assert not cache.has_scratch_slots
    assert cache.supports_index_mode(PageIndexMode.SHARED)
    assert not cache.enable_swa_scratch_reuse
    cache.enable_swa_scratch_reuse = False  # C11
    assert "ACTIVE" in repr(cache)
    cache.capacity = 130
    cache.history_length = 100
    assert (cache.capacity, cache.history_length, cache.num_blocks) == (130, 100, 5)
    cache.suspend()
    assert set(cache.get_base_page_indices(0)) == {-1}
    assert cache.resume()
    cache.close()
    cache.close()
    assert (cache.status, cache.num_blocks, cache.is_active) == (v2._Status.CLOSED, 0, False)
    assert (cache.capacity, cache.history_length, cache.num_committed_tokens) == (130, 100, 0)
    assert "CLOSED" in repr(cache)


def test_use_after_close(manager: KVCacheManager) -> None:
    one = manager.create_kv_cache()
    one.close()
    for call in (
        one.resume,
        one.suspend,
        one.stop_committing,
        lambda: one.resize(1),
        lambda: setattr(one, "capacity", 1),
        lambda: setattr(one, "cuda_stream", 1),
        lambda: setattr(one, "beam_width", 2),
        lambda: setattr(one, "enable_swa_scratch_reuse", False),
        lambda: one.set_base_page_index_buf(0, 0, None),
    ):
        with pytest.raises(LogicError):
            call()


def test_argument_errors(manager: KVCacheManager, cache: KVCache) -> None:
    assert cache.resume()
    assert cache.resize(64, 10)
    before = manager.snapshot()
    for arguments, error in (
        ((-1,), ArgumentError),
        ((2**31,), ArgumentError),
        ((2**70,), ArgumentError),
        ((64, -1), ArgumentError),
        ((64, 9), ArgumentError),
        ((64, 65), ArgumentError),
        ((5,), ArgumentError),
        ((1.0,), TypeError),
        (("64",), TypeError),
        ((True,), TypeError),
        ((64, np.float32(3)), TypeError),
        ((64, np.bool_(True)), TypeError),
        ((1 << 20,), NeverFitsError),
    ):
        with pytest.raises(error):
            cache.resize(*arguments)
    for stream in (-1, 2**63):
        with pytest.raises(ArgumentError, match="cuda_stream"):
            cache.cuda_stream = stream
    for wrong in ("s", 1.0, None):
        with pytest.raises(TypeError, match="cuda_stream"):
            cache.cuda_stream = wrong  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="beam_width"):
        cache.beam_width = 0
    with pytest.raises(TypeError):
        cache.beam_width = 1.0  # type: ignore[assignment]
    with pytest.raises(TypeError):
        cache.enable_swa_scratch_reuse = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="scratch"):
        cache.enable_swa_scratch_reuse = True  # the manager does not configure it
    with pytest.raises(ArgumentError, match="attention group"):
        cache.get_ssm_block_base_index(0)
    with pytest.raises(ArgumentError):
        cache.get_base_page_indices(0, 1)
    with pytest.raises(TypeError):
        cache.get_aggregated_page_indices(0, valid_only=1)  # type: ignore[arg-type]
    assert manager.snapshot() == before


def test_setters_raise_when_slots_lack(manager: KVCacheManager, cache: KVCache) -> None:
    total = manager.pool_group_descs[0].num_slots
    with manager.create_kv_cache() as other:
        assert other.resume()
        assert cache.resume()
        assert other.resize(32 * (total - 1), 32 * (total - 1))
        assert cache.resize(32)
        assert not cache.resize(64)
        with pytest.raises(OutOfPagesError) as caught:
            cache.capacity = 64
        assert not isinstance(caught.value, NeverFitsError)
        assert cache.capacity == 32


def test_capacity_setter_and_scratch(backend: str) -> None:
    layers = [attention(0, MIB, 64)]
    fields = {"layers": layers, "swa_scratch_reuse": SwaScratchReuseConfig(), "commit_min_snapshot": False}
    with KVCacheManager(config(**fields), backend=backend, device="virtual") as made, made.create_kv_cache() as one:
        assert one.enable_swa_scratch_reuse
        assert one.resume()
        with pytest.raises(ValueError, match="scratch"):
            one.capacity = 32
        assert one.resize(320, 0)
        scratch = one.get_scratch_desc(0)
        assert scratch is not None
        assert (scratch.range.beg, scratch.range.end) == (0, 8)
        assert len(scratch.slot_ids) == 8
        assert one.has_scratch_slots
        assert not one.supports_index_mode(PageIndexMode.SHARED)
        assert one.supports_index_mode(PageIndexMode.PER_LAYER)


# -- introspection -----------------------------------------------------------------------------------------------------


def test_introspection(manager: KVCacheManager) -> None:
    assert introspection.storage_statistics(manager) == manager.get_storage_statistics(0)
    assert introspection.storage_utilization(manager) == [0.0, 0.0, 0.0]
    assert introspection.life_cycle_pool_group_indices(manager) == [0, 1, 2]
    assert introspection.attention_life_cycle_ids(manager) == [0, 1]
    assert introspection.swa_life_cycle_ids(manager) == [1]
    assert introspection.ssm_life_cycle_id(manager) == 2
    ratio = introspection.current_gpu_ratio(manager)
    assert len(ratio) == 3
    assert sum(ratio) == pytest.approx(1)
    batch = BatchDesc([KVCacheDesc(64, 63), KVCacheDesc(0, 0)])
    assert introspection.compute_slots_for_batch(manager, batch) == [2, 2, 2]  # scenario 67
    with pytest.raises(TypeError):
        introspection.compute_slots_for_batch(manager, [(64, 63)])  # type: ignore[arg-type]


def test_sizing_helpers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, backend)
    sizes, grain = [16252928, 4063232], 16 * MIB  # scenario 2
    grains = introspection.grains_for_slots(157, sizes, grain)
    slots, used = introspection.grains_to_slots(grains, sizes, grain)
    assert slots >= 157
    assert used <= grains
    assert introspection.grains_for_slots(0, sizes, grain) == 0
    assert introspection.grains_to_slots(1, sizes, grain) == (0, 0)
    pools = [[2 * MIB - 1], [2 * MIB]]  # scenario 74
    assert introspection.ratio_to_slot_count_list(10 * MIB, pools, [0.5, 0.5], 2 * MIB, [1, 1]) == [2, 3]
    assert introspection.ratio_to_slot_count_list(8 * MIB, [[MIB], [MIB]], [0.25, 0.75], MIB, [1, 1]) == [2, 6]
    with pytest.raises(ConfigError, match="floor"):
        introspection.ratio_to_slot_count_list(8 * MIB, pools, [0.5, 0.5], 2 * MIB, [3, 3])
    for ratios, floors in (([0.5], [1, 1]), ([0.5, 0.5], [1]), ([0.0, 1.0], [1, 1]), ([0.5, 0.5], [-1, 1])):
        with pytest.raises(ArgumentError):
            introspection.ratio_to_slot_count_list(10 * MIB, pools, ratios, 2 * MIB, floors)
    for slots_, sizes_, grain_ in ((-1, [1], 1), (1, [], 1), (1, [0], 1), (1, [1], 0)):
        with pytest.raises(ArgumentError):
            introspection.grains_for_slots(slots_, sizes_, grain_)
        with pytest.raises(ArgumentError):
            introspection.grains_to_slots(slots_, sizes_, grain_)
