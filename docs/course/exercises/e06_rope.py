"""Lesson 6: the gradient of a rotation."""

import numpy as np  # noqa: F401


def rotate_backward(dy, cos, sin):
    """dx of y = [a cos - b sin, a sin + b cos], x = [a, b]. dy: (T, D); cos, sin: (T, D / 2)."""
    raise NotImplementedError("your turn")
