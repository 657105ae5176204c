"""Lesson 9: a step of AdamW."""

import numpy as np


def adamw(w, m, v, grad, step, lr, config):
    """The new (w, m, v), arrays of one shape; m and v without the correction. step: 1 or more.

    config.beta1, config.beta2, config.eps, config.weight_decay are numbers, and so is lr, the learning rate.
    """
    m = config.beta1 * m + (1 - config.beta1) * grad
    v = config.beta2 * v + (1 - config.beta2) * grad**2
    mean = m / (1 - config.beta1**step)
    square = v / (1 - config.beta2**step)
    w = w * (1 - lr * config.weight_decay) - lr * mean / (np.sqrt(square) + config.eps)
    return w, m, v
