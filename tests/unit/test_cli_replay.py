"""``kvpool replay`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from kvpool.cli.main import app
from kvpool.sim.options import available_ram
from tests.support.arms import AVAILABLE, BACKEND_OF, NATIVE

DATA = Path(__file__).resolve().parent.parent / "data"
MOONCAKE, AZURE = str(DATA / "mooncake_tiny.jsonl"), str(DATA / "azure_tiny.csv")
ARMS = [arm for arm in ("v2cpp", "v2py") if arm in AVAILABLE]


def kvpool(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def replay_json(tmp_path: Path, *words: str, code: int = 0) -> dict:
    out = tmp_path / "out.json"
    result = kvpool("replay", *words, "--json", str(out))
    assert result.exit_code == code, result.output
    return json.loads(out.read_text())


def wrong_use(*words: str) -> str:
    """The one line of a refused command."""
    result = kvpool("replay", *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


ARM_FIELDS = {
    "backend",
    "steps",
    "requests_finished",
    "requests_refused",
    "max_seq_len_effective",
    "throughput_tokens_per_s",
    "throughput_with_manager_tokens_per_s",
    "ttft_ms",
    "tpot_ms",
    "batch",
    "prompt_tokens",
    "reused_tokens",
    "rehit_tokens",
    "suspensions",
    "recompute_pauses",
    "recomputed_tokens",
    "manager_us_per_step",
    "decision_digest",
    "content_checks",
    "content_errors",
    "pools",
}


def test_json(tmp_path: Path) -> None:
    result = replay_json(tmp_path, "--trace", MOONCAKE, "--memory", "1GiB")
    assert set(result) == {"schema", "kvpool", "settings", "arms"}
    assert result["schema"] == 1
    settings = result["settings"]
    assert settings["memory"] == 2**30
    assert settings["arrival"] == "trace"
    assert settings["tokens_per_block"] == 32
    assert settings["max_seq_len"] == 131_072
    assert settings["reuse"] is True
    assert settings["policy"] == dict.fromkeys(ARMS, "max_utilization")
    assert settings["step_model"]["gpu"] == "b200"
    assert list(result["arms"]) == ARMS
    for name, arm in result["arms"].items():
        assert set(arm) >= ARM_FIELDS
        assert "repeats" not in arm
        assert arm["backend"] == BACKEND_OF[name]
        assert (arm["requests_finished"], arm["requests_refused"]) == (6, 0)
        assert arm["prompt_tokens"] == 700 + 90 + 513 + 33 + 64 + 1200
        assert arm["content_checks"] is None
        assert set(arm["ttft_ms"]) == {"mean", "p50", "p99"}
        assert set(arm["manager_us_per_step"]) == {"p50", "p99"}
        (pool,) = arm["pools"]
        assert pool["pool_bytes"] == pool["slots"] * pool["slot_bytes"] <= 2**30
        assert [(g["kind"], g["window"], len(g["layers"])) for g in pool["layer_groups"]] == [
            ("attention", 128, 18),
            ("attention", None, 18),
        ]
        assert pool["samples"][-1] == {"step": arm["steps"], "live_bytes": 0, "pool_bytes": pool["pool_bytes"]}
    assert len({arm["decision_digest"] for arm in result["arms"].values()}) == 1


def test_requests_file(tmp_path: Path) -> None:
    lines = tmp_path / "requests.jsonl"
    assert kvpool("replay", "--trace", AZURE, "--max-seq-len", "320", "--requests", str(lines)).exit_code == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["arm"], row["index"], row["state"]) for row in rows] == [
        (arm, index, state) for arm in ARMS for index, state in enumerate(("finished", "refused", "finished"))
    ]
    assert set(rows[0]) == {"arm", "index", "prompt_tokens", "reused_tokens", "rehit_tokens", "ttft_ms", "state"}
    assert rows[1]["ttft_ms"] is None
    assert rows[0]["ttft_ms"] > 0


def test_table_on_stdout() -> None:
    result = kvpool("replay", "--limit", "2")
    assert result.exit_code == 0
    assert result.stderr == ""
    for word in ("gpt-oss-120b", "80 GiB", "1k1k", "prompt tokens reused", "decision digest", *ARMS):
        assert word in result.stdout


def test_reuse_is_on_and_can_be_switched_off(tmp_path: Path) -> None:
    words = ("--trace", MOONCAKE, "--memory", "1GiB", "--requests", str(tmp_path / "requests.jsonl"))
    on = replay_json(tmp_path, *words)["arms"]
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert {line["index"]: line["reused_tokens"] for line in lines} == {0: 0, 1: 89, 2: 512, 3: 0, 4: 0, 5: 700}
    off = replay_json(tmp_path, *words, "--no-reuse")["arms"]
    for arm in ARMS:
        assert (on[arm]["prompt_tokens"], on[arm]["reused_tokens"]) == (2600, 89 + 512 + 700)
        assert (off[arm]["prompt_tokens"], off[arm]["reused_tokens"]) == (2600, 0)
        assert on[arm]["rehit_tokens"] == 0
        assert on[arm]["decision_digest"] != off[arm]["decision_digest"]
        assert on[arm]["throughput_tokens_per_s"] > off[arm]["throughput_tokens_per_s"]
    assert "1,301 (50.04 %)" in kvpool("replay", *words).stdout


def test_contents_are_checked_on_host(tmp_path: Path) -> None:
    result = replay_json(tmp_path, "--trace", MOONCAKE, "--device", "host", "--memory", "256MiB")
    for arm in result["arms"].values():
        assert arm["content_checks"] > 0
        assert arm["content_errors"] == 0
    assert len({arm["token_digest"] for arm in result["arms"].values()}) == 1


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_injected_corruption_ends_with_1(tmp_path: Path, model: str) -> None:
    words = ("--trace", MOONCAKE, "--device", "host", "--memory", "256MiB", "--inject-corruption", "--model", model)
    result = replay_json(tmp_path, *words, code=1)
    for arm in result["arms"].values():
        assert arm["content_errors"] >= 1
    shown = kvpool("replay", *words)
    assert shown.exit_code == 1
    assert "content_errors" in shown.stderr


def test_corruption_of_a_single_token_request_is_found(tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    words = ("--trace", str(trace), "--device", "host", "--memory", "64MiB", "--inject-corruption")
    assert kvpool("replay", *words).exit_code == 1


def test_repeat_gives_medians_and_the_same_digest(tmp_path: Path) -> None:
    once = replay_json(tmp_path, "--trace", AZURE)
    thrice = replay_json(tmp_path, "--trace", AZURE, "--repeat", "3")
    for name, arm in thrice["arms"].items():
        assert arm["repeats"] == 3
        assert arm["decision_digest"] == once["arms"][name]["decision_digest"]
        assert arm["ttft_ms"] == once["arms"][name]["ttft_ms"]


def test_rate_arrivals_are_seeded(tmp_path: Path) -> None:
    words = ("--workload", "1k1k", "--limit", "5", "--arrival", "20")
    digests = [
        replay_json(tmp_path, *words, "--seed", seed)["arms"]["v2py"]["decision_digest"] for seed in ("1", "1", "2")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_tensor_parallel_halves_the_slots_bytes(tmp_path: Path) -> None:
    whole = replay_json(tmp_path, "--limit", "1")["arms"]["v2py"]["pools"][0]
    half = replay_json(tmp_path, "--limit", "1", "--tp", "2")["arms"]["v2py"]["pools"][0]
    assert half["slot_bytes"] * 2 == whole["slot_bytes"]


def test_gpt_oss_at_4_gib(tmp_path: Path) -> None:
    arms = replay_json(tmp_path, "--limit", "1", "--memory", "4GiB")["arms"]
    assert {arm["max_seq_len_effective"] for arm in arms.values()} == {110_528}


def test_recompute_pauses_and_equal_digests(tmp_path: Path) -> None:
    arms = replay_json(tmp_path, "--workload", "1k1k", "--limit", "8", "--memory", "256MiB")["arms"]
    for arm in arms.values():
        assert arm["recompute_pauses"] > 0
        assert arm["requests_finished"] == 8
    assert len({arm["decision_digest"] for arm in arms.values()}) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--policy", "adaptive"), "--policy: adaptive is not built yet; legal: auto, max_utilization"),
        (("--policy", "guaranteed_no_evict"), "--policy: guaranteed_no_evict is not built yet"),
        (("--policy", "lifo"), "--policy: 'lifo' is unknown; legal: auto, max_utilization"),
        (("--host-memory", "1GiB"), "--host-memory: a host tier is not built yet; legal: 0"),
        (("--host-memory", "lots"), "--host-memory: 'lots' is not a size"),
        (("--pool-sizing", "elastic"), "--pool-sizing: elastic is not built yet; legal: planned"),
        (("--report", "x.html"), "--report: the HTML report is not built yet"),
        (("--device", "cuda"), "--device: cuda is not built yet; legal: virtual, host"),
        (("--device", "tpu"), "--device: 'tpu' is unknown; legal: virtual, host"),
        (("--arms", "v1"), "--arms: v1 is not built yet; legal:"),
        (("--arms", "v3"), "--arms: 'v3' is unknown; legal: a comma-separated list of"),
        (("--arms", ""), "--arms: '' is unknown"),
        (("--workload", "mix"), "--workload: mix is not built yet; legal: 1k1k, 1k8k, 8k1k, multiturn, agent"),
        (("--workload", "x"), "--workload: 'x' is unknown"),
        (("--workload", "1k1k", "--trace", MOONCAKE), "--workload: a trace is given too"),
        (("--trace", "none.jsonl"), "--trace: none.jsonl can't be read (no such file or directory)"),
        (("--trace", "none.parquet"), "--trace: none.parquet has neither ending"),
        (("--arrival", "trace"), "--arrival: a workload has no arrival times"),
        (("--arrival", "nan"), "--arrival: nan is no rate"),
        (("--memory", "80GB"), "--memory: '80GB' is not a size"),
        (("--memory", "1MiB"), "--memory: 1048576 bytes are too few"),
        (("--model", "gpt-4"), "--model: unknown model 'gpt-4'"),
        (("--tp", "3"), "--tp: 8 KV heads can not be divided over tp=3 ranks; legal: 1, 2, 4, 8, 16"),
        (("--tp", "0"), "--tp: 0 is out of range"),
        (("--gpu", "a100"), "--gpu: 'a100' is unknown; legal: h100, h200, b200, gb200"),
        (("--limit", "0"), "--limit: 0 is out of range; legal: an integer from 1"),
        (("--limit", "many"), "--limit: not an integer; legal: an integer"),
        (("--limit", "2.5"), "--limit: not an integer"),
        (("--max-batch-size", "-1"), "--max-batch-size: -1 is out of range"),
        (("--max-seq-len", "8"), "--max-seq-len: 8 is shorter than a block; legal: at least 32 tokens"),
        (("--tokens-per-block", "33", "--model", "deepseek-v4-flash"), "--tokens-per-block: 33 does not suit"),
        (("--seed", "-1"), "--seed: -1 is out of range"),
        (("--repeat", "0"), "--repeat: 0 is out of range"),
        (("--inject-corruption",), "--inject-corruption: the virtual device has no bytes to corrupt"),
        (("--json", "no/such/folder/x.json"), "--json: no/such/folder/x.json can't be written"),
        (("--requests", "."), "--requests: . can't be written"),
        (("--frobnicate",), "--frobnicate"),
        (("surplus",), "surplus"),
        (("--limit",), "--limit"),
    ],
)
def test_wrong_use_is_one_line(words: tuple[str, ...], line: str) -> None:
    assert line in wrong_use(*words)


def test_more_than_the_ram(tmp_path: Path) -> None:
    line = wrong_use("--device", "host", "--memory", str(available_ram() * 2))
    assert "--memory" in line
    assert "RAM" in line


@pytest.mark.skipif(NATIVE, reason="the extension is built")
def test_missing_extension_is_told_with_the_remedy() -> None:
    line = wrong_use("--arms", "v2cpp")
    assert "kvpool._native" in line
    assert "KVPOOL_NATIVE=ON" in line


def test_missing_extension_leaves_v2cpp_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.v2 import backend_choice

    def missing() -> None:
        raise ImportError("kvpool._native is not installed; build it with KVPOOL_NATIVE=ON")

    monkeypatch.setattr(backend_choice, "native_module", missing)
    assert list(replay_json(tmp_path, "--limit", "1")["arms"]) == ["v2py"]
    assert "build it with KVPOOL_NATIVE=ON" in wrong_use("--arms", "v2py,v2cpp")


def test_malformed_trace_names_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 0}\n')
    assert f"--trace: {trace}:2: input_length" in wrong_use("--trace", str(trace))


def test_differing_digests_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.sim import replay
    from kvpool.sim.options import ReplayOptions, prepare

    outcome = replay.run_replay(prepare(ReplayOptions(limit=1, arms="v2py")))
    arm = outcome.result.arms["v2py"]
    twins = {"v2cpp": arm.model_copy(update={"decision_digest": "other"}), "v2py": arm}
    assert replay._differences(twins) == ["decision_digest differs between v2cpp and v2py"]
    monkeypatch.setattr(replay, "_differences", lambda arms: replay_failures)
    replay_failures = ["decision_digest differs between v2cpp and v2py"]
    result = kvpool("replay", "--limit", "1")
    assert result.exit_code == 1
    assert "decision_digest differs" in result.stderr


def test_config_json_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "vocab_size": 1000,
                "max_position_embeddings": 4096,
            }
        )
    )
    result = replay_json(tmp_path, "--model", str(path), "--limit", "2")
    assert result["arms"]["v2py"]["max_seq_len_effective"] == 4096
