"""A gate of one number for each row: the shared expert's of Qwen2-MoE."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash
from tinyforge.ops.sigmoid import sigmoid


@kernel
def sigmoid_gate_fwd(x: Array, z: Array) -> Array:
    return x * sigmoid(z)


@kernel
def sigmoid_gate_bwd(dy: Array, x: Array, z: Array) -> tuple[Array, Array]:
    s = sigmoid(z)
    return dy * s, np.vecdot(dy, x)[..., None] * (s * (1 - s))


sigmoid_gate_bwd.on("meta")(lambda x, z: (like(x), like(z)))


class SigmoidGate(Op):
    """y = s(z) x,  s(z) = 1 / (1 + exp(-z))

    x, y: (..., C); z: (..., 1). Saves x and z. backward: dx = s dy,  dz = s (1 - s) dy . x.

    Source: the Qwen team, "Qwen1.5-MoE" (2024).
    """

    fwd = sigmoid_gate_fwd
    bwd = sigmoid_gate_bwd

    def forward(self, x: Array, z: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        self.expect(z, shape=(*x.shape[:-1], 1))
        self.save(stash, x, z)
        return self.fwd(x, z)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, Array]:
        x, z = stash.pop(self)
        return self.bwd(dy, x, z)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for *lead, width in ((2, 3, 5), (4, 1), (7, 8), (0, 4)):
            inputs = (rng.normal(size=(*lead, columns)) for columns in (width, 1))
            yield cls(backend), tuple(map(backend.asarray, inputs))
