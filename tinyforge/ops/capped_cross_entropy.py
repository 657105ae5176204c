"""Cross-entropy of logits with a softcap or a bias, with the output head's linear map: the losses of Gemma 2, GPT-J."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.op import Cases, Param, Stash
from tinyforge.ops.activations import tanh_bwd
from tinyforge.ops.cross_entropy import (
    NO_TEACHER,
    LinearCrossEntropy,
    SoftTargets,
    chunk_rows,
    cross_entropy_bwd,
    cross_entropy_fwd,
    masked_targets,
    rows_of,
)
from tinyforge.ops.linear import linear_bwd
from tinyforge.params import with_buffer


class CappedCrossEntropy(LinearCrossEntropy):
    """nll = cross_entropy(z),  z = c tanh((h W^T + b) / c)

    Shapes as in LinearCrossEntropy, with one head; b: (V,), or none; c: `cap`, 0 for z = h W^T + b. Saves h, tanh and
    softmax - onehot, (N, V) each: twice the memory of LinearCrossEntropy. Without a stash, logits are dropped chunk by
    chunk.

    backward, with R = softmax - onehot, t = tanh((h W^T + b) / c) and g[n] = dnll[n] R[n] (1 - t[n]^2):
        dh = g W,   dW += g^T h,   db += sum over n of g[n]
    UserError for `SoftTargets`.

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024).
    """

    linear_bwd = linear_bwd
    tanh_bwd = tanh_bwd
    loss, loss_bwd = cross_entropy_fwd, cross_entropy_bwd

    def __init__(
        self, weight: Param, cap: float, backend: Backend, name: str = "", *, bias: Param | None = None
    ) -> None:
        super().__init__(weight, backend, name, cap=cap)
        if self.shape[0] != 1:
            raise ValueError(f"{self.name}: {self.shape[0]} output heads, expected one")
        self.bias = bias

    def forward(self, h: Array, targets: Array | SoftTargets, stash: Stash | None = None) -> Array:
        if isinstance(targets, SoftTargets):
            raise UserError(NO_TEACHER)
        self.expect(h, self.shape[2])
        self.expect_ids(targets, self.shape[1], -1)
        rows, ids = h.reshape(-1, self.shape[2]), targets.reshape(-1, 1)
        nll, kept = self.backend.zeros(ids.shape, wide(rows.dtype)), []
        for part in self._chunks(len(rows)):
            t = self._tanh(rows[part])
            z = self.scale(t, self.cap) if self.cap else t
            nll[part], residual = self.loss(z[:, None], ids[part])
            kept += [(t if self.cap else None, residual)] if stash is not None else []
        self.save(stash, h, kept)
        return nll.reshape(targets.shape)

    def _chunks(self, rows: int) -> list[slice]:
        """The same with and without a stash, for equal bits."""
        step = chunk_rows(self.shape[1])
        return [slice(i, i + step) for i in range(0, rows, step)]

    def _tanh(self, h: Array) -> Array:
        """Without a cap, z."""
        z = self.logits_fwd(h, self.weight.value.reshape(self.shape[1:]), self.bias.value if self.bias else None)
        return self.tanh(self.scale(z, 1 / self.cap)) if self.cap else z

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, None]:
        h, kept = stash.pop(self)
        rows, dnll, weight = h.reshape(-1, self.shape[2]), rows_of(dy), self.weight.value.reshape(self.shape[1:])
        dh = self.backend.empty(rows.shape)
        for part, (t, residual) in zip(self._chunks(len(rows)), kept, strict=True):
            dz = self.loss_bwd(dnll if dnll.ndim == 1 else dnll[part], residual)[:, 0]
            dz = self.tanh_bwd(dz, t) if self.cap else dz
            dweight, accumulate = (None, True) if self.weight.frozen else self.weight.grad_with_beta()
            dweight = None if dweight is None else dweight.reshape(weight.shape)
            dbias = self.bias.grad if self.bias else None
            dh[part] = self.linear_bwd(dweight, dbias, dz, rows[part], weight, accumulate)
        return dh.reshape(h.shape), None

    def logits(self, h: Array, head: int = 0) -> Array:
        return self.scale(self._tanh(h), self.cap) if self.cap else self._tanh(h)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for n, cap, *shape in ((6, 2, 1, 5, 4), (3, 2, 7, 2), (5, 2, 4, 3), (4, 0, 6, 3)):
            bias = Param("bias", (shape[-2],), fill=0.0, decay=False) if shape[-1] == 3 else None
            weight = Param("weight", tuple(shape), std=1.0)
            op = with_buffer(cls(weight, cap, backend, bias=bias), backend, rng)
            _, vocab, dim = op.shape
            yield op, (backend.asarray(rng.normal(size=(n, dim))), backend.asarray(masked_targets(rng, n, 1, vocab)))
