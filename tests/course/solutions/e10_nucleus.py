"""Lesson 10: nucleus sampling."""

import numpy as np


def nucleus(p, top_p):
    """The distribution p: (V,), cut to its most likely tokens, up to the one with which their sum reaches top_p."""
    order = np.argsort(-p)
    kept = np.searchsorted(np.cumsum(p[order]), top_p * (1 - 1e-15)) + 1
    cut = np.zeros_like(p)
    cut[order[:kept]] = p[order[:kept]]
    return cut / cut.sum()
