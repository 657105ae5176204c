"""Distillation: a model learns from a teacher's probabilities as well as from the text.

    q = (1 - share) onehot(next token) + share p_teacher,    loss = mean over tokens of -sum_v q[v] log p[v]

The teacher reads the same rows without dropout and has no gradient. Only its final hidden states and its output heads
are kept: `LinearCrossEntropy` makes its logits chunk by chunk beside the model's own.

    taught = Distilled(model, teacher, share=0.5)      trains like `model`, whose weights it changes

Sources: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (2015); Timiryasov, Tastet, "Baby Llama"
(2023), for small corpora that are read many times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.frozen_model import frozen_model
from tinyforge.kernel import Array
from tinyforge.op import Stash
from tinyforge.ops import LinearCrossEntropy
from tinyforge.ops.cross_entropy import SoftTargets
from tinyforge.registry import ModelSpec


class Distilled:
    """`model` in training with a teacher. Other attributes are the model's. Without a stash, as in evaluation, it is
    the model alone.

    teacher: of the same vocabulary, with at least as many prediction heads. share: of the teacher in the targets.
    """

    def __init__(self, model: Any, teacher: Any, share: float) -> None:
        self.model, self.teacher, self.share = model, teacher, share
        self._heads = _output_heads(teacher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def forward(self, ids: Array, targets: Array, *, stash: Stash | None = None, **options: Any) -> Any:
        if stash is None:
            return self.model.forward(ids, targets, **options)
        weight = self._heads.weight.value.reshape(self._heads.shape)
        soft = SoftTargets(targets, self.teacher.hidden(ids, **options), weight, self.share)
        return self.model.forward(ids, soft, stash=stash, **options)

    def replica(self) -> Distilled:
        """A copy for a worker of data-parallel training: the teacher is shared."""
        return Distilled(self.model.replica(), self.teacher, self.share)

    def flop_per_token(self, seq_len: int) -> float:
        """The model's training, and the teacher's forward pass: a third of what training it would take."""
        return float(self.model.flop_per_token(seq_len) + self.teacher.flop_per_token(seq_len) / 3)


@dataclass(frozen=True)
class Teacher:
    """Which model teaches, before it is built: for checks and for the forecast of memory."""

    spec: ModelSpec
    config: ModelConfig
    share: float

    def check(self, spec: ModelSpec, config: ModelConfig, seq_len: int, documents: bool) -> None:
        """Raise UserError if it cannot teach a model of this config. documents: whether --document-mask is given."""
        mine = self.config
        if (self.spec.learns, spec.learns) != ("text", "text"):
            raise UserError(f"--teacher: {self.spec.title} learns {self.spec.learns} and {spec.title} {spec.learns}; "
                            "use two models of next tokens")  # fmt: skip
        if mine.vocab != config.vocab:
            raise UserError(f"--teacher has {mine.vocab} ids, the model {config.vocab}; give both the same tokenizer")
        if mine.prediction_heads < config.prediction_heads:
            raise UserError(f"--teacher has {mine.prediction_heads} prediction heads, the model "
                            f"{config.prediction_heads}; give the model fewer, e.g. --set "
                            f"mtp_heads={mine.prediction_heads}")  # fmt: skip
        if mine.context < seq_len:
            raise UserError(f"--teacher reads {mine.context} tokens, a row has {seq_len}; use --seq-len {mine.context}")
        if documents and not self.spec.documents:
            raise UserError(f"--teacher: {self.spec.title} cannot keep documents apart; leave out --document-mask")

    def beside(self, model: Any, backend: Backend) -> Distilled:
        """`model` with this teacher, whose weights are zeros: enough for the phantom backend."""
        build = partial(self.spec.build, self.config, backend)
        return Distilled(model, frozen_model(build), self.share)


def _output_heads(model: Any) -> LinearCrossEntropy:
    found = [op for op in model.ops() if isinstance(op, LinearCrossEntropy)]
    if not found:
        raise UserError(f"--teacher: {type(model).__name__} has no output heads that predict next tokens")
    return found[-1]
