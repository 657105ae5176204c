"""All benchmarks by one command: what a stopped run keeps, what does not fit is left out, and what changed is named."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import all as bench
from bench.all import CPU, GPU, Part, changes_table, compare, figures, main
from tinyforge.errors import UserError

WRITES = """import json, sys
path = sys.argv[sys.argv.index("--json") + 1]
ours = {"median_ms": 3.0, "peak_memory_mib": None}
json.dump({"results": {"tinyforge": ours}, "argv": sys.argv[1:]}, open(path, "w"))
"""


def parts(tmp_path: Path, **scripts: str) -> tuple[Part, ...]:
    made = []
    for name, text in scripts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        made.append(Part(f"cpu-{name}", str(path), 5))
    return tuple(made)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[Part, ...], *flags: str) -> tuple[int, dict]:
    monkeypatch.setattr(bench, "CPU", given)
    before = tmp_path / "before"
    before.mkdir(exist_ok=True)
    status = main(["--on", "cpu", "--out", str(tmp_path / "out"), "--before", str(before), *flags])
    return status, json.loads((tmp_path / "out" / "all.json").read_text(encoding="utf-8"))["parts"]


def test_each_part_has_its_file_and_a_failure_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before").mkdir()
    old = {"results": {"tinyforge": {"median_ms": 4.0}}}
    (tmp_path / "before" / "cpu-good.json").write_text(json.dumps(old), encoding="utf-8")
    given = parts(tmp_path, bad="raise SystemExit('no such device')", good=WRITES, silent="pass")
    status, found = run(tmp_path, monkeypatch, given)
    assert status == 1 and [found[p.name]["status"] for p in given] == ["failed", "done", "failed"]
    assert found["cpu-bad"]["why"] == "no such device"
    assert json.loads((tmp_path / "out" / "cpu-good.json").read_text(encoding="utf-8")) == found["cpu-good"]["result"]
    assert "tinyforge, median_ms" in (table := capsys.readouterr().out) and "-25.0%" in table


def test_without_a_measurement_there_is_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, parts(tmp_path, bad="raise SystemExit('no such device')"))
    said = capsys.readouterr().out
    assert said.endswith("\nno figure was measured: nothing to compare\n") and "committed" not in said


def test_a_part_ends_at_its_limit_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(marker)!r}, 'w')"
    slow = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
    status, found = run(tmp_path, monkeypatch, parts(tmp_path, slow=slow, good=WRITES), "--limit", "1")
    assert status == 1 and [f["status"] for f in found.values()] == ["stopped", "done"]
    assert found["cpu-slow"]["why"] == "more than 1 s" and found["cpu-slow"]["seconds"] < 2.5
    time.sleep(2.5)
    assert not marker.exists()


def test_what_does_not_fit_into_the_budget_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Part("cpu-long", "no-such-file.py", 1000)
    status, found = run(tmp_path, monkeypatch, (long, *parts(tmp_path, good=WRITES)), "--seconds", "60")
    assert status == 0 and [f["status"] for f in found.values()] == ["left out", "done"]
    assert "it takes about 1000" in found["cpu-long"]["why"]


def test_the_last_run_says_how_long_a_part_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {
        "parts": {CPU[0].name: {"status": "done", "seconds": 77.0}, CPU[1].name: {"status": "stopped", "seconds": 1}}
    }
    (tmp_path / "all.json").write_text(json.dumps(last), encoding="utf-8")
    assert main(["--on", "cpu", "--list", "--before", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == [CPU[0].name, "77"] and lines[1].split()[1] == f"{CPU[1].seconds:.0f}"


def test_inputs_and_configs_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = parts(tmp_path, script=WRITES)[0].command
    text = tmp_path / "input.txt"
    text.write_text("x", encoding="utf-8")
    given = (
        Part("cpu-a", script + " --data {text}", 5),
        Part("cpu-b", script + " --data {shards}", 5),
        Part("cpu-c", script + " --config {config}", 5),
    )
    status, found = run(tmp_path, monkeypatch, given, "--text", str(text))
    assert status == 0 and found["cpu-a"]["result"]["argv"][:2] == ["--data", str(text)]
    assert found["cpu-b"] == {"status": "left out", "why": "--shards names no file"}
    assert json.loads(Path(found["cpu-c"]["result"]["argv"][1]).read_text(encoding="utf-8")) == bench.NINE_MILLION


def test_names_choose_whole_words() -> None:
    def names(only: str) -> list[str]:
        return [p.name for p in bench.chosen(GPU, only)]

    assert names("decode") == [
        *("gpu-decode-base", "gpu-decode-base-64", "gpu-decode-base-weights"),
        *("gpu-decode-8b-int4", "webgpu-decode-base"),
    ]
    assert names("grouped-mma") == ["gpu-grouped-mma"]
    with pytest.raises(UserError, match="--only trai: no part is called so; the parts are gpu-train-32x512"):
        names("train,trai")


def test_figures_are_found_in_lists_and_named() -> None:
    found = {"rows": [{"kernel": "rope", "us": 20, "bytes": 3}], "results": {"a": {"median_ms": 2.0, "step_ms": [1]}}}
    assert list(figures(found)) == [("rows, rope, us", 20.0), ("results, a, median_ms", 2.0)]
    lines = changes_table([*compare("x", found, {"rows": [{"kernel": "rope", "us": 20.2}]}), ("x", "zero", 0.0, 1.0)])
    assert "new" in lines[1] and lines[2].split()[-1] == "-" and lines[-1] == "1 figures moved by at most 2%"


def test_the_parts_are_those_of_the_results() -> None:
    """Names are not given twice, every script and flag is there, and a page has each result that no part measures."""
    names = [part.name for part in (*GPU, *CPU)]
    assert len(set(names)) == len(names)
    pages = "".join(page.read_text(encoding="utf-8") for page in (Path("README.md"), *Path("docs").rglob("*.md")))
    left = {path.stem for path in Path("docs/results").glob("*.json")} - {*names, "all", "models"}
    assert sorted(name for name in left if f"{name}.json" not in pages) == []


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({p.command.split()[0] for p in GPU if p.command[0] != "-"}))
def test_no_benchmark_of_a_gpu_machine_imports_duckdb(script: str) -> None:
    """The GPU machine need not have it."""
    block = f"import sys; sys.modules['duckdb'] = None; sys.argv = [{script!r}, '--help']; import runpy; "
    block += "sys.path.insert(0, 'bench'); "  # as for a file that is run by its path
    done = subprocess.run(
        [sys.executable, "-c", block + f"runpy.run_path({script!r}, run_name='__main__')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--limit", "-1"], ["--text", "no-such-file"]])
def test_a_wrong_flag_is_one_line(flags: list[str]) -> None:
    with pytest.raises(UserError, match=rf"{flags[0]}"):
        main(["--on", "cpu", *flags])


def test_the_script_of_that_name_runs_it() -> None:
    done = subprocess.run(
        ["bench/all.sh", "--on", "cpu", "--list"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.splitlines()[-1].startswith(f"{len(CPU)} parts, about ") and shlex.split(done.stdout)
