"""Two small causal models with random weights: one whose state cannot go back, and one of Llama's shape, heads wide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyforge.backends import Backend, get_backend
from tinyforge.config import ModelConfig
from tinyforge.infer.cache import KVCache
from tinyforge.infer.causal_lm import FusedLayer, FusedWeights
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import Attention, Embedding, Linear, RMSNorm, RoPE, SwiGLU
from tinyforge.params import with_buffer


class State:
    """What a recurrent model keeps: one vector a row. It cannot go back."""

    can_rewind = False

    def __init__(self, batch: int, dim: int) -> None:
        self.length = 0
        self.state = np.zeros((batch, dim))

    def rewind(self, length: int) -> None:
        raise NotImplementedError("a recurrent state cannot go back")


class Recurrent(Op):
    """h_t = tanh(W h_{t-1} + E[x_t]); logits = U h_t."""

    prediction_heads = 1

    def __init__(self, context: int = 40, vocab: int = 23, dim: int = 12, seed: int = 0) -> None:
        super().__init__(get_backend("numpy", "fp64", workers=1))
        self.config = ModelConfig(context, vocab)
        rng = np.random.default_rng(seed)
        self.matrices = [rng.normal(size=shape) for shape in ((dim, dim), (vocab, dim), (vocab, dim))]
        self.caches = 0

    def hidden(self, ids: np.ndarray, stash: Stash | None = None, *, cache: State | None = None) -> np.ndarray:
        w, e, _ = self.matrices
        h = np.zeros((len(ids), len(w))) if cache is None else cache.state
        found = []
        for column in ids.T:
            h = np.tanh(h @ w.T + e[column])
            if cache is not None:
                cache.state = h
            found.append(h)
        if cache is not None:
            cache.length += ids.shape[1]
        return np.stack(found, axis=1)

    def logits(self, h: np.ndarray, head: int = 0) -> np.ndarray:
        return h @ self.matrices[2].T

    def make_cache(self, batch: int, capacity: int) -> State:
        self.caches += 1
        return State(batch, len(self.matrices[0]))

    def fused_weights(self) -> None:
        return None


@dataclass(frozen=True)
class Sizes(ModelConfig):
    dim: int = 20
    hidden: int = 14
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 6
    layers: int = 2


class Wide(Op):
    """Llama's shape, one head of output, with heads * head_dim != dim: what NanoEuler cannot be."""

    prediction_heads = 1

    def __init__(self, sizes: Sizes, backend: Backend, fused: bool = True) -> None:
        super().__init__(backend)
        self.config, self.fused = sizes, fused
        c = sizes

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear(Param(name, (rows, columns)), backend)

        self.embedding = Embedding(Param("embedding", (c.vocab, c.dim)), backend)
        self.norms = [
            RMSNorm(Param(f"norm{i}", (c.dim,), fill=1.0, decay=False), backend, 1e-3) for i in range(2 * c.layers + 1)
        ]
        self.layers = [
            (
                linear(f"{i}.qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, c.dim),
                linear(f"{i}.out", c.dim, c.heads * c.head_dim),
                linear(f"{i}.gate_up", 2 * c.hidden, c.dim),
                linear(f"{i}.down", c.dim, c.hidden),
            )
            for i in range(c.layers)
        ]
        self.attentions = [Attention(c.heads, c.kv_heads, backend) for _ in range(c.layers)]
        self.rope = RoPE(c.head_dim, c.context, c.heads + c.kv_heads, backend, 50.0)
        self.swiglu = SwiGLU(backend)
        self.head = linear("head", c.vocab, c.dim)
        with_buffer(self, backend, np.random.default_rng(0))

    def params(self) -> list[Param]:
        ops = [self.embedding, *self.norms, *(op for layer in self.layers for op in layer), self.head]
        return [param for op in ops for param in op.params()]

    def hidden(self, ids: np.ndarray, stash: Stash | None = None, *, cache: KVCache | None = None) -> np.ndarray:
        x = self.embedding.forward(ids, stash)
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            heads = qkv.forward(self.norms[2 * i].forward(x, stash), stash)
            heads = heads.reshape(*ids.shape, -1, self.config.head_dim)
            heads = self.rope.forward(heads, stash, offset=cache.length if cache else 0)
            a = self.attentions[i].forward(heads, stash, cache=cache.layer(i) if cache else None)
            x = x + out.forward(a.reshape(*ids.shape, -1), stash)
            x = x + down.forward(self.swiglu.forward(gate_up.forward(self.norms[2 * i + 1].forward(x))))
        if cache:
            cache.advance(ids.shape[1])
        return self.norms[-1].forward(x)

    def logits(self, h: np.ndarray, head: int = 0) -> np.ndarray:
        return self.head.forward(h)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(self.backend, c.layers, batch, capacity, c.kv_heads, c.head_dim)

    def fused_weights(self) -> FusedWeights | None:
        c = self.config
        if not self.fused:
            return None
        layers = [FusedLayer(*(op.weight.value for op in layer)) for layer in self.layers]
        return FusedWeights(
            dim=c.dim,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            context=c.context,
            vocab=c.vocab,
            norm_eps=1e-3,
            layers=layers,
            gains=[norm.params()[0].value for norm in self.norms],
            embedding=self.embedding.weight.value,
            lm_heads=self.head.weight.value[None],
            cos=self.rope.cos,
            sin=self.rope.sin,
        )
