"""Lesson 2: the gradients of a linear map."""


def linear_backward(dweight, dy, x, weight):
    """Return dx of y = x W^T; add W's gradient to `dweight`. dy: (..., O), x: (..., I), W: (O, I)."""
    rows = dy.reshape(-1, dy.shape[-1])
    dweight += rows.T @ x.reshape(-1, x.shape[-1])
    return dy @ weight
