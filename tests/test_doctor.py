"""The doctor names what is missing and the command that installs it; it fails only where the CPU cannot train."""

import importlib.metadata
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tinyforge import doctor


class CUDARuntimeError(RuntimeError):
    pass


def fake_cupy(driver: int = 13020, compute: tuple[int, int] = (9, 0), broken: str = "") -> Any:
    """What the doctor asks of CuPy, with answers of our choice."""

    def answer(part: str, value: Any) -> Any:
        def call(*_: Any) -> Any:
            if part == broken:
                raise CUDARuntimeError(f"{part} failed")
            return value

        return call

    card = {"major": compute[0], "minor": compute[1], "name": b"Card", "totalGlobalMem": 80 << 30}
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        driverGetVersion=answer("driver", driver),
        getDeviceCount=answer("count", 1),
        runtimeGetVersion=answer("runtime", 13010),
        getDeviceProperties=answer("card", card),
    )
    nvrtc = SimpleNamespace(getVersion=answer("nvrtc", (13, 1)))
    return SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc))


def with_cupy(monkeypatch: pytest.MonkeyPatch, module: Any, names: tuple[str, ...] = ("cupy-cuda13x",)) -> None:
    builds = [SimpleNamespace(metadata={"Name": name}) for name in names]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: builds)
    monkeypatch.setattr(doctor, "version_of", lambda package: "1.0")
    monkeypatch.setitem(sys.modules, "cupy", module)


def trouble(findings: list[doctor.Finding]) -> list[str]:
    return [str(f) for f in findings if not f.ok]


def test_it_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    assert "training on the CPU: works" in capsys.readouterr().out


def test_kernels_that_openblas_did_not_choose_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "blas_kernels", lambda: "Haswell")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert "Haswell, set by OPENBLAS_CORETYPE  ->  unset OPENBLAS_CORETYPE" in trouble(doctor.kernels())[0]
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert trouble(doctor.kernels()) == [] and doctor.kernels()[0].found == "Haswell, chosen by OpenBLAS"
    monkeypatch.setattr(doctor, "blas_kernels", lambda: "")
    assert doctor.kernels() == []


def test_a_missing_package_fails_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "safetensors" else "1.0")
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "MISSING  safetensors" in out and "pip install safetensors" in out
    assert "training on the CPU: see above" in out


def test_training_works_without_duckdb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "duckdb" else "1.0")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "DuckDB" in line)
    assert line.startswith("- ") and "only the commands in data/ need it" in line
    assert line.endswith("pip install duckdb")
    assert "training on the CPU: works" in out


def test_a_report_says_what_adapters_compute(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wgpu", reason="the adapters of WebGPU")
    assert doctor.main(["--report"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"--backend auto takes \w+ to train a language model: \w+", said)
    report = said.split("```")[1].splitlines()
    assert report[1].startswith("tinyforge ") and "wgpu" in report[1]
    for line in report[2:]:
        assert re.match(r"adapter \d+: .*features: |  products: off by \d\.\de-0[4-9] .* GFLOP/s$", line), line


def test_no_cupy_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [])
    (finding,) = doctor.gpu()
    assert finding.ok is None and finding.fix == doctor.INSTALL


def test_two_builds_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cupy(monkeypatch, fake_cupy(), ("cupy-cuda12x", "cupy-cuda13x"))
    (line,) = trouble(doctor.gpu())
    assert "several builds" in line and "pip uninstall cupy-cuda12x cupy-cuda13x" in line


def test_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cupy(monkeypatch, None)  # None in sys.modules makes the import fail
    (line,) = trouble(doctor.gpu())
    assert "cannot be imported" in line and "again" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"broken": "nvrtc"}, 'pip install "cupy-cuda13x[ctk]"'),
        ({"broken": "count"}, "none that CUDA can use (count failed)"),
        ({"driver": 12080}, "for CUDA 12.8; CuPy is built for 13.1"),
        ({"compute": (7, 5)}, "bf16 kernels want sm_80"),
    ],
)
def test_what_is_wrong_with_the_gpu_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    with_cupy(monkeypatch, fake_cupy(**settings))
    (line,) = trouble(doctor.gpu())
    assert said in line and "\n" not in line


def test_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cupy(monkeypatch, fake_cupy())
    findings = doctor.gpu()
    assert not trouble(findings)
    assert "Card, 80 GiB, sm_90" in str(findings[-1])


@pytest.mark.parametrize("reason", ["", "numba is not installed: pip install it"])
def test_the_kernels_that_decode_and_train_on_a_cpu(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing", lambda: reason)
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.9")
    found = doctor.compiled_kernels()
    assert found.what == "CPU kernels" and found.fix == reason.removeprefix("numba is not installed: ")
    assert found.found == ("NumPy's: numba is not installed" if reason else "compiled by numba 0.9")
