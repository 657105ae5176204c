"""Cross-entropy of softcapped logits, with the output head's linear map: the loss of Gemma 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.cross_entropy import (
    LinearCrossEntropy,
    SoftTargets,
    chunk_rows,
    cross_entropy_bwd,
    cross_entropy_fwd,
    masked_targets,
    rows_of,
)
from tinyforge.ops.linear import linear_bwd
from tinyforge.ops.scale import scale_fwd
from tinyforge.ops.tanh import tanh_bwd, tanh_fwd
from tinyforge.params import with_buffer


class CappedCrossEntropy(LinearCrossEntropy):
    """nll = cross_entropy(z),  z = c tanh(h W^T / c)

    Shapes as in LinearCrossEntropy, with one head; c: `cap`. Saves h, tanh and softmax - onehot, (N, V) each: twice
    the memory of LinearCrossEntropy. Without a stash, logits are dropped chunk by chunk.

    backward, with R = softmax - onehot, t = tanh(h W^T / c) and g[n] = dnll[n] R[n] (1 - t[n]^2):
        dh = g W,   dW += g^T h
    UserError for `SoftTargets`.

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024).
    """

    linear_bwd = linear_bwd
    scale = scale_fwd
    tanh, tanh_bwd = tanh_fwd, tanh_bwd
    loss, loss_bwd = cross_entropy_fwd, cross_entropy_bwd

    def __init__(self, weight: Param, cap: float, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        if self.shape[0] != 1:
            raise ValueError(f"{self.name}: {self.shape[0]} output heads, expected one")
        self.cap = cap

    def forward(self, h: Array, targets: Array | SoftTargets, stash: Stash | None = None) -> Array:
        if isinstance(targets, SoftTargets):
            raise UserError("a model with softcapped logits does not learn from a teacher; train it on its text alone")
        self.expect(h, self.shape[2])
        self.expect_ids(targets, self.shape[1], -1)
        rows, ids = h.reshape(-1, self.shape[2]), targets.reshape(-1, 1)
        nll, kept = self.backend.zeros(ids.shape, wide(rows.dtype)), []
        for part in self._chunks(len(rows)):
            t = self._tanh(rows[part])
            nll[part], residual = self.loss(self.scale(t, self.cap)[:, None], ids[part])
            kept += [(t, residual)] if stash is not None else []
        if stash is not None:
            stash.push(self, h, kept)
        return nll.reshape(targets.shape)

    def _chunks(self, rows: int) -> list[slice]:
        """The same with and without a stash, for equal bits."""
        step = chunk_rows(self.shape[1])
        return [slice(i, i + step) for i in range(0, rows, step)]

    def _tanh(self, h: Array) -> Array:
        z = self.logits_fwd(h, self.weight.value.reshape(self.shape[1:]), None)
        return self.tanh(self.scale(z, 1 / self.cap))

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, None]:
        h, kept = stash.pop(self)
        rows, dnll, weight = h.reshape(-1, self.shape[2]), rows_of(dy), self.weight.value.reshape(self.shape[1:])
        dh = self.backend.empty(rows.shape)
        for part, (t, residual) in zip(self._chunks(len(rows)), kept, strict=True):
            dz = self.loss_bwd(dnll if dnll.ndim == 1 else dnll[part], residual).reshape(t.shape)
            dweight, accumulate = (None, True) if self.weight.frozen else self.weight.grad_with_beta()
            dweight = None if dweight is None else dweight.reshape(weight.shape)
            dh[part] = self.linear_bwd(dweight, None, self.tanh_bwd(dz, t), rows[part], weight, accumulate)
        return dh.reshape(h.shape), None

    def logits(self, h: Array, head: int = 0) -> Array:
        return self.scale(self._tanh(h), self.cap)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for n, *shape in ((6, 1, 5, 4), (3, 7, 2)):
            op = with_buffer(cls(Param("weight", tuple(shape), std=1.0), 2.0, backend), backend, rng)
            _, vocab, dim = op.shape
            yield op, (backend.asarray(rng.normal(size=(n, dim))), backend.asarray(masked_targets(rng, n, 1, vocab)))
