"""Other destinations of a run's figures: `--log tensorboard` and `--log wandb`. metrics.jsonl is written in any case.

A writer is called with each row of metrics.jsonl. A resumed run makes TensorBoard discard what came after the step that
it starts from; in Weights & Biases it is another run of the same group.
"""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.terminal import one_line

Writer = Callable[[dict[str, Any]], None]


def check_writer(name: str) -> None:
    """Raise UserError if the package that `--log` needs is not installed."""
    if name in WRITERS and importlib.util.find_spec(name) is None:
        raise UserError(f"--log {name}: the package {name} is not installed; pip install {name}, or use --log none")


def open_writer(name: str, out: Path, step: int, settings: Mapping[str, Any]) -> Writer | None:
    """The writer that `--log` asks for, or None. step: the run starts from it. Raises UserError if it cannot start."""
    if name not in WRITERS:
        return None
    check_writer(name)
    try:
        return WRITERS[name](out, step, settings)
    except Exception as error:  # wandb raises its own types: no key, no network
        raise UserError(
            f"--log {name}: it cannot start: {one_line(str(error))}; see its own documentation, or use --log none"
        ) from error


def _tensorboard(out: Path, step: int, settings: Mapping[str, Any]) -> Writer:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    file = EventFileWriter(str(out / "tensorboard"), flush_secs=10)
    atexit.register(file.close)
    if step:
        file.add_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(row: dict[str, Any]) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in row.items() if key != "step"]
        file.add_event(Event(step=row["step"], summary=Summary(value=values)))

    return write


def _wandb(out: Path, step: int, settings: Mapping[str, Any]) -> Writer:
    import wandb

    run = wandb.init(
        project="tinyforge", group=str(out), name=f"{out.name} from step {step}", dir=out, config=dict(settings)
    )
    return lambda row: run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])


WRITERS: dict[str, Callable[[Path, int, Mapping[str, Any]], Writer]] = {"tensorboard": _tensorboard, "wandb": _wandb}
