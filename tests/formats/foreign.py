"""Another program's weights as a model of ours, and a model's tensors under Hugging Face's names."""

from __future__ import annotations

from typing import Any

from tinyforge.backends import Backend
from tinyforge.formats.foreign import describe, entries, spec_of_model
from tinyforge.formats.opened import fill
from tinyforge.formats.weights import Weights
from tinyforge.layout import Entry


def load_weights(weights: Weights, backend: Backend) -> Any:
    spec, config, tensors = describe(weights)
    model = spec.build(config, backend)
    fill(model.buffer, tensors, weights.source)
    return model


def entries_of(model: Any) -> list[Entry]:
    return list(entries(spec_of_model(model), model.config))
