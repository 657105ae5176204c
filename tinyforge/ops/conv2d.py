"""Two-dimensional convolution of images, channels last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.backends.numpy_backend import row_blocks
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.linear import made, sizes_of
from tinyforge.params import with_buffer

Shape = tuple[int, ...]
CHUNK_BYTES = 64 << 20
"""Of the matrix of windows on a GPU, where float32 and float64 make one in parts."""


def size_after(size: int, kernel: int, stride: int, padding: int) -> int:
    """The height or width of the output; at least 1 for a kernel that fits."""
    return (size + 2 * padding - kernel) // stride + 1


def output_shape(x: Shape, weight: Shape, stride: int, padding: int) -> Shape:
    """(B, H', W', O) of images (B, H, W, I) and weights (O, h, w, I)."""
    height, width = (size_after(n, k, stride, padding) for n, k in zip(x[1:3], weight[1:3], strict=True))
    return x[0], height, width, weight[0]


def windows(x: Array, height: int, width: int, stride: int, padding: int) -> Array:
    """(B, H, W, I) to (B, H' W', h w I): what each output position sees, zeros outside of the image."""
    batch, high, wide, channels = x.shape
    if padding:
        padded = np.zeros((batch, high + 2 * padding, wide + 2 * padding, channels), x.dtype)
        padded[:, padding:-padding, padding:-padding] = x
        x = padded
    axes: Any = 1, 2  # NumPy 2.3's annotations allow one axis only
    seen = np.lib.stride_tricks.sliding_window_view(x, (height, width), axes)[:, ::stride, ::stride]
    down, across = seen.shape[1:3]
    return seen.transpose(0, 1, 2, 4, 5, 3).reshape(batch, down * across, height * width * channels)


def _parts(x: Shape, weight: Shape, itemsize: int) -> Iterator[slice]:
    """Slices of the batch whose windows fit in a core's cache, or one image at a time."""
    return row_blocks(x[0], int(np.prod(x[1:])) * weight[1] * weight[2] * itemsize)


@kernel
def conv2d_fwd(x: Array, weight: Array, bias: Array | None, add: Array | None, stride: int, padding: int) -> Array:
    """x: (B, H, W, I); weight: (O, h, w, I); bias: (O,), or None; add: like the result, (B, H', W', O), or None."""
    outs, height, width, _ = weight.shape
    y = np.empty(output_shape(x.shape, weight.shape, stride, padding), x.dtype)
    flat = weight.reshape(outs, -1).T
    for part in _parts(x.shape, weight.shape, x.itemsize):
        seen = windows(x[part], height, width, stride, padding)
        np.matmul(seen, flat, out=y[part].reshape(len(seen), -1, outs))
    if bias is not None:
        y += bias
    if add is not None:
        y += add
    return y


@conv2d_fwd.on("meta")
def conv2d_fwd_memory(x: Array, weight: Array, stride: int, padding: int) -> Array:
    shape = output_shape(x.shape, weight.shape, stride, padding)
    y = empty(shape, x.dtype)
    _scratch = scratch(x.shape, weight.shape, shape, x.dtype)
    return y


def scratch(x: Shape, weight: Shape, y: Shape, dtype: Any) -> list[Array]:
    """What the CUDA launchers allocate for a product with windows of x, of weights and for positions like y's: copies
    whose channels are a multiple of 8, or a part of the matrix of windows."""
    channels, depth = x[-1], int(np.prod(weight[1:]))
    if np.dtype(dtype).itemsize == 2:
        if channels % 8 == 0:
            return []
        more = -(-channels // 8) * 8
        return [empty((*shape[:-1], more), dtype) for shape in (x, weight)]
    rows = int(np.prod(y[:3]))
    return [empty((min(rows, chunk_rows(depth, np.dtype(dtype).itemsize)), depth), dtype)]


def chunk_rows(depth: int, itemsize: int) -> int:
    """Rows of a part of the matrix of windows."""
    return max(1, CHUNK_BYTES // (depth * itemsize))


@kernel
def conv2d_bwd_input(dy: Array, weight: Array, shape: Shape, stride: int, padding: int) -> Array:
    """The gradient of x, which has `shape`: each output position's gradient goes back to the window that it saw."""
    outs, height, width, channels = weight.shape
    batch, down, across, _ = dy.shape
    _, high, wide, _ = shape
    if stride == 1 and height == width and padding < height:  # one product with all taps, instead of one for each
        flipped = weight[:, ::-1, ::-1].transpose(3, 1, 2, 0)
        return conv2d_fwd(dy, flipped, None, None, 1, height - 1 - padding)
    dx = np.zeros((batch, high + 2 * padding, wide + 2 * padding, channels), dy.dtype)
    for part in _parts(shape, weight.shape, dy.itemsize):
        up = dy[part].reshape(-1, outs)
        for i in range(height):
            for j in range(width):
                place = dx[part, i : i + stride * down : stride, j : j + stride * across : stride]
                place += (up @ weight[:, i, j]).reshape(place.shape)
    return dx[:, padding : padding + high, padding : padding + wide].copy() if padding else dx


@conv2d_bwd_input.on("meta")
def conv2d_bwd_input_memory(dy: Array, weight: Array, shape: Shape) -> Array:
    dx = empty(shape, dy.dtype)
    outs, height, width, channels = weight.shape
    flipped = (channels, height, width, outs)
    _flipped = empty(flipped, dy.dtype)
    _scratch = scratch(dy.shape, flipped, shape, dy.dtype)
    return dx


@kernel
def conv2d_bwd_weight(
    dweight: Array | None, dbias: Array | None, dy: Array, x: Array | None, stride: int, padding: int
) -> None:
    """x is only needed for dweight."""
    outs = dy.shape[-1]
    if dbias is not None:
        dbias += dy.reshape(-1, outs).sum(axis=0)
    if dweight is None or x is None:
        return
    _, height, width, channels = dweight.shape
    flat = np.zeros((outs, height * width * channels), dweight.dtype)
    for part in _parts(x.shape, dweight.shape, x.itemsize):
        seen = windows(x[part], height, width, stride, padding)
        flat += dy[part].reshape(-1, outs).T @ seen.reshape(-1, seen.shape[-1])
    dweight += flat.reshape(dweight.shape)


@conv2d_bwd_weight.on("meta")
def conv2d_bwd_weight_memory(dweight: Array | None, dy: Array, x: Array | None) -> None:
    if dweight is not None and x is not None:
        _scratch = scratch(x.shape, dweight.shape, dy.shape, x.dtype)
        if x.dtype.itemsize == 2 and dy.shape[-1] % 8:
            _padded = empty((*dy.shape[:-1], -(-dy.shape[-1] // 8) * 8), dy.dtype)


class Conv2d(Op):
    """y[b, r, c, o] = bias[o] + sum over i, j, k of W[o, i, j, k] x[b, r S + i - P, c S + j - P, k],  x = 0 outside

    x: (B, H, W, I), channels last; W: (O, h, w, I); bias: (O,), or none; S: stride; P: padding, zeros on each side;
    y: (B, H', W', O), H' = floor((H + 2 P - h) / S) + 1. Saves x. PyTorch's weight (O, I, h, w) is W with its axes in
    another order: `theirs.transpose(0, 2, 3, 1)`.

    add: like y, added to it in the same pass, such as a residual stream. Its gradient is dy.

    Made from sizes, `Conv2d(out, inputs, size, backend)`, its parameters are `name`.weight, which starts at
    N(0, 1 / (h w I)), and `name`.bias, which starts at 0. input_gradient: False if the input is data; backward then
    returns None.

    backward: dW[o, i, j, k] += sum of dy[b, r, c, o] x[b, r S + i - P, c S + j - P, k],  db += sum of dy,
        dx[b, p, q, k] = sum of dy[b, r, c, o] W[o, i, j, k] over all r S + i - P = p, c S + j - P = q

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998).
    """

    fwd = conv2d_fwd
    bwd_input = conv2d_bwd_input
    bwd_weight = conv2d_bwd_weight

    @overload
    def __init__(
        self,
        weight: Param,
        backend: Backend,
        name: str = "",
        *,
        bias: Param | None = None,
        stride: int = 1,
        padding: int = 0,
        input_gradient: bool = True,
    ) -> None: ...
    @overload
    def __init__(
        self,
        weight: int,
        inputs: int,
        size: int,
        backend: Backend,
        name: str = "",
        *,
        bias: bool = True,
        stride: int = 1,
        padding: int = 0,
        input_gradient: bool = True,
    ) -> None: ...
    def __init__(
        self,
        weight: Any,
        *rest: Any,
        bias: Any = None,
        stride: int = 1,
        padding: int = 0,
        input_gradient: bool = True,
        **named: Any,
    ) -> None:
        """(weight: Param, backend, name, bias=Param or None), or (out, inputs, size, backend, name, bias=True)."""
        sizes, rest = sizes_of(type(self).__name__, weight, rest, named, ("inputs", "size"))
        super().__init__(*rest, **named)
        if not isinstance(weight, Param):
            inputs, size = sizes
            weight, bias = made(self, (weight, size, size, inputs), bias is None or bool(bias))
        if len(weight.shape) != 4 or stride < 1 or padding < 0:
            raise ValueError(
                f"{self.name}: weight {weight.shape}, stride {stride}, padding {padding}; expected (O, h, w, I), a "
                "stride of 1 or more and a padding of 0 or more"
            )
        self.weight: Param = weight
        self.bias: Param | None = bias
        self.stride, self.padding, self.input_gradient = stride, padding, input_gradient

    def forward(self, x: Array, stash: Stash | None = None, *, add: Array | None = None) -> Array:
        shape = output_shape(x.shape, self.weight.shape, self.stride, self.padding) if x.ndim == 4 else ()
        if x.ndim != 4 or x.shape[3] != self.weight.shape[3] or min(shape[1:3]) < 1:
            raise ValueError(
                f"{self.name}: an input of {x.shape}, expected (B, H, W, {self.weight.shape[3]}), its H and W with the "
                f"padding at least {self.weight.shape[1:3]}"
            )
        self.expect(x)
        self.save(stash, None if self.weight.frozen else x, x.shape)
        return self.fwd(x, self.weight.value, self.bias.value if self.bias else None, add, self.stride, self.padding)

    def backward(self, dy: Array, stash: Stash) -> Any:
        x, shape = stash.pop(self)
        self.bwd_weight(self.weight.grad, self.bias.grad if self.bias else None, dy, x, self.stride, self.padding)
        if not self.input_gradient:
            return None
        return self.bwd_input(dy, self.weight.value, shape, self.stride, self.padding)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # A window of odd and of even size, strides that leave a rest, no padding, as much as the window, and less, one
        # position, no image.
        for (b, h, w, i), (o, down, across), stride, padding in (
            ((2, 5, 4, 3), (4, 3, 3), 1, 1),
            ((1, 6, 7, 2), (3, 3, 2), 2, 1),
            ((3, 3, 3, 1), (2, 3, 3), 1, 0),
            ((2, 7, 5, 2), (1, 2, 2), 3, 0),
            ((2, 3, 2, 8), (8, 1, 1), 1, 0),
            ((1, 3, 2, 1), (2, 2, 2), 1, 2),
            ((2, 2, 3, 1), (1, 2, 2), 1, 1),
            ((1, 4, 5, 2), (2, 3, 2), 1, 1),
            ((2, 5, 5, 2), (3, 3, 3), 2, 1),
            ((0, 3, 3, 2), (2, 3, 3), 1, 1),
        ):
            for bias in (None, Param("bias", (o,), fill=0.0, decay=False)):
                weight = Param("weight", (o, down, across, i), std=1.0)
                op = with_buffer(cls(weight, backend, bias=bias, stride=stride, padding=padding), backend, rng)
                yield op, (backend.asarray(rng.normal(size=(b, h, w, i))),)
