"""Lesson 7: two tiles of attention become one."""

import numpy as np


def merge(first, second):
    """(m, l, o) of both tiles, from the (m, l, o) of each.

    m: the largest score s of the tile; l: sum exp(s - m); o: sum exp(s - m) v, a vector.
    """
    (m1, l1, o1), (m2, l2, o2) = first, second
    m = np.maximum(m1, m2)
    a, b = np.exp(m1 - m), np.exp(m2 - m)
    return m, a * l1 + b * l2, a * o1 + b * o2
