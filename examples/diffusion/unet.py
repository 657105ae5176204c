"""A small U-Net that predicts the velocity from noise to images. Read `predict`, then `backward` from the bottom up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import BaseConfig
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import MSE, Add, Conv2d, Embedding, Fork, GroupNorm, Linear, SiLU, Upsample
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.registry import ModelSpec, register


@dataclass(frozen=True)
class Config(BaseConfig):
    """image: height and width, a multiple of 4. channels: 1 for grey. classes: labels of the images. width: channels at
    full size, a multiple of 4; twice as many at a half and a quarter of it. features: of the time, an even number."""

    image: int = 28
    channels: int = 1
    classes: int = 10
    width: int = 16
    features: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("image", "channels", "classes", "width", "features")
        if self.image % 4 or self.width % 4 or self.features % 2:
            raise UserError(
                f"config: image {self.image}, width {self.width}, features {self.features}; expected multiples of 4, 4 "
                "and 2"
            )

    def input_shapes(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        picture = (batch, self.image, self.image, self.channels)
        return picture, (batch, self.features), (batch,), picture

    @property
    def float_inputs(self) -> tuple[int, ...]:
        return 0, 1, 3


class Block:
    """y = x + conv2(silu(norm2(conv1(silu(norm1(x))) + shift)))

    x, y: (B, H, W, C); shift: (B, C), made from the time and the label.
    """

    def __init__(self, at: str, channels: int, backend: Backend) -> None:
        self.fork = Fork(backend, f"{at}.fork")
        self.norm1, self.norm2 = (norm(f"{at}.norm{n}", channels, backend) for n in (1, 2))
        self.conv1, self.conv2 = (Conv2d(channels, channels, 3, backend, f"{at}.conv{n}", padding=1) for n in (1, 2))
        self.channels = channels

    def ops(self) -> list[Op]:
        return [self.fork, self.norm1, self.conv1, self.norm2, self.conv2]

    def forward(self, x: Array, shift: Array, stash: Stash | None) -> Array:
        x, branch = self.fork.forward(x, stash)
        h = self.conv1.forward(self.norm1.forward(branch, stash), stash)
        return self.conv2.forward(self.norm2.forward(h, stash, shift=shift), stash, add=x)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, Array]:
        """Returns dx and dshift."""
        dh, dshift = self.norm2.backward(self.conv2.backward(dy, stash), stash)
        dbranch = self.norm1.backward(self.conv1.backward(dh, stash), stash)
        return self.fork.backward((dy, dbranch), stash), dshift


def norm(name: str, channels: int, backend: Backend) -> GroupNorm:
    gain, bias = (
        Param(f"{name}.{what}", (channels,), fill=fill, decay=False) for what, fill in (("gain", 1.0), ("bias", 0.0))
    )
    return GroupNorm(gain, bias, 4, backend, name=name, silu=True)


class UNet(Model):
    """loss[b] = the mean of (v(x_b, t_b, label_b) - target_b)^2,  v the U-Net's prediction

    x, target: (B, S, S, K); times: (B, F), the `features` of t; labels: (B,) int32; loss: (B,).

        a = block1(conv_in(x))                               at full size, `width` channels
        b = block2(down1(a))                                 at a half, twice as many
        c = block4(block3(down2(b)))                         at a quarter
        b = block5(up2(upsample(c)) + b)
        a = block6(up1(upsample(b)) + a)
        v = conv_out(silu(norm_out(a)))

    Each block gets a shift, a linear map of e = silu(time(t) + label).
    Source: Ronneberger et al., "U-Net" (2015), with sums in place of its concatenations.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        *,
        values: Array | None = None,
        recompute: Recompute = "",
        input_gradient: bool = False,
    ) -> None:
        """recompute: ignored. input_gradient: whether backward returns the gradient of x."""
        super().__init__(backend)
        self.config, width, wide = config, config.width, 2 * config.width

        def conv(name: str, out: int, inputs: int, **how: Any) -> Conv2d:
            return Conv2d(out, inputs, 3, backend, name, padding=1, **how)

        self.time = Linear(4 * width, config.features, backend, "time")
        self.label = Embedding(Param("label", (config.classes, 4 * width), std=0.5), backend, "label")
        self.add, self.silu = Add(backend, "add"), SiLU(backend, "silu")
        self.blocks = [Block(f"blocks.{i}", c, backend) for i, c in enumerate((width, wide, wide, wide, wide, width))]
        self.ends = np.cumsum([block.channels for block in self.blocks]).tolist()
        self.shifts = Linear(self.ends[-1], 4 * width, backend, "shifts")
        self.conv_in = conv("conv_in", width, config.channels, input_gradient=input_gradient)
        self.down1, self.down2 = conv("down1", wide, width, stride=2), conv("down2", wide, wide, stride=2)
        self.up1, self.up2 = conv("up1", width, wide), conv("up2", wide, wide)
        self.upsample1, self.upsample2 = Upsample(2, backend, "upsample1"), Upsample(2, backend, "upsample2")
        self.fork1, self.fork2 = Fork(backend, "fork1"), Fork(backend, "fork2")
        self.norm_out = norm("norm_out", width, backend)
        zero = Param("conv_out.weight", (config.channels, 3, 3, width), fill=0.0)  # the first prediction is 0
        bias = Param("conv_out.bias", (config.channels,), fill=0.0, decay=False)
        self.conv_out = Conv2d(zero, backend, "conv_out", bias=bias, padding=1)
        self.loss = MSE(backend, "loss")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def predict(self, x: Array, times: Array, labels: Array, stash: Stash | None = None) -> Array:
        """v: (B, S, S, K)."""
        e = self.time.forward(times, stash)
        e = self.silu.forward(self.add.forward(e, self.label.forward(labels, stash), stash), stash)
        shifts = self.shifts.forward(e, stash)
        s = [shifts[:, end - block.channels : end] for block, end in zip(self.blocks, self.ends, strict=True)]
        block1, block2, block3, block4, block5, block6 = self.blocks
        a = block1.forward(self.conv_in.forward(x, stash), s[0], stash)
        a, skip1 = self.fork1.forward(a, stash)
        b = block2.forward(self.down1.forward(a, stash), s[1], stash)
        b, skip2 = self.fork2.forward(b, stash)
        c = block3.forward(self.down2.forward(b, stash), s[2], stash)
        c = block4.forward(c, s[3], stash)
        b = self.up2.forward(self.upsample2.forward(c, stash), stash, add=skip2)
        b = block5.forward(b, s[4], stash)
        a = self.up1.forward(self.upsample1.forward(b, stash), stash, add=skip1)
        a = block6.forward(a, s[5], stash)
        return self.conv_out.forward(self.norm_out.forward(a, stash), stash)

    def forward(self, x: Array, times: Array, labels: Array, target: Array, stash: Stash | None = None) -> Array:
        return self.loss.forward(self.predict(x, times, labels, stash), target, stash)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array | None, Array, None, Array]:
        dv, dtarget = self.loss.backward(dy, stash)
        block1, block2, block3, block4, block5, block6 = self.blocks
        ds: list[Any] = [None] * len(self.blocks)
        da, ds[5] = block6.backward(self.norm_out.backward(self.conv_out.backward(dv, stash), stash), stash)
        dskip1 = da
        db, ds[4] = block5.backward(self.upsample1.backward(self.up1.backward(da, stash), stash), stash)
        dskip2 = db
        dc, ds[3] = block4.backward(self.upsample2.backward(self.up2.backward(db, stash), stash), stash)
        dc, ds[2] = block3.backward(dc, stash)
        db = self.fork2.backward((self.down2.backward(dc, stash), dskip2), stash)
        db, ds[1] = block2.backward(db, stash)
        da = self.fork1.backward((self.down1.backward(db, stash), dskip1), stash)
        da, ds[0] = block1.backward(da, stash)
        dx = self.conv_in.backward(da, stash)
        dshifts = self.backend.empty((len(dv), self.ends[-1]))
        for block, end, d in zip(self.blocks, self.ends, ds, strict=True):
            dshifts[:, end - block.channels : end] = d
        de = self.silu.backward(self.shifts.backward(dshifts, stash), stash)
        dtime, dlabel = self.add.backward(de, stash)
        self.label.backward(dlabel, stash)
        return dx, self.time.backward(dtime, stash), None, dtarget

    def ops(self) -> list[Op]:
        start: list[Op] = [self.time, self.label, self.add, self.silu, self.shifts, self.conv_in]
        between: list[Op] = [
            self.fork1,
            self.down1,
            self.fork2,
            self.down2,
            self.upsample2,
            self.up2,
            self.upsample1,
            self.up1,
        ]
        return [*start, *(op for b in self.blocks for op in b.ops()), *between, self.norm_out, self.conv_out, self.loss]

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step for one image: 6 for each weight of a convolution and position
        of its result."""
        quarter, half = {"down2", "blocks.2", "blocks.3"}, {"down1", "up2", "blocks.1", "blocks.4"}

        def positions(name: str) -> int:
            at = name.rpartition(".")[0] if name.startswith("blocks") else name
            return (self.config.image // (4 if at in quarter else 2 if at in half else 1)) ** 2

        return sum(6.0 * op.weight.size * positions(op.name) for op in self.ops() if isinstance(op, Conv2d))

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for image, channels, batch in ((8, 1, 2), (4, 2, 3)):
            config = Config(image=image, channels=channels, classes=3, width=8, features=6)
            model = with_buffer(cls(config, backend, input_gradient=True), backend, rng, std=0.3)
            shape = (batch, image, image, channels)
            x, times, target = (backend.asarray(rng.normal(size=size)) for size in (shape, (batch, 6), shape))
            yield model, (x, times, backend.asarray(rng.integers(0, 3, batch)), target)


SPEC = ModelSpec(
    "unet",
    "UNet",
    UNet,
    Config,
    {"small": Config(), "base": Config(width=64)},
    "A U-Net that turns noise into images",
    learns="images from noise",
    use="python examples/diffusion/sample.py RUN",
    source='Ronneberger et al., "U-Net" (2015); Lipman et al., "Flow Matching for Generative Modeling" (2022)',
    backward="A skip connection is a sum: its gradient is copied. The time's gradient is the sum over all positions.",
)
register(SPEC)
