"""The shape of a model: what every model's config shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from tinyforge.errors import UserError

ABOVE_ZERO = ("rope_theta", "norm_eps")
"""Fields that must be positive: they are divisors or go into a logarithm."""

MOST, MOST_POSITIONS, MOST_REPEATED = 1 << 24, 1 << 20, 1 << 10
"""Upper limits: of any size; of the context, for which there are tables; of parts that are built one by one. A larger
number is a typing error, and without a limit it would take hours to run out of memory."""
REPEATED = ("layers", "mtp_heads")


@dataclass(frozen=True)
class BaseConfig:
    """Base of all models' configs: frozen dataclasses that travel with every checkpoint, with a default for each field.

    A model that reads no tokens derives from this one, and says by `input_shapes` and `float_inputs` what it reads; a
    language model derives from `ModelConfig`.
    """

    def __post_init__(self) -> None:
        """Check the fields; a subclass adds its own checks. Raises UserError."""
        for f in fields(self):
            value = getattr(self, f.name)
            if not all(math.isfinite(v) for v in (value if isinstance(value, tuple) else (value,)) if type(v) is float):
                raise UserError(f"config: {f.name} is {value}, expected finite numbers")
            most = MOST_REPEATED if f.name in REPEATED else MOST_POSITIONS if f.name == "context" else MOST
            if type(value) is int and value > most:
                raise UserError(f"config: {f.name} is {value:,}, expected at most {most:,}")
            if f.name in ABOVE_ZERO and value <= 0:
                raise UserError(f"config: {f.name} is {value}, expected a number above 0")

    def input_shapes(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of forward's inputs for `batch` rows, targets included: `--plan`, `models show` and the check that
        a step fits run forward on arrays of these shapes, without memory. length: of sequences; others ignore it."""
        raise NotImplementedError(f"{type(self).__name__} has no input_shapes: the shapes of forward's inputs")

    @property
    def float_inputs(self) -> tuple[int, ...]:
        """The numbers of those inputs that are floats; the others are integers."""
        return ()

    @property
    def prediction_heads(self) -> int:
        """K: the number of output heads; head k predicts the token k + 1 places ahead."""
        return 1

    @property
    def head_weights(self) -> tuple[float, ...]:
        """The weight of each head in the loss, (K,); only the ratios count."""
        return (1.0,) * self.prediction_heads

    @property
    def term_weights(self) -> dict[str, float]:
        """The weights of the loss terms that the model adds to the likelihoods, by name. The forward of a model that
        has some returns (nll, terms); see `tinyforge.train.objectives`."""
        return {}

    def require_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise UserError(f"config: {name} is {getattr(self, name)}, expected at least 1")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls().override(values)

    def override(self, values: Mapping[str, Any]) -> Self:
        """This config with some fields replaced. Raises UserError for an unknown name and a value of the wrong type."""
        known = [f.name for f in fields(self)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UserError(f"config: unknown key {unknown[0]!r}; known: {', '.join(known)}")
        usual = type(self)()  # not self, in which a float field may hold an int
        for name, value in values.items():
            default = getattr(usual, name)
            if not fits(value, default):
                raise UserError(f"config: {name} is {value!r}, expected {WANTED[type(default)]}")
        changes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return replace(self, **changes)


@dataclass(frozen=True)
class ModelConfig(BaseConfig):
    """Base of the language models' configs.

    context: longest sequence, tokens. vocab: token ids.
    """

    context: int = 128
    vocab: int = 512

    def __post_init__(self) -> None:
        self.require_positive("context", "vocab")
        super().__post_init__()

    def input_shapes(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        """See `BaseConfig.input_shapes`: ids and targets of `batch` sequences of `length`."""
        return (batch, length), (batch, length, self.prediction_heads)


WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", tuple: "a list of numbers"}


def fits(value: Any, default: Any) -> bool:
    """Whether a value from outside has the type of the field's default; an int fits a float."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(fits(v, 0.0) for v in value)
    if isinstance(default, bool | str):
        return isinstance(value, type(default))
    return isinstance(value, int | float if isinstance(default, float) else int) and not isinstance(value, bool)
