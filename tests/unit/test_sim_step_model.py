"""The step model's numbers, from the formula with pencil and paper."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

from kvpool.models import get_model
from kvpool.sim.options import ReplayOptions, prepare
from kvpool.sim.step_model import ReadCost, StepModel


def cost(name: str, block: int = 32) -> ReadCost:
    return ReadCost.of_layers(get_model(name).layer_configs(block), block)


def test_gpt_oss_reads() -> None:
    reads = cost("gpt-oss-120b")
    assert reads == ReadCost(18 * 2048.0, ((128, 18 * 2048.0),), 0)
    # decode at 1,000 tokens: 1,000 in the full layers, 128 in the windowed ones
    assert reads.chunk_bytes(1000, 999) == 18 * 2048 * (1000 + 128)
    # a chunk of 100 after 1,000: its first query sees 127 tokens before itself
    assert reads.chunk_bytes(1100, 1000) == 18 * 2048 * (1100 + 227)
    assert reads.chunk_bytes(50, 0) == 18 * 2048 * (50 + 50)


def test_state_is_read_whole() -> None:
    reads = cost("qwen3-next-80b-a3b")
    assert reads.state_bytes == 36 * 2_146_304
    assert reads.chunk_bytes(10, 9) == 36 * 2_146_304 + 12 * 2048 * 10


def test_seconds_is_a_roofline() -> None:
    settings = prepare(ReplayOptions(limit=1)).settings.step_model
    model = StepModel(settings)
    weights = 5.13e9 * 0.53
    assert model.seconds(1, 1e9) == pytest.approx((weights + 1e9) / 8e12 + 0.0005, rel=1e-12)
    assert model.seconds(8192, 1e6) == pytest.approx(2 * 5.13e9 * 8192 / 2.25e15 + 0.0005, rel=1e-12)


def test_ranks_share_weights_and_arithmetic() -> None:
    settings = prepare(ReplayOptions(limit=1, tp=4)).settings.step_model
    assert settings.ranks == 4
    assert StepModel(settings).seconds(1, 0.0) == pytest.approx(5.13e9 * 0.53 / 4 / 8e12 + 0.0005, rel=1e-12)
