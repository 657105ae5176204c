"""What recipes with --teacher share: opening teachers, checking that they fit, and attaching them to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.formats import hub
from tinyforge.formats.opened import Opened
from tinyforge.formats.runs import open_model, resolve_checkpoint
from tinyforge.registry import ModelSpec
from tinyforge.report import timed
from tinyforge.tokenizers import TextTokenizer
from tinyforge.train.distil import Distilled, Ensemble, Teachers, check_teacher
from tinyforge.train.settings import PretrainSettings, SftSettings, Teaching, sequence_length


def open_teachers(settings: Teaching) -> list[Opened]:
    """The checkpoints of --teacher."""
    return [open_model(resolve_checkpoint(path)) for path in settings.teacher]


def teacher_specs(teachers: Sequence[Opened], settings: Teaching) -> Teachers | None:
    """The teachers before they are built."""
    return Teachers(tuple((t.spec, t.config) for t in teachers), settings.teacher_share) if teachers else None


def check_teachers(
    teachers: Sequence[Opened],
    settings: PretrainSettings | SftSettings,
    spec: ModelSpec,
    config: ModelConfig,
    tokenizer: TextTokenizer,
    owner: object,
) -> None:
    """Raise UserError if one of them cannot teach this model, whose tokenizer is that of `owner`."""
    seq_len = sequence_length(config, settings)
    for t in teachers:
        if tokenizer.hash() != t.tokenizer.hash():
            raise UserError(
                f"--teacher: {t.path} has another tokenizer than {owner}; give both the same one, "
                f"{t.path}/tokenizer.json"
            )
        check_teacher(str(t.path), t.spec, t.config, spec, config, seq_len, bool(settings.document_mask))


def wrap_with_teachers(model: Any, teachers: Sequence[Opened], backend: Backend, settings: Teaching) -> Any:
    """The model that learns: with its teachers, or alone."""
    if not teachers:
        return model
    with timed("building the teacher"):
        built = [t.build(backend, frozen=True).model for t in teachers]
    names = " + ".join(f"{hub.called(t.path)}, {t.spec.name}" for t in teachers)
    print(f"teacher: {names}, share {settings.teacher_share:g} of the targets")
    return Distilled(model, Ensemble(built, model.config.prediction_heads, backend), settings.teacher_share)


def add_teacher_metadata(teachers: Sequence[Opened], meta: Mapping[str, Any]) -> dict[str, Any]:
    """A run's meta with its teachers' hashes, and among its inputs those that its teachers have read: they reach the
    model through them."""
    if not teachers:
        return dict(meta)
    inputs = dict.fromkeys([*meta.get("inputs", ()), *(path for t in teachers for path in t.inputs())])
    return {**meta, "teacher": " ".join(t.fingerprint() for t in teachers), "inputs": list(inputs)}
