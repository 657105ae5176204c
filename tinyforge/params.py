"""The parameters of a model: named tensors in and out of its buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.op import ParamBuffer


def named(buffer: ParamBuffer, flat: Any, backend: Backend, prefix: str = "") -> dict[str, np.ndarray]:
    """The parts of a flat array by parameter name, as NumPy copies: what a checkpoint stores."""
    return {prefix + p.name: np.array(backend.to_numpy(buffer.view(flat, p))) for p in buffer.params}


def load_named(
    buffer: ParamBuffer, flat: Any, tensors: dict[str, np.ndarray], backend: Backend, source: Path, prefix: str = ""
) -> None:
    """The reverse of `named`, refusing missing tensors and wrong shapes."""
    for p in buffer.params:
        tensor = tensors.get(prefix + p.name)
        if tensor is None or tensor.shape != p.shape:
            got = "nothing" if tensor is None else tensor.shape
            raise UserError(f"checkpoint {source}: {prefix + p.name} has {got}, the model wants {p.shape}")
        buffer.view(flat, p)[...] = backend.asarray(tensor, flat.dtype)
    if flat is buffer.masters:
        buffer.publish()
