"""Launches activations.cu."""

from __future__ import annotations

from functools import partial

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import activations as op
from tinyforge.ops.rows_cuda import launch_elements


def launched(entry: str, *arrays: Array) -> Array:
    out = new(arrays[0].shape, arrays[0].dtype)
    return launch_elements("ops/activations.cu", entry, out, *map(contiguous, arrays))


for kernel in (op.relu_fwd, op.relu2_fwd, op.sigmoid_fwd, op.silu_fwd, op.tanh_fwd):
    kernel.on("cupy")(partial(launched, kernel.name))
for kernel_bwd in (op.relu_bwd, op.relu2_bwd, op.sigmoid_bwd, op.silu_bwd, op.tanh_bwd):
    kernel_bwd.on("cupy")(partial(launched, kernel_bwd.name))
