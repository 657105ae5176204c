"""Lesson 5: the gradients of attention."""

import numpy as np


def attention_backward(do, q, k, v, p, softmax_backward):
    """(dq, dk, dv) of o = p v, p = softmax(q k^T / sqrt(D)) with the future hidden.

    do, q, k, v: (B, T, D); p: (B, T, T), 0 where hidden. softmax_backward(dy, y) is your function of lesson 1.
    """
    dv = p.swapaxes(-1, -2) @ do
    dp = do @ v.swapaxes(-1, -2)
    ds = softmax_backward(dp, p) / np.sqrt(q.shape[-1])
    return ds @ k, ds.swapaxes(-1, -2) @ q, dv
