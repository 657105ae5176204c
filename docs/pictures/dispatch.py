"""Draw dispatch.svg: how six tokens with two choices each are sorted by expert, multiplied, and added up again.

    python docs/pictures/dispatch.py            write it
    python docs/pictures/dispatch.py --check    only say whether it is what this draws

The places are computed by the op's own `sort_by_expert`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import files
import numpy as np

from tinyforge.ops.mixture import sort_by_expert

PICTURE = Path(__file__).with_suffix(".svg")
CHOSEN = np.array([[0, 2], [1, 0], [2, 0], [0, 1], [2, 1], [0, 2]], np.int32)  # no token chooses expert 3
COLOURS = ("#4477aa", "#ee8866", "#228833", "#999999")
CELL, GAP, TOP = 26, 4, 46
LEFT, ROWS, PRODUCT, RIGHT = 20, 210, 400, 610  # of the columns


def text(x: float, y: float, words: str, size: int = 12, fill: str = "#333", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"/>'


def line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    middle = (x0 + x1) / 2
    return (
        f'<path d="M{x0} {y0} C{middle} {y0} {middle} {y1} {x1} {y1}" stroke="{colour}" stroke-width="1.3" '
        'fill="none" opacity="0.75"/>'
    )


def draw() -> str:
    slots, tokens, places, starts = sort_by_expert(CHOSEN, 4)
    rows, step = len(slots), CELL + GAP
    height = TOP + rows * step + 14
    shift = (rows - len(CHOSEN)) * step / 2  # tokens stand in the middle

    def row_y(row: int) -> float:
        return TOP + row * step

    def token_y(token: int) -> float:
        return TOP + shift + token * step

    parts = [
        text(LEFT, 24, "tokens and their experts"),
        text(ROWS, 24, "rows, sorted by expert"),
        text(PRODUCT, 24, "one product a group"),
        text(RIGHT, 24, "a token's rows added"),
    ]
    for slot in range(rows):
        token, choice = divmod(slot, 2)
        colour, row = COLOURS[CHOSEN[token, choice]], int(places[token, choice])
        parts.append(line(LEFT + 128, token_y(token) + CELL / 2, ROWS, row_y(row) + CELL / 2, colour))
        parts.append(line(PRODUCT + 130, row_y(row) + CELL / 2, RIGHT, token_y(token) + CELL / 2, colour))
    for token, chosen in enumerate(CHOSEN):
        y = token_y(token)
        parts += [box(LEFT, y, 60, CELL, "#dddddd"), text(LEFT + 30, y + 17, f"x{token}", anchor="middle")]
        for choice, e in enumerate(chosen):
            x = LEFT + 66 + choice * 32
            parts += [box(x, y, 28, CELL, COLOURS[e]), text(x + 14, y + 17, f"{e}", fill="white", anchor="middle")]
        parts += [box(RIGHT, y, 60, CELL, "#dddddd"), text(RIGHT + 30, y + 17, f"y{token}", anchor="middle")]
    for row in range(rows):
        e = CHOSEN.reshape(-1)[slots[row]]
        parts.append(box(ROWS, row_y(row), 110, CELL, COLOURS[e]))
        parts.append(text(ROWS + 55, row_y(row) + 17, f"row {row}: x{tokens[row]}", fill="white", anchor="middle"))
    for e, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if stop > start:
            tall = (stop - start) * step - GAP
            parts.append(box(PRODUCT, row_y(start), 130, tall, COLOURS[e]))
            middle = row_y(start) + tall / 2 + 4
            parts.append(text(PRODUCT + 65, middle, f"expert {e}", fill="white", anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {RIGHT + 80} {height}" '
        f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(files.write({PICTURE: draw()}))
