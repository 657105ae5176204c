"""Draw the pictures of the course and of the pages that continue it. The bars of a step in performance.md and of its
waiting in scaling.md are read from their tables.

python docs/pictures/course.py            write them
python docs/pictures/course.py --check    only say whether they are what this file draws
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import checkout  # noqa: F401
import files
import numpy as np
from recurrences import arrow, page, text

from tinyforge.optim.adamw import AdamWConfig, adamw_, step_rates
from tinyforge.optim.schedules import learning_rate

FOLDER = Path(__file__).resolve().parent


def bar(x: float, base: float, height: float, kind: str, width: float = 40) -> str:
    return f'<rect x="{x:g}" y="{base - height:.1f}" width="{width:g}" height="{height:.1f}" rx="2" class="{kind}"/>'


def softmax() -> str:
    """Scores 1, 2, 3; their exponentials; their shares."""
    scores = np.array([1.0, 2.0, 3.0])
    powers = np.exp(scores)
    panels = (
        ("scores x", scores, 20, "{:.0f}"),
        ("exp(x), all positive", powers, 6, "{:.1f}"),
        ("divided by their sum: y", powers / powers.sum(), 150, "{:.2f}"),
    )
    parts = []
    for i, (title, values, scale, shown) in enumerate(panels):
        left = 40 + i * 230
        parts.append(text(left + 80, 24, title))
        for j, value in enumerate(values):
            x = left + j * 56
            parts.append(bar(x, 180, scale * value, "kept" if i == 2 else "box"))
            parts.append(text(x + 20, 172 - scale * value, shown.format(value), "small"))
        parts.append(f'<path d="M{left - 8} 180H{left + 168}" class="forward"/>')
        if i:
            parts.append(arrow(left - 50, 110, left - 18, 110))
    parts.append(text(350, 206, "the largest score takes most of the whole, and the shares sum to 1", "small"))
    return page(700, 220, "Softmax: scores, their exponentials, their shares of the sum", parts)


def matrix() -> str:
    """The probabilities of 8 positions, the future hidden, cut into blocks of 2 x 2."""
    rng, n, size, left, top = np.random.default_rng(0), 8, 30, 110, 56
    scores = rng.normal(size=(n, n)) * 1.2
    p = np.where(np.tri(n, dtype=bool), np.exp(scores), 0)
    p /= p.sum(-1, keepdims=True)
    parts = [
        text(left + n * size / 2, 22, "keys: position s"),
        text(left - 14, top + n * size / 2, "queries:", anchor="end"),
        text(left - 14, top + n * size / 2 + 17, "position t", anchor="end"),
    ]
    for t in range(n):
        parts.append(text(left + (t + 0.5) * size, top - 8, str(t), "small"))
        for s in range(n):
            x, y = left + s * size, top + t * size
            if s <= t:
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" class="kept" '
                    f'fill-opacity="{0.12 + 0.88 * p[t, s]:.2f}"/>'
                )
            else:
                parts.append(f'<rect x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" class="cut" fill="none"/>')
    for i in range(0, n + 1, 2):
        at = i * size - 1
        parts.append(f'<path d="M{left - 1} {top + at}h{n * size}M{left + at} {top - 1}v{n * size}" class="back"/>')
    notes = (
        "A row is what one position looks at:",
        "darker is more weight, and it sums to 1.",
        "Dashed: the future, hidden by the mask.",
        "Blue, for lesson 7: tiles. Those that lie",
        "in the future entirely are never computed.",
    )
    parts += [text(380, top + 60 + 24 * i, note, "", "start") for i, note in enumerate(notes)]
    return page(680, 310, "The full T x T matrix of attention, with its blocks", parts)


def rotation() -> str:
    """A query and a key at positions 2 apart, early and late: both have turned, the angle between them has not."""
    parts, theta, radius = [], 0.3, 84
    for i, (tq, tk) in enumerate(((3, 1), (13, 11))):
        cx, cy = 170 + i * 330, 140
        parts.append(f'<circle cx="{cx}" cy="{cy}" r="{radius}" class="box"/>')
        ends = {}
        for name, start, t, kind in (("q", 0.9, tq, "forward"), ("k", 0.2, tk, "back")):
            angle = start + theta * t
            ends[name] = angle
            x, y = cx + radius * np.cos(angle), cy - radius * np.sin(angle)
            parts.append(arrow(cx, cy, float(x), float(y), kind))
            x, y = cx + (radius + 18) * np.cos(angle), cy - (radius + 18) * np.sin(angle) + 4
            parts.append(text(float(x), float(y), name))
        a, b = ends["k"], ends["q"]
        x1, y1, x2, y2 = (
            float(f) for f in (cx + 34 * np.cos(a), cy - 34 * np.sin(a), cx + 34 * np.cos(b), cy - 34 * np.sin(b))
        )
        parts.append(f'<path d="M{x1:.1f} {y1:.1f}A34 34 0 0 0 {x2:.1f} {y2:.1f}" class="forward"/>')
        parts.append(text(cx, 258, f"query at position {tq}, key at {tk}"))
    parts.append(
        text(335, 284, "both arrows have turned on; the angle between them, and so the score, is the same", "small")
    )
    return page(670, 300, "RoPE: arrows that turn with the position", parts)


def optimizers() -> str:
    """Gradient descent and AdamW without decay, 60 steps on a valley that is 100 times as steep in y as in x."""
    steep, start = np.array([1.0, 100.0]), np.array([-2.6, 0.9])
    config, left, top, unit = AdamWConfig(weight_decay=0.0), 330, 120, 105
    w, m, v = start.copy(), np.zeros(2), np.zeros(2)
    paths: dict[str, list[np.ndarray]] = {"forward": [start], "back": [start]}
    plain = start.copy()
    for step in range(1, 61):
        plain = plain - 0.018 * steep * plain
        paths["forward"].append(plain)
        adamw_(w, w, m, v, steep * w, step_rates(step, 0.06, config)[0], 1.0, config)
        paths["back"].append(w.copy())
    parts = []
    for level in (0.3, 1.2, 2.7, 4.8):
        rx, ry = np.sqrt(2 * level / steep) * unit
        parts.append(f'<ellipse cx="{left}" cy="{top}" rx="{rx:.1f}" ry="{ry:.1f}" class="cut" fill="none"/>')
    for kind, points in paths.items():
        line = " ".join(f"{left + unit * x:.1f},{top - unit * y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" class="{kind}"/>')
    parts += [
        f'<circle cx="{left}" cy="{top}" r="4" class="kept"/>',
        text(left + 10, top - 12, "lake", "small", "start"),
        text(left + 120, top + 4, "floor", "small"),
        text(left, 64, "wall", "small"),
        text(left, 184, "wall", "small"),
        arrow(40, 246, 76, 246),
        text(84, 250, "gradient descent: the steep direction swings, the flat one creeps", "small", "start"),
        arrow(40, 268, 76, 268, "back"),
        text(84, 272, "AdamW: each direction is divided by the size of its own gradients", "small", "start"),
    ]
    return page(660, 288, "Two optimizers in a narrow valley", parts)


def nucleus() -> str:
    """The four probabilities of lesson 10, cut."""
    p, top_p = np.array([0.5, 0.3, 0.15, 0.05]), 0.75
    running = p.cumsum()
    kept = int((running < top_p).sum()) + 1
    parts = [text(300, 24, f"top_p = {top_p}: the likeliest tokens, up to the one with which their sum reaches it")]
    for i, value in enumerate(p):
        x = 90 + i * 112
        parts.append(bar(x, 190, 250 * value, "kept" if i < kept else "box", 72))
        parts.append(text(x + 36, 182 - 250 * value, f"{value:g}", "small"))
        parts.append(text(x + 36, 210, f"{running[i]:g}", "small"))
    cut = 90 + kept * 112 - 20
    parts += [f'<path d="M{cut} 44V216" class="cut"/>', text(44, 210, "sum", "small")]
    return page(600, 228, "Sorted probabilities, and where the nucleus is cut", parts)


def shapes() -> str:
    """The arrays of a linear map as boxes whose sides are their axes: N = 6 rows, I = 3 inputs, O = 2 outputs."""
    unit = 18

    def array(x: float, y: float, rows: int, columns: int, name: str, kind: str, sides: tuple[str, str]) -> str:
        width, height = columns * unit, rows * unit
        return (
            f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" class="{kind}"/>'
            + text(x + width / 2, y + height / 2 + 5, name)
            + text(x + width / 2, y - 6, sides[1])
            + text(x - 6, y + height / 2 + 4, sides[0], anchor="end")
        )

    lines = (
        (40, 0, "forward", (("y", 6, 2, "N", "O"), "=", ("x", 6, 3, "N", "I"), ("W^T", 3, 2, "I", "O"))),
        (320, 0, "for the input", (("dx", 6, 3, "N", "I"), "=", ("dy", 6, 2, "N", "O"), ("W", 2, 3, "O", "I"))),
        (150, 180, "for the weight", (("dW", 2, 3, "O", "I"), "=", ("dy^T", 2, 6, "O", "N"), ("x", 6, 3, "N", "I"))),
    )
    parts = []
    for left, top, title, items in lines:
        x = float(left)
        parts.append(text(left - 12, top + 24, title, anchor="start"))
        for i, item in enumerate(items):
            if isinstance(item, str):
                parts.append(text(x - 6, top + 125, item))
                x += 24
                continue
            name, rows, columns, side, above = item
            kind = "again" if i == 0 else "box"
            parts.append(array(x, top + 120 - rows * unit / 2, rows, columns, name, kind, (side, above)))
            x += columns * unit + 34
    parts.append(text(300, 384, "neighbouring sides must match; what is left over is the shape of the result"))
    return page(600, 400, "The shapes of a linear map and of its gradients", parts)


def sphere() -> str:
    """A norm takes every vector to the circle; the gradient runs along it."""
    cx, cy, radius = 150, 140, 88
    parts = [f'<circle cx="{cx}" cy="{cy}" r="{radius}" class="box"/>']
    for angle, length in ((0.5, 124), (1.25, 44), (2.6, 106), (4.1, 60)):
        c, s = float(np.cos(angle)), float(-np.sin(angle))
        parts.append(f'<path d="M{cx} {cy}L{cx + length * c:.1f} {cy + length * s:.1f}" class="cut"/>')
        parts.append(f'<circle cx="{cx + length * c:.1f}" cy="{cy + length * s:.1f}" r="4" class="again"/>')
        parts.append(f'<circle cx="{cx + radius * c:.1f}" cy="{cy + radius * s:.1f}" r="4" class="kept"/>')
    c, s = float(np.cos(0.5)), float(-np.sin(0.5))
    x, y = cx + 124 * c, cy + 124 * s
    parts.append(arrow(x, y, x + 56 * s, y - 56 * c, "back"))
    notes = (
        '<circle cx="306" cy="90" r="4" class="again"/>' + text(322, 94, "x, of any length", "", "start"),
        '<circle cx="306" cy="122" r="4" class="kept"/>' + text(322, 126, "r x, all of one length", "", "start"),
        arrow(298, 154, 316, 154, "back") + text(322, 158, "dx, at a right angle to x: a longer x gives", "", "start"),
        text(322, 176, "the same r x, so the loss does not change along x", "", "start"),
    )
    return page(690, 270, "RMSNorm moves every vector to one sphere", [*parts, *notes])


def stash() -> str:
    """The stash while two ops run forward, then backward."""
    moments = (("", []), ("norm forward", ["norm: x"]), ("down forward", ["norm: x", "down: h"]))
    moments += (("down backward", ["norm: x"]), ("norm backward", []))
    parts = []
    for i, (title, records) in enumerate(moments):
        x = 30 + i * 150
        parts.append(f'<path d="M{x} 60V170H{x + 96}V60" class="forward"/>')
        for j, record in enumerate(records):
            parts.append(f'<rect x="{x + 6}" y="{136 - j * 34}" width="84" height="28" rx="3" class="box"/>')
            parts.append(text(x + 48, 155 - j * 34, record))
        if i:
            parts.append(arrow(x - 46, 110, x - 8, 110, "forward" if i < 3 else "back"))
            parts.append(text(x - 26, 40, title, "small"))
            parts.append(text(x - 26, 98, "push" if i < 3 else "pop", "small"))
    return page(740, 190, "The stash: forward pushes records, backward pops them in reverse", parts)


def threads() -> str:
    """1,000 elements, four blocks of 256 threads, the last 24 of them without an element."""
    parts = []
    for i in range(4):
        x = 30 + i * 160
        parts.append(f'<rect x="{x}" y="44" width="150" height="40" rx="3" class="box"/>')
        parts.append(text(x + 75, 34, f"block {i}", "small"))
        parts.append(text(x + 75, 69, "threads 0 to 255"))
        parts.append(arrow(x + 75, 86, x + 75, 112))
        parts.append(text(x + 75, 134, f"i = {i * 256} to {i * 256 + 255}", "small"))
    parts.append('<rect x="646" y="44" width="14" height="40" class="kept"/>')
    parts.append(
        text(345, 164, "1,000 elements end at i = 999; the 24 threads in red must return without writing", "small")
    )
    return page(690, 180, "Blocks of threads over an array", parts)


def step() -> str:
    """The table of docs/performance.md as a bar, with the time that the products alone would take at their best."""
    page_text = (FOLDER.parent / "performance.md").read_text(encoding="utf-8")
    table = page_text.partition("| kernels | ms a step |")[2].partition("\n\n")[0]
    groups = {"matrix products": "products", "attention": "attention", "memory passes": "norms|AdamW|loss|all else"}
    groups["gaps"] = "gaps"
    times = dict.fromkeys(groups, 0.0)
    for name, values in re.findall(r"^\| ([^*|]+) \| ([\d.+ ]+) \|$", table, re.MULTILINE):
        (group,) = (group for group, words in groups.items() if re.match(words, name))
        times[group] += sum(map(float, values.split("+")))
    left, unit, x = 30.0, 24.0, 30.0
    parts = []
    for (name, time), kind in zip(times.items(), ("kept", "again", "box", "cut"), strict=True):
        fill = ' fill="none"' if kind == "cut" else ""
        parts.append(f'<rect x="{x:.1f}" y="56" width="{unit * time:.1f}" height="40" class="{kind}"{fill}/>')
        label, row = f"{name} {time:.1f} ms", 116 if time > 3.5 else 136 if time > 1 else 156
        parts.append(text(x + unit * time / 2, row, label, "small"))
        x += unit * time
    floor = left + unit * 11 / 0.783
    parts.append(f'<path d="M{floor:.1f} 44V104" class="back"/>')
    parts.append(text(floor, 38, "14 ms: 11 TFLOP at 783 TFLOP/s", "small"))
    return page(700, 170, "Where the time of a step of base goes, ms on one H200", parts)


def schedule() -> str:
    """The learning rate of a run of 1,000 steps by `wsd`, with the defaults of a recipe."""
    left, base, width, height, steps, peak = 70, 210, 560, 150, 1000, 4e-3
    rates = [learning_rate("wsd", i / steps, peak, decay=0.4, warmup=0.02) for i in range(steps + 1)]
    points = " ".join(
        f"{left + width * i / steps:.1f},{base - height * rates[i] / peak:.1f}" for i in (0, 10, 20, 600, 800, 1000)
    )
    parts = [
        f'<path d="M{left} {base}H{left + width}M{left} {base}V44" class="cut"/>',
        f'<polyline points="{points}" class="back"/>',
        text(left - 8, base - height + 4, "4e-3", "small", "end"),
        text(left - 8, base + 4, "0", "small", "end"),
        text(left, 30, "learning rate", "small"),
    ]
    for step, name in ((20, "20"), (600, "600"), (1000, "step 1,000")):
        x = left + width * step / steps
        parts.append(f'<path d="M{x:.1f} 52V{base}" class="cut"/>')
        parts.append(text(x, base + 18, name, "small"))
    parts += [
        text(left + 18, 46, "warm-up: 2 %", "small", "start"),
        text(left + width * 0.31, 132, "stable: as fast as the run can bear"),
        text(left + width * 0.31, 150, "long steps: the loss falls, and jitters", "small"),
        text(left + width * 0.745, 172, "decay: 40 %"),
        text(left + width * 0.745, 190, "short steps: it settles", "small"),
        text(left + width + 6, base - 4, f"{rates[-1]:.0e}", "small", "start"),
    ]
    return page(680, 246, "The learning rate of a run: warm-up, stable, decay", parts)


def surprise() -> str:
    """-log p, and the gradient of three logits whose second is the target."""
    left, base, width, height = 60, 190, 260, 140
    p = np.linspace(0.01, 1, 100)
    points = " ".join(f"{left + width * a:.1f},{base + height * np.log(a) / 4.7:.1f}" for a in p)
    parts = [
        text(left + width / 2, 26, "the loss, -log p, of a token"),
        f'<path d="M{left} {base}H{left + width}M{left} {base}V40" class="cut"/>',
        f'<polyline points="{points}" class="back"/>',
        text(left + width / 2, base + 34, "p, the probability that the model gave it", "small"),
    ]
    for a in (0.01, 0.2, 0.5, 0.9):
        x, y = left + width * a, base + height * np.log(a) / 4.7
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="kept"/>')
        parts.append(text(x + 8, y - 4, f"{-np.log(a):.2f}", "small", "start"))
        parts.append(text(x, base + 16, f"{a:g}", "small"))
    middle, names = 110, ("token 0", "token 1: it came", "token 2")
    parts.append(text(520, 26, "its gradient: p, minus 1 at the target"))
    parts.append(f'<path d="M396 {middle}H656" class="forward"/>')
    for i, g in enumerate((0.7, -0.8, 0.1)):
        x, size = 412 + i * 94, abs(g) * 80
        top = middle - size if g > 0 else middle
        kind = "kept" if g < 0 else "box"
        parts.append(f'<rect x="{x}" y="{top:.1f}" width="40" height="{size:.1f}" rx="2" class="{kind}"/>')
        parts.append(text(x + 20, top - 6 if g > 0 else top + size + 14, f"{g:g}", "small"))
        parts.append(text(x + 20, 214, names[i], "small"))
    return page(680, 236, "The loss of a token and its gradient", parts)


def own_model() -> str:
    """The parts of the model of lesson 12 with the lessons whose functions they call."""
    rows = (
        ("characters", ""),
        ("embedding", ""),
        ("norm, attention with RoPE, add", "1, 2, 4, 5, 6, 8"),
        ("norm, squared ReLU network, add", "2, 4, 8, 11"),
        ("norm, output head", "2, 4"),
        ("loss", "3"),
    )
    parts = [text(200, 22, "forward, down"), text(470, 22, "lessons"), text(580, 22, "backward, up")]
    for i, (name, lessons) in enumerate(rows):
        y = 34 + i * 36
        parts.append(f'<rect x="60" y="{y}" width="280" height="26" rx="3" class="{"box" if lessons else "again"}"/>')
        parts.append(text(200, y + 17, name))
        parts.append(text(470, y + 17, lessons))
        if i:
            parts.append(arrow(200, y - 10, 200, y - 1))
            parts.append(arrow(580, y + 12, 580, y - 18, "back"))
    parts.append('<path d="M352 106h10v62h-10" class="cut" fill="none"/>')
    parts.append(text(370, 141, "twice", "small", "start"))
    parts.append(
        text(340, 266, "then AdamW (9) moves the weights; sampling uses 7 and 10; the order is yours (12)", "small")
    )
    return page(680, 282, "The parts of your own model", parts)


def op() -> str:
    """Forward above, backward below, the stash between them."""
    parts = [
        text(60, 54, "x"),
        arrow(74, 50, 138, 50),
        '<rect x="142" y="32" width="150" height="36" rx="4" class="box"/>',
        text(217, 55, "forward: softmax"),
        arrow(296, 50, 360, 50),
        text(376, 54, "y"),
        arrow(392, 50, 470, 50),
        text(500, 54, "..."),
        arrow(526, 50, 590, 50),
        text(620, 54, "loss L"),
        '<rect x="157" y="92" width="120" height="30" rx="4" class="again"/>',
        text(217, 112, "stash: y"),
        arrow(200, 70, 200, 90),
        arrow(234, 124, 234, 144, "back"),
        '<rect x="142" y="146" width="150" height="36" rx="4" class="box"/>',
        text(217, 169, "backward"),
        arrow(590, 164, 526, 164, "back"),
        text(500, 168, "..."),
        arrow(470, 164, 296, 164, "back"),
        text(385, 186, "upstream gradient, dy in code", "small"),
        arrow(138, 164, 74, 164, "back"),
        text(72, 186, "gradient of x, dx", "small"),
        text(604, 168, "dL/dL = 1", "", "start"),
    ]
    return page(690, 204, "An op: forward saves on the stash what backward needs", parts)


def cache() -> str:
    """The cache while three tokens are added: kept columns, and the new one."""
    parts = []
    for step in range(3):
        left = 40 + step * 220
        for i in range(3 + step):
            kind = "kept" if i == 2 + step else "box"
            for row in range(2):
                parts.append(
                    f'<rect x="{left + i * 30}" y="{52 + row * 40}" width="26" height="32" rx="3" class="{kind}"/>'
                )
        parts.append(text(left, 36, f"token {3 + step}", "small", "start"))
        if step:
            parts.append(arrow(left - 50, 88, left - 14, 88))
    parts += [
        text(32, 72, "k", "small", "end"),
        text(32, 112, "v", "small", "end"),
        text(350, 156, "red: computed now; grey: kept. The new query reads all columns", "small"),
    ]
    return page(690, 172, "The key/value cache grows by a column a token", parts)


def fp8() -> str:
    """The codes of e4m3 from 0.5 to 4."""
    left, scale, y = 40, 172, 64
    parts = [f'<path d="M{left} {y}H{left + 3.5 * scale:g}" class="forward"/>']
    for power in (-1, 0, 1):
        for m in range(8 if power < 1 else 9):
            value = 2.0**power * (1 + m / 8)
            x = left + (value - 0.5) * scale
            long = value in (0.5, 1, 2, 4)
            parts.append(f'<path d="M{x:g} {y - (22 if long else 12)}V{y}" class="{"back" if long else "forward"}"/>')
            if long:
                parts.append(text(x, y + 22, f"{value:g}"))
    for low, name in ((0.5, "1/16 apart"), (1, "1/8 apart"), (2, "1/4 apart")):
        parts.append(text(left + (1.5 * low - 0.5) * scale, 28, name, "small"))
    return page(690, 104, "The FP8 numbers from 0.5 to 4", parts)


def ranks() -> str:
    """A step of two ranks."""
    parts = []
    for i, top in enumerate((30, 132)):
        parts += [
            f'<rect x="20" y="{top}" width="130" height="56" rx="4" class="box"/>',
            text(85, top + 24, f"rank {i}: its half"),
            text(85, top + 42, "of the batch", "small"),
            arrow(154, top + 28, 196, top + 28),
            f'<rect x="200" y="{top}" width="130" height="56" rx="4" class="box"/>',
            text(265, top + 24, "complete model"),
            text(265, top + 42, "forward, backward", "small"),
            arrow(334, top + 28, 396, 102 if i == 0 else 116, "back"),
            arrow(504, 102 if i == 0 else 116, 546, top + 28, "back"),
            f'<rect x="550" y="{top}" width="130" height="56" rx="4" class="box"/>',
            text(615, top + 24, "update"),
            text(615, top + 42, "the same on both", "small"),
        ]
    parts += [
        '<rect x="400" y="86" width="100" height="46" rx="4" class="again"/>',
        text(450, 106, "sum of the"),
        text(450, 122, "gradients"),
    ]
    return page(700, 214, "Two ranks: half of the batch each, one sum of gradients", parts)


def waiting() -> str:
    """Of the steps of a million tokens in scaling.md: the share of each in which nothing hides the sum."""
    table = (FOLDER.parent / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^ +(\d+) +none +([\d.]+) +[\d,]+ +[\d.]+ +([\d.]+)", table, re.MULTILINE)
    parts = [text(350, 24, "one step of a million tokens, on more and more GPUs")]
    for i, (gpus, step_ms, late) in enumerate(rows[-5:]):
        share, y = float(late) / float(step_ms), 40 + i * 32
        parts += [
            text(90, y + 16, f"{gpus} GPUs", "small", "end"),
            f'<rect x="100" y="{y}" width="{480 * (1 - share):.1f}" height="24" rx="2" class="box"/>',
            f'<rect x="{580 - 480 * share:.1f}" y="{y}" width="{480 * share:.1f}" height="24" rx="2" class="kept"/>',
            text(590, y + 16, f"{float(step_ms):.0f} ms", "small", "start"),
        ]
    parts.append(text(340, 216, "grey: computing; red: waiting for the sum of the gradients", "small"))
    return page(690, 230, "The share of a step that waits for the sum", parts)


if __name__ == "__main__":
    drawn = {
        "fp8": fp8(),
        "ranks": ranks(),
        "scaling": waiting(),
        "cache": cache(),
        "op": op(),
        "surprise": surprise(),
        "own-model": own_model(),
        "schedule": schedule(),
        "step": step(),
        "linear-shapes": shapes(),
        "norm-sphere": sphere(),
        "stash": stash(),
        "threads": threads(),
        "softmax-bars": softmax(),
        "attention-matrix": matrix(),
        "rotation": rotation(),
        "optimizers": optimizers(),
        "nucleus": nucleus(),
    }
    sys.exit(files.write({FOLDER / f"{name}.svg": svg for name, svg in drawn.items()}))
