"""Mamba, forward and backward. Read `hidden` and `forward`, then `backward` from the bottom up.

Differences from GPT-2 and Llama: a block has one half instead of two, and instead of attention a convolution over a few
positions and a recurrence over all of them. The state for generation has a constant size.
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.infer.cache import StateCache
from tinyforge.kernel import Array
from tinyforge.model import NextTokenModel
from tinyforge.models.mamba.config import Config
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import AddRMSNorm, CausalConv, Embedding, Linear, LinearCrossEntropy, SelectiveScan
from tinyforge.params import ParamBuffer
from tinyforge.residual import PreNorm, ResidualStream
from tinyforge.rng import Stream

STEP_MIN, STEP_MAX = 1e-3, 1e-1  # range of the initial step sizes dt


class Mixer:
    """The branch of a block: out(scan(u, delta, B, C, z)), with (u', z) = input(h), u = conv(u'),
    (low, B, C) = select(u) and delta = step(low)."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        c, channels, at = config, config.channels, f"blocks.{layer}"
        self.splits = (c.step_rank, c.step_rank + c.state)

        def linear(name: str, matrices: tuple[int, ...], columns: int, scale: float = 1.0) -> Linear:
            std = scale * (3 * columns) ** -0.5
            weight = Param(f"{at}.{name}.weight", (sum(matrices), columns), std=std, matrices=matrices)
            return Linear(weight, backend, f"{at}.{name}")

        def vector(name: str, fill: float = 0.0) -> Param:
            return Param(f"{at}.{name}", (channels,), fill=fill, decay=False)

        self.input = linear("input", (channels, channels), c.dim)
        kernel = Param(f"{at}.conv.weight", (channels, 1, c.taps), std=(3 * c.taps) ** -0.5)
        self.conv = CausalConv(kernel, vector("conv.bias"), backend, f"{at}.conv")
        self.select = linear("select", (c.step_rank, c.state, c.state), channels)
        self.step = linear("step", (channels,), c.step_rank)
        a_log = Param(f"{at}.scan.a_log", (channels, c.state), fill=0.0, decay=False)
        self.scan = SelectiveScan(a_log, vector("scan.skip", 1.0), vector("scan.bias"), backend, f"{at}.scan")
        self.out = linear("out", (c.dim,), channels, c.layers**-0.5)  # keeps the stream's variance from growing

    def forward(self, h: Array, stash: Stash | None, tail: Array | None, state: Array | None) -> Array:
        uz = self.input.forward(h, stash)  # (B, T, 2 E)
        channels = uz.shape[-1] // 2
        u = self.conv.forward(uz[..., :channels], stash, tail=tail)  # (B, T, E)
        selected = self.select.forward(u, stash)  # (B, T, R + 2 N)
        first, second = self.splits
        low, b, c = selected[..., :first], selected[..., first:second], selected[..., second:]
        delta = self.step.forward(low, stash)  # (B, T, E)
        y = self.scan.forward(u, delta, b, c, uz[..., channels:], stash, state=state)  # (B, T, E)
        return self.out.forward(y, stash)

    def backward(self, dy: Array, stash: Stash) -> Array:
        dy = self.out.backward(dy, stash)  # (B, T, E)
        (batch, length, channels), (first, second) = dy.shape, self.splits
        duz = self.out.backend.empty((batch, length, 2 * channels))
        du, ddelta, db, dc, _ = self.scan.backward(dy, stash, out=duz[..., channels:])
        dselected = self.out.backend.empty((batch, length, self.select.weight.shape[0]))
        dselected[..., :first] = self.step.backward(ddelta, stash)
        dselected[..., first:second], dselected[..., second:] = db, dc
        du += self.select.backward(dselected, stash)
        self.conv.backward(du, stash, out=duz[..., :channels])
        return self.input.backward(duz, stash)

    def ops(self) -> list[Op]:
        return [self.input, self.conv, self.select, self.step, self.scan, self.out]


class Block:
    """x = x + mixer(norm(x)), with x the residual stream, (B, T, C)."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        self.norm = pre_norm(f"blocks.{layer}.norm", config, backend)
        self.mixer = Mixer(config, layer, backend)

    def forward(self, stream: ResidualStream, stash: Stash | None, tail: Array | None, state: Array | None) -> None:
        """tail, state: of the positions before these, overwritten; None for none."""
        stream.add(self.mixer.forward(self.norm.forward(stream, stash), stash, tail, state))

    def backward(self, dx: Array, stash: Stash) -> Array:
        """The gradient of the stream before the block, from that after it."""
        return self.norm.backward(self.mixer.backward(dx, stash), stash, residual=dx)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        return [self.norm.op, *self.mixer.ops()]


def pre_norm(name: str, config: Config, backend: Backend) -> PreNorm:
    gain = Param(f"{name}.weight", (config.dim,), fill=1.0, decay=False)
    return PreNorm(AddRMSNorm(gain, backend, config.norm_eps, name))


class Mamba(NextTokenModel):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | tokens 0..t of row b), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). The stream starts as the embedding; a block adds to it
    once, x = x + block(norm(x)); then a final norm, and the embedding again as the output head. recompute: ignored,
    nothing here would be worth it. `values` shares another model's weights.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).
    """

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        super().__init__(backend)
        self.config, self.recompute = config, recompute
        table = Param("embedding.weight", (config.vocab, config.dim), std=0.02)
        self.embedding = Embedding(table, backend, "embedding")
        self.blocks = [Block(config, i, backend) for i in range(config.layers)]
        self.final_norm = pre_norm("final_norm", config, backend)
        self.head = LinearCrossEntropy(table, backend, "head")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def initialise(self, seed: int) -> None:
        """A = -1 .. -N in every channel; steps dt between STEP_MIN and STEP_MAX, their logarithms uniform."""
        super().initialise(seed)
        rates = np.log(np.arange(1, self.config.state + 1))
        span = np.log(STEP_MAX / STEP_MIN)
        for block in self.blocks:
            scan = block.mixer.scan
            drawn = Stream(seed, "init").fork(scan.bias.name).uniform((self.config.channels,))
            step = STEP_MIN * np.exp(span * drawn)
            self.buffer.set_master(scan.a_log, np.broadcast_to(rates, scan.a_log.shape))
            self.buffer.set_master(scan.bias, step + np.log(-np.expm1(-step)))  # softplus of this is the step
        self.buffer.publish()

    def hidden(self, ids: Array, stash: Stash | None = None, *, cache: StateCache | None = None) -> Array:
        """(B, T) ids to the final-normed stream, (B, T, C). With a cache, ids continue the text in it."""
        stream = ResidualStream(self.embedding.forward(ids, stash))
        for i, block in enumerate(self.blocks):
            tail, state = cache.states[i] if cache else (None, None)
            block.forward(stream, stash, tail, state)
        if cache:
            cache.length += ids.shape[1]
        return self.final_norm.forward(stream, stash)

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array:
        return self.head.forward(self.hidden(ids, stash), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dh, _ = self.head.backward(dy, stash)
        dx = self.final_norm.backward(dh, stash)
        for block in reversed(self.blocks):
            dx = block.backward(dx, stash)
        self.embedding.backward(dx, stash)

    def make_cache(self, batch: int, capacity: int) -> StateCache:
        """Per block, the last inputs of its convolution and the state of its scan; capacity is ignored."""
        c, zeros, wide = self.config, self.backend.zeros, self.backend.master_dtype
        return StateCache(
            [(zeros((batch, c.taps - 1, c.channels)), zeros((batch, c.channels, c.state), wide)) for _ in self.blocks]
        )

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter in a matrix product, the
        embedding counted once, as the output head; 3 times the scan's forward, with 6 per number of its states (the
        decay counts as one). Recomputation is not counted."""
        c = self.config
        return 6 * self.buffer.count + 3 * 6 * c.layers * c.channels * c.state

    def ops(self) -> list[Op]:
        return [self.embedding, *(op for block in self.blocks for op in block.ops()), self.final_norm.op, self.head]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # Values large enough that the gradients of the step sizes stay measurable.
        shapes = (
            (Config(dim=8, layers=2, state=3, context=9, vocab=11, norm_eps=0.1), 2, 9),
            (Config(dim=5, layers=1, expand=3, state=2, taps=3, rank=2, context=7, vocab=3), 3, 5),
            (Config(dim=7, layers=1, expand=1, state=2, taps=1, context=2, vocab=5, norm_eps=0.1), 2, 2),
            (Config(dim=6, layers=1, state=2, context=40, vocab=7, norm_eps=0.1), 1, 35),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.6)
