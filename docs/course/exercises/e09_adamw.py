"""Lesson 9: a step of AdamW."""

import numpy as np  # noqa: F401


def adamw(w, m, v, grad, step, lr, config):
    """The new (w, m, v), arrays of one shape; m and v without the correction. step: 1 or more.

    config.beta1, config.beta2, config.eps, config.weight_decay are numbers, and so is lr, the learning rate.
    """
    raise NotImplementedError("your turn")
