"""GELU, exact (erf) and by GPT-2's tanh formula."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.linear import linear_bwd_bias
from tinyforge.ops.sigmoid import sigmoid
from tinyforge.params import with_buffer

_SQRT_2_PI = 0.7978845608028654  # sqrt(2 / pi)
_CUBIC = 0.044715


def _ratio(x: Array, numerator: tuple[float, ...], denominator: tuple[float, ...]) -> Array:
    """A quotient of two polynomials, highest power first, by Horner's rule."""
    return np.polyval(np.asarray(numerator, x.dtype), x) / np.polyval(np.asarray(denominator, x.dtype), x)


def erfc(a: Array) -> Array:
    """1 - erf(a) for a >= 0, to a few units in the last place, the tail included; NumPy has none.

    Source: W. J. Cody, "Rational Chebyshev approximations for the error function" (1969): one rational function on
    a <= 0.46875, one for exp(a^2) erfc(a) up to 4, one beyond.
    """
    near = np.minimum(a, 0.46875) ** 2
    middle = np.clip(a, 0.46875, 4.0)
    far = np.clip(a, 4.0, 28.0)  # where exp(-a^2) is 0
    inverse = 1.0 / (far * far)
    tail = (0.5641895835477563 - inverse * _ratio(inverse, _P, _Q)) / far
    rest = np.where(a <= 4.0, np.exp(-middle * middle) * _ratio(middle, _C, _D), np.exp(-far * far) * tail)
    return np.where(a <= 0.46875, 1.0 - a * _ratio(near, _A, _B), rest)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_A = _numbers(
    "1.85777706184603153e-1 3.16112374387056560e0 1.13864154151050156e2 3.77485237685302021e2 3.20937758913846947e3"
)
_B = _numbers("1.0 2.36012909523441209e1 2.44024637934444173e2 1.28261652607737228e3 2.84423683343917062e3")
_C = _numbers(
    "2.15311535474403846e-8 5.64188496988670089e-1 8.88314979438837594e0 6.61191906371416295e1 "
    "2.98635138197400131e2 8.81952221241769090e2 1.71204761263407058e3 2.05107837782607147e3 "
    "1.23033935479799725e3"
)
_D = _numbers(
    "1.0 1.57449261107098347e1 1.17693950891312499e2 5.37181101862009858e2 1.62138957456669019e3 "
    "3.29079923573345963e3 4.36261909014324716e3 3.43936767414372164e3 1.23033935480374942e3"
)
_P = _numbers(
    "1.63153871373020978e-2 3.05326634961232344e-1 3.60344899949804439e-1 1.25781726111229246e-1 "
    "1.60837851487422766e-2 6.58749161529837803e-4"
)
_Q = _numbers(
    "1.0 2.56852019228982242e0 1.87295284992346725e0 5.27905102951428412e-1 6.05183413124413191e-2 "
    "2.33520497626869185e-3"
)
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _phi32(x: Array) -> Array:
    """Phi of float32 by the error function, to 3e-7, in half the time of `erfc`.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26: erfc(a) = exp(-a^2) P(t) for
    a >= 0, P a polynomial of degree 5 without a constant, t = 1 / (1 + 0.3275911 a).
    """
    a = np.abs(x)
    a *= np.float32(0.5**0.5)
    t = a * np.float32(0.3275911)
    t += 1
    np.reciprocal(t, out=t)
    tail = t * np.float32(_TAIL[0])
    for coefficient in _TAIL[1:]:
        tail += np.float32(coefficient)
        tail *= t
    a *= a
    np.negative(a, out=a)
    tail *= np.exp(a, out=a)
    tail *= np.float32(0.5)
    return np.where(x < 0, tail, 1 - tail)


def _phi(x: Array, approximate: str) -> Array:
    if approximate == "erf" and x.dtype == np.float32:
        return _phi32(x)
    if approximate == "erf":
        tail = 0.5 * erfc(np.abs(x) * 0.5**0.5)
        return np.where(x < 0, tail, 1.0 - tail)
    u = x * x  # (1 + tanh u) / 2 = sigmoid(2u), which keeps the tail
    u *= _CUBIC
    u += 1
    u *= x
    u *= 2 * _SQRT_2_PI
    return sigmoid(u, u)


@kernel
def gelu_fwd(x: Array, bias: Array | None, approximate: str) -> Array:
    """gelu(x + bias); bias: one number for each column of x, or None."""
    if bias is not None:
        x = x + bias
    return x * _phi(x, approximate)


@kernel
def gelu_bwd(
    hidden: Array | None, dbias: Array | None, dy: Array, x: Array, bias: Array | None, approximate: str
) -> Array:
    """Returns dx, and writes gelu(x + bias) into `hidden`, of x's shape, if given. dbias: only with bias."""
    if bias is not None:
        x = x + bias
    phi = _phi(x, approximate)
    if hidden is not None:
        np.multiply(x, phi, out=hidden)
    if approximate == "erf":
        slope = np.exp(-0.5 * x * x) * (0.5 * _SQRT_2_PI)
    else:
        # Phi = (1 + tanh u) / 2, and 1 - tanh^2 u = 4 Phi (1 - Phi)
        slope = 2.0 * phi * (1.0 - phi) * _SQRT_2_PI * (1.0 + 3.0 * _CUBIC * x * x)
    dx = dy * (phi + x * slope)
    if dbias is not None:
        linear_bwd_bias(dbias, dx)
    return dx


class GELU(Op):
    """y = x Phi(x), Phi the normal distribution function

    approximate="erf":   Phi(x) = (1 + erf(x / sqrt 2)) / 2
    approximate="tanh":  Phi(x) ~ (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, as in GPT-2

    bias: added to x first; (C,), or none. x, y: (..., C). Saves x.
    backward: dx = dy * (Phi(x) + x Phi'(x)), Phi' the derivative of the formula in use.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
    """

    fwd = gelu_fwd
    bwd = gelu_bwd

    def __init__(
        self, backend: Backend, approximate: str = "tanh", name: str = "", *, bias: Param | None = None
    ) -> None:
        super().__init__(backend, name)
        if approximate not in ("tanh", "erf"):
            raise ValueError(f"GELU: approximate is {approximate!r}, expected 'tanh' or 'erf'")
        self.approximate, self.bias = approximate, bias

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x, self.bias.size if self.bias else None)
        self.save(stash, x)
        return self.fwd(x, self.bias.value if self.bias else None, self.approximate)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        bias, dbias = (self.bias.value, self.bias.grad) if self.bias else (None, None)
        return self.bwd(None, dbias, dy, x, bias, self.approximate)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for approximate in ("tanh", "erf"):
            for shape in ((2, 3, 9), (1,), (0, 4)):
                yield cls(backend, approximate), (backend.asarray(rng.normal(size=shape) * 2),)
            op = with_buffer(cls(backend, approximate, bias=Param("bias", (9,), fill=0.0, decay=False)), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(2, 3, 9))),)
            # Both sides of each border between the pieces of erf (|x| / sqrt 2 = 0.46875 and 4).
            edges = np.array([-9.0, -5.8, -5.5, -0.8, -0.6, 0.0, 0.6, 0.8, 5.5, 5.8, 9.0])
            yield cls(backend, approximate), (backend.asarray(edges + rng.normal(size=edges.shape) * 0.01),)
