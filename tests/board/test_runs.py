"""Runs are read while they grow, each line once; what is drawn of a million rows has their extremes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tinyforge.board import runs as module
from tinyforge.board.__main__ import main
from tinyforge.board.runs import Board, Run, extremes, smoothed
from tinyforge.errors import UserError


def line(step: int, **more: float) -> str:
    row = {"step": step, "tokens": 10 * step, "loss": 1 / step, "lr": 0.1, "seconds": 0.5 * step, **more}
    return json.dumps(row) + "\n"


def write(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, "run")


def steps(run: Run) -> list[float]:
    return run.columns("loss")[0].tolist()


def test_each_line_is_read_once_and_a_cut_one_when_it_is_whole(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    assert not run.refresh() and run.version == 0 and run.count == 0  # nothing there yet
    write(path, line(1) + line(2)[:20])
    run.refresh()
    assert steps(run) == [1]
    seen = run.version
    run.refresh()
    assert run.version == seen
    write(path, line(2)[20:] + line(3))
    run.refresh()
    assert steps(run) == [1, 2, 3] and run.version > seen and run.last["loss"] == 1 / 3


@pytest.mark.parametrize("how", ["replaced", "cut", "over the old one"])
def test_a_file_that_is_written_anew_is_read_anew(how: str, run: Run) -> None:
    """A resumed run drops the rows after its checkpoint."""
    path = run.folder / "metrics.jsonl"
    write(path, "".join(map(line, range(1, 50))))
    run.refresh()
    text = "".join(line(step, extra=1.0) for step in range(1, 60 if how == "over the old one" else 6))
    if how == "replaced":
        path.with_name("new").write_text(text, encoding="utf-8")
        os.replace(path.with_name("new"), path)
    else:
        path.write_text(text, encoding="utf-8")
    run.refresh()
    assert steps(run) == list(range(1, 60 if how == "over the old one" else 6)) and "extra" in run.keys
    assert run.count == len(steps(run))


def test_damaged_lines_are_counted_and_the_others_read(run: Run) -> None:
    bad = [
        '{"step": 2, "lo\n',
        "[]\n",
        '{"step": "3"}\n',
        '{"step": 4, "loss": "x"}\n',
        "\n",
        "{" * 5000 + "\n",
        '{"step": 9}, {"step": 10}\n',
        '{"step": 1e3, "loss": 1}\n',
        "\udcff\n",
    ]
    text = line(1) + "".join(bad) + line(5) + '{"step": 6, "loss": NaN}\n' + '{"step": 7, "loss": Infinity}\n'
    (run.folder / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    run.refresh()
    assert steps(run) == [1, 5] and run.damaged == len(bad)
    summary = json.dumps(run.summary(0.0), allow_nan=False)  # a browser takes no NaN
    assert "NaN" not in summary


def test_rows_of_too_many_kinds_are_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TABLES", 8)
    write(run.folder / "metrics.jsonl", "".join(line(step, **{f"k{step}": 1.0}) for step in range(1, 40)))
    run.refresh()
    assert len(run.tables) == 8 and run.left_out == 39 - 8


def test_a_line_without_an_end_does_not_fill_the_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)
    write(run.folder / "metrics.jsonl", line(1) + "x" * 10_000 + "\n" + line(2))
    while run.refresh():
        pass
    assert steps(run) == [1, 2]


def test_a_curve_has_its_extremes_and_its_ends() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=100_003)
    values[[777, 54_321]] = 50, -50
    for points in (2, 10, 801, 5000):
        kept = extremes(values, points)
        assert len(kept) <= points + 2 and kept[0] == 0 and kept[-1] == len(values) - 1 and (np.diff(kept) > 0).all()
        assert {777, 54_321} <= set(kept.tolist())
    few = extremes(values[:7], 100)
    assert few.tolist() == list(range(7)) and extremes(values[:0], 100).size == 0


@pytest.mark.parametrize("keep", [0.001, 0.5, 0.98, 0.9999])
def test_smoothing_is_the_moving_average_without_bias(keep: float) -> None:
    values = np.random.default_rng(1).normal(size=3001) + 5
    state, expected = 0.0, []
    for step, value in enumerate(values, start=1):
        state = keep * state + (1 - keep) * value
        expected.append(state / (1 - keep**step))
    np.testing.assert_allclose(smoothed(values, keep), expected, rtol=1e-10)
    assert smoothed(values[:0], keep).size == 0


def test_a_curve_over_a_part_reaches_the_frame(run: Run) -> None:
    write(run.folder / "metrics.jsonl", "".join(map(line, range(1, 1001))))
    run.refresh()
    found = run.curve("loss", 0.0, 5000, "tokens", 4000, 5000)
    assert found["step"] == list(range(399, 502)) and found["value"][1] == pytest.approx(1 / 400, rel=1e-6)
    assert run.curve("loss", 0.9, 100, "seconds", 1e9, 2e9)["count"] == 0
    assert run.curve("loss", 0.9, 100)["count"] == 1000


def test_runs_come_and_go(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert not board.refresh() and board.summary()["runs"] == []
    for name in ("a", "group/b", "group/step-00000001/no", ".hidden/no", "1/2/3/4/5/too-deep"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "metrics.jsonl", line(1))
    (tmp_path / "loop").symlink_to(tmp_path)
    board._searched = -np.inf
    board.refresh()
    assert sorted(board.runs) == ["a", "group/b"]
    (tmp_path / "a" / "metrics.jsonl").unlink()
    board._searched = -np.inf
    board.refresh()
    assert sorted(board.runs) == ["group/b"]
    assert sorted(Board(tmp_path / "group" / "b").runs) == []
    one = Board(tmp_path / "group" / "b")
    one.refresh()
    assert list(one.runs) == ["b"]


def test_whether_a_run_is_live(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", line(7))
    run = Run(tmp_path, "run")
    run.refresh()
    now = time.time()
    assert run.summary(now)["live"] and not run.summary(now + 3600)["live"]
    for settings, live in (
        ({"steps": 7}, False),
        ({"steps": None, "minutes": 60.0}, True),
        ({"steps": None, "minutes": run.last["seconds"] / 60}, False),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"settings": settings}), encoding="utf-8")
        run.refresh()
        assert run.summary(now)["live"] == live, settings


@pytest.mark.parametrize("text", ["{", "[]", '{"settings": 5, "config": [NaN]}', '{"a": Infinity}'])
def test_damaged_files_beside_the_metrics(text: str, tmp_path: Path) -> None:
    for name in ("run.json", "scores.json", "samples.jsonl", "ledger.json"):
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    write(tmp_path / "metrics.jsonl", line(1))
    target = tmp_path / "out.html"
    assert main([str(tmp_path), "--export", str(target)]) == 0
    assert "NaN" not in target.read_text(encoding="utf-8").partition('id="exported">')[2].partition("</script>")[0]


def test_an_export_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in .*: no folder there has a metrics.jsonl"):
        main([str(tmp_path), "--export", str(tmp_path / "report.html")])
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_many_rows(tmp_path: Path) -> None:
    """Read in parts, drawn in as many points as a screen has, and kept as doubles."""
    tail = json.dumps({"tokens": 4096, "loss": 2.123456, "bits_per_byte": 1.23456, "lr": 0.004, "seconds": 3.25})[1:]
    with open(tmp_path / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f'{{"step": {step}, {tail}\n' for step in range(1, 300_001))
    run, looks = Run(tmp_path, "run"), 1
    while run.refresh():
        looks += 1
    found = run.curve("loss", 0.98, 1600)
    assert run.count == 300_000 and looks > 5 and len(run.tables) == 1
    assert found["count"] == 300_000 and len(found["value"]) <= 1602


def test_rounded_values_are_short_and_near() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=2000) * 10.0 ** rng.integers(-40, 40, 2000), [0.0, 1e300, -1e-300, 5.0]])
    found = module._rounded(values)
    np.testing.assert_allclose(np.array(found, float), values, rtol=6e-7)
    assert max(len(repr(value)) for value in found) <= 25 and np.mean([len(repr(v)) for v in found]) < 14
    assert module._rounded(np.array([1.0, np.nan, np.inf])) == [1.0, None, None]
    assert repr(module._rounded(np.array([1.0, 4096.0]))) == "[1, 4096]"
