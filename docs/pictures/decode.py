"""Draw decode.svg: when each step of a layer runs in the decode kernel, and what the copies of weights do meanwhile.

    python docs/pictures/decode.py            write it
    python docs/pictures/decode.py --check    only say whether it is what this draws

The times of the steps are read from the table of docs/kernels/decode.md, where they were measured.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import files

PICTURE = Path(__file__).with_suffix(".svg")
PAGE = Path(__file__).resolve().parents[1] / "kernels" / "decode.md"
STEPS = ("qkv", "attention", "projection", "gate, up", "down")
STEPS_OF_PAGE = " | ".join(STEPS)
WAIT, WORK, ATTENTION, COPY = "#dde3ea", "#4477aa", "#ee8866", "#228833"
QKV, OUT, GATE_UP, DOWN = 1280 * 768, 768 * 768, 4096 * 768, 768 * 2048  # weights of a layer of base
RATE = 4.28e12  # bytes a second of a large copy
LEFT, WIDTH, TOP, ROW, GAP = 150, 620, 62, 30, 14
COMPUTED = 1.1  # us of attention's step in which it computes, as the page says


def durations() -> list[float]:
    """Of the steps of a layer, us."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(f'| {STEPS_OF_PAGE} |')}\n\|[-|]+\|\n\|(.*)\|$", page, re.M)
    if found is None:
        raise SystemExit(f"{PAGE.name}: no table of {', '.join(STEPS)}")
    return [float(cell) / 1000 for cell in found[1].split("|")]


def text(x: float, y: float, words: str, size: int = 12, fill: str = "#333", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, fill: str, height: float = ROW) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="3" fill="{fill}"/>'


def draw() -> str:
    times = durations()
    ends = [sum(times[: i + 1]) for i in range(len(times))]
    starts = [end - time for end, time in zip(ends, times, strict=True)]
    scale = WIDTH / ends[-1]

    def x(time: float) -> float:
        return LEFT + time * scale

    def row(number: int) -> float:
        return TOP + number * (ROW + GAP)

    bottom = row(3)
    parts = [text(LEFT, 20, f"one of 16 layers of base, one token: {ends[-1]:.1f} µs; the time stamps slow it down")]
    for name, start, time in zip(STEPS, starts, times, strict=True):
        parts.append(text(x(start + time / 2), TOP - 12, name, anchor="middle"))
        parts.append(text(x(start + time / 2), bottom + 14, f"{time:.1f} µs", 11, "#666", "middle"))
    for end in [0, *ends]:
        parts.append(f'<path d="M{x(end):.1f} {TOP - 6} V{bottom}" stroke="#bbb" stroke-width="1"/>')
    labels = ("blocks with attention", "all other blocks", "copies of weights")
    parts += [text(LEFT - 10, row(i) + ROW / 2 + 4, label, anchor="end") for i, label in enumerate(labels)]
    for step, start, end in zip(STEPS, starts, ends, strict=True):
        for blocks in (0, 1):
            fill = WAIT if step == "attention" else WORK
            parts.append(box(x(start) + 1, row(blocks), (end - start) * scale - 2, fill))
    parts.append(box(x(ends[1] - COMPUTED), row(0), COMPUTED * scale - 1, ATTENTION))
    # Requested as soon as weights are taken: at the beginning of a step, those of the steps after it.
    for step, weights in ((1, OUT + GATE_UP), (3, DOWN), (4, QKV)):
        parts.append(box(x(starts[step]) + 1, row(2), weights * 2 / RATE * 1e6 * scale, COPY))
    legend = (
        (WORK, "a product and its wait"),
        (WAIT, "waits"),
        (ATTENTION, f"attention computes, {COMPUTED:g} µs"),
        (COPY, "copies, from their request, at 4.28 TB/s"),
    )
    for (fill, words), at in zip(legend, (0, 158, 220, 392), strict=True):
        parts += [box(LEFT + at, bottom + 30, 10, fill, 10), text(LEFT + at + 14, bottom + 39, words, 11)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 52}" '
        'font-family="sans-serif">\n<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(files.write({PICTURE: draw()}))
