"""How other libraries lay out a model's weights: the table that a model's hf.py is made of, and the checks it needs.

The module that `ModelSpec.hf` names has

    PREFIX                  what the names of the trunk's tensors begin with; files of the bare trunk lack it
    IGNORED                 a regular expression: tensors that have no place in the model and are no loss
    RENAMED                 pairs of parts of names, as older files have them and as they are now; may be left out
    read_config(given)      a Config from the content of config.json; raises UserError for what the model cannot be
    write_config(config)    the reverse, architecture included
    entries(config)         every tensor of theirs, as an `Entry`, layer by layer
    left_out(config)        what `entries` does not carry over: a few words, or ""

The first three are for models with `ModelSpec.architectures`, the only ones that are read; others are written only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyforge.config import WANTED, fits
from tinyforge.errors import UserError
from tinyforge.kernel import Array


@dataclass(frozen=True)
class Entry:
    """One tensor of theirs: a parameter of ours, or a part of it along its first axes.

    theirs, shape: its name and shape there. ours: our parameter's name; empty for a tensor that is zeros, since we have
    none. part: which rows of ours (a slice), which entry (a number, which drops the axis), or which rows of which entry
    (both); None for all of it. transposed: theirs is the transpose. axes: the shape of ours, where theirs has the same
    numbers with other axes.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    part: slice | int | tuple[int, slice] | None = None
    transposed: bool = False
    axes: tuple[int, ...] | None = None

    def put(self, ours: Array, theirs: Array) -> None:
        """Write their tensor into its place in our parameter."""
        place = self.at(ours)
        place[...] = theirs.T if self.transposed else theirs.reshape(place.shape)

    def take(self, ours: Array) -> Array:
        """Their tensor, a view of our parameter."""
        return self.at(ours).T if self.transposed else self.at(ours).reshape(self.shape)

    def at(self, ours: Array) -> Array:
        """The part of our parameter, or of an array with rows like it, that is theirs: a view."""
        return ours if self.part is None else ours[self.part]


def setting(given: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """config.json's value of that name; the default where it is absent or null. Raises UserError for a wrong type,
    and for a missing value without a default."""
    value = given.get(name)
    if value is None:
        if default is None:
            raise UserError(f"config.json has no {name}; get the file again")
        return default
    if not fits(value, kind()):
        raise UserError(f"config.json: {name} is {value!r}, wants {WANTED[kind]}")
    return kind(value)


def require(given: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Refuse a value of config.json that is none of those supported; the first is the default."""
    value = given.get(name, supported[0])
    if value not in supported:
        raise UserError(f"config.json: {name} is {value!r}; supported: {', '.join(map(repr, supported))}")
