"""The two orders of a head's rows in the weights of queries and keys.

Rotary embedding rotates pairs of rows. Hugging Face and this project pair the halves of a head, (x_i, x_i+D/2);
llama2.c, and llama.cpp's llama architecture, pair neighbours, (x_2i, x_2i+1).
"""

from __future__ import annotations

import numpy as np


def pairs(x: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows, (heads D, C), from halves to neighbours."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def halves(x: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `pairs`."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
