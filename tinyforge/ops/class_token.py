"""A learned token in front of a sequence, whose output a classifier reads."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def class_token_fwd(x: Array, token: Array) -> Array:
    y = np.empty((len(x), x.shape[1] + 1, x.shape[2]), x.dtype)
    y[:, 0], y[:, 1:] = token, x
    return y


class_token_fwd.on("meta")(lambda x: empty((len(x), x.shape[1] + 1, x.shape[2]), x.dtype))


@kernel
def class_token_bwd(dtoken: Array | None, dy: Array) -> Array:
    if dtoken is not None:
        dtoken += dy[:, 0].sum(axis=0)
    return dy[:, 1:].copy()


class_token_bwd.on("meta")(lambda dy: empty((len(dy), dy.shape[1] - 1, dy.shape[2]), dy.dtype))


class ClassToken(Op):
    """y[b, 0] = c,  y[b, 1 + t] = x[b, t]

    x: (B, T, C); c: (C,), a parameter; y: (B, T + 1, C). Saves nothing.
    backward: dx[b, t] = dy[b, 1 + t], dc += sum over b of dy[b, 0].

    Sources: [CLS] in Devlin et al., "BERT" (2018); before patches in Dosovitskiy et al. (2020).
    """

    fwd = class_token_fwd
    bwd = class_token_bwd

    def __init__(self, token: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.token = token

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x, self.token.size)
        self.save(stash)
        return self.fwd(x, self.token.value)

    def backward(self, dy: Array, stash: Stash) -> Array:
        stash.pop(self)
        return self.bwd(self.token.grad, dy)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((3, 4, 5), (1, 1, 1), (2, 0, 3)):
            op = with_buffer(cls(Param("token", shape[-1:], fill=0.0, decay=False), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)
