"""Draw gemm.svg: when a block of the Hopper matrix product copies, multiplies and writes, in its two schedules.

    python docs/pictures/gemm.py            write it
    python docs/pictures/gemm.py --check    only say whether it is what this draws

The times are a model's, not a measurement's: steps of the sum at the tensor cores' full rate, 4,096 FLOP a clock,
copies that take 0.8 of that, 1,500 clocks to write a tile of 128 x 256 in bf16. Who waits for what is the kernel's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import files

PICTURE = Path(__file__).with_suffix(".svg")
DEPTH, STEPS = 64, 12  # a sum over 768
FLOP_A_CLOCK, COPY, WRITE = 4096, 0.8, 1500 / (128 * 256)
LATENCY = 700  # clocks from asking for a buffer to having it
TILES = ("#4477aa", "#ee8866", "#228833", "#aa3377")
LEFT, TOP, ROW, GAP, SCALE = 150, 50, 24, 6, 0.0148  # SCALE: of a clock


@dataclass(frozen=True)
class Bar:
    row: int
    start: float
    stop: float
    tile: int
    writing: bool = False


def simulate(rows: int, columns: int, stages: int, tiles: int, pingpong: bool) -> list[Bar]:
    """Rows: 0 the producer, 1 and 2 the consumers."""
    step = 2 * rows * columns * DEPTH / FLOP_A_CLOCK
    write = WRITE * rows * columns * (2 if pingpong else 1)  # one warpgroup writes it, or both
    bars, empty, asked, cores, ready = [], [0.0] * stages, 0.0, 0.0, [0.0, 0.0]
    for tile in range(tiles):
        group, began, first = tile % 2, asked, None
        for k in range(STEPS):
            slot = (tile * STEPS + k) % stages
            asked = max(asked, empty[slot])
            began = asked if k == 0 else began
            here = asked + LATENCY
            asked += COPY * step
            start = max(here, cores, ready[group])
            first = start if first is None else first
            cores = empty[slot] = start + step
        bars.append(Bar(0, began, asked, tile))
        for g in (group,) if pingpong else (0, 1):
            bars += [Bar(1 + g, first or 0, cores, tile), Bar(1 + g, cores, cores + write, tile, True)]
            ready[g] = cores + write
        if not pingpong:
            cores += write
    return bars


def text(x: float, y: float, words: str, size: int = 12, fill: str = "#333", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def timeline(top: int, title: str, bars: list[Bar], right: float) -> list[str]:
    parts = [text(10, top - 14, title, 13)]
    for row, name in enumerate(("one thread copies", "warpgroup 1", "warpgroup 2")):
        y = top + row * (ROW + GAP)
        parts.append(text(LEFT - 8, y + 16, name, anchor="end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{right - LEFT}" height="{ROW}" fill="#f2f2f2"/>')
    for bar in bars:
        x, wide, y = LEFT + bar.start * SCALE, (bar.stop - bar.start) * SCALE, top + bar.row * (ROW + GAP)
        opacity = 0.4 if bar.writing else 1
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" fill="{TILES[bar.tile % 4]}" '
            f'fill-opacity="{opacity}" stroke="white"/>'
        )
        words = "w" if bar.writing else f"tile {bar.tile}"
        parts.append(text(x + wide / 2, y + 16, words, 11, "#333" if bar.writing else "white", "middle"))
    return parts


def draw() -> str:
    both = [
        ("cooperative: 128 x 256, both warpgroups on one tile (w: writing it)", simulate(128, 256, 4, 4, False)),
        (
            "ping-pong: 128 x 128, to each its own; one writes while the other multiplies",
            simulate(128, 128, 6, 8, True),
        ),
    ]
    right = LEFT + max(b.stop for _, bars in both for b in bars) * SCALE + 4
    step = 3 * (ROW + GAP) + 44
    parts = [p for i, (title, bars) in enumerate(both) for p in timeline(TOP + i * step, title, bars, right)]
    height = TOP + 2 * step
    words = "time, by a model of the kernel; below, twice as many tiles of half the size"
    parts.append(text(LEFT, height - 20, words))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 10:.0f} {height}" '
        f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(files.write({PICTURE: draw()}))
