"""Distillation: a model learns from a teacher's probabilities as well as from the text.

    q = (1 - share) onehot(next token) + share p_teacher,    loss = mean over tokens of -sum_v q[v] log p[v]

The teacher reads the same rows without dropout and has no gradient. Only its final hidden states and its output heads
are kept: `LinearCrossEntropy` makes its logits chunk by chunk together with the model's. Several teachers are an
`Ensemble`, whose p_teacher comes from the mean of their logits.

    taught = Distilled(model, Ensemble([teacher], heads, backend), share=0.5)    trains like `model`, whose weights it
                                                                                 changes

Sources: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (2015), also for ensembles; for small
corpora that are read many times, Timiryasov, Tastet, "Baby Llama" (2023), and Kim, Kotha, Liang, Hashimoto,
"Pre-training under infinite compute" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.frozen_model import frozen_model
from tinyforge.kernel import Array
from tinyforge.op import Stash
from tinyforge.ops import LinearCrossEntropy
from tinyforge.ops.cross_entropy import SoftTargets
from tinyforge.registry import ModelSpec
from tinyforge.report import count_of


class Ensemble:
    """Models that predict together: the softmax of the mean of their logits h_m W_m^T, m = 1 to M. With the hidden
    states and the weights side by side it is one product, and nothing else needs to know how many they are:

        (h_1 W_1^T + ... + h_M W_M^T) / M = [h_1 ... h_M] [W_1/M ... W_M/M]^T

    models: of one vocabulary, with at least `heads` prediction heads; their weights no longer change. weight: the
    right-hand factor, (heads, V, C_1 + ... + C_M).
    """

    def __init__(self, models: Sequence[Any], heads: int, backend: Backend) -> None:
        self.models, self.backend = models, backend
        found = [op.weight.value.reshape(op.shape)[:heads] for op in map(_output_heads, models)]
        if len(found) > 1:
            # Divided in the master precision, and rounded once.
            found = [backend.table(w.shape, partial(_divided, backend, w, len(found))) for w in found]
        self.weight = self._side_by_side(found)

    def hidden(self, ids: Array, **options: Any) -> Array:
        """(..., C_1 + ... + C_M)"""
        return self._side_by_side([model.hidden(ids, **options) for model in self.models])

    def flop_per_token(self, seq_len: int) -> float:
        return sum(float(model.flop_per_token(seq_len)) for model in self.models)

    def _side_by_side(self, arrays: Sequence[Array]) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        joined = self.backend.empty((*arrays[0].shape[:-1], sum(x.shape[-1] for x in arrays)))
        start = 0
        for x in arrays:
            joined[..., start : (start := start + x.shape[-1])] = x
        return joined


class Distilled:
    """`model` in training with a teacher. Other attributes are the model's. Without a stash, as in evaluation, it is
    the model alone. share: of the teacher in the targets; taught: of so many of the first rows, or of all."""

    def __init__(self, model: Any, teacher: Ensemble, share: float) -> None:
        self.model, self.teacher, self.share = model, teacher, share

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def forward(
        self, ids: Array, targets: Array, *, stash: Stash | None = None, taught: int | None = None, **options: Any
    ) -> Any:
        if stash is None or taught == 0:
            return self.model.forward(ids, targets, stash=stash, **options)
        first = slice(taught)
        of_teacher = {name: value[first] for name, value in options.items()}
        hidden = self.teacher.hidden(ids[first], **of_teacher)
        soft = SoftTargets(targets, hidden, self.teacher.weight, self.share)
        return self.model.forward(ids, soft, stash=stash, **options)

    def replica(self) -> Distilled:
        """A copy for a worker of data-parallel training: the teacher is shared."""
        return Distilled(self.model.replica(), self.teacher, self.share)

    def flop_per_token(self, seq_len: int) -> float:
        """The model's training, and the teacher's forward pass: a third of what training it would take."""
        return float(self.model.flop_per_token(seq_len) + self.teacher.flop_per_token(seq_len) / 3)


@dataclass(frozen=True)
class Teachers:
    """Which models teach, before they are built: for the forecast of memory."""

    models: tuple[tuple[ModelSpec, ModelConfig], ...]
    share: float

    def wrap_with_teachers(self, model: Any, backend: Backend) -> Distilled:
        """`model` with these teachers, whose weights are zeros: enough for the meta backend."""
        built = [frozen_model(partial(spec.build, config, backend)) for spec, config in self.models]
        return Distilled(model, Ensemble(built, model.config.prediction_heads, backend), self.share)


def check_teacher(
    name: str,
    teaches: ModelSpec,
    theirs: ModelConfig,
    spec: ModelSpec,
    config: ModelConfig,
    seq_len: int,
    documents: bool,
) -> None:
    """Raise UserError if the teacher `name` cannot teach a model of `spec` and `config`. documents: whether
    --document-mask is given."""
    if (teaches.learns, spec.learns) != ("text", "text"):
        raise UserError(
            f"--teacher: {teaches.title} learns {teaches.learns} and {spec.title} {spec.learns}; use two "
            "models of next tokens"
        )
    if theirs.vocab != config.vocab:
        raise UserError(
            f"--teacher: {name} has {theirs.vocab} ids, the model {config.vocab}; give both the same tokenizer"
        )
    if theirs.prediction_heads < config.prediction_heads:
        raise UserError(
            f"--teacher: {name} has {count_of(theirs.prediction_heads, 'prediction head')}, the model "
            f"{config.prediction_heads}; give the model fewer, e.g. --set mtp_heads={theirs.prediction_heads}"
        )
    if theirs.context < seq_len:
        raise UserError(
            f"--teacher: {name} reads {theirs.context} tokens, a row has {seq_len}; use --seq-len {theirs.context}"
        )
    if documents and not teaches.documents:
        raise UserError(f"--teacher: {teaches.title} cannot keep documents apart; leave out --document-mask")


def _divided(backend: Backend, weight: Array, by: int) -> np.ndarray:
    return np.asarray(backend.to_numpy(weight).astype(backend.master_dtype) / by)


def _output_heads(model: Any) -> LinearCrossEntropy:
    found = [op for op in model.ops() if isinstance(op, LinearCrossEntropy)]
    if not found:
        raise UserError(f"--teacher: {type(model).__name__} has no output heads that predict next tokens")
    return found[-1]
