"""ViT, forward and backward. Read `hidden` and `forward`, then `backward` from the bottom up.

Differences from GPT-2: the tokens are patches of an image, a learned class token precedes them, every token attends to
every other, and there is one prediction for the whole sequence, from the class token. The block is GPT-2's
(models/gpt2/block.py).
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.models.gpt2 import block as gpt2
from tinyforge.models.gpt2.config import Config as GPT2Config
from tinyforge.models.gpt2.parts import linear, norm
from tinyforge.models.vit.config import Config
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import ClassToken, CrossEntropy, Dropout, LearnedPositions, Patches, Take
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.residual import PreNorm, ResidualStream


class Block(gpt2.Block):
    """GPT-2's, without a causal mask, and with the exact GELU."""

    def __init__(self, config: Config, layer: int, backend: Backend, recompute: bool) -> None:
        c = config
        shape = GPT2Config(dim=c.dim, heads=c.heads, layers=c.layers, dropout=c.dropout, norm_eps=c.norm_eps)
        super().__init__(shape, layer, backend, c.hidden, causal=False, gelu="erf", recompute=recompute)


class ViT(Model):
    """nll[b, 0, 0] = -log p(targets[b, 0, 0] | image b), 0 where the target is -1

    images: (B, K, S, S), integers of 0 to 255 or floats that are normalised already (see `Patches`); targets:
    (B, 1, 1) int32, the class; nll: (B, 1, 1). The stream starts as x = [class token, embedded patches] + position;
    block:
        x = x + out(attention(qkv(norm1(x))));   x = x + down(gelu(up(norm2(x))))
    then a final norm, and a linear map from the class token to the classes. recompute: keep the stream instead of the
    norms' outputs, and compute these again in backward.

    backward returns the gradient of float images. Source: Dosovitskiy et al., "An Image is Worth 16x16 Words:
    Transformers for Image Recognition at Scale" (2020).
    """

    per_head = True

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        super().__init__(backend)
        self.config, self.recompute = config, recompute
        dim, pixels = config.dim, config.channels * config.patch**2

        self.patches = Patches(config.patch, backend, "patches")
        self.embedding = linear("embedding", dim, pixels, backend, std=pixels**-0.5, matrices=0)
        self.class_token = ClassToken(Param("class_token", (dim,), std=0.02, decay=False), backend, "class_token")
        self.positions = LearnedPositions(
            Param("positions.weight", (config.context, dim), std=0.02), backend, "positions"
        )
        self.dropout = Dropout(config.dropout, backend, "dropout")
        self.blocks = [Block(config, i, backend, bool(recompute)) for i in range(config.layers)]
        self.final_norm = PreNorm(norm("final_norm", config, backend))
        self.take = Take(backend, "take")
        self.head = linear("head", config.classes, dim, backend, matrices=0)
        self.loss = CrossEntropy(backend, "loss")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def hidden(self, images: Array, stash: Stash | None = None) -> Array:
        """(B, K, S, S) to the final-normed stream, (B, 1 + N, C); place 0 is the class token's."""
        p = self.patches.forward(images, stash)  # (B, N, K P P)
        x = self.class_token.forward(self.embedding.forward(p, stash), stash)  # (B, 1 + N, C)
        x = self.positions.forward(x, stash)
        x = self.dropout.forward(x, stash)
        stream = ResidualStream(x)
        for block in self.blocks:
            block.forward(stream, stash)
        return self.final_norm.forward(stream, stash)

    def classify(self, images: Array, stash: Stash | None = None) -> Array:
        """Logits of the classes, (B, 1, classes)."""
        h = self.hidden(images, stash)
        first = self.backend.zeros((len(images), 1), np.dtype(np.int32))
        return self.head.forward(self.take.forward(h, first, stash), stash)

    def forward(self, images: Array, targets: Array, stash: Stash | None = None) -> Array:
        return self.loss.forward(self.classify(images, stash)[:, :, None], targets, stash)  # of (B, 1, 1, classes)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array | None, None]:
        dlogits, _ = self.loss.backward(dy, stash)
        dh, _ = self.take.backward(self.head.backward(dlogits[:, :, 0], stash), stash)
        dx = self.final_norm.backward(dh, stash)
        for block in reversed(self.blocks):
            dx = block.backward(dx, stash)
        dx = self.dropout.backward(dx, stash)
        dx = self.class_token.backward(self.positions.backward(dx, stash), stash)
        return self.patches.backward(self.embedding.backward(dx, stash), stash), None

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token of the 1 + N of an image: 6 for each parameter of the
        embedding and the blocks, and attention over all tokens. No recomputation; the head, used once, is left out."""
        c = self.config
        matrices = sum(p.size for p in self.params()) - self.positions.weight.size - c.classes * (c.dim + 1)
        return 6.0 * matrices + 12.0 * c.layers * c.dim * c.context

    def ops(self) -> list[Op]:
        """Norms but the first come after all blocks, as in the buffers and optimizer states of earlier checkpoints."""
        first, *norms = [norm.op for block in self.blocks for norm in (block.norm1, block.norm2)] + [self.final_norm.op]
        branches = [op for block in self.blocks for branch in (block.attention, block.mlp) for op in branch.ops()]
        start: list[Op] = [self.patches, self.embedding, self.class_token, self.positions, self.dropout]
        return [*start, first, *branches, *norms, self.take, self.head, self.loss]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        tiny = Config(image=6, patch=2, channels=3, classes=4, dim=6, heads=2, layers=2, hidden=5)
        one = Config(image=3, patch=3, classes=2, dim=4, heads=1, layers=1, hidden=3, dropout=0.3, norm_eps=0.1)
        for config, batch in ((tiny, 2), (tiny.override({"patch": 3, "channels": 1}), 3), (one, 1)):
            model = with_buffer(cls(config, backend), backend, rng, std=0.3)
            images = rng.normal(size=(batch, config.channels, config.image, config.image))
            targets = rng.integers(0, config.classes, (batch, 1, 1))
            yield model, (backend.asarray(images), backend.asarray(targets))
        pixels = rng.integers(0, 256, (2, 3, 6, 6))
        yield (
            with_buffer(cls(tiny, backend), backend, rng, std=0.3),
            (backend.asarray(pixels), backend.asarray(np.array([[[1]], [[-1]]]))),
        )
