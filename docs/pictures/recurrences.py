"""Draw scan.svg and lstm.svg: what the scan keeps of time, and where the LSTM's gradient ends.

python docs/pictures/recurrences.py            write both
python docs/pictures/recurrences.py --check    only say whether both are what this file draws
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import files

FOLDER = Path(__file__).resolve().parent
STYLE = """<style>text { font: 13px system-ui, sans-serif; fill: #333 } .small { font-size: 11px; fill: #666 }
.box { fill: #f4f5f7; stroke: #b9bec6 } .kept { fill: #d9542b } .again { fill: #fff; stroke: #d9542b }
.forward { stroke: #333; stroke-width: 1.6; fill: none } .back { stroke: #2b6cb0; stroke-width: 1.6; fill: none }
.cut { stroke: #b9bec6; stroke-width: 1.2; stroke-dasharray: 4 4 }</style>
<defs><marker id="f" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="#333"/></marker><marker id="b" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" \
markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#2b6cb0"/></marker></defs>"""


def page(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
        f'{STYLE}\n<rect width="{width}" height="{height}" rx="6" fill="#fff"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{content}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "forward") -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{kind}" marker-end="url(#{kind[0]})"/>'


def scan() -> str:
    """Three tiles of four positions; forward above, the second tile's backward below."""
    left, step, tiles, each = 150, 46, 3, 4
    parts = [
        text(20, 65, "forward", anchor="start"),
        text(20, 165, "backward,", anchor="start"),
        text(20, 182, "tile 1", anchor="start"),
    ]
    for tile in range(tiles):
        x = left + tile * each * step
        parts += [
            f'<rect x="{x}" y="32" width="{each * step - 10}" height="58" rx="5" class="box"/>',
            text(x + (each * step - 10) / 2, 24, f"tile {tile}", "small"),
            f'<circle cx="{x - 5}" cy="61" r="7" class="kept"/>',
        ]
        for t in range(each):
            at = x + t * step + 16
            parts.append(arrow(at - (12 if t == 0 else step - 9), 61, at - 2, 61))
            parts.append(f'<circle cx="{at + 4}" cy="61" r="5" class="box"/>')
    x = left + each * step
    parts.append(f'<rect x="{x}" y="118" width="{each * step - 10}" height="92" rx="5" class="box"/>')
    parts.append(f'<circle cx="{x - 5}" cy="142" r="7" class="kept"/>')
    for t in range(each):
        at = x + t * step + 16
        parts.append(arrow(at - (12 if t == 0 else step - 9), 142, at - 2, 142))
        parts.append(f'<circle cx="{at + 4}" cy="142" r="5" class="again"/>')
        parts.append(arrow(at + (step - 9 if t + 1 < each else 34), 186, at + 11, 186, "back"))
        parts.append(f'<rect x="{at - 1}" y="181" width="10" height="10" class="again" style="stroke:#2b6cb0"/>')
    parts.append(arrow(x + 14, 186, x - 22, 186, "back"))
    parts += [
        text(x + each * step + 10, 146, "the states, computed again", "small", "start"),
        text(x + each * step + 28, 190, "g, from the tile after", "small", "start"),
        text(x - 28, 190, "to the tile before", "small", "end"),
        f'<circle cx="{left - 5}" cy="238" r="7" class="kept"/>',
        text(
            left + 10,
            242,
            "kept in memory: the state before each tile, here of 4 positions, in the code of 32",
            "small",
            "start",
        ),
    ]
    return page(730, 260, "The scan: states kept before each tile, and computed again in backward", parts)


def lstm() -> str:
    """Two windows of a text, unrolled; the state goes on across the cut, the gradient does not."""
    left, step, each, gap = 70, 84, 4, 60
    parts = []
    for window in range(2):
        x0 = left + window * (each * step + gap)
        parts.append(text(x0 + each * step / 2 - 12, 24, f"batch {window}", "small"))
        for t in range(each):
            x, name = x0 + t * step, window * each + t
            parts += [
                f'<rect x="{x}" y="62" width="52" height="44" rx="5" class="box"/>',
                text(x + 26, 88, "LSTM"),
                arrow(x + 26, 134, x + 26, 109),
                text(x + 26, 149, f"x{name}"),
                arrow(x + 26, 60, x + 26, 42),
                text(x + 26, 38, f"h{name}"),
            ]
            last, first = t + 1 == each, t == 0
            if not last:
                parts += [arrow(x + 54, 78, x + step - 2, 78), arrow(x + step - 2, 94, x + 54, 94, "back")]
            elif window == 0:
                parts.append(arrow(x + 54, 78, x + step + gap - 2, 78))
            if first and window == 0:
                parts.append(arrow(x - 36, 78, x - 2, 78))
    cut = left + each * step + gap / 2 - 16
    parts += [
        f'<path d="M{cut:g} 30V168" class="cut"/>',
        text(cut, 184, "h and c go on, the gradient ends", "small"),
        text(34, 68, "0", "small"),
    ]
    width = left + 2 * each * step + gap + 10
    parts += [arrow(left, 200, left + 40, 200), text(left + 48, 204, "state", "small", "start")]
    parts += [arrow(left + 150, 200, left + 110, 200, "back"), text(left + 158, 204, "gradient", "small", "start")]
    return page(width, 218, "Truncated backpropagation through time with a carried state", parts)


if __name__ == "__main__":
    sys.exit(files.write({FOLDER / "scan.svg": scan(), FOLDER / "lstm.svg": lstm()}))
