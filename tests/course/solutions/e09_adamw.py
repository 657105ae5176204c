"""Lesson 9: a step of AdamW."""

import numpy as np


def adamw(w, m, v, grad, step, lr, config):
    """The new (w, m, v). config has beta1, beta2, eps and weight_decay; step counts from 1."""
    m = config.beta1 * m + (1 - config.beta1) * grad
    v = config.beta2 * v + (1 - config.beta2) * grad**2
    mean = m / (1 - config.beta1**step)
    square = v / (1 - config.beta2**step)
    w = w * (1 - lr * config.weight_decay) - lr * mean / (np.sqrt(square) + config.eps)
    return w, m, v
