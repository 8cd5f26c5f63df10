"""Each backend against the oracle: lengths, live blocks, slot ids, gate and refusals after every random command."""

from __future__ import annotations

import random

import pytest

from kvpool.errors import ConfigError
from kvpool.v2 import AttentionLayerConfig, KVCacheManagerConfig, ReusePolicy
from tests.model.model_driver import ModelDriver, model_of
from tests.model.reuse_model import ReuseModel
from tests.support import oracle
from tests.support.arms import build
from tests.support.commands import CommandMaker, Driver, random_manager_config

MODELLED = {
    "create", "resume", "suspend", "resize", "history", "capacity", "step", "beam", "stop", "scratch", "close",
}  # fmt: skip


def test_oracle_demand_by_hand() -> None:
    full, window = oracle.LC(), oracle.LC(128, 1)
    assert oracle.demand(full, [(2049, 2048)], 0, 32, None) == 65
    assert oracle.demand(oracle.LC(1024), [(2049, 2048)], 0, 32, None) == 33
    assert oracle.demand(window, [(512, 0)] * 4, 0, 32, None) == 64
    assert oracle.demand(oracle.LC(128, 1, False, oracle.Fraction(1, 48)), [(512, 0)] * 4, 0, 32, 0) == 4 * (5 + 1)
    assert oracle.demand(oracle.LC(is_ssm=True), [(64, 63), (0, 0)], 0, 32, None) == 2
    assert oracle.demand(full, [(64, 32)] * 3, 40, 32, None) == 1 + 3
    assert oracle.structural_floor(oracle.LC(16), [], 32) == 2
    assert oracle.structural_floor(oracle.LC(11), [], 16) == 2
    assert oracle.structural_floor(oracle.LC(1), [], 32) == 1
    assert oracle.structural_floor(oracle.LC(128), [], 32) == 5
    for window_size in range(1, 200):
        for tpb in (1, 3, 16, 32):
            floor = oracle.structural_floor(oracle.LC(window_size), [], tpb)
            assert floor == (window_size + tpb - 2) // tpb + 1
            peak = max(
                oracle.blocks(h + 1, tpb) - len(oracle.stale(h, tpb, window_size)) for h in range(3 * window_size)
            )
            assert peak <= floor


def test_oracle_solver_by_hand() -> None:
    mib = 1 << 20
    a = oracle.Group([oracle.LC()], [2 * mib - 1], 1, 1)
    b = oracle.Group([oracle.LC(1)], [2 * mib], 1, 1)
    assert oracle.solve([a, b], 10 * mib) == [2, 3]
    assert oracle.solve([b, a], 10 * mib) == [3, 2]
    assert oracle.solve([a, b], 3 * mib) is None


@pytest.mark.parametrize("seed", range(80))
def test_backend_against_the_model(arm, seed: int) -> None:
    rng = random.Random(9000 + seed)
    while True:
        config = random_manager_config(rng)
        try:
            manager = build(arm, config)
            break
        except ConfigError:
            continue
    driver, model = Driver(manager), model_of(manager)
    predicted = ModelDriver(model)
    maker = CommandMaker(rng, config, driver.groups)
    for turn in range(200):
        command = maker.next(driver)
        if command[0] == "setter":
            command = ("capacity", *command[1:])
        if command[0] not in MODELLED:
            continue
        if command[0] == "beam" and config.swa_scratch_reuse is not None:
            continue  # scratch slots of several beams: left open by the rules
        if command[0] == "resize" and command[2] is None and command[3] is None and not driver.active(command[1]):
            continue  # C1 says True, §1.7 says LogicError
        answer = driver.run(command)
        want = predicted.run(command, answer)
        where = f"{arm}, seed {seed}, command {turn}: {command}"
        if answer[0] == "error":
            answer = answer[:2]
        elif command[0] in ("step", "create"):
            answer = ("ok", answer[1][0])
        if want is not None and want[0] == "error" and want[1] == "any":
            assert answer[0] == "error", where
        elif want is not None:
            assert answer == want, where
        snapshot = manager.snapshot()
        expected = model.snapshot()
        for cache_shown in snapshot["caches"]:
            for key in ("tail", "scope", "match", "ssm_source"):
                cache_shown.pop(key, None)
        for key in ("pool_groups", "caches"):
            assert snapshot[key] == expected[key], where
        for cache in model.caches.values():
            real = next(c for c in driver.caches if c is not None and c.handle == cache.handle)
            for lc, rule in enumerate(model.lcs):
                for beam in range(cache.beams):
                    got = [int(i) for i in real.get_base_page_indices(lc, beam)]
                    want_row = [-1] * real.num_blocks if rule.is_ssm else model.exposed(cache, lc, beam)
                    assert got == want_row, where
        manager.audit()
    driver.finish()


REUSE_MODELLED = MODELLED | {"commit", "clear", "probe", "plan", "drop", "discard", "retext"}


def required_only(config: KVCacheManagerConfig) -> bool:
    layers = [layer for layer in config.layers if isinstance(layer, AttentionLayerConfig)]
    return all(layer.reuse_policy == ReusePolicy.REQUIRED for layer in layers)


@pytest.mark.parametrize("seed", range(80))
def test_lengths_and_answers_with_commits(arm, seed: int) -> None:
    """Lengths, live blocks, refusals and shortages of requests that commit, match and share pages."""
    rng = random.Random(19_000 + seed)
    while True:
        config = random_manager_config(rng, reuse=True)
        try:
            manager = build(arm, config)
        except ConfigError:
            continue
        if required_only(config):
            break
        manager.shutdown()
    driver = Driver(manager)
    model = ReuseModel(driver, model_of(manager))
    maker = CommandMaker(rng, config, driver.groups, reuse=True)
    counts = {"ok": 0, "refused": 0, "short": 0}
    for turn in range(250):
        command = maker.next(driver)
        name = "capacity" if command[0] == "setter" else command[0]
        if name not in REUSE_MODELLED or (name == "beam" and config.swa_scratch_reuse is not None):
            continue
        if name == "resume" and len(command) > 3:
            command = command[:3]
        if name == "resize" and command[2] is None and command[3] is None and not driver.active(command[1]):
            continue
        where = f"{arm}, seed {seed}, command {turn}: {command}"
        before = manager.snapshot()
        model.load(before)
        want = model.predict(command)
        answer = driver.run(command)
        model.follow(command, answer)
        if want is not None:
            got = answer[:2]
            if got[0] == "ok" and name == "step":
                got = ("ok", answer[1][0])
            if want == ("error", "any"):
                want = ("error", got[1])
            assert got == want, where
        short = answer[1] is False or (name == "step" and answer[0] == "ok" and False in answer[1][0])
        counts["refused" if answer[0] == "error" else "short" if short else "ok"] += 1
        after = manager.snapshot()
        assert [cache["handle"] for cache in after["caches"]] == sorted(model.requests), where
        for cache in after["caches"]:
            request = model.requests[cache["handle"]]
            shown, wanted = model.shown(cache), model.expected(request)
            if request.ended:
                wanted["ssm"] = shown["ssm"]  # moved into the tree unless that holds as much already
            assert shown == wanted, where
        manager.audit()
    assert counts["ok"] > 30
    driver.finish()


@pytest.mark.parametrize("window", [1, 5, 16, 33, 64, None])
@pytest.mark.parametrize("sinks", [0, 1, 40])
def test_windows_at_every_length(arm, window, sinks) -> None:
    from tests.support.configs import MIB, config, one

    if window is None and sinks:
        pytest.skip("sinks need a window")
    tpb = 16
    manager = build(arm, config([one(0, MIB, window, sinks or None)], 64 * MIB, tpb))
    cache = manager.create_kv_cache()
    cache.stop_committing()
    assert cache.resume()
    for history in range(300):
        assert cache.resize(history + 1, history)
        live = {o for o, i in enumerate(cache.get_base_page_indices(0)) if i >= 0}
        must = {p // tpb for p in range(history + 1) if oracle.needed(p, history, window, sinks)}
        assert must <= live
        assert live == set(range(oracle.blocks(history + 1, tpb))) - oracle.stale(
            history, tpb, window, -(-sinks // tpb)
        )
        assert len(manager.snapshot()["pool_groups"][0]["used"]) == len(live)
    cache.close()
    manager.shutdown()
