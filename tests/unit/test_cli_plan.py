"""``kvpool plan`` and the arithmetic behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from kvpool.cli.main import app
from kvpool.models import get_model
from kvpool.sim.plan import PlanOptions, make_plan, plan_config
from kvpool.v2 import KVCacheManager


def plan_json(tmp_path: Path, *words: str) -> dict:
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", *words, "--json", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


def test_gpt_oss_at_10_gib(tmp_path: Path) -> None:
    """Numbers of the worked example: 9,102 pages shared by need against 4,551 + 4,551."""
    plan = plan_json(tmp_path, "--memory", "10GiB", "--max-seq-len", "9216")
    assert set(plan) >= {
        "schema",
        "kvpool",
        "settings",
        "bytes_per_token",
        "request_bytes",
        "ideal",
        "fits",
        "layer_groups",
        "pools",
        "splits",
    }
    assert plan["bytes_per_token"] == 36 * 2048
    assert [group["slots_per_request"] for group in plan["layer_groups"]] == [5, 288]
    assert plan["request_bytes"] == 293 * 1_179_648
    assert [pool["slots"] for pool in plan["pools"]] == [9102]
    assert plan["fits"] == plan["ideal"] == 31
    assert plan["splits"]["equal"] == {"slots": [4551, 4551], "fits": 15}
    assert plan["settings"]["typical_step"] == [9215, 9214]


def test_heaviest_length_is_not_the_longest() -> None:
    """At 9,216 the window has 4 pages, a little earlier 5."""
    plan = make_plan(PlanOptions(memory="10GiB", max_seq_len=9216))
    capacity, history = plan.settings.typical_step
    assert history == capacity - 1
    assert capacity == 9215
    one_less = make_plan(PlanOptions(memory="10GiB", max_seq_len=9215))
    assert one_less.request_bytes == plan.request_bytes


@pytest.mark.parametrize(
    ("model", "length"),
    [("gemma-3-27b", 8192), ("mimo-v2-flash", 32_768), ("qwen3-next-80b-a3b", 2048), ("deepseek-v4-pro", 512)],
)
def test_what_fits_can_be_opened(model: str, length: int, backend: str) -> None:
    plan = make_plan(PlanOptions(model=model, memory="40GiB", max_seq_len=length))
    assert plan.fits >= plan.ideal * 98 // 100 > 0
    assert plan.fits >= plan.splits.equal.fits
    block = plan.settings.tokens_per_block
    config, (capacity, history) = plan_config(
        get_model(model), memory=40 * 2**30, tokens_per_block=block, length=length
    )
    manager = KVCacheManager(config, backend=backend, device="virtual")
    caches = []
    while len(caches) <= plan.ideal:
        cache = manager.create_kv_cache()
        cache.stop_committing()
        caches.append(cache)
        if not (cache.resume(None) and cache.resize(capacity, history)):
            break
    assert len(caches) - 1 == plan.fits
    for cache in caches:
        cache.close()
    manager.shutdown()


def test_nothing_fits_names_the_longest_that_does() -> None:
    options = PlanOptions(model="llama-3.1-8b", memory="1GiB", max_seq_len=65_536)
    plan = make_plan(options)
    assert (plan.ideal, plan.fits, plan.pools) == (0, 0, [])
    longest = plan.longest_fitting
    assert longest == 2**30 // (32 * 4096) // 32 * 32
    result = CliRunner().invoke(app, ["plan", "--model", "llama-3.1-8b", "--memory", "1GiB", "--max-seq-len", "65536"])
    assert result.exit_code == 0
    assert f"the longest that does has {longest:,}" in result.stdout
    fits = [
        make_plan(PlanOptions(model="llama-3.1-8b", memory="1GiB", max_seq_len=length)).fits
        for length in (longest, longest + 32)
    ]
    assert fits == [1, 0]


@pytest.mark.parametrize(
    ("model", "memory"), [("gpt-oss-120b", "2GiB"), ("gemma-3-27b", "1GiB"), ("qwen3-next-80b-a3b", "300MiB")]
)
def test_the_named_length_fits_and_the_next_does_not(model: str, memory: str) -> None:
    """Windows hold a page more on the way than at a whole number of blocks."""
    longest = make_plan(PlanOptions(model=model, memory=memory, max_seq_len=131_072)).longest_fitting
    assert longest
    plans = [
        make_plan(PlanOptions(model=model, memory=memory, max_seq_len=length)) for length in (longest, longest + 32)
    ]
    assert [plan.fits > 0 for plan in plans] == [True, False]


def test_length_below_max_seq_len() -> None:
    short = make_plan(PlanOptions(model="gemma-3-27b", memory="40GiB", length=2048))
    long = make_plan(PlanOptions(model="gemma-3-27b", memory="40GiB", length=2048, max_seq_len=131_072))
    assert short.settings.max_seq_len == 2048
    assert long.settings.max_seq_len == 131_072
    assert long.request_bytes == short.request_bytes
    assert long.splits.max_length.fits < short.splits.max_length.fits
    # a whole sequence of max_seq_len must fit too
    full = next(pool for pool in long.pools if pool.layer_groups == [1])
    assert full.slots >= 4096


def test_windows_of_the_whole_length_are_full() -> None:
    plan = make_plan(PlanOptions(model="gemma-3-27b", memory="40GiB", max_seq_len=512))
    assert [group.window for group in plan.layer_groups] == [None]


def test_dtype_and_ranks() -> None:
    plain = make_plan(PlanOptions(memory="10GiB", max_seq_len=8192))
    fp8 = make_plan(PlanOptions(memory="10GiB", max_seq_len=8192, dtype="fp8", tp=2))
    assert fp8.request_bytes * 4 == plain.request_bytes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--dtype", "int3"), "--dtype: 'int3' is unknown; legal: bfloat16"),
        (("--memory", "0"), "--memory: 0 is too small"),
        (("--length", "10", "--max-seq-len", "5"), "--length: 10 is longer than --max-seq-len"),
        (("--max-seq-len", "0"), "--max-seq-len: 0 is out of range"),
        (("--model", "nothing"), "--model: unknown model"),
        (("--model", "deepseek-v4-pro", "--tokens-per-block", "32"), "--tokens-per-block: 32 does not suit"),
    ],
)
def test_wrong_use_is_one_line(words: tuple[str, ...], line: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 2
    (shown,) = result.stderr.splitlines()
    assert line in shown


def test_backend_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_KV_CACHE_MANAGER_V2_BACKEND", "python")
    assert make_plan(PlanOptions(max_seq_len=512)).settings.backend == "python"
    monkeypatch.setenv("TLLM_KV_CACHE_MANAGER_V2_BACKEND", "rust")
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 2
    assert "'cpp' or 'python'" in result.stderr
