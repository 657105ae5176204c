"""The residual stream of a pre-norm model, and the branches that add to it.

    stream.add(self.attention.forward(self.norm1.forward(stream, stash), stash, context))
    stream.add(self.mlp.forward(self.norm2.forward(stream, stash), stash))

These two lines are a block's forward. The fused kernels are chosen here. A branch ends with a linear map that has not
run yet (`Addend`). If the map can add into its product, `ResidualStream.add` runs it with `add=x`. Otherwise the stream
owes the addition until the next norm reads it, which adds and normalises in one kernel. Backward has no stream object:
the gradient of x is an array, and each norm's backward adds it (`residual`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.op import Op, Recompute, Stash
from tinyforge.ops.add import Add
from tinyforge.ops.add_layernorm import AddLayerNorm
from tinyforge.ops.add_rmsnorm import AddRMSNorm
from tinyforge.ops.attention import Attention, LayerCache, split
from tinyforge.ops.dropout import Dropout
from tinyforge.ops.embedding import Order
from tinyforge.ops.fp8 import Scaled
from tinyforge.ops.mix import Mix
from tinyforge.ops.mix_rmsnorm import MixRMSNorm
from tinyforge.ops.qk_norm_rope import QKNormRoPE
from tinyforge.ops.rmsnorm import RMSNorm
from tinyforge.ops.rope import RoPE
from tinyforge.ops.swiglu_linear import swiglu_mlp
from tinyforge.ops.value_embedding import ValueEmbedding


class Recomputed(NamedTuple):
    """A norm's value, (B, T, C), and the function that recomputes it in backward, so that no map keeps the value."""

    value: Array
    again: Callable[[], Array]


class Addend(NamedTuple):
    """The end of a branch, not run yet. run: computes the product of `last`, its last map; accepts `add` if that does.
    dropout, after: follow it."""

    run: Callable[..., Array]
    last: Op
    dropout: Dropout
    stash: Stash | None
    after: Sequence[Op] = ()

    def value(self) -> Array:
        """The branch, apart from the stream."""
        y = self.dropout.forward(self.run(), self.stash)
        for op in self.after:
            y = op.forward(y, stash=self.stash)
        return y


class ResidualStream:
    """The residual stream x + owed. x: (B, T, C); owed: the same, or None. first: x before the first layer.

    outputs: what branches return apart from their addition, such as the usage of a router's experts.
    keep: set by `ActivationCheckpoint`: the next norm leaves x in `kept`, after the addition.
    """

    def __init__(self, x: Array, first: Any = None) -> None:
        self.x, self.first = x, x if first is None else first
        self.owed: Array | None = None
        self.outputs: list[Array] = []
        self.keep = False
        self.kept: Array | None = None

    def add(self, branch: Addend | Array) -> None:
        """One forward-Euler step: x += branch. RuntimeError if no norm has read the stream since the last addition."""
        if self.owed is not None:
            raise RuntimeError("the stream owes an addition already: a norm must read it between two branches")
        if not isinstance(branch, Addend):
            self.owed = branch
        elif branch.last.adds and not branch.dropout.rate and not branch.after:
            self.x = branch.dropout.forward(branch.run(add=self.x), branch.stash)
        else:
            self.owed = branch.value()

    def normed(self, norm: AddRMSNorm | AddLayerNorm, stash: Stash | None) -> Any:
        """norm(x + owed). Afterwards x is the sum, and nothing is owed."""
        self.x, y = norm.forward(self.x, self.owed, stash)
        self._paid()
        return y

    def plain(self, add: Add) -> Array:
        """x + owed, for a branch without a norm before it."""
        if self.owed is not None:
            self.x = add.forward(self.x, self.owed)
        self._paid()
        return self.x

    def _paid(self) -> None:
        self.owed = None
        if self.keep:
            self.kept, self.keep = self.x, False


class PreNorm:
    """A norm that reads the stream. op: AddRMSNorm or AddLayerNorm.

    recompute: forward returns `Recomputed`, for a norm that saves the stream anyway.
    """

    def __init__(self, op: AddRMSNorm | AddLayerNorm, *, recompute: bool = False) -> None:
        self.op, self.recompute = op, recompute

    def forward(self, stream: ResidualStream, stash: Stash | None = None) -> Any:
        y = stream.normed(self.op, stash)
        return Recomputed(y, partial(self.op.normed, stream.x)) if self.recompute else y

    def backward(self, dy: Array, stash: Stash, residual: Any = None) -> Any:
        """The gradient of the stream before the norm. residual: that of the stream after it, None at its end."""
        return self.op.backward((residual, dy), stash)[1]

    def ops(self) -> list[Op]:
        return [self.op]


class MixedNorm:
    """A norm before which the stream x becomes a x + b x0, x0 the stream before the first layer. The gradient of x0 is
    added up in the stash. An AddRMSNorm becomes one kernel with the mix."""

    def __init__(self, mix: Mix, norm: PreNorm, backend: Backend) -> None:
        self.mix, self.norm, self.op, self.add = mix, norm, norm.op, Add(backend, mix.name)
        self.fused: MixRMSNorm | None = None
        if type(op := norm.op) is AddRMSNorm:
            self.fused = MixRMSNorm(mix.a, mix.b, op.weight, backend, op.eps, op.name, plus_one=op.plus_one)

    def forward(self, stream: ResidualStream, stash: Stash | None = None) -> Any:
        x = stream.plain(self.add)
        if self.fused:
            stream.x, y = self.fused.forward(x, stream.first, stash)
            return y
        stream.x = self.mix.forward(x, stream.first, stash)
        return self.norm.forward(stream, stash)

    def backward(self, dy: Array, stash: Stash, residual: Any = None) -> Array:
        if self.fused:
            dx, stash.first = self.fused.backward((residual, dy), stash, into=stash.first)
        else:
            dx, stash.first = self.mix.backward(self.norm.backward(dy, stash, residual), stash, into=stash.first)
        return dx

    def ops(self) -> list[Op]:
        return [self.fused] if self.fused else [self.mix, *self.norm.ops()]


class NoNorm:
    """In place of a PreNorm: a branch that reads the stream as it is, as in OLMo 2."""

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.add = Add(backend, name)

    def forward(self, stream: ResidualStream, stash: Stash | None = None) -> Array:
        return stream.plain(self.add)

    def backward(self, dy: Array, stash: Stash, residual: Any = None) -> Array:
        return dy if residual is None else self.add.forward(dy, residual)

    def ops(self) -> list[Op]:
        """None: it saves nothing, and learns nothing."""
        return []


class Branch:
    """What branches end with. after: ops between dropout and the addition, such as Gemma 2's second norm."""

    def __init__(self, dropout: Dropout, after: Sequence[Op] = ()) -> None:
        self.dropout, self.after = dropout, after

    def leave(self, dy: Any, stash: Stash) -> Any:
        """The gradient of the last map's product."""
        for op in reversed(self.after):
            dy = op.backward(dy, stash)
        return self.dropout.backward(dy, stash)


class AttentionContext(NamedTuple):
    """What attention knows of a pass besides its input. cache: the keys and values of earlier positions. offset: the
    number of these positions, or each token's own position, (T,). starts: first position of each token's document, (B,
    T). lengths: see `Attention`. ids: the tokens, (B, T), for value embeddings; order: see `Embedding`."""

    cache: LayerCache | None = None
    offset: Any = 0
    starts: Array | None = None
    lengths: Array | None = None
    ids: Array | None = None
    order: Order | None = None


NO_CONTEXT = AttentionContext()


class SelfAttention(Branch):
    """out(attention(rope(norms(qkv(h)))))

    h: (B, T, C), or what the norm before makes of it. head_norms: pairs of a norm and the heads it applies to, such as
    the query heads: each of them, or all together if the norm is as wide. RoPE becomes part of the product before it
    and of attention's backward where there is a kernel. values: adds rows of the tokens' own to v.
    """

    def __init__(
        self,
        qkv: Op,
        attention: Attention,
        out: Op,
        dropout: Dropout,
        *,
        head_dim: int,
        rope: RoPE | None = None,
        head_norms: Sequence[tuple[RMSNorm, slice]] = (),
        values: ValueEmbedding | None = None,
        after: Sequence[Op] = (),
    ) -> None:
        super().__init__(dropout, after)
        self.qkv, self.attention, self.out = qkv, attention, out
        self.head_dim, self.rope, self.head_norms, self.values = head_dim, rope, head_norms, values

    def forward(self, h: Any, stash: Stash | None, context: AttentionContext = NO_CONTEXT) -> Addend:
        cache, _, starts, lengths, *_ = context
        qkv = self.project(h, stash, context)
        a = self.attention.forward(qkv, stash, cache=cache, starts=starts, lengths=lengths)  # (B, T, Hq, D)
        run = partial(self.out.forward, a.reshape(*a.shape[:2], -1), stash=stash)
        return Addend(run, self.out, self.dropout, stash, self.after)

    def project(self, h: Any, stash: Stash | None, context: AttentionContext) -> Array:
        """What attention reads: q, k and v, (B, T, Hq + 2 Hkv, D)."""
        qkv = self.rotated(h, stash, context.offset)
        if self.values is None:
            return qkv
        x, ids = h.x if isinstance(h, Scaled) else h, context.ids
        assert ids is not None
        return self.values.forward(qkv, x, ids, stash, out=qkv, order=context.order)

    def rotated(self, h: Any, stash: Stash | None, offset: Any) -> Array:
        """q, k and v after RoPE."""
        if self.rope is not None and not self.head_norms:
            return self.rope.after(self.qkv, h, stash, offset=offset)
        qkv = first_map(self.qkv, h, stash)
        qkv = qkv.reshape(*qkv.shape[:2], -1, self.head_dim)
        for norm, heads in self.head_norms:
            norm.forward(part := rows_of(norm, qkv[:, :, heads]), stash, out=part)
        return qkv if self.rope is None else self.rope.forward(qkv, stash, offset=offset, out=qkv)

    def fill(self, h: Any, context: AttentionContext) -> None:
        """Append keys and values to the cache, and compute nothing else."""
        assert context.cache is not None
        _, k, v = split(self.project(h, None, context), self.attention.heads)
        context.cache.append(k, v, None)

    def backward(self, dy: Any, stash: Stash) -> Array:
        da = self.out.backward(self.leave(dy, stash), stash)  # (B, T, Hq D)
        da = da.reshape(*da.shape[:2], -1, self.head_dim)
        # RoPE's backward is part of attention's, unless more is part of RoPE or lies between the two.
        apart = self.values is not None or isinstance(self.rope, QKNormRoPE)
        dqkv = self.attention.backward(da, stash, rope=None if apart else self.rope)  # (B, T, Hq + 2 Hkv, D)
        dgates = None if self.values is None else self.values.leave(dqkv, stash)
        if self.rope is not None and apart:
            dqkv = self.rope.backward(dqkv, stash, out=dqkv)
        for norm, heads in reversed(self.head_norms):
            norm.backward(part := rows_of(norm, dqkv[:, :, heads]), stash, out=part)
        dh: Array = self.qkv.backward(dqkv.reshape(*da.shape[:2], -1), stash)
        if self.values is not None and dgates is not None:
            self.values.spread(dh, dgates)
        return dh

    def ops(self) -> list[Op]:
        """In the order of forward."""
        rope = [] if self.rope is None else [self.rope]
        norms, values = [norm for norm, _ in self.head_norms], [] if self.values is None else [self.values]
        return [self.qkv, *norms, *rope, *values, self.attention, self.out, self.dropout, *self.after]


def rows_of(norm: RMSNorm, heads: Array) -> Array:
    """A view of some heads, (B, T, H, D), as the rows of a norm: each head, or all of a position."""
    return heads if norm.weight.size == heads.shape[3] else heads.reshape(*heads.shape[:2], -1)


class MLP(Branch):
    """down(up(h)), where down begins with the activation: LinearSwiGLU and SwiGLULinear, or Linear and GELULinear;
    or down(activation(up(h)))

    h: (B, T, C), or what the norm before makes of it.
    """

    def __init__(
        self, up: Op, down: Op, dropout: Dropout, *, activation: Op | None = None, after: Sequence[Op] = ()
    ) -> None:
        super().__init__(dropout, after)
        self.up, self.down, self.activation = up, down, activation

    def forward(self, h: Any, stash: Stash | None) -> Addend:
        if self.activation:
            u = self.activation.forward(first_map(self.up, h, stash), stash=stash)
            run = partial(self.down.forward, u, stash=stash)
        elif isinstance(h, Recomputed):
            run = partial(self.down.forward, first_map(self.up, h, stash), stash=stash)
        else:
            run = partial(swiglu_mlp, self.up, self.down, h, stash)
        return Addend(run, self.down, self.dropout, stash, self.after)

    def backward(self, dy: Any, stash: Stash) -> Array:
        du = self.down.backward(self.leave(dy, stash), stash)
        if self.activation:
            du = self.activation.backward(du, stash)
        dh: Array = self.up.backward(du, stash)
        return dh

    def ops(self) -> list[Op]:
        """In the order of forward."""
        activation = [self.activation] if self.activation else []
        return [self.up, *activation, self.down, self.dropout, *self.after]


def first_map(op: Any, h: Any, stash: Stash | None) -> Any:
    """The first map of a branch on a norm's value, or on one that is recomputed in backward."""
    if isinstance(h, Recomputed):
        return op.forward(h.value, stash, recompute=h.again)
    return op.forward(h, stash=stash)


class ActivationCheckpoint(Op):
    """A block whose forward is recomputed in backward: only its input is kept.

    forward and backward as those of the block. Saves the stream that the block's first norm reads, and drops what the
    ops of the block have saved. backward first reruns forward on the same stash, which then has the records that the
    block's own backward pops; dropout uses the same random streams. This takes the memory of one block at a time, and
    the time of another forward: a third more. The result is bitwise identical.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """

    def __init__(self, block: Any, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.block = block

    def forward(self, stream: ResidualStream, stash: Stash | None, context: AttentionContext) -> None:  # type: ignore[override]
        if stash is None:
            self.block.forward(stream, None, context)
            return
        before, stream.keep = len(stash), True
        self.block.forward(stream, stash, context)
        stash.drop(before)
        stash.push(self, stream.kept, stream.first, context)
        stream.kept = None

    def backward(self, dx: Any, stash: Stash, *rest: Any) -> Any:
        self.restore(stash)
        return self.block.backward(dx, stash, *rest)

    def restore(self, stash: Stash) -> None:
        """Rerun forward. A method of its own: x is freed before the block's backward."""
        x, first, context = stash.pop(self)
        self.block.forward(ResidualStream(x, first), stash, context)


def layers_of(blocks: Sequence[Any], backend: Backend, recompute: Recompute) -> Sequence[Any]:
    """The blocks as a model runs them: each under a checkpoint if blocks are recomputed."""
    if recompute != "blocks":
        return blocks
    return [ActivationCheckpoint(block, backend, f"blocks.{i}") for i, block in enumerate(blocks)]
