"""What works on this machine and, for everything that does not, why."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from kvpool import __version__
from kvpool.sim.arms import backend_problems
from kvpool.sim.driver_probe import DeviceReport, DriverReport, probe_driver
from kvpool.sim.usage import choose

REQUIREMENTS = ("cuda", "fabric")


class BackendReport(BaseModel):
    """A backend of the V2 manager."""

    ok: bool
    reason: str | None


class FabricReport(BaseModel):
    """Memory that other nodes of an NVLink domain can import."""

    ok: bool
    kind: str | None
    reason: str | None


class DoctorResult(BaseModel):
    """The file that ``kvpool doctor --json`` writes."""

    schema_: Literal[1] = Field(alias="schema")
    kvpool: str
    device_auto: str
    backends: dict[str, BackendReport]
    driver: DriverReport
    devices: list[DeviceReport]
    fabric: FabricReport


def examine() -> DoctorResult:
    """The report; probes the driver, allocates nothing."""
    backends = {
        backend: BackendReport(ok=problem is None, reason=problem) for backend, problem in backend_problems().items()
    }
    driver, devices = probe_driver()
    return DoctorResult.model_construct(
        schema_=1,
        kvpool=__version__,
        device_auto="host",
        backends=backends,
        driver=driver,
        devices=devices,
        fabric=FabricReport(ok=False, kind=None, reason="the cuda device and its fabric probe are not built yet"),
    )


def unmet(result: DoctorResult, required: list[str]) -> list[str]:
    """One line for every required thing that this kvpool can't use here; UsageError for an unknown one."""
    missing = []
    for name in required:
        if choose("--require", name, REQUIREMENTS) == "fabric":
            if not result.fabric.ok:
                missing.append(f"fabric is required: {result.fabric.reason}")
        elif not result.driver.ok:
            missing.append(f"cuda is required: {result.driver.reason}")
        elif not result.devices:
            missing.append("cuda is required: the driver names no device")
        elif result.device_auto != "cuda":
            missing.append("cuda is required: the driver answers, but kvpool's cuda device is not built yet")
    return missing
