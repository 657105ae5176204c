"""Lesson 4: the gradients of RMSNorm."""

import numpy as np


def rmsnorm_backward(dgain, dy, gain, x, eps):
    """Return dx of y = gain * x / sqrt(mean(x^2) + eps); add gain's gradient to `dgain`. dy, x: (N, C); gain: (C,)."""
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    dn = dy * gain
    dx = r * dn - r**3 * x * (dn * x).mean(axis=-1, keepdims=True)
    dgain += (dy * x * r).sum(axis=0)
    return dx
