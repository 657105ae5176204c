"""Lesson 7: two tiles of attention become one."""

import numpy as np


def merge(first, second):
    """(m, z, a) of both tiles, from the (m, z, a) of each.

    m: the largest score s of the tile; z: sum exp(s - m); a: sum exp(s - m) v, a vector.
    """
    (m1, z1, a1), (m2, z2, a2) = first, second
    m = np.maximum(m1, m2)
    f, g = np.exp(m1 - m), np.exp(m2 - m)
    return m, f * z1 + g * z2, f * a1 + g * a2
