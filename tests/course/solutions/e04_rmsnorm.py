"""Lesson 4: the gradients of RMSNorm."""

import numpy as np


def rmsnorm_backward(dy, gain, x, eps):
    """(dx, dgain) of y = gain * x / sqrt(mean(x^2) + eps). dy, x: (N, C); gain: (C,)."""
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    dn = dy * gain
    dx = r * dn - r**3 * x * (dn * x).mean(axis=-1, keepdims=True)
    return dx, (dy * x * r).sum(axis=0)
