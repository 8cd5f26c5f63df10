"""The content check finds what it must find: in every kind of buffer, at every position, in every layer group."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pydantic")

from kvpool.models import AttentionLayer, ModelGeometry, StateLayer, get_model
from kvpool.sim.config import executor_config
from kvpool.sim.content import ContentCheck
from kvpool.sim.lanes import Lanes, Running
from kvpool.sim.pool_stamps import stamp_fields
from kvpool.sim.ragged import ragged
from kvpool.sim.requests import TraceRequest
from kvpool.sim.sequences import Sequences
from kvpool.sim.toy_tokens import FIRST_OUTPUT_ID, made_up_tokens, next_token, prompt_tokens
from kvpool.v2 import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
)

MIB = 2**20
FULL = AttentionLayer(kv_heads=2, head_dim=16)
MODEL = ModelGeometry(
    "check",
    max_position_embeddings=1000,
    layers=(
        AttentionLayer(kv_heads=2, head_dim=16, window=40),
        FULL,
        AttentionLayer(kv_heads=1, head_dim=4),
        StateLayer.mamba2(2, 4, 4, 1),
    ),
)


class Driver:
    """One request on a manager of real bytes, moved by hand."""

    def __init__(self, config: KVCacheManagerConfig, backend: str, prompt: int, seed: int = 0) -> None:
        self.manager = KVCacheManager(config, backend=backend, device="host")
        block = config.tokens_per_block
        blocks = -(-(prompt + 64) // block)
        self.table = np.full((len(self.manager.layer_grouping), 1, blocks), -1, np.int32)
        spec = TraceRequest(0, 0.0, prompt, 32)
        sequences = Sequences(1, blocks * block, [spec], seed, made_up=False)
        self.check = ContentCheck()
        self.check.attach(self.manager, self.table, sequences.rows)
        self.cache = self.manager.create_kv_cache()
        self.cache.stop_committing()
        assert self.cache.resume(None)
        self.request = Running(spec, row=0, target=prompt, cache=self.cache)
        self.lanes = Lanes(1)
        self.lanes.append(self.request, self.cache.handle)
        sequences.enter(self.request)
        self.check.admit(self.request)

    def move(self, history: int, capacity: int, decode: bool = False) -> None:
        self.lanes.set_chunk(0, 0, history, capacity)
        arguments = self.lanes.arguments(1)
        result = self.manager.step(
            arguments.handles, arguments.rows, arguments.capacities, arguments.histories, self.table
        )
        assert result.ok.all()
        self.check.step(self.lanes, int(decode), int(not decode))

    def read(self, history: int) -> int:
        before = self.check.errors
        self.check.keep_last_token(self.request, history)
        return self.check.errors - before

    def close(self) -> None:
        self.cache.close()
        self.manager.shutdown()


def small(backend: str, prompt: int = 100) -> Driver:
    config = executor_config(MODEL, memory=32 * MIB, tokens_per_block=16, max_seq_len=512, max_num_tokens=512)
    return Driver(config, backend, prompt)


def test_every_readable_record_is_counted(backend: str) -> None:
    driver = small(backend)
    driver.move(0, 100)
    assert driver.check.checks == 0
    assert driver.read(100) == 0
    # window 40 at history 100: blocks 3 .. 6, so tokens 48 .. 99; two layers of two buffers; full: two layers; two states
    assert driver.check.checks == 52 * 2 + 100 * 4 + 2
    driver.close()


def test_record_as_documented(backend: str) -> None:
    """(layer, role, token, position) as four u32 at the head of each token's bytes."""
    driver = small(backend)
    driver.move(0, 100)
    manager = driver.manager
    tokens = prompt_tokens(driver.request.spec, 0)
    roles = sorted({role for _, role in manager.all_buffer_ids})
    for layer, role in ((0, "key"), (1, "value")):
        view = manager.get_buffers(layer, role, np.uint8, 2, 32)
        group = manager.get_layer_group_id(layer)
        slot = driver.table[group, 0, 5]
        record = view[slot, 3].ravel()[:16].view("<u4")
        assert record.tolist() == [layer, roles.index(role), tokens[83], 83]
    driver.close()


@pytest.mark.parametrize("position", [48, 63, 64, 99])
def test_any_flipped_byte_is_found(backend: str, position: int) -> None:
    driver = small(backend)
    driver.move(0, 100)
    clean = driver.read(100)
    assert clean == 0
    token = driver.check.outputs[0][0]
    for group, fields in enumerate(stamp_fields(driver.manager)):
        for field in fields:
            slot, place = int(driver.table[group, 0, position // 16]), position % 16
            if field.is_state:
                slot, place = driver.cache.get_ssm_block_base_index(group), 0
            field.flip(slot, place)
            driver.check.outputs[0].clear()
            assert driver.read(100) == 1
            seen = field.window is None or position >= 100 + 1 - field.window
            assert (driver.check.outputs[0] != [token]) is seen
            field.flip(slot, place)
    driver.check.outputs[0].clear()
    assert driver.read(100) == 0
    assert driver.check.outputs[0] == [token]
    driver.close()


def test_a_page_lost_from_the_table_is_an_error(backend: str) -> None:
    driver = small(backend)
    driver.move(0, 100)
    driver.table[driver.manager.get_layer_group_id(1), 0, 2] = -1
    assert driver.read(100) == 16 * 4  # two full layers of two buffers
    driver.close()


def test_two_pages_swapped_are_an_error(backend: str) -> None:
    driver = small(backend)
    driver.move(0, 100)
    full = driver.manager.get_layer_group_id(1)
    driver.table[full, 0, [1, 2]] = driver.table[full, 0, [2, 1]]
    assert driver.read(100) > 0
    driver.close()


def test_chunks_and_decode_make_no_difference_to_the_token(backend: str) -> None:
    whole, pieces = small(backend), small(backend)
    whole.move(0, 100)
    for start in range(0, 100, 10):
        pieces.move(start, start + 10)
    assert whole.read(100) == pieces.read(100) == 0
    assert whole.check.outputs == pieces.check.outputs
    whole.move(100, 101, decode=True)
    assert whole.read(101) == 0
    assert len(whole.check.outputs[0]) == 2
    whole.close()
    pieces.close()


def test_b216_positions_around_65536(backend: str) -> None:  # B216
    """131,072 tokens in blocks of 32: stamps right at 65,535, 65,536 and 131,071."""
    length = 131_072
    buffers = [BufferConfig(role="key", size=16 * 32)]
    config = KVCacheManagerConfig(
        tokens_per_block=32,
        cache_tiers=[GpuCacheTierConfig(quota=16 * MIB)],
        layers=[AttentionLayerConfig(layer_id=0, buffers=buffers), AttentionLayerConfig(1, buffers, 100_000)],
    )
    driver = Driver(config, backend, length)
    for start in range(0, length, 8192):
        driver.move(start, start + 8192)
    assert driver.read(length) == 0
    tokens = prompt_tokens(driver.request.spec, 0)
    for position in (65_535, 65_536, 131_071):
        slot = int(driver.table[0, 0, position // 32])
        view = driver.manager.get_buffers(0, "key", np.uint8, 1, 16)
        record = view[slot, position % 32].ravel().view("<u4")
        assert record.tolist() == [0, 0, tokens[position], position]
        driver.check.outputs[0].clear()
        stamp_fields(driver.manager)[0][0].flip(slot, position % 32)
        assert driver.read(length) == 1
        stamp_fields(driver.manager)[0][0].flip(slot, position % 32)
    driver.close()


@pytest.mark.parametrize("size", [3, 8, 15, 17, 20])
def test_odd_bytes_per_token(backend: str, size: int) -> None:
    """Less than a record, or a record at an odd place: still every one of layer, role, token and position shows."""
    buffers = [BufferConfig(role=role, size=size * 8) for role in ("key", "value")]
    config = KVCacheManagerConfig(
        tokens_per_block=8,
        cache_tiers=[GpuCacheTierConfig(quota=4 * MIB)],
        layers=[AttentionLayerConfig(layer_id=layer, buffers=buffers) for layer in range(2)],
    )
    driver = Driver(config, backend, 20)
    driver.move(0, 20)
    assert driver.read(20) == 0
    (field,) = stamp_fields(driver.manager)[0]
    assert field.view.shape == (field.view.shape[0], 4, 8, min(size, 16))
    slot = int(driver.table[0, 0, 1])
    stamps = {field.view[slot, buffer, token].tobytes() for buffer in range(4) for token in range(8)}
    assert len(stamps) == 32
    driver.close()


def test_compressed_layers_are_checked(backend: str) -> None:
    config = executor_config(
        get_model("deepseek-v4-flash"), memory=512 * MIB, tokens_per_block=128, max_seq_len=1024, max_num_tokens=512
    )
    driver = Driver(config, backend, 300)
    driver.move(0, 300)
    assert driver.read(300) == 0
    assert driver.check.checks > 300
    driver.close()


def test_prompt_tokens_follow_the_trace_ids() -> None:
    first = prompt_tokens(TraceRequest(0, 0.0, 700, 1, (5, 9)), 0)
    second = prompt_tokens(TraceRequest(1, 0.0, 600, 1, (5, 7)), 3)
    assert first[:512].tolist() == second[:512].tolist() == list(range(5 * 512, 6 * 512))
    assert first[512] == 9 * 512
    one, other = (prompt_tokens(TraceRequest(i, 0.0, 50, 1), 1) for i in (0, 1))
    assert one.tolist() != other.tolist()
    assert one.min() >= 0
    assert one.max() < FIRST_OUTPUT_ID
    assert one.tolist() != prompt_tokens(TraceRequest(0, 0.0, 50, 1), 2).tolist()


def test_prompts_share_a_system_prompt_and_the_turn_before() -> None:
    first = prompt_tokens(TraceRequest(0, 0.0, 40, 1, system=3, system_tokens=30), 1)
    second = prompt_tokens(TraceRequest(1, 0.0, 50, 1, system=3, system_tokens=35), 1)
    assert first[:30].tolist() == second[:30].tolist()
    assert first[30] != second[30]
    other = prompt_tokens(TraceRequest(1, 0.0, 50, 1, system=4, system_tokens=35), 1)
    assert other[0] != second[0]
    assert other[35:].tolist() == second[35:].tolist()
    turn = TraceRequest(2, 0.0, 60, 1, follows=1)
    third = prompt_tokens(turn, 1, second)
    assert third[:50].tolist() == second.tolist()
    assert len(third) == 60
    with pytest.raises(ValueError, match="request 2 follows 1"):
        prompt_tokens(turn, 1)


def test_answers_lie_apart_from_prompts() -> None:
    prompt = prompt_tokens(TraceRequest(0, 0.0, 50, 1), 0)
    answer = made_up_tokens(prompt, 20)
    assert answer.min() >= FIRST_OUTPUT_ID
    assert answer.dtype == np.int32
    assert made_up_tokens(prompt.copy(), 30)[:20].tolist() == answer.tolist()
    assert made_up_tokens(prompt[1:], 20).tolist() != answer.tolist()
    assert FIRST_OUTPUT_ID <= next_token(12345) < 2**31


def test_ragged() -> None:
    owners, values = ragged(np.asarray([5, 0, 7]), np.asarray([2, 0, 3]))
    assert owners.tolist() == [0, 0, 2, 2, 2]
    assert values.tolist() == [5, 6, 7, 8, 9]
