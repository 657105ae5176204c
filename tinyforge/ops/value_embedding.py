"""Value embeddings: a row for each token's id, added to attention's values through a gate."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.embedding import Order, embedding_bwd, embedding_bwd_memory
from tinyforge.ops.sigmoid import sigmoid
from tinyforge.params import with_buffer


@kernel
def value_embedding_fwd(
    out: Array | None, qkv: Array, x: Array, ids: Array, table: Array, gate: Array
) -> tuple[Array, Array]:
    """y: qkv with the rows added to its last heads, and the gates, (B, T, Hkv)."""
    heads, reads = gate.shape
    gates = 2 * sigmoid(x[..., :reads] @ gate.T)
    y = qkv.copy() if out is None else out
    if out is not None and out is not qkv:
        out[...] = qkv
    y[:, :, -heads:] += gates[..., None] * table[ids].reshape(*ids.shape, heads, qkv.shape[-1])
    return y, gates


@value_embedding_fwd.on("meta")
def value_embedding_fwd_memory(out: Array | None, qkv: Array, gate: Array) -> tuple[Array, Array]:
    return like(qkv) if out is None else out, empty((*qkv.shape[:2], gate.shape[0]), wide(qkv.dtype))


@kernel
def value_embedding_bwd(
    dtable: Array | None,
    dgate: Array | None,
    dqkv: Array,
    x: Array,
    ids: Array,
    table: Array,
    gate: Array,
    gates: Array,
    order: Order | None = None,
) -> Array:
    """dz, (B, T, Hkv): the gradient of x W^T. order: as in embedding_bwd."""
    heads, reads = gate.shape
    dv = dqkv[:, :, -heads:]
    dz = np.vecdot(dv, table[ids].reshape(dv.shape)) * gates * (1 - gates / 2)
    if dtable is not None:
        embedding_bwd(dtable, (gates[..., None] * dv).reshape(*ids.shape, table.shape[1]), ids, order)
    if dgate is not None:
        dgate += dz.reshape(-1, heads).T @ x[..., :reads].reshape(-1, reads)
    return dz


@value_embedding_bwd.on("meta")
def value_embedding_bwd_memory(
    dtable: Array | None, dqkv: Array, ids: Array, table: Array, gates: Array, order: Order | None = None
) -> Array:
    rows = empty((*ids.shape, table.shape[1]), dqkv.dtype)
    if dtable is not None:
        embedding_bwd_memory(dtable, rows, ids, order)
    return like(gates)


@kernel
def value_gate_bwd(dx: Array, dz: Array, gate: Array) -> None:
    """dx += dz W, in the channels that the gate reads."""
    dx[..., : gate.shape[1]] += dz @ gate


value_gate_bwd.on("meta")(lambda: None)


class ValueEmbedding(Op):
    """v_h += g_h E[id]_h,  g = 2 s(W x),  s(z) = 1 / (1 + exp(-z)), for each value head h

    qkv, y: (B, T, H, D), packed, values last; x: (B, T, C), what made qkv, of which the gate reads the first channels;
    ids: (B, T); E, `table`: (V, Hkv D); W, `gate`: (Hkv, channels); C: `width`. A gate of 0 adds the row as it is.
    Saves x, ids and g, (B, T, Hkv). `out=qkv` works in place. order: as in Embedding.

    backward, with dv the values' part of dy:
        dE[id]_h += g_h dv_h,   dz_h = g_h (1 - g_h / 2) dv_h . E[id]_h,   dW += dz^T x,   dx = dz W
    `leave` computes all but dx, and `spread` adds that to another gradient of x.

    Sources: Zhou et al., "Value Residual Learning For Alleviating Attention Concentration In Transformers" (2024);
    value embeddings in modded-nanogpt (Jordan et al., 2024); gates that read a few channels in nanochat (Karpathy,
    2025).
    """

    fwd = value_embedding_fwd
    bwd = value_embedding_bwd
    gate_bwd = value_gate_bwd

    def __init__(self, table: Param, gate: Param, width: int, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.table, self.gate, self.width = table, gate, width
        if table.shape[1] % gate.shape[0]:
            raise ValueError(f"{self.name}: rows of {table.shape[1]} for {gate.shape[0]} heads, expected a multiple")

    def forward(
        self,
        qkv: Array,
        x: Array,
        ids: Array,
        stash: Stash | None = None,
        *,
        out: Array | None = None,
        order: Order | None = None,
    ) -> Array:
        self.expect(qkv, self.table.shape[1] // self.gate.shape[0])
        self.expect(x, self.width)
        self.expect_ids(ids, self.table.shape[0])
        y, gates = self.fwd(out, qkv, x, ids, self.table.value, self.gate.value)
        self.save(stash, x, ids, gates, order)
        return y

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, Array, None]:
        (*_, (_, (x, *_))) = stash
        dz = self.leave(dy, stash)
        self.spread(dx := self.backend.zeros(x.shape), dz)
        return dy, dx, None

    def leave(self, dqkv: Array, stash: Stash) -> Array:
        """The gradients of the parameters; returns dz for `spread`."""
        x, ids, gates, order = stash.pop(self)
        known = (self.table.value, self.gate.value, gates, order)
        return self.bwd(self.table.grad, self.gate.grad, dqkv, x, ids, *known)

    def spread(self, dx: Array, dz: Array) -> None:
        """dx += dz W."""
        self.gate_bwd(dx, dz, self.gate.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for b, t, heads, kv_heads, d, dim, reads in (
            (2, 5, 4, 2, 4, 7, 3),
            (1, 7, 3, 1, 6, 8, 8),
            (1, 1, 3, 1, 2, 2, 1),
            (1, 0, 3, 1, 4, 4, 2),
            (2, 3, 6, 2, 8, 40, 37),
        ):
            table, gate = Param("table", (5, kv_heads * d), std=1.0), Param("gate", (kv_heads, reads), std=1.0)
            op = with_buffer(cls(table, gate, dim, backend), backend, rng)
            qkv, x = rng.normal(size=(b, t, heads, d)), rng.normal(size=(b, t, dim))
            yield op, (*map(backend.asarray, (qkv, x)), backend.asarray(rng.integers(0, 5, (b, t))))
