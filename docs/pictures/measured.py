"""Draw measured.svg and write README's table of measurements, both from docs/results/*.json.

    python docs/pictures/measured.py            write both
    python docs/pictures/measured.py --check    only say whether both are what the JSON gives

A measurement whose file is not there is left out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import files

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS, PICTURE, README = ROOT / "docs/results", ROOT / "docs/pictures/measured.svg", ROOT / "README.md"
BEGIN, END = "<!-- measured: docs/pictures/measured.py writes this table -->", "<!-- measured, end -->"
OURS = "tinyforge"
COMPILED, GRAPH, THREAD = "torch compiled", "torch compiled, CUDA graph", "torch eager, 1 thread"


@dataclass(frozen=True)
class Measured:
    """One row: what is timed, where, and the file, figure and peer that it comes from."""

    what: str
    machine: str
    file: str
    figure: str
    peer: str
    unit: str

    @property
    def found(self) -> dict[str, Any]:
        return dict(json.loads((RESULTS / self.file).read_text(encoding="utf-8")))

    def values(self) -> tuple[float, float]:
        """Ours and the peer's."""
        found = self.found
        results = found["results"] if "results" in found else found["lengths"][0]["results"]
        return results[OURS][self.figure], results[self.peer][self.figure]


H200, AMD, INTEL = "H200, bf16", "AMD EPYC, 2 cores, fp32", "Intel Xeon, 2 cores, fp32"
BASE, SMALL, GPT2 = "gpu-train-16x1024.json", "cpu-train-16x128.json", "gpu-train-gpt2-124m.json"
PREFILL = "gpu-prefill-base.json"
ROWS = (
    Measured("training step, NanoEuler base, 16 x 1024 tokens", H200, BASE, "median_ms", COMPILED, "ms"),
    Measured("peak memory of that step", H200, BASE, "peak_memory_mib", COMPILED, "MiB"),
    Measured("training step, GPT-2 124M, 16 x 1024 tokens", H200, GPT2, "median_ms", COMPILED, "ms"),
    Measured("nanoGPT's shakespeare_char, 5,000 steps", H200, "gpu-shakespeare-char.json", "seconds", COMPILED, "s"),
    Measured("decoding, NanoEuler base, per token", H200, "gpu-decode-base.json", "median_us", GRAPH, "µs"),
    Measured("first token after a prompt of 512, NanoEuler base", H200, PREFILL, "median_ms", GRAPH, "ms"),
    Measured("decoding 64 texts at once, a token of each", H200, "gpu-decode-base-64.json", "median_us", GRAPH, "µs"),
    Measured("training step, NanoEuler small, 16 x 128 tokens", AMD, SMALL, "median_ms", COMPILED, "ms"),
    Measured("the same", INTEL, "cpu-train-16x128-intel.json", "median_ms", COMPILED, "ms"),
    Measured("decoding, NanoEuler small, per token", AMD, "cpu-decode-small.json", "median_us", THREAD, "µs"),
)


def rows() -> list[Measured]:
    """The measurements whose file is there."""
    return [row for row in ROWS if (RESULTS / row.file).exists()]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def markdown() -> str:
    lines = ["| | machine | tinyforge | PyTorch | ratio |", "|---|---|---|---|---|"]
    for row in rows():
        ours, theirs = row.values()
        peer = {THREAD: "eager", COMPILED: "compiled", GRAPH: "CUDA graph"}[row.peer]
        lines.append(
            f"| {row.what} | {row.machine}, {row.found['date']} | [{number(ours)} {row.unit}](docs/results/{row.file}) "
            f"| {number(theirs)} {row.unit} ({peer}) | **{ours / theirs:.2f}** |"
        )
    return "\n".join(lines)


def svg() -> str:
    """Two bars a row, as long as the time that was taken, PyTorch's 1."""
    width, left, full, height = 860, 350, 400, 44
    shown = [row for row in rows() if row.figure != "peak_memory_mib"]
    parts = []
    for index, row in enumerate(shown):
        ours, theirs = row.values()
        scale, y = full / max(ours, theirs), 52 + index * height
        parts.append(f'<text x="{left - 12}" y="{y + 13}" text-anchor="end">{row.what}</text>')
        parts.append(f'<text x="{left - 12}" y="{y + 27}" text-anchor="end" class="small">{row.machine}</text>')
        for name, value, top in (("ours", ours, y), ("peer", theirs, y + 15)):
            parts.append(f'<rect class="{name}" x="{left}" y="{top}" width="{value * scale:.1f}" height="13"/>')
            end, shown_value = left + value * scale + 6, f"{number(value)} {row.unit}"
            parts.append(f'<text x="{end:.1f}" y="{top + 11}" class="small">{shown_value}</text>')
    bottom = 52 + len(shown) * height
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" role="img" font-size="13" \
font-family="system-ui, sans-serif">
<title>Time taken by tinyforge and by PyTorch</title>
<style>.small {{ font-size: 11px; fill: #666 }} .ours {{ fill: #d9542b }} .peer {{ fill: #b9bec6 }}</style>
<rect width="{width}" height="{bottom}" rx="6" fill="#fff"/>
<rect class="ours" x="{left}" y="18" width="13" height="13"/><text x="{left + 19}" y="29">tinyforge</text>
<rect class="peer" x="{left + 100}" y="18" width="13" height="13"/>
<text x="{left + 119}" y="29">PyTorch, best of its modes measured; shorter is faster</text>
{chr(10).join(parts)}
</svg>
"""


def readme() -> str:
    """README with the table between its two marks."""
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{markdown()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(files.write({PICTURE: svg(), README: readme()}))
