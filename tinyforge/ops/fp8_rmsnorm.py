"""RMS normalisation that quantises what it writes, for products in FP8 (fp8.py)."""

from __future__ import annotations

from typing import Any

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty, like, per_row
from tinyforge.kernel import Array, kernel
from tinyforge.op import Param, Stash
from tinyforge.ops.add_rmsnorm import AddRMSNorm
from tinyforge.ops.fp8 import BYTE, Scaled, quantise_rows
from tinyforge.ops.rmsnorm import rmsnorm_bwd, rmsnorm_fwd


@kernel
def rmsnorm_scaled_fwd(
    x: Array, weight: Array, eps: float, *, backend: Any = None
) -> tuple[Array, Array, Array, Array]:
    """y, its codes and scales, and rstd."""
    y, rstd = rmsnorm_fwd(x, weight, eps)
    return y, *quantise_rows(y, backend=backend), rstd


rmsnorm_scaled_fwd.on("meta")(lambda x: (like(x), empty(x.shape, BYTE), per_row(x), per_row(x)))


@kernel
def rmsnorm_scaled_bwd(
    dweight: Array | None,
    dy: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    residual: Array | None,
    *,
    backend: Any = None,
) -> tuple[Array, Array, Array]:
    """dx as from rmsnorm_bwd, its codes and scales."""
    dx = rmsnorm_bwd(dweight, dy, weight, y, rstd, residual)
    return dx, *quantise_rows(dx, backend=backend)


rmsnorm_scaled_bwd.on("meta")(lambda y: (like(y), empty(y.shape, BYTE), per_row(y)))


class FP8AddRMSNorm(AddRMSNorm):
    """AddRMSNorm. scaled: y is a `Scaled`. scaled_backward: ddelta is. The dx of backward may be a `Scaled` too."""

    scaled_fwd = rmsnorm_scaled_fwd
    scaled_bwd = rmsnorm_scaled_bwd
    quantise = quantise_rows

    def __init__(
        self,
        weight: Param,
        backend: Backend,
        eps: float = 1e-5,
        name: str = "",
        *,
        scaled: bool = True,
        scaled_backward: bool = True,
    ) -> None:
        super().__init__(weight, backend, eps, name)
        self.scaled, self.scaled_backward = scaled, scaled_backward

    def forward(self, residual: Array, delta: Array | None, stash: Stash | None = None) -> tuple[Array, Any]:
        if not self.scaled:
            return super().forward(residual, delta, stash)
        if delta is None:
            x, (y, codes, scale, rstd) = residual, self.scaled_fwd(residual, self.weight.value, self.eps)
        else:
            x, y, rstd = self.add_fwd(residual, delta, self.weight.value, self.eps)
            codes, scale = self.quantise(y)
        self.save(stash, y, rstd)
        return x, Scaled(y, codes, scale)

    def normed(self, x: Array) -> Any:
        if not self.scaled:
            return super().normed(x)
        y, codes, scale, _ = self.scaled_fwd(x, self.weight.value, self.eps)
        return Scaled(y, codes, scale)

    def backward(self, dy: tuple[Any, Array], stash: Stash) -> tuple[Array, Any]:
        residual, dnormed = dy
        if isinstance(residual, Scaled):
            residual = residual.x
        if not self.scaled_backward:
            return super().backward((residual, dnormed), stash)
        y, rstd = stash.pop(self)
        ddelta = Scaled(*self.scaled_bwd(self.weight.grad, dnormed, self.weight.value, y, rstd, residual))
        return ddelta.x, ddelta
