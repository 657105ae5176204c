"""Lesson 1: the gradient of softmax."""


def softmax_backward(dy, y):
    """dx of y = softmax(x) over the last axis. dy, y: (..., C)."""
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))
