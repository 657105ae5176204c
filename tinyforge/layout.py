"""How other libraries lay out a model's weights: the entries of a model's hf.py, and checks of config.json.

The module that `ModelSpec.hf` names has

    PREFIX                  the prefix of the trunk's tensor names, or several; files of the bare trunk lack it
    IGNORED                 a regular expression: tensors that the model does not need
    RENAMED                 optional: pairs (old, new) of parts of names, for older files
    read_config(given)      a Config from the content of config.json; raises UserError for what the model cannot do
    write_config(config)    the reverse, architecture included
    entries(config)         every tensor of theirs, as an `Entry`, layer by layer
    left_out(config)        optional: what `entries` does not carry over: a few words, or ""

The first three are for models with `ModelSpec.architectures`, which can be read; others are written only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinyforge.config import WANTED, ModelConfig, fits
from tinyforge.errors import UserError
from tinyforge.kernel import Array


@dataclass(frozen=True)
class Entry:
    """One tensor of theirs: a parameter of ours, or a part of it along its first axes.

    theirs, shape: its name and shape in the file. ours: our parameter's name; empty if we have none, and the tensor is
    zeros. part: a slice of rows, an index (which drops the axis), or an index and a slice; None for the whole
    parameter. transposed: theirs is the transpose, of the last two axes. plus: ours is theirs plus this number. axes:
    our shape, if theirs has the same numbers with other axes. order: the numbers of their rows in the order of ours;
    None for the same.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    part: slice | int | tuple[int, slice] | None = None
    transposed: bool = False
    axes: tuple[int, ...] | None = None
    order: np.ndarray | None = field(default=None, compare=False)
    plus: float = 0.0

    def put(self, ours: Array, theirs: Array) -> None:
        """Write their tensor into its place in our parameter."""
        place = self.at(ours)
        place[...] = theirs.swapaxes(-1, -2) if self.transposed else self.in_our_order(theirs).reshape(place.shape)

    def take(self, ours: Array) -> Array:
        """Their tensor, a view of our parameter, or a copy if the rows have another order."""
        return (
            self.at(ours).swapaxes(-1, -2)
            if self.transposed
            else self.in_their_order(self.at(ours)).reshape(self.shape)
        )

    def in_our_order(self, theirs: Array) -> Array:
        return theirs if self.order is None else theirs[self.order]

    def in_their_order(self, ours: Array) -> Array:
        return ours if self.order is None else ours[np.argsort(self.order)]

    def at(self, ours: Array) -> Array:
        """A view of the part of our parameter, or of an array with the same rows, that is this tensor."""
        return ours if self.part is None else ours[self.part]


@dataclass(frozen=True)
class Given(Mapping[str, Any]):
    """Several contents of config.json as one: the first value that is not null."""

    maps: tuple[Mapping[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        found = [value for given in self.maps if (value := given.get(name)) is not None]
        if not found:
            raise KeyError(name)
        return found[0]

    def __iter__(self) -> Iterator[str]:
        return iter({name for given in self.maps for name in given})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_null(given: Mapping[str, Any], name: str) -> bool:
    """Whether config.json has the key, as null: the family's default does not apply."""
    first = given.maps[0] if isinstance(given, Given) else given
    return name in first and first[name] is None


def setting(given: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """config.json's value of that name, or the default if it is absent or null. Raises UserError for a wrong type,
    and for a missing value without a default."""
    value = given.get(name)
    if value is None:
        if default is None:
            raise UserError(f"config.json has no {name}; get the file again")
        return default
    if not fits(value, kind()):
        raise UserError(f"config.json: {name} is {value!r}, expected {WANTED[kind]}")
    return kind(value)


Fields = Mapping[str, tuple[Any, ...]]
"""Fields of a Config, each with the name, the type and perhaps the default of the same number in config.json."""


def read_fields(given: Mapping[str, Any], names: Fields) -> dict[str, Any]:
    """The values of the fields in config.json. Raises UserError as `setting`."""
    return {ours: setting(given, *theirs) for ours, theirs in names.items()}


def write_fields(config: ModelConfig, names: Fields) -> dict[str, Any]:
    """The reverse."""
    return {theirs: getattr(config, ours) for ours, (theirs, *_) in names.items()}


def class_names(count: int) -> dict[str, Any]:
    """The labels of a classifier whose classes have no names, as transformers writes them."""
    return class_labels([f"LABEL_{i}" for i in range(count)])


def class_labels(names: Sequence[str]) -> dict[str, Any]:
    """id2label and label2id of config.json."""
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def class_count(given: Mapping[str, Any]) -> int:
    """The number of a classifier's labels; transformers writes none for its default, two."""
    labels = given.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else 2


def require(given: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Raise UserError unless config.json's value is one of those supported; the first is the default."""
    value = given.get(name, supported[0])
    if value not in supported:
        raise UserError(f"config.json: {name} is {value!r}; supported: {', '.join(map(repr, supported))}")
