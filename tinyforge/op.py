"""Op, Param, Stash: the three things that everything else here is made of.

There is no graph and no tape. An `Op` computes forward and has a backward written by hand next to it. What backward
needs, forward pushes on a `Stash`; a model's backward is its forward read upwards, so records come off in reverse.

One rule for gradients, everywhere: parameter gradients are accumulated (`+=`), activation gradients are assigned
(`=`), and backward never writes to the `dy` that it was given. `tests/ops/test_contract.py` enforces it for all ops. A
product need not add to zeros: `Param.summed_in`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, Kernel, bind
from tinyforge.rng import Stream

Key = Any
"""Of a stream that dropout draws from: two numbers, or an array of two uint32 where the kernels are to read them."""


class Param:
    """A named tensor to be learned: `value` and its `grad`, views into the flat buffer of the model's `ParamBuffer`.

    Both exist once the buffer does; reading them earlier raises RuntimeError. The initial value is
    `fill + std * N(0, 1)`: `std=0.02` for a matrix, `fill=1` for a norm's gain. `decay` says whether AdamW's weight
    decay applies.

    frozen: set before the buffer is made. A frozen parameter is read and never learned: its `grad` is None, which tells
    an op's backward to leave that product out, and it has no master weights and no moments.

    matrices: rows of each of the matrices that lie in it one below the other (the leading axes folded), where it maps
    one hidden layer to the next: Muon makes the update of each orthogonal. A number stands for so many of equal height.
    Empty for all else: embeddings, heads, norms, vectors.

    weights: of a frozen parameter, set before the buffer is made: the format of one byte in which it is kept, see
    quantised.py; `value` is then computed from `stored` each time that it is read.

    arrive: set while the value is on its way from other ranks; makes the device wait for it.

    by_product: set by ops that take the gradient by `summed_in`. blank: the gradient is 0, which its memory does not
    say yet, see `ParamBuffer.clear_grads`. Reading `grad` writes the zeros.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], *, std: float = 0.0, fill: float = 0.0, decay: bool = True,
        matrices: Sequence[int] | int = (),
    ) -> None:  # fmt: skip
        if isinstance(matrices, int):
            matrices = (math.prod(shape[:-1]) // max(1, matrices),) * matrices
        if matrices and sum(matrices) != np.prod(shape[:-1]):
            raise ValueError(f"Param {name}: matrices of {matrices} rows, and the shape is {shape}")
        self.name = name
        self.shape = shape
        self.matrices = tuple(matrices)
        self.std = std
        self.fill = fill
        self.decay = decay
        self.frozen = False
        self.weights = ""
        self.arrive: Callable[[], None] | None = None
        self.by_product = False
        self.blank = False

    @property
    def grad(self) -> Array:
        if self.blank:
            self.blank = False
            self._grad.fill(0)
        return self._grad

    @grad.setter
    def grad(self, grad: Array) -> None:
        self._grad = grad

    @grad.deleter
    def grad(self) -> None:
        del self._grad

    def summed_in(self) -> tuple[Array, bool]:
        """The gradient, and whether it is to be added to. If not, its memory may hold anything, and whoever has called
        this writes all of it: a product that does so needs no zeros, and reads nothing."""
        blank, self.blank = self.blank, False
        return self._grad, not blank

    def settle(self) -> None:
        """Write the zeros of a blank gradient."""
        if self.blank:
            _ = self.grad

    @property
    def value(self) -> Array:
        if self.arrive is not None:
            self.arrive()
        return self._value.values() if self.weights else self._value

    @value.setter
    def value(self, value: Array) -> None:
        self._value = value

    @property
    def stored(self) -> Any:
        """What is in memory: the value, or its codes and scales, `Quantised`."""
        return self._value if self.weights else self.value

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not set.
        if name in ("_value", "_grad"):
            raise RuntimeError(
                f"Param {self.name} has no {name.removeprefix('_')} yet: give the model's parameters memory with "
                "ParamBuffer(op.params(), backend), or a single op with with_buffer(op, backend, rng)"
            )
        raise AttributeError(f"Param has no attribute {name!r}")

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __repr__(self) -> str:
        return f"Param({self.name}, {self.shape})"


class Stash:
    """What forward saved for backward: a last-in first-out list of records, each consumed once, by its owner.

    noise: what is random in a training pass (dropout) is drawn from `stash.noise.fork(op.name)`, whose key is `key`.
    None: nothing is random, and a stash changes no bit of the result.
    """

    def __init__(self, noise: Stream | None = None) -> None:
        self.noise = noise
        self._records: list[tuple[Op, tuple[Any, ...]]] = []

    def push(self, owner: Op, *saved: Any) -> None:
        self._records.append((owner, saved))

    def pop(self, owner: Op) -> tuple[Any, ...]:
        if not self._records:
            raise RuntimeError(
                f"{owner.name} pops an empty stash: its forward ran without a stash, or its backward ran twice"
            )
        pushed_by, saved = self._records.pop()
        if pushed_by is not owner:
            raise RuntimeError(
                f"{owner.name} popped the record of {pushed_by.name}: backward must visit the ops in the "
                "reverse order of forward"
            )
        return saved

    def drop(self, length: int) -> None:
        """Let go of all records but the first `length`: their forward is run again before their backward."""
        del self._records[length:]

    def key(self, owner: Op, rate: float) -> Key | None:
        """The key of the stream of what `owner` drops at `rate`; None if it drops nothing."""
        return self.noise.fork(owner.name).key if self.noise and rate else None

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        """The records, each with its owner, in the order of forward; to look at, none is consumed."""
        return iter(self._records)


class Op:
    """One differentiable operation. Subclasses list the `kernels` they call and write forward and backward.

    `forward(*inputs, stash=None)`: without a stash it is inference: the same bits, nothing kept.
    `backward(dy, stash)`: returns the gradient of each input, a tuple if there are several (None for integer inputs),
    and adds to the parameters' `grad`, except where that is None: a frozen parameter's.

    adds: set on maps whose forward takes `add`, an array that the product adds to its result.
    per_head: set on losses whose backward also takes dy of shape (K,), the last axis of the output alone: one number
    per head, the same for all tokens.
    """

    kernels: ClassVar[tuple[Kernel[..., Any], ...]] = ()
    per_head: ClassVar[bool] = False
    adds: bool = False

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend = backend
        self.name = name or type(self).__name__
        self.k = bind(self.kernels, backend, type(self).__name__)

    def forward(self, *inputs: Any, stash: Stash | None = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, dy: Any, stash: Stash) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def params(self) -> list[Param]:
        """Each Param once, also when tied."""
        return []

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        """The gradient-check hook: yields (op, inputs) with random data, edge cases included."""
        raise NotImplementedError(f"{cls.__name__} has no gradient-check cases")


Recompute = Literal["", "norms", "blocks"]
"""What a model computes again in backward instead of keeping it: nothing, its norms, or whole blocks."""


class Again(Op):
    """A block whose forward is run again in backward: of all that it saves, only its input is kept.

    run(block, x, h, normed, stash) = block(x, h, stash), with h = normed(x), the norm before the block. Saves x,
    and drops what the ops of the block have saved. `restore` runs the block again on the same stash, which then has
    their records for the block's own backward; what is random in them is drawn from the same streams. So the memory is
    that of one block at a time, and the time that of another forward, a third more. The bits are the same.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """

    def run(
        self, block: Callable[..., Any], x: Array, h: Array, normed: Callable[[Array], Array],
        stash: Stash | None = None,
    ) -> Any:  # fmt: skip
        if stash is None:
            return block(x, h, None)
        before = len(stash)
        result = block(x, h, stash)
        stash.drop(before)
        stash.push(self, block, x, normed)
        return result

    def restore(self, stash: Stash) -> None:
        block, x, normed = stash.pop(self)
        block(x, normed(x), stash)


class WithKeywords(Op):
    """An op whose last inputs are keywords of its forward, for the checker's cases: there, inputs have no names.

    keywords: by name, what makes the keyword of the input.
    """

    def __init__(self, op: Op, **keywords: Callable[[Array], Any]) -> None:
        super().__init__(op.backend, op.name)
        self.op, self.keywords = op, keywords
        self.per_head = op.per_head  # type: ignore[misc]

    def forward(self, *inputs: Any, stash: Stash | None = None) -> Any:
        count = len(inputs) - len(self.keywords)
        made = {name: make(x) for (name, make), x in zip(self.keywords.items(), inputs[count:], strict=True)}
        return self.op.forward(*inputs[:count], stash=stash, **made)

    def backward(self, dy: Any, stash: Stash) -> Any:
        return self.op.backward(dy, stash)

    def params(self) -> list[Param]:
        return self.op.params()
