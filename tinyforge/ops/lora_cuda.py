"""LoRA on the GPU: matrix products that scale and accumulate, and dropout.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import CupyBackend, contiguous
from tinyforge.backends.gemm import gemm
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops import lora
from tinyforge.ops.dropout_cuda import dropout
from tinyforge.ops.linear_cuda import linear_fwd
from tinyforge.quantised import Quantised, plain


@lora.lora_fwd.on("cupy")
def lora_fwd(
    x: Array,
    weight: Array | Quantised,
    bias: Array | None,
    a: Array,
    b: Array,
    scale: float,
    key: Key | None,
    rate: float,
    *,
    backend: CupyBackend,
) -> tuple[Array, Array]:
    x = contiguous(x)
    y = linear_fwd(x, plain(weight), bias, backend=backend)
    dropped = x if key is None else dropout(x, key, rate)
    u = gemm(dropped.reshape(-1, x.shape[-1]), a, transpose_b=True, tf32=backend.tf32)
    gemm(u, b, y.reshape(len(u), len(b)), transpose_b=True, accumulate=True, scale=scale, tf32=backend.tf32)
    return y, u


@lora.lora_bwd.on("cupy")
def lora_bwd(
    da: Array | None,
    db: Array | None,
    dy: Array,
    x: Array,
    u: Array,
    weight: Array | Quantised,
    a: Array,
    b: Array,
    scale: float,
    key: Key | None,
    rate: float,
    *,
    backend: CupyBackend,
) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    up, width = dy.reshape(len(u), dy.shape[-1]), x.shape[-1]
    if db is not None:
        gemm(up, u, db, transpose_a=True, accumulate=True, scale=scale, tf32=backend.tf32)
    du = gemm(up, b, scale=scale, tf32=backend.tf32)
    if da is not None:
        dropped = x if key is None else dropout(x, key, rate)
        gemm(du, dropped.reshape(len(u), width), da, transpose_a=True, accumulate=True, tf32=backend.tf32)
        del dropped
    # The adapter's part comes first: only it is masked, and the product with W is added to it.
    dx = gemm(du, a, tf32=backend.tf32)
    if key is not None:
        dx = dropout(dx, key, rate)
    gemm(up, plain(weight), dx, accumulate=True, tf32=backend.tf32)
    return dx.reshape(x.shape)


@lora.lora_merge.on("cupy")
def lora_merge(weight: Array, a: Array, b: Array, scale: float, *, backend: CupyBackend) -> Array:
    merged = weight.copy()
    return gemm(b, a, merged, accumulate=True, scale=scale, tf32=backend.tf32)
