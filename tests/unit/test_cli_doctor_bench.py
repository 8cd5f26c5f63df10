"""``kvpool doctor``, ``kvpool bench`` and what all commands share."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from kvpool.cli.main import app
from kvpool.sim import doctor, driver_probe
from kvpool.sim.bench import CASES
from tests.support.arms import AVAILABLE, BACKEND_OF, NATIVE


def kvpool(*words: str):
    return CliRunner().invoke(app, list(words))


def test_doctor_json(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    result = kvpool("doctor", "--json", str(out))
    assert result.exit_code == 0
    report = json.loads(out.read_text())
    assert set(report) == {"schema", "kvpool", "device_auto", "backends", "driver", "devices", "fabric"}
    assert report["device_auto"] == "host"
    assert report["backends"]["python"] == {"ok": True, "reason": None}
    assert report["backends"]["cpp"]["ok"] is NATIVE
    assert report["driver"]["ok"] or report["driver"]["reason"]
    assert report["fabric"]["ok"] is False
    assert report["fabric"]["kind"] is None
    assert report["fabric"]["reason"]


@pytest.mark.parametrize("what", ["cuda", "fabric"])
def test_doctor_require(what: str) -> None:
    result = kvpool("doctor", "--require", what)
    assert result.exit_code == 1
    assert f"{what} is required" in result.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--peer",), "--peer: the check between processes is not built yet"),
        (("--model", "gpt-oss-120b"), "--model: the check of a model is not built yet"),
        (("--require", "rocm"), "--require: 'rocm' is unknown; legal: cuda, fabric"),
    ],
)
def test_doctor_wrong_use(words: tuple[str, ...], line: str) -> None:
    result = kvpool("doctor", *words)
    assert result.exit_code == 2
    (shown,) = result.stderr.splitlines()
    assert line in shown


class FakeDriver:
    """Answers like libcuda, through the same C types."""

    def __init__(self, init: int = 0, count: int = 1) -> None:
        self._init = init
        self._count = count

    def cuDriverGetVersion(self, number) -> int:
        number._obj.value = 13_010
        return 0

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceGet(self, device, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size: int, device) -> int:
        name.value = b"Test GPU"
        return 0

    def cuDeviceTotalMem_v2(self, size, device) -> int:
        size._obj.value = 2**37
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        value._obj.value = 1
        return 0 if attribute == 102 else 1


def test_driver_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_probe.ctypes, "CDLL", lambda name: FakeDriver())
    driver, devices = driver_probe.probe_driver()
    assert driver == driver_probe.DriverReport(ok=True, version="13.1", reason=None)
    assert devices == [driver_probe.DeviceReport(index=0, name="Test GPU", memory_bytes=2**37, vmm=True, fabric=None)]
    (line,) = doctor.unmet(doctor.examine(), ["cuda"])
    assert "not built yet" in line
    assert kvpool("doctor").exit_code == 0


def test_driver_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_probe.ctypes, "CDLL", lambda name: FakeDriver(init=100))
    driver, devices = driver_probe.probe_driver()
    assert driver == driver_probe.DriverReport(ok=False, version="13.1", reason="cuInit answered error 100")
    assert devices == []
    monkeypatch.setattr(driver_probe.ctypes, "CDLL", lambda name: FakeDriver(count=0))
    assert doctor.unmet(doctor.examine(), ["cuda"]) == ["cuda is required: the driver names no device"]


def test_library_without_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_probe.ctypes, "CDLL", lambda name: object())
    driver, _ = driver_probe.probe_driver()
    assert driver.reason == "libcuda.so.1 has no cuDriverGetVersion"
    assert ctypes.CDLL is not None


def test_bench(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = kvpool("bench", "--filter", "a.*1024", "--json", str(out))
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert set(report) == {"schema", "kvpool", "rows"}
    backends = sorted(BACKEND_OF[arm] for arm in AVAILABLE)
    assert [(row["backend"], row["name"]) for row in report["rows"]] == [
        (backend, name) for backend in backends for name in ("a.alloc1024", "a.free1024")
    ]
    for row in report["rows"]:
        assert set(row) == {"name", "backend", "median", "min", "max", "unit", "n", "params"}
        assert 0 < row["min"] <= row["median"] <= row["max"]


@pytest.mark.slow
def test_every_bench_case_runs() -> None:
    assert {"a.alloc1024", "a.free1024", "b.decode256@2k"} <= set(CASES)
    for name, case in CASES.items():
        samples = case.run(BACKEND_OF[AVAILABLE[-1]])
        assert len(samples) >= (256 if name.startswith("b.") else 14)


def test_bench_without_a_match() -> None:
    result = kvpool("bench", "--filter", "zzz")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvpool: --filter: 'zzz' matches no case")


def test_unknown_command_names_the_legal_ones() -> None:
    result = kvpool("replya")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "replya" in line
    assert "replay, plan, doctor, bench" in line


def test_version_and_help() -> None:
    from kvpool import __version__

    assert kvpool("--version").stdout == f"kvpool {__version__}\n"
    for words in ([], ["replay"], ["plan"], ["doctor"], ["bench"]):
        result = kvpool(*words, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.stdout
    assert kvpool().stdout == kvpool("--help").stdout


def test_as_a_module_and_quiet_without_a_terminal() -> None:
    command = [sys.executable, "-m", "kvpool.cli", "replay", "--limit", "1", "--arms", "v2py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "v2py (python)" in done.stdout


def test_parsing_loads_neither_manager_nor_rich() -> None:
    code = "import sys, kvpool.cli.main; print([m for m in ('rich', 'numpy', 'pydantic', 'kvpool.v2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
