"""Lesson 8: the backward of a residual block."""


def block_backward(norm, down, dy, stash):
    """dx of y = x + down.forward(norm.forward(x, stash), stash): the forward, read upwards."""
    dh = down.backward(dy, stash)
    return dy + norm.backward(dh, stash)
