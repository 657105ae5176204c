"""The runs of words that a text has from another."""

from __future__ import annotations

import numpy as np

from examples.storyteller.grams import gram_shares, grams_of


def test_the_share_of_grams_that_are_known() -> None:
    known = np.concatenate(list(grams_of(["zero One, two: three four", "x " * (1 << 20), "nine"], 3)))
    texts = ["one two three four five", "", "five six seven", "x x x", "three four x"]
    assert gram_shares(texts, 3, known).tolist() == [2 / 3, 0, 0, 1, 0]  # none reaches from one text into the next
