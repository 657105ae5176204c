"""What recipes with --teacher share: opening it, checking that it fits, and putting it beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.hub.opened import Opened
from tinyforge.hub.runs import open_model, trained_model
from tinyforge.registry import ModelSpec
from tinyforge.report import timed
from tinyforge.text import TextTokenizer
from tinyforge.train.distil import Distilled, Teacher
from tinyforge.train.settings import TaughtSettings, sequence_length


def open_teacher(settings: TaughtSettings) -> Opened | None:
    """The checkpoint of --teacher, if it is given."""
    return open_model(trained_model(settings.teacher)) if settings.teacher else None


def described(teacher: Opened | None, settings: TaughtSettings) -> Teacher | None:
    """The teacher before it is built."""
    return Teacher(teacher.spec, teacher.config, settings.teacher_share) if teacher else None


def check_teacher(
    teacher: Opened, settings: TaughtSettings, spec: ModelSpec, config: ModelConfig, tokenizer: TextTokenizer,
    owner: object,
) -> None:  # fmt: skip
    """Raise UserError if it cannot teach this model, whose tokenizer is that of `owner`."""
    if tokenizer.hash() != teacher.tokenizer.hash():
        raise UserError(f"--teacher: {teacher.path} has another tokenizer than {owner}; give both the same one, "
                        f"{teacher.path}/tokenizer.json")  # fmt: skip
    Teacher(teacher.spec, teacher.config, settings.teacher_share).check(
        spec, config, sequence_length(config, settings.seq_len), bool(settings.document_mask)
    )


def beside(model: Any, teacher: Opened | None, backend: Backend, settings: TaughtSettings) -> Any:
    """The model that learns: with its teacher, or alone."""
    if teacher is None:
        return model
    with timed("building the teacher"):
        built = teacher.build(backend, frozen=True).model
    print(f"teacher: {teacher.path}, {teacher.spec.name}, share {settings.teacher_share:g} of the targets")
    return Distilled(model, built, settings.teacher_share)


def taught_by(teacher: Opened | None, meta: Mapping[str, Any]) -> dict[str, Any]:
    """A run's meta with its teacher's hash, and among its inputs those that its teacher has read: they reach the model
    through it."""
    if teacher is None:
        return dict(meta)
    inputs = list(dict.fromkeys([*meta.get("inputs", ()), *teacher.inputs()]))
    return {**meta, "teacher": teacher.fingerprint(), "inputs": inputs}
