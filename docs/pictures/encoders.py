"""Draws encoders.svg: how an image becomes a sequence, and which keys a query sees in each kind of model.

python docs/pictures/encoders.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

OUT = Path(__file__).with_name("encoders.svg")
TOKENS, LENGTH = 8, 6  # of the sequence that is padded


def image(axis: plt.Axes) -> None:
    """A digit of 8 x 8 pixels and the order of its four patches."""
    strokes = ("........", "..####..", ".....#..", "....#...", "...####.", "......#.", "..####..", "........")
    axis.imshow([[1.0 if pixel == "#" else 0.0 for pixel in row] for row in strokes], cmap="Blues", vmax=2)
    for place in (-0.5, 3.5, 7.5):
        axis.axhline(place, color="C1")
        axis.axvline(place, color="C1")
    for number in range(4):
        axis.text(0.1 + number % 2 * 4, 0.3 + number // 2 * 4, str(number), color="black", fontsize=12)
    axis.set_title("an image in patches 0 to 3; ViT\nputs a class token before them", fontsize=9)


def seen(axis: plt.Axes, mask: np.ndarray, title: str) -> None:
    axis.imshow(mask, cmap="Blues", vmin=0, vmax=1.6)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("key", fontsize=8)
    axis.set_ylabel("query", fontsize=8)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "tinyforge"  # the same bytes every time
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.7), layout="constrained")
    query, key = np.mgrid[:TOKENS, :TOKENS]
    image(axes[0])
    seen(axes[1], key <= query, "GPT-2: each token sees\nwhat came before")
    seen(axes[2], np.ones((TOKENS, TOKENS)), "ViT: every patch sees\nevery patch")
    seen(axes[3], key < LENGTH, f"BERT: {LENGTH} words; the {TOKENS - LENGTH} places\nof padding are not seen")
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
