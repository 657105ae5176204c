"""LoRA on a model: which of its linear maps get an adapter, and the model around the frozen one.

    make = partial(spec.build, config, backend)
    model = Adapted(make, Adapters(rank=8, targets=("qkv", "out")))     the model's own code does not change

The model is built without memory, its linear maps are replaced by `ops.LoRA` by name, all else is frozen, and then one
buffer is made: frozen weights take no memory for masters, gradients or moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.frozen_model import set_format
from tinyforge.kernel import Array
from tinyforge.op import Op, Param
from tinyforge.ops import GELU, GELULinear, Linear, LoRA, MixtureOfExperts, SwiGLU, SwiGLULinear
from tinyforge.params import UNPLACED, ParamBuffer

LINEAR_MAPS = (Linear, SwiGLULinear, GELULinear)


@dataclass(frozen=True)
class Adapters:
    """rank: R of A (R, I) and B (O, R). alpha: the product is scaled by alpha / rank. dropout: on the adapters' input.
    targets: the last parts of the names of the linear maps that get one; empty for all but routers. weights: what the
    frozen matrices are kept in, as in QLoRA, one of `quantised.FOR_TUNING`; empty for the backend's precision."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    weights: str = ""


class Adapted:
    """A model whose own weights are frozen, with adapters that are learned. Other attributes are the model's.

    make: builds it, as `make(values=...)`. values, frozen_values: those of another such model, to share its weights.
    adapters: the LoRA ops by the names of the linear maps that they replace.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        settings: Adapters,
        values: Array | None = None,
        frozen_values: Array | None = None,
    ) -> None:
        self._make, self.settings = make, settings
        self.model = make(values=UNPLACED)
        backend: Backend = self.model.backend
        if backend.fp8:
            raise UserError("--precision fp8: adapters have no products in FP8; use bf16 or fp32, or train all weights")
        found = [op for op in self.model.ops() if isinstance(op, LINEAR_MAPS)]
        names = list(dict.fromkeys(_last(op) for op in found))
        for target in settings.targets:
            if target not in names:
                raise UserError(f"no linear map of the model is called {target!r}; known: {', '.join(names)}")
        for p in self.model.params():
            p.frozen = True
        # A router is adapted if it is named: PEFT cannot, since in transformers it is no linear layer.
        routers = [op.gate for op in self.model.ops() if isinstance(op, MixtureOfExperts)]
        chosen = [op for op in found if (_last(op) in settings.targets if settings.targets else op not in routers)]
        if not chosen:
            raise UserError("--lora: the model has no linear maps but its head; leave it out to train all weights")
        most = max(min(op.weight.shape) for op in chosen)
        if settings.rank > most:
            raise UserError(f"--lora is {settings.rank}, expected at most {most}: no linear map here has a higher rank")
        self.adapters: dict[str, LoRA] = {}
        for op in chosen:
            self.adapters[op.name] = _adapter(op, settings, backend)
            _exchange(self.model, op, self.adapters[op.name])
        if settings.weights:
            set_format(self.model, settings.weights, heads="")
        self.buffer = self.model.buffer = ParamBuffer(self.model.params(), backend, values, frozen_values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def replica(self) -> Adapted:
        """A model that reads these weights and owns its gradients: a worker of data-parallel training."""
        found = Adapted(self._make, self.settings, self.buffer.values, self.buffer.frozen_values)
        for p, own in zip(found.buffer.frozen, self.buffer.frozen, strict=True):
            if own.weights:
                p.value = own.stored
        return found

    def fused_weights(self) -> Any:
        """The model's, with the adapters merged into copies of the matrices. None where those are codes: the copies
        would take the memory that these save."""
        if self.settings.weights:
            return None
        frozen = {op.weight: op.weight.value for op in self.adapters.values()}
        try:
            for op in self.adapters.values():
                op.weight.value = op.merged()
            return self.model.fused_weights()
        finally:
            for weight, value in frozen.items():
                weight.value = value

    def flop_per_token(self, seq_len: int) -> float:
        """0: the convention counts a product for every weight's gradient, and here most are skipped."""
        return 0.0


def _last(op: Op) -> str:
    return op.name.rpartition(".")[2]


def _adapter(op: Any, settings: Adapters, backend: Backend) -> LoRA:
    """A LoRA around `op`'s weight. A starts with PEFT's variance, 1 / 3I, and B at 0."""
    (outputs, inputs), rank = op.weight.shape, settings.rank
    name = op.weight.name.removesuffix(".weight")  # by which they are merged
    a = Param(f"{name}.lora_a", (rank, inputs), std=(3 * inputs) ** -0.5)
    b = Param(f"{name}.lora_b", (outputs, rank), fill=0.0)
    activation: Op | None = None
    if isinstance(op, SwiGLULinear):
        activation = SwiGLU(backend, f"{op.name}.swiglu")
    elif isinstance(op, GELULinear):
        activation = GELU(backend, op.approximate, f"{op.name}.gelu", bias=op.input_bias)
    how: dict[str, Any] = {"bias": getattr(op, "bias", None), "alpha": settings.alpha, "rate": settings.dropout}
    return LoRA(op.weight, a, b, backend, op.name, activation=activation, **how)


def _exchange(model: Any, old: Op, new: Op) -> None:
    """Put `new` where the model has `old`: an op's name is its path, "blocks.0.qkv" for an op that model.blocks[0] or
    one of its branches holds."""
    holder = model
    for part in old.name.split(".")[:-1]:
        if part.isdigit():
            holder = dict(enumerate(holder or ())).get(int(part))
        else:
            holder = next((value for _, name, value in _held(holder) if name == part), None)
    places = [(owner, name) for owner, name, value in _held(holder) if value is old]
    if not places:
        raise UserError(
            f"{type(model).__name__}: {old.name} is not the path of that op in the model; leave it out of "
            "the targets, or name it by its path"
        )
    for owner, name in places:
        setattr(owner, name, new)


def _held(holder: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each attribute of the holder, then of what it holds: its owner, its name and its value."""
    for owner in (holder, *getattr(holder, "__dict__", {}).values()):
        for name, value in getattr(owner, "__dict__", {}).items():
            yield owner, name, value
