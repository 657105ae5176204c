"""Launches cross_entropy.wgsl, between the products of the output heads. The residual is (n, K V)."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new, on_host, told_on_host
from tinyforge.backends.webgpu_gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import cross_entropy
from tinyforge.ops.cross_entropy import CHUNK

FILE = "ops/cross_entropy.wgsl"


@cross_entropy.sum_tokens.on("webgpu")
def sum_tokens(nll: Array) -> Array:
    """Added on the host in float64, which most adapters do not have: a few numbers for each token."""
    return on_host(cross_entropy.sum_tokens.body)(nll)


def softmax_residual(nll: Array, logits: Array, targets: Array) -> None:
    """logits: (n, K V), written over; nll, targets: (n, K)."""
    arrays = {"nll": nll, "logits": logits, "targets": contiguous(targets)}
    launch(FILE, "softmax_residual", groups(nll.size, 1), arrays, (nll.size, logits.size // max(nll.size, 1)))


def scale_rows(residual: Array, dnll: Array, rows: int, *, in_place: bool = False) -> Array:
    scaled = residual if in_place else new(residual, residual.shape)
    factors = contiguous(dnll.astype(residual.dtype, copy=False))
    arrays = {"scaled": scaled, "residual": None if in_place else residual, "dnll": factors}
    launch(FILE, "scale_rows", groups(rows, 1), arrays, (rows, residual.size // max(rows, 1)), {"IN_PLACE": in_place})
    return scaled


@cross_entropy.cross_entropy_fwd.on("webgpu")
def cross_entropy_fwd(logits: Array, targets: Array) -> tuple[Array, Array]:
    residual, nll = contiguous(logits).copy(), new(logits, targets.shape)
    softmax_residual(nll, residual, targets)
    return nll, residual


@cross_entropy.cross_entropy_bwd.on("webgpu")
def cross_entropy_bwd(dnll: Array, residual: Array) -> Array:
    return scale_rows(residual, dnll, residual.size // max(residual.shape[-1], 1))


@cross_entropy.linear_cross_entropy_fwd.on("webgpu")
def linear_cross_entropy_fwd(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0
) -> tuple[Array, Any]:
    """With a cap on the host, with the residual in the layout of this backend."""
    if cap:
        nll, kept = told_on_host(cross_entropy.linear_cross_entropy_fwd.body)(h, weight, targets, keep, cap)
        return nll, kept and [contiguous(x.reshape(-1, x.shape[-1]).T) for x in kept]
    heads, vocab, dim = weight.shape
    flat, nll = weight.reshape(heads * vocab, dim), new(h, (len(h), heads))
    residual = []
    for first in range(0, len(h), CHUNK):
        part = slice(first, first + CHUNK)
        logits = gemm(h[part], flat, transpose_b=True)
        softmax_residual(nll[part], logits, targets[part])
        if keep:
            residual.append(logits)
    return nll, residual if keep else None


@cross_entropy.linear_soft_cross_entropy_fwd.on("webgpu")
def linear_soft_cross_entropy_fwd(
    h: Array, weight: Array, targets: Array, teacher_h: Array, teacher_weight: Array, keep: bool, share: float
) -> tuple[Array, Any]:
    """On the host, with the residual in the layout of this backend."""
    body = told_on_host(cross_entropy.linear_soft_cross_entropy_fwd.body)
    nll, residual = body(h, weight, targets, teacher_h, teacher_weight, keep, share)
    rows = residual and [contiguous(x.reshape(-1, x.shape[-1]).T) for x in residual]
    return nll, rows


@cross_entropy.linear_cross_entropy_bwd.on("webgpu")
def linear_cross_entropy_bwd(
    dweight: Array | None, dnll: Array, h: Array, residual: Any, weight: Array, accumulate: bool = True
) -> Array:
    heads, vocab, dim = weight.shape
    flat, dh = weight.reshape(heads * vocab, dim), new(h, h.shape)
    done = 0
    for logits in residual:
        part = slice(done, done + len(logits))
        scale_rows(logits, dnll if dnll.ndim == 1 else dnll[part], len(logits) * heads, in_place=True)
        if dweight is not None:
            gradient = dweight.reshape(heads * vocab, dim)
            gemm(logits, h[part], gradient, transpose_a=True, accumulate=accumulate or done > 0)
        gemm(logits, flat, dh[part])
        done += len(logits)
    if dweight is not None and not residual and not accumulate:
        dweight.fill(0)
    return dh


@cross_entropy.linear_cross_entropy_frozen_fwd.on("webgpu")
def linear_cross_entropy_frozen_fwd(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0
) -> tuple[Array, Any]:
    """The gradient in h of each head alone: nothing of the size of the logits is kept. With a cap on the host."""
    if cap:
        return told_on_host(cross_entropy.linear_cross_entropy_frozen_fwd.body)(h, weight, targets, keep, cap)
    heads, vocab, dim = weight.shape
    nll = new(h, (len(h), heads))
    dh = new(h, (len(h), heads, dim)) if keep else None
    for first in range(0, len(h), CHUNK):
        part = slice(first, first + CHUNK)
        logits = gemm(h[part], weight.reshape(heads * vocab, dim), transpose_b=True)
        softmax_residual(nll[part], logits, targets[part])
        if dh is not None:
            for head in range(heads):
                rows = logits[:, head * vocab : (head + 1) * vocab]
                dh[part, head] = gemm(rows, weight[head])
    return nll, dh


@cross_entropy.linear_cross_entropy_frozen_bwd.on("webgpu")
def linear_cross_entropy_frozen_bwd(dnll: Array, dh: Array) -> Array:
    scaled = dh * dnll.astype(dh.dtype, copy=False)[..., None]
    total = scaled[:, 0].copy()
    for head in range(1, dh.shape[1]):
        total += scaled[:, head]
    return total
