"""Figures that also go to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyforge.errors import UserError
from tinyforge.train.metrics import Metrics
from tinyforge.train.settings import Settings
from tinyforge.train.writers import WRITERS, open_writer

SETTINGS = {"lr": 0.1, "data": ("a", "b"), "minutes": None}


def log(out: Path, name: str, first: int, last: int) -> None:
    written = Metrics(out, first, open_writer(name, out, first, SETTINGS))
    for step in range(first + 1, last + 1):
        written.write(step=step, loss=1 / step, **({"val_loss": 2.0} if step == last else {}))


def test_none_is_asked_for() -> None:
    assert open_writer("none", Path("nowhere"), 0, SETTINGS) is None
    assert Settings(steps=1).log == "none"


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_package_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda expected: None)
    message = f"--log {name}: the package {name} is not installed; pip install {name}, or use --log none"
    with pytest.raises(UserError, match=message):
        Settings(steps=1, log=name).check()
    with pytest.raises(UserError, match=message):
        open_writer(name, tmp_path, 0, SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_the_figures_and_forgets_what_a_resumed_run_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by TensorBoard itself."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr("tinyforge.train.writers.atexit", types.SimpleNamespace(register=at_exit.append))
    for first, last in ((0, 5), (3, 6)):
        log(tmp_path, "tensorboard", first, last)
        at_exit.pop()()  # as at the end of the process
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["loss", "val_loss"]
    scalars = found.Scalars("loss")
    assert [s.step for s in scalars] == [1, 2, 3, 4, 5, 6]
    assert [s.value for s in scalars] == pytest.approx([1 / step for step in range(1, 7)])


def test_wandb_gets_every_row_in_a_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with wandb's signatures: the real one starts a service of its own and expects an account."""
    runs: list[dict[str, Any]] = []

    class Stand:
        def __init__(self, **about: Any) -> None:
            runs.append(about | {"rows": []})

        def log(self, row: dict[str, Any], step: int) -> None:
            runs[-1]["rows"].append((step, row))

    module = types.ModuleType("wandb")
    module.init = lambda **about: Stand(**about)  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    log(tmp_path / "run", "wandb", 0, 2)
    log(tmp_path / "run", "wandb", 1, 2)
    assert [run["name"] for run in runs] == ["run from step 0", "run from step 1"]
    assert runs[0]["group"] == runs[1]["group"] == str(tmp_path / "run") and runs[0]["config"] == SETTINGS
    assert runs[0]["rows"] == [(1, {"loss": 1.0}), (2, {"loss": 0.5, "val_loss": 2.0})]

    def refuse(**about: Any) -> Any:
        raise RuntimeError("api_key not configured (no-tty)\ncall wandb.login()")

    module.init = refuse  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="--log wandb: it cannot start: api_key not configured .*; see its own"):
        open_writer("wandb", tmp_path, 0, SETTINGS)
