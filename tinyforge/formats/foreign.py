"""Models of other programs: Hugging Face directories (safetensors), GGUF, and llama2.c's .bin files.

Each model's hf.py maps their tensors to our parameters (see `tinyforge.layout`). Nothing in a file is executed, all
names and shapes are checked before a model is built, and tensors are read and written one at a time.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError, errors_in
from tinyforge.files import shown
from tinyforge.formats import gguf_model, huggingface, llama2c
from tinyforge.formats.opened import Tensors
from tinyforge.formats.weights import Weights
from tinyforge.layout import Entry
from tinyforge.registry import ModelSpec, models
from tinyforge.tensors import Lazy, writer_of

HEAD = "lm_head.weight"


def is_foreign(path: Path) -> bool:
    """Whether `path` is a model of another program; otherwise it should be one of our checkpoints."""
    files = llama2c.is_file(path) or gguf_model.is_file(path)
    return files or huggingface.is_directory(path) or huggingface.is_adapter(path)


def open_weights(path: Path) -> Weights:
    """The weights of a foreign model, not read yet. UserError for damaged files."""
    if llama2c.is_file(path):
        return llama2c.open_file(path)
    return gguf_model.open_file(path) if gguf_model.is_file(path) else huggingface.open_directory(path)


def describe(weights: Weights) -> tuple[ModelSpec, ModelConfig, Tensors]:
    """The registered model that the weights belong to, its config, and the weights under our names.

    Raises UserError for an architecture that no registered model reads, and for tensors that are missing, surplus, or
    of the wrong shape. No tensor is read for these checks.
    """
    with errors_in(weights.source):
        spec = _spec_of(weights.config)
        layout = _layout(spec)
        config = layout.read_config(weights.config)
        places = _places(weights, layout, config)
    parts: dict[str, list[tuple[Entry, Callable[[], np.ndarray]]]] = {}
    for entry, read in places:
        if entry.plus:
            read = partial(_shifted, read, entry.plus)
        parts.setdefault(entry.ours, []).append((entry, read))
    return spec, config, {ours: _Whole(own) for ours, own in parts.items()}


@dataclass(frozen=True)
class _Whole:
    """One of our parameters, assembled from their tensors: each entry with what reads its tensor."""

    parts: list[tuple[Entry, Callable[[], np.ndarray]]]

    def __call__(self) -> np.ndarray:
        entry, read = self.parts[0]
        theirs, last = read(), self.parts[-1][0].part
        first = entry.axes or (theirs.swapaxes(-1, -2).shape if entry.transposed else theirs.shape)
        if isinstance(last, slice):
            first = (last.stop, *first[1:])
        elif isinstance(last, tuple):
            first = (last[0] + 1, last[1].stop, *first[1:])
        elif last is not None:
            first = (last + 1, *first)
        elif first == theirs.shape and not entry.transposed:
            return entry.in_our_order(theirs)
        whole = np.zeros(first, theirs.dtype)
        entry.put(whole, theirs)
        for entry, read in self.parts[1:]:
            entry.put(whole, read())
        return whole

    def into(self, out: Any) -> None:
        """Write it into an array of its shape, or `Quantised`, without a second one of its size where their tensor lies
        as ours."""
        for entry, read in self.parts:
            plain = entry.part is None and not entry.transposed and entry.order is None
            if plain and out.shape == entry.shape and (write := writer_of(read)):
                write(out)
            else:
                entry.put(out, read())


def _shifted(read: Callable[[], np.ndarray], number: float) -> np.ndarray:
    return read().astype(np.float64) + number


def entries(spec: ModelSpec, config: ModelConfig) -> Iterator[Entry]:
    """A model's tensors under their Hugging Face names. UserError for a model without a Hugging Face form."""
    return _layout(spec).entries(config)


def weights_of(model: Any) -> Weights:
    """A model's weights under Hugging Face's names. Parts without a place there are left out, with a line on stderr.

    UserError for a model without a Hugging Face form.
    """
    layout = _layout(spec_of_model(model))
    if hasattr(layout, "left_out") and (lost := layout.left_out(model.config)):
        print(f"note: left out: {lost}", file=sys.stderr)
    params = {p.name: model.buffer.view(model.buffer.masters, p) for p in model.buffer.params}

    def maker(entry: Entry) -> Callable[[], np.ndarray]:
        if not entry.ours:
            return lambda: np.zeros(entry.shape, np.float32)
        read = lambda: entry.take(model.backend.to_numpy(params[entry.ours]))  # noqa: E731
        return partial(_shifted, read, -entry.plus) if entry.plus else read

    tensors = {entry.theirs: (entry.shape, maker(entry)) for entry in layout.entries(model.config)}
    return Weights(Path(spec_of_model(model).name), layout.write_config(model.config), tensors)


def spec_of_model(model: Any) -> ModelSpec:
    """The registered spec of a model."""
    return next(spec for spec in models().values() if type(model.config) is spec.config)


def _spec_of(config: dict[str, Any]) -> ModelSpec:
    supported = {name: spec for spec in models().values() for name in spec.architectures}
    if (names := config.get("architectures")) is None:  # the type says it too: gemma3_text for Gemma3ForCausalLM
        kind = str(config.get("model_type")).replace("_", "").removesuffix("text")
        names = [name for name in supported if re.split("For|LMHead", name)[0].lower() == kind][:1] or None
        config["architectures"] = names
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(
            f"config.json: architectures is {shown(names)}, expected a list of one name; get the file again"
        )
    if names[0] not in supported:
        raise UserError(
            f"config.json: architecture {names[0]!r}; supported: {', '.join(supported)}; choose one of these"
        )
    return supported[names[0]]


def _layout(spec: ModelSpec) -> ModuleType:
    if not spec.hf:
        raise UserError(f"other programs have no format for {spec.title}; use --format tinyforge")
    return importlib.import_module(spec.hf)


def _places(weights: Weights, layout: ModuleType, config: ModelConfig) -> list[tuple[Entry, Callable[[], np.ndarray]]]:
    """Each tensor with its entry, after checking all names and shapes. Entries come layer by layer, so that a config
    with a billion layers is refused at the first missing one."""
    left = {_renamed(name, layout): found for name, found in weights.tensors.items()}
    if left and not any(name.startswith(layout.PREFIX) for name in left):  # without the head's prefix
        prefix = next(iter(layout.entries(config))).theirs.partition(".")[0]
        left = {name if name == HEAD else f"{prefix}.{name}": found for name, found in left.items()}
    places = []
    for entry in layout.entries(config):
        shape, read = left.pop(entry.theirs, (None, None))
        if read is None:
            raise UserError(f"tensor {entry.theirs} is missing; get the files again")
        if shape != entry.shape:
            raise UserError(f"tensor {entry.theirs} has shape {shape}, config.json asks for {entry.shape}")
        places.append((entry, read))
    weights.ignored[:] = sorted(name for name in left if re.fullmatch(layout.IGNORED, name))
    if HEAD in left and _is_tied(left[HEAD], places[0]):
        weights.ignored.append(HEAD)
    for name in weights.ignored:
        del left[name]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UserError(f"tensor {min(left)}{more} has no place in the model; it would be lost")
    return places


def _renamed(name: str, layout: ModuleType) -> str:
    """The current name of a tensor that was renamed."""
    for old, new in getattr(layout, "RENAMED", ()):
        name = name.replace(old, new)
    return name


def _is_tied(head: Lazy, embedding: tuple[Entry, Any]) -> bool:
    """Whether a head that config.json calls tied is a second copy of the embedding."""
    return head[0] == embedding[0].shape and np.array_equal(head[1](), embedding[1]())
