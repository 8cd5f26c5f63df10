"""Small models, requests and replays for the tests of the executor loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

pytest.importorskip("pydantic")

from kvpool.models import AttentionLayer, ModelGeometry, StateLayer
from kvpool.sim.options import ReplayJob, ReplayOptions, prepare
from kvpool.sim.replay import ReplayOutcome, run_replay
from kvpool.sim.requests import TraceRequest
from kvpool.v2 import KVCacheManager
from tests.support.arms import AVAILABLE

FULL = AttentionLayer(kv_heads=16, head_dim=512)
WINDOW = AttentionLayer(kv_heads=16, head_dim=512, window=40)
STATE = StateLayer.mamba2(2, 4, 4, 1)
MODEL = ModelGeometry("small", max_position_embeddings=400, layers=(WINDOW, FULL))
MIB = 2**20


def job(requests: list[TraceRequest], model: ModelGeometry = MODEL, memory: int = 64 * MIB, **options) -> ReplayJob:
    arms = ",".join(AVAILABLE)
    made = prepare(ReplayOptions(limit=len(requests), memory=str(memory), arms=arms, **options))
    effective = made.settings.model_copy(update={"model": model.name, "max_seq_len": model.max_position_embeddings})
    return replace(made, settings=effective, model=model, requests=requests)


def requests_of(*lengths: tuple[int, int], arrival: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(i, arrival, prompt, output) for i, (prompt, output) in enumerate(lengths)]


def run(made: ReplayJob) -> ReplayOutcome:
    outcome = run_replay(made)
    assert outcome.failures == []
    for arm in outcome.result.arms.values():
        assert arm.requests_finished + arm.requests_refused == len(made.requests)
    return outcome


class Recorder:
    """Stands between the loop and a manager and keeps what each batch call asked for."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.calls: list[list[tuple[int, int, int]]] = []  # (row, history, capacity)

    def __getattr__(self, name: str):
        return getattr(self._manager, name)

    def step(self, handles, rows, capacities, histories, table, tokens=None):
        self.calls.append(list(zip(rows.tolist(), histories.tolist(), capacities.tolist(), strict=True)))
        return self._manager.step(handles, rows, capacities, histories, table, tokens)


LAYERS = st.lists(
    st.one_of(
        st.just(FULL), st.sampled_from([1, 5, 16, 33, 64, 200]).map(lambda w: replace(WINDOW, window=w)), st.just(STATE)
    ),
    min_size=1,
    max_size=4,
).filter(lambda layers: any(layer is not STATE for layer in layers))
"""Layers of a model with some attention."""
