"""Cross-entropy over K multi-token heads, and the same fused with the heads' linear map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.backends.numpy_backend import row_blocks
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash, WithKeywords
from tinyforge.ops.activations import tanh_fwd
from tinyforge.ops.linear import linear_fwd
from tinyforge.ops.scale import scale_fwd
from tinyforge.params import with_buffer

CHUNK_BYTES = 1 << 21
"""Size of a chunk of logits on NumPy: it stays in a core's cache between passes."""
FEW_LOGITS = 1024
CHUNK = 4096
"""Tokens of a chunk of logits on a GPU."""
NO_TEACHER = "logits with a softcap or a bias do not learn from a teacher; train the model on text alone"
FROZEN_LOGITS = 1 << 25
"""Logits of a chunk on a GPU if the weight is frozen: they are not kept."""


@dataclass(frozen=True)
class SoftTargets:
    """Targets that a teacher shares in, for distillation: q = (1 - share) onehot(ids) + share softmax(h W^T)

    ids: (..., K) int32, -1 for none, which the teacher does not change. hidden: h, (..., C'), and heads: W,
    (K or more, V, C'), the teacher's; they have no gradient. share: 0 to 1. A model takes them as its `targets`. Where
    h has fewer rows than ids, the rows after them have no teacher: share is 0 there.
    """

    ids: Array
    hidden: Array
    heads: Array
    share: float


def masked_targets(rng: np.random.Generator, n: int, heads: int, vocab: int) -> np.ndarray:
    """Random targets as in training: the tail of each later head is -1, and so are some random rows."""
    targets = rng.integers(0, vocab, (n, heads))
    for k in range(heads):
        targets[max(n - k, 0) :, k] = -1
    targets[rng.random(n) < 0.2] = -1
    return targets


def exp_needs_shift(x: Array) -> bool:
    """Whether a softmax of x must subtract the maximum first. Within +-60 neither exp nor its sums overflow or vanish,
    even in fp32, and softmax is the same function with and without the shift. One pass over x here saves two that go
    row by row."""
    return x.size > 0 and bool(x.max() > 60 or x.min() < -60)


def softmax_residual_(logits: Array, targets: Array, cap: float = 0.0) -> Array:
    """Turn logits (K, V, n) into softmax - onehot in place (0 where there is no target); returns nll: (n, K).

    cap: c, if not 0 the logits u are z = c tanh(u / c), and the residual is that times dz/du. targets: (n, K). The
    vocabulary is not the last axis, so that NumPy takes maxima and sums over whole rows at a time: along a row they
    take five times as long.
    """
    index = targets.T[:, None]
    masked = index < 0
    index = np.where(masked, 0, index)
    slope = None
    if cap:
        logits *= logits.dtype.type(1 / cap)
        np.tanh(logits, out=logits)
        slope = 1 - logits * logits
        logits *= logits.dtype.type(cap)
    if exp_needs_shift(logits):
        logits -= logits.max(axis=1, keepdims=True)
    picked = np.take_along_axis(logits, index, axis=1)
    np.exp(logits, out=logits)
    total = np.ones((1, logits.shape[1]), logits.dtype) @ logits
    nll = np.where(masked, 0, np.log(total) - picked)
    logits *= np.where(masked, 0, 1 / total)
    probability = np.take_along_axis(logits, index, axis=1)
    np.put_along_axis(logits, index, np.where(masked, 0, probability - 1), axis=1)
    if slope is not None:
        logits *= slope
    return nll[:, 0].T


def soft_residual_(logits: Array, teacher: Array, targets: Array, share: float) -> Array:
    """Turn logits (K, V, n) into softmax - q in place, see `SoftTargets` (0 where there is no target); returns the
    cross-entropy with q: (n, K). teacher: its logits, (K, V, n), which are written over. targets: (n, K)."""
    index = targets.T[:, None]
    there = index >= 0
    for x in (logits, teacher):
        x -= x.max(axis=1, keepdims=True)
    q = np.exp(teacher, out=teacher)
    q *= np.where(there, share / q.sum(axis=1, keepdims=True), 0)
    index = np.where(there, index, 0)
    picked = np.take_along_axis(q, index, axis=1) + np.where(there, 1 - share, 0)
    np.put_along_axis(q, index, picked.astype(q.dtype), axis=1)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    nll = -np.einsum("kvn,kvn->nk", q, logits)
    np.exp(logits, out=logits)
    logits *= there
    logits -= q
    return nll


def per_row(dnll: Array, dtype: Any) -> Array:
    """dnll, (K,) or (n, K), in the layout of the residual: (K, 1, 1) or (K, 1, n)."""
    return dnll.astype(dtype).reshape(-1, dnll.shape[-1]).T[:, None]


@kernel
def sum_tokens(nll: Array) -> Array:
    """(..., K) to its sums over all tokens, (K,) float64, in a fixed order."""
    return nll.reshape(-1, nll.shape[-1]).sum(axis=0, dtype=np.float64)


sum_tokens.on("meta")(lambda nll: empty(nll.shape[-1:], np.float64))


@kernel
def cross_entropy_fwd(logits: Array, targets: Array) -> tuple[Array, Array]:
    """logits: (n, K, V); returns nll: (n, K), and the residual in a layout of the backend's own."""
    residual = logits.transpose(1, 2, 0).copy()
    return softmax_residual_(residual, targets), residual


cross_entropy_fwd.on("meta")(lambda logits, targets: (empty(targets.shape, wide(logits.dtype)), like(logits)))


@kernel
def cross_entropy_bwd(dnll: Array, residual: Array) -> Array:
    """dnll: (K,) or (n, K)."""
    scaled = residual * per_row(dnll, residual.dtype)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


cross_entropy_bwd.on("meta")(lambda residual: like(residual))


def chunks(rows: int, weight: Array) -> Iterator[slice]:
    """Slices of `rows` whose logits take about CHUNK_BYTES."""
    return row_blocks(rows, weight.shape[0] * weight.shape[1] * weight.itemsize, CHUNK_BYTES)


def row_pitch(heads: int, vocab: int, itemsize: int) -> int:
    """Numbers from one token's logits to the next on a GPU: heads * vocab, or for one head with a large odd vocabulary
    the next multiple of 128 bytes: unaligned rows make matrix products and vector accesses take several times as long.
    Few logits are fast anyway, and padding copies the weights."""
    odd = heads == 1 and vocab >= FEW_LOGITS and vocab * itemsize % 16
    return -(-vocab * itemsize // 128) * 128 // itemsize if odd else heads * vocab


@kernel
def linear_cross_entropy_fwd(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0
) -> tuple[Array, Any]:
    """h: (n, C); weight: (K, V, C); targets: (n, K); cap: as in softmax_residual_. Returns nll: (n, K), and with `keep`
    the residual, in a layout of the backend's own, else None."""
    heads, vocab, dim = weight.shape
    residual = []  # a contiguous block a chunk
    nll = np.empty((len(h), heads), h.dtype)
    for part in chunks(len(h), weight):
        logits = (weight.reshape(-1, dim) @ h[part].T).reshape(heads, vocab, -1)
        nll[part] = softmax_residual_(logits, targets[part], cap)
        if keep:
            residual.append(logits)
    return nll, residual if keep else None


@linear_cross_entropy_fwd.on("meta")
def linear_cross_entropy_fwd_memory(h: Array, weight: Array, keep: bool) -> tuple[Array, Any]:
    heads, vocab, _ = weight.shape
    nll, pitch = empty((len(h), heads), wide(h.dtype)), row_pitch(heads, vocab, h.itemsize)
    _padded = empty((pitch if pitch > heads * vocab else 0, weight.shape[2]), weight.dtype)
    residual = empty((len(h), pitch), h.dtype)
    return nll, residual if keep else None


@kernel
def linear_soft_cross_entropy_fwd(
    h: Array, weight: Array, targets: Array, teacher_h: Array, teacher_weight: Array, keep: bool, share: float
) -> tuple[Array, Any]:
    """As linear_cross_entropy_fwd, with `SoftTargets`. teacher_h: (n or less, C'); teacher_weight: (K, V, C')."""
    heads, vocab, dim = weight.shape
    residual, flat = [], teacher_weight.reshape(heads * vocab, -1)
    nll = np.empty((len(h), heads), h.dtype)
    for part in chunks(len(h), weight):
        logits = (weight.reshape(-1, dim) @ h[part].T).reshape(heads, vocab, -1)
        teacher = (flat @ teacher_h[part].T).reshape(heads, vocab, -1)
        soft, own, taught = nll[part], targets[part], teacher.shape[-1]
        if taught:
            soft[:taught] = soft_residual_(logits[..., :taught], teacher, own[:taught], share)
        if taught < len(own):
            soft[taught:] = softmax_residual_(logits[..., taught:], own[taught:])
        if keep:
            residual.append(logits)
    return nll, residual if keep else None


@linear_soft_cross_entropy_fwd.on("meta")
def linear_soft_cross_entropy_fwd_memory(
    h: Array, weight: Array, teacher_weight: Array, keep: bool
) -> tuple[Array, Any]:
    heads, vocab, _ = weight.shape
    pitch = row_pitch(heads, vocab, h.itemsize)
    _padded = empty((pitch if pitch > heads * vocab else 0, teacher_weight.shape[2]), weight.dtype)
    _teacher = empty((min(len(h), CHUNK), pitch), h.dtype)
    return linear_cross_entropy_fwd_memory(h, weight, keep)


@kernel
def linear_cross_entropy_bwd(
    dweight: Array | None, dnll: Array, h: Array, residual: Any, weight: Array, accumulate: bool = True
) -> Array:
    """dnll: (K,) or (n, K). accumulate: as in linear_bwd. May write over the residual."""
    scale = per_row(dnll, h.dtype)
    flat = weight.reshape(-1, weight.shape[-1])
    shared = dnll.ndim == 1
    if shared:
        # Scale the small matrices, W and dW: the large residual is then read twice and never written.
        flat = (weight * scale).reshape(flat.shape)
    gradient = None if dweight is None else np.zeros(flat.shape, h.dtype)
    dh = np.empty(h.shape, h.dtype)
    for part, logits in zip(chunks(len(h), weight), residual, strict=True):
        if not shared:
            logits *= scale[..., part]
        rows = logits.reshape(len(flat), -1)
        if gradient is not None:
            gradient += rows @ h[part]
        np.matmul(rows.T, flat, out=dh[part])
    if dweight is not None and gradient is not None:
        gradient = gradient.reshape(weight.shape)
        gradient = gradient * scale if shared else gradient
        if accumulate:
            dweight += gradient
        else:
            dweight[...] = gradient
    return dh


@linear_cross_entropy_bwd.on("meta")
def linear_cross_entropy_bwd_memory(
    dweight: Array | None, dnll: Array, h: Array, residual: Array, weight: Array
) -> Array:
    if dnll.ndim > 1:
        heads, vocab, dim = weight.shape
        _padded = empty((residual.shape[1] if residual.shape[1] > heads * vocab else 0, dim), weight.dtype)
        return empty(h.shape, h.dtype)
    shape = residual.shape[1], weight.shape[2]
    if dweight is not None:
        empty(shape, dweight.dtype)  # dW before it is scaled by dnll
    scaled = empty(shape, weight.dtype)
    return empty(h.shape, scaled.dtype)


def chunk_rows(pitch: int) -> int:
    """Rows of a chunk of logits on a GPU if the weight is frozen: a multiple of 128, 64 MB in bf16."""
    return min(max(FROZEN_LOGITS // pitch // 128, 1) * 128, 4096)


@kernel
def linear_cross_entropy_frozen_fwd(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0
) -> tuple[Array, Array | None]:
    """As linear_cross_entropy_fwd, for a weight without a gradient: with `keep` the second is R W, (n, K, C)."""
    heads, vocab, dim = weight.shape
    dh = np.empty((len(h), heads, dim), h.dtype) if keep else None
    nll = np.empty((len(h), heads), h.dtype)
    for part in chunks(len(h), weight):
        logits = (weight.reshape(-1, dim) @ h[part].T).reshape(heads, vocab, -1)
        nll[part] = softmax_residual_(logits, targets[part], cap)
        if dh is not None:
            dh[part] = (logits.transpose(0, 2, 1) @ weight).swapaxes(0, 1)
    return nll, dh


@linear_cross_entropy_frozen_fwd.on("meta")
def linear_cross_entropy_frozen_fwd_memory(h: Array, weight: Array, keep: bool) -> tuple[Array, Array | None]:
    heads, vocab, dim = weight.shape
    nll, pitch = empty((len(h), heads), wide(h.dtype)), row_pitch(heads, vocab, h.itemsize)
    _padded = empty((pitch if pitch > heads * vocab else 0, dim), weight.dtype)
    dh = empty((len(h), heads, dim), h.dtype) if keep else None
    _logits = empty((min(len(h), chunk_rows(pitch)), pitch), h.dtype)
    return nll, dh


@kernel
def linear_cross_entropy_frozen_bwd(dnll: Array, dh: Array) -> Array:
    """dnll: (K,) or (n, K); dh: (n, K, C), of each head alone, to (n, C)."""
    return (dh * dnll[..., None].astype(dh.dtype)).sum(axis=1)


@linear_cross_entropy_frozen_bwd.on("meta")
def linear_cross_entropy_frozen_bwd_memory(dh: Array) -> Array:
    scaled, (rows, heads, dim) = empty(dh.shape, dh.dtype), dh.shape
    if heads == 1:
        return scaled
    _places = empty((rows, heads), np.dtype(np.int32))
    return empty((rows, dim), dh.dtype)


def rows_of(dnll: Array) -> Array:
    """(..., K) to (n, K); (K,) stays."""
    return dnll if dnll.ndim == 1 else dnll.reshape(-1, dnll.shape[-1])


class CrossEntropy(Op):
    """nll[n, k] = log(sum_v exp(z[n, k, v])) - z[n, k, targets[n, k]],  0 where targets[n, k] is -1

    logits z: (..., K, V); targets: (..., K) int32 in [0, V), or -1 for "no target"; nll: (..., K), nats, one number per
    token and head, in the precision of sums (`wide`). The caller weighs them in its loss: the mean over shards or
    micro-batches with unequal counts is not the mean of their means. Saves softmax(z) - onehot.

    backward(dnll: (..., K), or (K,) if it is the same for all tokens):
        dz[n, k] = dnll[n, k] * (softmax(z[n, k]) - onehot(targets[n, k])),  0 where there is no target

    Source: Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction" (2024).
    """

    fwd = cross_entropy_fwd
    bwd = cross_entropy_bwd
    per_head = True

    def forward(self, logits: Array, targets: Array, stash: Stash | None = None) -> Array:
        self.expect(logits)
        self.expect_ids(targets, logits.shape[-1], -1)
        heads = targets.shape[-1]
        nll, residual = self.fwd(logits.reshape(-1, heads, logits.shape[-1]), targets.reshape(-1, heads))
        self.save(stash, residual, logits.shape)
        return nll.reshape(targets.shape)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, None]:
        residual, shape = stash.pop(self)
        return self.bwd(rows_of(dy), residual).reshape(shape), None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for lead, heads, vocab in (((6,), 3, 5), ((1,), 1, 2), ((3, 3), 4, 7), ((3,), 2, 1)):
            logits = rng.normal(size=(*lead, heads, vocab)) * 3
            targets = masked_targets(rng, int(np.prod(lead)), heads, vocab).reshape(*lead, heads)
            yield cls(backend), (backend.asarray(logits), backend.asarray(targets))


class LinearCrossEntropy(Op):
    """nll = cross_entropy(h W^T), chunk by chunk: the reference is Linear, then CrossEntropy

    h: (..., C); W: (K, V, C), an output head for each predicted token, or (V, C) for a single head; targets: (..., K);
    nll: (..., K). W may also be an embedding's table, (V, C): then the weights are tied, and both ops add to its
    gradient.
    With a stash, each chunk's logits become softmax - onehot in place while they are in cache; this residual is saved,
    (N, K, V) with N rows, and so is h. Without a stash each chunk's logits are dropped.

    backward(dnll: (..., K), or (K,) if it is the same for all tokens), with R = softmax - onehot:
        dh[n] = sum_k dnll[n, k] R[n, k] W[k],   dW[k] += sum_n dnll[n, k] R[n, k]^T h[n]
    (K,) is the fast path: dnll scales W and dW, and R is read twice and never written. With a frozen W there is no dW:
    forward already computes R[n, k] W[k] and saves that, (N, K, C), which is smaller since C < V.

    targets may be `SoftTargets`, which have a distribution q where others have onehot(targets):
        nll = -sum_v q[v] log softmax(z)[v],   R = softmax - q
    With share = 1, nll - H(q) is the divergence KL(q || softmax). Source: Hinton, Vinyals, Dean, "Distilling the
    Knowledge in a Neural Network" (2015), at temperature 1.

    cap: c, if not 0 the logits are z = c tanh(u / c), u = h W^T, and R is (softmax - onehot) (1 - tanh^2): the same
    memory and passes. UserError for `SoftTargets` then. Source: Gemma Team, "Gemma 2" (2024).
    """

    logits_fwd = linear_fwd
    scale, tanh = scale_fwd, tanh_fwd
    fwd = linear_cross_entropy_fwd
    soft_fwd = linear_soft_cross_entropy_fwd
    bwd = linear_cross_entropy_bwd
    frozen_fwd = linear_cross_entropy_frozen_fwd
    frozen_bwd = linear_cross_entropy_frozen_bwd
    per_head = True

    def __init__(self, weight: Param, backend: Backend, name: str = "", *, cap: float = 0.0) -> None:
        super().__init__(backend, name)
        self.weight, self.cap = weight, cap
        weight.overwrite_grad = True
        self.shape = weight.shape if len(weight.shape) == 3 else (1, *weight.shape)

    def forward(self, h: Array, targets: Array | SoftTargets, stash: Stash | None = None) -> Array:
        self.expect(h, self.shape[2])
        heads, _, dim = self.shape
        rows, weight = h.reshape(-1, dim), self.weight.value.reshape(self.shape)
        if isinstance(targets, SoftTargets):
            if self.cap:
                raise UserError(NO_TEACHER)
            ids, hidden = targets.ids.reshape(-1, heads), targets.hidden.reshape(-1, targets.hidden.shape[-1])
            soft = ids, hidden, targets.heads[:heads]
            nll, residual = self.soft_fwd(rows, weight, *soft, stash is not None, targets.share)
            self.save(stash, h, residual)
            return nll.reshape(targets.ids.shape)
        self.expect_ids(targets, self.shape[1], -1)
        forward = self.frozen_fwd if self.weight.frozen else self.fwd
        nll, kept = forward(rows, weight, targets.reshape(-1, heads), stash is not None, self.cap)
        self.save(stash, h.shape if self.weight.frozen else h, kept)
        return nll.reshape(targets.shape)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, None]:
        h, residual = stash.pop(self)
        if isinstance(h, tuple):  # only its shape: the residual is R W
            return self.frozen_bwd(rows_of(dy), residual).reshape(h), None
        rows = h.reshape(-1, h.shape[-1])
        dweight, accumulate = (None, True) if self.weight.frozen else self.weight.grad_with_beta()
        dweight, weight = (
            None if dweight is None else dweight.reshape(self.shape),
            self.weight.value.reshape(self.shape),
        )
        dh = self.bwd(dweight, rows_of(dy), rows, residual, weight, accumulate)
        return dh.reshape(h.shape), None

    def logits(self, h: Array, head: int = 0) -> Array:
        """Inference: the logits of one head, (..., V)."""
        u = self.logits_fwd(h, self.weight.value.reshape(self.shape)[head], None)
        return self.scale(self.tanh(self.scale(u, 1 / self.cap)), self.cap) if self.cap else u

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # The last case spans several chunks, the last of them partly filled.
        many = 2 * (CHUNK_BYTES // (8 * 2 * 1024)) + 5
        for n, *shape in ((6, 3, 5, 4), (1, 1, 2, 1), (9, 4, 7, 3), (8, 6, 5), (7, 2, 6, 3), (many, 2, 1024, 3)):
            cap = 1.5 if n == 7 else 0.0
            op = with_buffer(cls(Param("weight", tuple(shape), std=1.0), backend, cap=cap), backend, rng)
            heads, vocab, dim = op.shape
            lead = (2, n // 2) if n == 8 else (n,)
            h = rng.normal(size=(*lead, dim))
            inputs = backend.asarray(h), backend.asarray(masked_targets(rng, n, heads, vocab).reshape(*lead, heads))
            yield op, inputs
            if (
                n == many or cap
            ):  # a sum over so many numbers is too rough for a finite difference; the values are tested
                continue
            teacher = (
                backend.asarray(rng.normal(size=size)) for size in ((*lead, dim + 1), (heads + 1, vocab, dim + 1))
            )
            yield WithKeywords(op, targets=partial(_taught, teacher=tuple(teacher))), inputs


def _taught(ids: Array, teacher: tuple[Array, Array]) -> SoftTargets:
    return SoftTargets(ids, *teacher, share=0.7)
