"""Launches dropout.wgsl."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops import dropout as op


@op.dropout.on("webgpu")
def dropout(x: Array, key: Key, rate: float) -> Array:
    y = new(x, x.shape)
    sizes = (1.0 / (1.0 - rate), x.size, int(rate * 2**32), *map(int, key))
    launch("ops/dropout.wgsl", "dropout", groups(-(-x.size // 4)), {"y": y, "x": contiguous(x)}, sizes)
    return y
