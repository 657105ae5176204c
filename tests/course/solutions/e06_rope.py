"""Lesson 6: the gradient of a rotation."""

import numpy as np


def rotate_backward(dy, cos, sin):
    """dx of y = [a cos - b sin, a sin + b cos], x = [a, b]. dy: (T, D); cos, sin: (T, D / 2)."""
    da, db = np.split(dy, 2, axis=-1)
    return np.concatenate([da * cos + db * sin, db * cos - da * sin], axis=-1)
