"""LoRA on WebGPU: gemm.wgsl and dropout.wgsl. The scale goes into the adapter's own matrices, which are small."""

from __future__ import annotations

from tinyforge.backends.webgpu_gemm import gemm
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops import lora
from tinyforge.ops.dropout_webgpu import dropout
from tinyforge.ops.linear_webgpu import linear_fwd, rows_of
from tinyforge.quantised import Quantised, plain


@lora.lora_fwd.on("webgpu")
def lora_fwd(
    x: Array,
    weight: Array | Quantised,
    bias: Array | None,
    a: Array,
    b: Array,
    scale: float,
    key: Key | None,
    rate: float,
) -> tuple[Array, Array]:
    y = linear_fwd(x, plain(weight), bias)
    u = gemm(rows_of(x if key is None else dropout(x, key, rate)), a, transpose_b=True)
    gemm(u, b * scale, rows_of(y), transpose_b=True, accumulate=True)
    return y, u


@lora.lora_bwd.on("webgpu")
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
) -> Array:
    up = rows_of(dy)
    if db is not None:
        gemm(up, u * scale, db, transpose_a=True, accumulate=True)
    du = gemm(up, b * scale)
    if da is not None:
        gemm(du, rows_of(x if key is None else dropout(x, key, rate)), da, transpose_a=True, accumulate=True)
    # The adapter's part comes first: only it is masked, and the product with W is added to it.
    dx = gemm(du, a)
    if key is not None:
        dx = dropout(dx, key, rate)
    return gemm(up, plain(weight), dx, accumulate=True).reshape(x.shape)


@lora.lora_merge.on("webgpu")
def lora_merge(weight: Array, a: Array, b: Array, scale: float) -> Array:
    return gemm(b * scale, a, add=plain(weight))
