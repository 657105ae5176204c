"""Lesson 12: the backward of a model, and with it your own language model."""

import numpy as np  # noqa: F401


def model_backward(model, dnll, stash):
    """Add the gradient of each weight; dnll: (B, T), the upstream gradient of the loss of each token.

    Forward was: model.embedding, each of model.blocks, model.norm, model.head, model.loss. Each has backward(d, stash).
    """
    raise NotImplementedError("your turn")
