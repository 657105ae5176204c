"""Draw the pictures of the pages on kernels.

python docs/pictures/kernels.py            write them
python docs/pictures/kernels.py --check    only say whether they are what this file draws
"""

from __future__ import annotations

import sys
from pathlib import Path

import files
from recurrences import arrow, page, text

FOLDER = Path(__file__).resolve().parent


def box(x: float, y: float, width: float, height: float, kind: str = "box", label: str = "", small: bool = True) -> str:
    fill = ' fill="none"' if kind == "cut" else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"{fill}/>'
    return shape + (text(x + width / 2, y + height / 2 + 4, label, "small" if small else "") if label else "")


def attention() -> str:
    """One block of attention's forward: its queries stay, tiles of keys and values pass by."""
    parts = [
        box(20, 40, 180, 190),
        text(110, 30, "memory: large, slow"),
        box(250, 40, 150, 190),
        text(325, 30, "shared memory"),
        box(450, 40, 230, 190),
        text(565, 30, "registers of its threads"),
    ]
    for i in range(5):
        kind = "kept" if i == 2 else "again" if i < 2 else "box"
        parts.append(box(40, 56 + 32 * i, 140, 24, kind, "" if i == 2 else f"keys, values: tile {i}"))
    parts += [
        '<text x="110" y="136" text-anchor="middle" class="small" style="fill:#fff">keys, values: tile 2</text>',
        box(265, 56, 120, 34, "again", "64 queries: stay"),
        box(265, 116, 120, 34, "again", "tile 2, in use"),
        box(265, 176, 120, 34, "box", "tile 3, arriving"),
        arrow(182, 132, 261, 132),
        arrow(182, 166, 261, 190),
        box(470, 84, 190, 28, "kept"),
        '<text x="565" y="102" text-anchor="middle" class="small" style="fill:#fff">64 x 64 scores of this tile</text>',
        box(470, 140, 190, 28, "again", "m, Z and a of each query"),
        arrow(387, 74, 466, 92),
        arrow(387, 132, 466, 104),
        arrow(565, 114, 565, 137),
        text(565, 206, "after the last tile: o = a / Z is written", "small"),
        text(350, 258, "the scores live in registers for a moment, and are never written to memory", "small"),
    ]
    return page(700, 272, "Attention on a GPU: queries stay, keys and values pass by", parts)


def row() -> str:
    """768 numbers in bf16 in the registers of a warp."""
    parts = [text(20, 30, "a row of 768 numbers in bf16: 96 vectors of 8 numbers, 16 bytes each", anchor="start")]
    for i in range(3):
        y = 46 + i * 34
        for lane in range(32):
            parts.append(box(20 + lane * 20, y, 18, 24, "kept" if lane == 0 else "box"))
        parts.append(text(672, y + 16, f"load {i}", "small", "start"))
    parts += [
        text(29, 166, "lane 0", "small"),
        text(649, 166, "lane 31", "small"),
        arrow(29, 178, 29, 196),
        text(
            20,
            214,
            "3 vectors in its registers; the sum over the row: each lane adds its 24 numbers,",
            "small",
            "start",
        ),
        text(20, 230, "then 5 shuffles add those of the lanes: 16 apart, 8, 4, 2, 1", "small", "start"),
    ]
    return page(740, 244, "A row in the registers of a warp", parts)


def adamw() -> str:
    """The 30 bytes a parameter as boxes."""
    parts, x = [text(20, 26, "read: 16 bytes", anchor="start")], 20.0
    for name, size in (("gradient, 4", 4), ("weight, 4", 4), ("m, 4", 4), ("v, 4", 4)):
        parts.append(box(x, 38, 34 * size - 4, 34, "box", name))
        x += 34 * size
    parts += [arrow(290, 76, 290, 98), text(300, 92, "some 15 operations, hidden by the reading", "small", "start")]
    parts.append(text(20, 96, "write: 14 bytes", anchor="start"))
    x = 20.0
    for name, size in (("weight, 4", 4), ("m, 4", 4), ("v, 4", 4), ("bf16 copy, 2", 2)):
        parts.append(box(x, 108, 34 * size - 4, 34, "kept" if size == 2 else "again", "" if size == 2 else name))
        x += 34 * size
    parts.append(text(x + 4, 130, "bf16 copy of the weight, 2: what the ops read", "small", "start"))
    return page(780, 160, "What AdamW moves for each parameter", parts)


def loss() -> str:
    """The logits of a chunk, overwritten by the residual."""
    parts = [
        box(20, 50, 110, 70, "box", "stream, head"),
        arrow(134, 85, 190, 85),
        text(162, 76, "product", "small"),
        box(196, 40, 150, 90, "again", "logits z"),
        arrow(350, 85, 426, 85),
        text(388, 76, "one pass", "small"),
        box(432, 40, 150, 90, "kept"),
        '<text x="507" y="82" text-anchor="middle" class="small" style="fill:#fff">probabilities, less 1 at</text>',
        '<text x="507" y="98" text-anchor="middle" class="small" style="fill:#fff">the token; same memory</text>',
        arrow(586, 72, 652, 54, "back"),
        arrow(586, 98, 652, 116, "back"),
        box(658, 34, 90, 36, "box", "dh"),
        box(658, 100, 90, 36, "box", "dW"),
        text(
            388,
            156,
            "537 MB at 16,384 tokens, 4 heads and 4,096 ids: there is room and time for one such array",
            "small",
        ),
    ]
    return page(770, 172, "The loss: one large array, overwritten in place", parts)


def experts() -> str:
    """Rows sorted by expert, cut into tiles that a block each takes."""
    counts, parts, x = (3, 1, 2), [text(20, 28, "rows, sorted by expert", anchor="start")], 20.0
    for expert, tiles in enumerate(counts):
        for i in range(tiles):
            width = 70 if i == tiles - 1 else 100
            parts.append(box(x, 44, 98, 46, "cut"))
            parts.append(box(x, 44, width - 2, 46, ("again", "box")[expert % 2], f"expert {expert}"))
            parts.append(arrow(x + 49, 92, x + 49, 116))
            parts.append(text(x + 49, 132, f"block {sum(counts[:expert]) + i}", "small"))
            x += 104
    parts.append(
        text(330, 160, "a tile has 128 rows of one expert; the last of each is partly empty (dashed)", "small")
    )
    return page(664, 176, "Grouped products: a block finds its expert by itself", parts)


def bounds() -> str:
    """The table of the page on the scan as bars, with what was measured."""
    times = (("memory", 95), ("shared memory", 105), ("instructions", 104), ("exponentials", 114), ("measured", 175))
    parts = []
    for i, (name, time) in enumerate(times):
        y = 24 + i * 34
        parts.append(text(140, y + 17, name, anchor="end"))
        parts.append(box(150, y, time * 2.6, 24, "kept" if name == "measured" else "again"))
        parts.append(text(158 + time * 2.6, y + 17, f"{time} µs", "small", "start"))
    parts.append(text(330, 214, "each resource alone would need this long; no single one explains the time", "small"))
    return page(680, 230, "The selective scan, forward: four bounds and the time", parts)


def teams() -> str:
    """64 rows as four teams of 66 blocks, two blocks on each multiprocessor."""
    parts = [text(90, 28, "64 texts"), text(440, 28, "132 multiprocessors, two blocks on each")]
    for team in range(4):
        y = 44 + team * 42
        parts.append(box(20, y, 140, 32, "box" if team % 2 else "again", f"rows {team * 16} to {team * 16 + 15}"))
        parts.append(arrow(164, y + 16, 212, y + 16))
        for i in range(11):
            parts.append(box(220 + i * 36, y, 30, 32, "box" if team % 2 else "again"))
        parts.append(text(624, y + 20, "66 blocks", "small", "start"))
    parts.append(
        text(350, 232, "a team waits only for itself; all teams read the same weights, from the L2 cache", "small")
    )
    return page(700, 248, "Decoding a batch: teams of rows and of blocks", parts)


def muon() -> str:
    """A product of one matrix fills few multiprocessors, that of all matrices of its shape all of them."""
    parts = []
    for label, top, count in (("one matrix: 18 tiles", 44, 18), ("sixteen at once: 288 tiles", 152, 132)):
        parts.append(text(20, top - 12, label, anchor="start"))
        for i in range(132):
            parts.append(box(20 + (i % 44) * 15, top + (i // 44) * 18, 12, 14, "kept" if i < count else "box"))
    parts.append(text(350, 226, "132 multiprocessors; red: at work in the first round of tiles", "small"))
    return page(700, 240, "Muon: matrices of one shape are multiplied together", parts)


def gemm() -> str:
    """A tile of a product, with the rows of both factors that it needs."""
    parts = [text(330, 24, "W: (O, I), one row for each column of Y"), text(70, 120, "X: (T, I)")]
    for i in range(6):
        parts.append(box(240 + i * 40, 36, 34, 66, "again" if i in (2, 3) else "box"))
        parts.append(box(130, 116 + i * 26, 90, 20, "again" if i in (2, 3) else "box"))
        for j in range(6):
            kind = "kept" if i in (2, 3) and j in (2, 3) else "box"
            parts.append(box(240 + j * 40, 116 + i * 26, 34, 20, kind))
    parts += [
        text(510, 150, "Y = X W^T: (T, O)", anchor="start"),
        text(510, 176, "red: a tile, kept in registers; it needs", "small", "start"),
        text(510, 192, "only the outlined rows of X and of W,", "small", "start"),
        text(510, 208, "and uses each of their numbers many times", "small", "start"),
    ]
    return page(760, 286, "A tile of a matrix product", parts)


def gpu() -> str:
    """The three memories of an H200, with sizes and what reads them."""
    parts = [
        box(20, 40, 200, 150, "box"),
        text(120, 30, "memory"),
        text(120, 108, "141 GB"),
        text(120, 128, "copies at 4.3 TB/s", "small"),
        arrow(224, 104, 276, 104),
        box(280, 40, 400, 150, "again"),
        text(480, 30, "one of 132 multiprocessors"),
        box(300, 62, 150, 106, "box"),
        text(375, 100, "shared memory"),
        text(375, 120, "227 KB", "small"),
        arrow(454, 114, 488, 114),
        box(492, 62, 170, 106, "box"),
        text(577, 90, "registers"),
        text(577, 110, "255 numbers a thread", "small"),
        text(577, 136, "32 threads are a warp:", "small"),
        text(577, 152, "all do the same at once", "small"),
        text(350, 216, "to the right: smaller, nearer, faster", "small"),
    ]
    return page(700, 232, "The memories of a GPU", parts)


if __name__ == "__main__":
    drawn = {
        "gpu": gpu(),
        "gemm-tile": gemm(),
        "attention-stream": attention(),
        "warp-row": row(),
        "adamw-bytes": adamw(),
        "loss-passes": loss(),
        "experts": experts(),
        "scan-bounds": bounds(),
        "teams": teams(),
        "muon-tiles": muon(),
    }
    sys.exit(files.write({FOLDER / f"{name}.svg": svg for name, svg in drawn.items()}))
