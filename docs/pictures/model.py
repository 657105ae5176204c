"""Draw block, attention-tiles, online-softmax and conv2d.svg: a block, attention's tiles, and a window that moves.

python docs/pictures/model.py            write them
python docs/pictures/model.py --check    only say whether they are what this file draws
"""

from __future__ import annotations

import sys
from pathlib import Path

import files
from recurrences import arrow, page, text

FOLDER = Path(__file__).resolve().parent


def box(x: float, y: float, width: float, height: float, label: str = "", kind: str = "box") -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4.5, label) if label else "")


def block() -> str:
    """The stream from left to right; each half leaves it, and adds to it again."""
    parts = [arrow(20, 190, 880, 190), text(34, 180, "x"), text(866, 180, "y")]
    halves = ((60, ["RMSNorm", "qkv", "RoPE", "attention", "out"]), (510, ["RMSNorm", "up", "SwiGLU", "down"]))
    for left, names in halves:
        step, width = (84, 78) if len(names) == 5 else (86, 78)
        end = left + step * len(names)
        parts.append(arrow(left, 190, left, 106))
        for i, name in enumerate(names):
            parts.append(box(left - 12 + i * step, 74, width, 32, name))
            if i:
                parts.append(arrow(left - 12 + i * step - (step - width), 90, left - 12 + i * step, 90))
        last = end - step + width / 2 - 12
        parts.append(arrow(last, 106, last, 182))
        parts.append(f'<circle cx="{last:g}" cy="190" r="9" class="box"/>' + text(last, 194.5, "+"))
    parts.append(text(450, 34, "NanoEuler's block: two steps of x + f(x)"))
    parts.append("<style>text, .small { font-size: 14px }</style>")
    parts.append(
        text(
            450,
            226,
            "backward: dy goes along the stream as it is, and through each half from right to left; "
            "where they meet, gradients add",
            "small",
        )
    )
    return page(900, 246, "A block of NanoEuler", parts)


def tiles() -> str:
    """The scores of 8 query tiles and 8 key tiles under a causal mask: what is computed, masked, left out."""
    size, left, top = 26, 110, 60
    parts = [text(330, 28, "The scores of causal attention, in tiles: none is kept in memory")]
    for row in range(8):
        for column in range(8):
            kind = "again" if column == row else "kept" if column < row else "cut"
            fill = ' fill="none"' if kind == "cut" else ""
            x, y = left + column * size, top + row * size
            parts.append(f'<rect x="{x}" y="{y}" width="{size - 3}" height="{size - 3}" class="{kind}"{fill}/>')
    parts += [
        text(left + 4 * size, top - 10, "keys and values, in tiles", "small"),
        text(left - 8, top + 4 * size, "queries", "small", "end"),
        arrow(left, top + 5.5 * size - 2, left + 5.6 * size, top + 5.5 * size - 2, "back"),
    ]
    notes = (
        (("kept", ""), "computed whole"),
        (("again", ""), "on the diagonal: the mask is applied"),
        (("cut", ' fill="none"'), "above it: never computed"),
    )
    for i, ((kind, fill), note) in enumerate(notes):
        y = top + 20 + i * 34
        parts.append(f'<rect x="360" y="{y}" width="18" height="18" class="{kind}"{fill}/>')
        parts.append(text(388, y + 14, note, "", "start"))
    parts.append(text(360, top + 150, "The arrow: a tile of queries goes over its tiles of", "small", "start"))
    parts.append(text(360, top + 166, "keys, and keeps m, Z and a (the online softmax).", "small", "start"))
    return page(660, 290, "Tiles of attention", parts)


def online_softmax() -> str:
    parts = [text(380, 28, "One query over three tiles of keys: m, Z and a are all that is kept")]
    scores = ("1.0  0.2", "3.0  1.0", "2.0  0.5")
    largest = ("m = 1", "m = 3", "m = 3")
    factors = ("", "Z, a times exp(1 - 3)", "Z, a as they are")
    for i in range(3):
        x = 60 + i * 230
        parts += [
            box(x, 56, 150, 34, f"scores {scores[i]}"),
            arrow(x + 75, 90, x + 75, 128),
            box(x, 130, 150, 60),
            text(x + 75, 154, largest[i]),
            text(x + 75, 176, "Z, a so far"),
        ]
        if i:
            parts += [arrow(x - 78, 160, x - 2, 160), text(x - 40, 208, factors[i], "small")]
    parts += [arrow(672, 160, 712, 160), text(748, 164, "o = a / Z")]
    return page(790, 232, "The online softmax", parts)


def convolution() -> str:
    """The image of the page's example, the window at two places, and what it finds."""
    size, parts = 40, []
    for left, first, found in ((30, 0, "0"), (260, 1, "10")):
        for i in range(3):
            for j, pixel in enumerate((0, 0, 5, 5)):
                parts.append(box(left + j * size, 44 + i * size, size, size, str(pixel)))
        at, top = left + first * size, 44
        parts.append(
            f'<rect x="{at}" y="{top}" width="{2 * size}" height="{2 * size}" class="again" fill-opacity="0" '
            'style="stroke-width:3"/>'
        )
        for i in range(2):
            for j, weight in enumerate(("-1", "1")):
                parts.append(text(at + j * size + size - 3, top + i * size + 12, weight, "small", "end"))
        parts.append(text(left + 2 * size, 30, f"here it finds {found}", "small"))
    for i in range(2):
        for j, value in enumerate((0, 10, 0)):
            parts.append(box(490 + j * size, 64 + i * size, size, size, str(value)))
    parts += [arrow(430, 104, 484, 104), text(550, 30, "at all six places: y", "small")]
    parts.append(text(320, 190, "red: the window; in its corners its weights, in the middle the pixels", "small"))
    return page(640, 206, "A window of 2 x 2 weights moves over an image of 3 x 4 pixels", parts)


if __name__ == "__main__":
    pictures = {
        "block": block(),
        "attention-tiles": tiles(),
        "online-softmax": online_softmax(),
        "conv2d": convolution(),
    }
    sys.exit(files.write({FOLDER / f"{name}.svg": svg for name, svg in pictures.items()}))
