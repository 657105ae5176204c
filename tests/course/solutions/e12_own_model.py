"""Lesson 12: the backward of a model, and with it your own language model."""


def model_backward(model, dnll, stash):
    """Add the gradient of each weight; dnll: (B, T), the upstream gradient of the loss of each token.

    Forward was: model.embedding, each of model.blocks, model.norm, model.head, model.loss. Each has backward(d, stash).
    """
    d = model.loss.backward(dnll, stash)
    d = model.head.backward(d, stash)
    d = model.norm.backward(d, stash)
    for block in reversed(model.blocks):
        d = block.backward(d, stash)
    model.embedding.backward(d, stash)
