"""The pages on CUDA kernels state the constants of the code: tile sizes, queues, shares of the work, bytes."""

from __future__ import annotations

import json
import re
from dataclasses import astuple
from pathlib import Path

import pytest

from tinyforge.backends.compile import constant, kernel_files, read
from tinyforge.infer.cuda.decode_batched_plan import TEAM_ROWS, BatchPlan
from tinyforge.infer.cuda.decode_single_plan import MOST_ROWS, RowPlan
from tinyforge.infer.cuda.plan import TILE
from tinyforge.ops.selective_scan import CHANNELS as SCAN_CHANNELS
from tinyforge.ops.selective_scan import TILE as SCAN_TILE
from tinyforge.ops.selective_scan_plan import FILE as SCAN
from tinyforge.ops.selective_scan_plan import backward_bytes

FOLDER = Path(__file__).parents[2] / "docs/kernels"
BASE = {"dim": 768, "hidden": 2048, "heads": 12, "kv_heads": 4, "layers": 16, "vocab": 4096, "outputs": 4}
ROW = RowPlan(**BASE, itemsize=2, blocks=132, shared=227 << 10, rows=1)  # as on an H200
BATCH = BatchPlan(**BASE, itemsize=2, blocks=264, shared=113 << 10, batch=64, resident=2)
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
ROWS_FILE, EMBEDDING, LOSS = "ops/rows.cuh", "ops/embedding.cu", "ops/cross_entropy.cu"


def page(name: str) -> str:
    """The text of a page, every run of white space one space."""
    return " ".join((FOLDER / name).read_text(encoding="utf-8").split())


def defined(file: str, pattern: str) -> int:
    """The number that the only group of `pattern` matches in a file."""
    found = re.search(pattern, read(file))
    assert found is not None, (file, pattern)
    return int(found[1])


STAGES, BLOCKS = constant(ROWS_FILE, "STAGES"), constant(ROWS_FILE, "BLOCKS")
WARPS = defined(ROWS_FILE, r"#define WARPS \(PER > 4 \? \d+ : (\d+)\)")
SHELF, PIECE, RUN = (constant(EMBEDDING, name) for name in ("SHELF", "PIECE", "BATCH"))
RESIDENT = defined(LOSS, r"#define RESIDENT \(PER && PER \* VEC <= 16 \? (\d+) : \d+\)")
THREADS = defined(LOSS, r"__launch_bounds__\(HELD \? HELD_THREADS : (\d+), RESIDENT\) softmax_residual")
(FEWER, MORE), (ROW_FEWER, ROW_MORE) = (
    [defined(file, rf"{name}_registers<(\d+)>") for name in ("fewer", "more")]
    for file in ("ops/gemm_hopper.cu", "infer/cuda/decode_single.cu")
)
TMA_MORE, TMA_FEWER = (defined("ops/attention_tma.cu", rf"{name}_REGISTERS = (\d+)") for name in ("WORKER", "COPIER"))
HELD = constant("infer/cuda/decode_single.cu", "HELD")
STATEMENTS = (
    ("decode.md", f"it keeps {ROW_FEWER}, and the eight warps that compute have {ROW_MORE}"),
    ("decode.md", f"at most {HELD} pieces (`HELD`)"),
    ("gemm.md", f"the warpgroup that copies ({FEWER} are left) and gives them to the others ({MORE})"),
    ("attention.md", f"gives the workers {TMA_MORE} registers a thread and the copying warps {TMA_FEWER}"),
    (
        "decode.md",
        f"Each lane has a queue in shared memory, {ROW.slots} places of 16 bytes at `base`: "
        f"{ROW.slots * ROW.warps * 32 * 16 >> 10} KB a multiprocessor",
    ),
    ("decode.md", f"with what comes {ROW.slots} places later"),
    ("decode.md", f"a lane requests {ROW.refill} pieces after each poll"),
    ("decode.md", f"deals tiles of {TILE} rows to blocks"),
    ("decode.md", f"`ROWS` is a constant of the kernel, 1 to {MOST_ROWS}."),
    ("decode-batch.md", f"teams of {TEAM_ROWS}, as many as a product on tensor cores takes"),
    ("decode-batch.md", f"64 rows are {WORDS[BATCH.teams]} teams of {BATCH.team} blocks"),
    ("decode-batch.md", f"each lane has {BATCH.slots} places of 16 bytes"),
    ("decode-batch.md", f"The partial sums of the {WORDS[BATCH.warps]} warps"),
    ("elementwise-and-norms.md", f"| {STAGES}, {BLOCKS}, {WARPS}, as it is |"),
    ("elementwise-and-norms.md", f"adds its {WORDS[WARPS]} warps in order"),
    ("elementwise-and-norms.md", f"`add_columns` adds the {132 * BLOCKS} rows"),
    ("elementwise-and-norms.md", f"{BASE['vocab'] // SHELF} blocks share the vocabulary, {SHELF} rows of W each"),
    (
        "elementwise-and-norms.md",
        f"A row of more than {PIECE} tokens is cut where the order's index is a multiple of {PIECE}",
    ),
    ("elementwise-and-norms.md", f"{WORDS[RUN]} rows of dy"),
    ("cross-entropy.md", f"A block of {THREADS} threads takes the row of one token and one head"),
    ("cross-entropy.md", f"{WORDS[RESIDENT]} blocks on a multiprocessor"),
    ("scan.md", f"**Tiles of {SCAN_TILE} positions.**"),
    ("scan.md", f"A block has {SCAN_CHANNELS} channels of one text, {constant(SCAN, 'THREADS')} threads."),
    ("scan.md", f"a channel has {WORDS[constant(SCAN, 'QUARTERS')]} lanes"),
    ("scan.md", f"Shared memory of backward: {backward_bytes(16, 4) / 1024:.0f} KB in float32"),
    ("scan.md", f"takes {backward_bytes(16, 8) / 1024:.0f} KB"),
    ("cross-entropy.md", f"a block of {constant(LOSS, 'HELD_THREADS')} threads"),
)


@pytest.mark.parametrize(("name", "statement"), STATEMENTS, ids=lambda text: text[:60])
def test_a_page_states_what_the_code_has(name: str, statement: str) -> None:
    assert statement in page(name)


def test_the_scan_is_cut_alike_on_both_backends() -> None:
    assert (constant(SCAN, "TILE"), constant(SCAN, "CHANNELS")) == (SCAN_TILE, SCAN_CHANNELS)


def test_the_kernels_of_a_batch_have_the_rows_of_the_plan() -> None:
    assert defined("infer/cuda/decode_batched.cu", r"constexpr int ROWS = (\d+);") == TEAM_ROWS
    for name in ("splits", "refill", "spin"):
        assert getattr(ROW, name) == defined("infer/cuda/decode_single.cu", rf"#define {name.upper()} (\d+)"), name


def test_the_chunks_of_the_loss_are_those_of_the_page() -> None:
    launcher = Path(__file__).parents[2] / "tinyforge/ops/cross_entropy.py"
    found = re.search(r"^CHUNK = (\d+)$", launcher.read_text(encoding="utf-8"), re.MULTILINE)
    assert found and f"writes the logits of {int(found[1]):,} tokens at a time" in page("cross-entropy.md")


def test_the_page_on_attention_has_the_times_of_its_json() -> None:
    text = page("attention.md")
    for file, precision, peer in (("gpu-attention", "bf16", "flash"), ("gpu-attention-tf32", "tf32", "effic.")):
        found = json.loads((FOLDER.parent / f"results/{file}.json").read_text("utf-8"))["results"]
        for result in found[:2]:
            shape, ours, theirs = result["shape"], result["tinyforge"], result[f"torch {peer}"]
            times = [ours[part]["median_us"] for part in ("forward", "backward", "both")]
            times += [theirs[part]["median_us"] for part in ("forward", "backward")]
            cells = " | ".join(f"{time:,.1f}" for time in times[:3])
            peers = " | ".join(f"{time:,.1f}" for time in times[3:])
            ratio = f"{times[2] / theirs['both']['median_us']:.2f}"
            row = rf"\| {precision}, {shape['batch']} x {shape['tokens']} \| {re.escape(cells)} \| torch \w+ "
            assert re.search(row + rf"\| {re.escape(peers)} \| {ratio} \|", text), (precision, cells, peers, ratio)


def test_every_kernel_page_has_an_idea_with_a_picture_then_a_log() -> None:
    for path in FOLDER.glob("[a-z]*.md"):
        text = path.read_text(encoding="utf-8")
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings[0].startswith("The idea") and headings[-1] == "The log" and len(headings) <= 3, (path, headings)
        idea = text.partition("\n## The log\n")[0]
        assert re.search(r"!\[[^]]+\]\(\.\./pictures/", idea) and "xample" in idea, path


def test_every_kernel_that_a_page_names_exists() -> None:
    """In backticks, with an underscore: a kernel, a function, a macro or a variable of the sources."""
    code = "\n".join(read(file) for file in kernel_files())
    code += "\n".join(path.read_text(encoding="utf-8") for path in (FOLDER.parents[1] / "tinyforge").rglob("*.py"))
    for path in FOLDER.glob("*.md"):
        for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", path.read_text(encoding="utf-8")):
            assert re.search(rf"\b{name}\b|\b\w+_{name}(_\w+)?\b", code), (path.name, name)


def test_the_page_has_the_times_of_the_products_that_a_rule_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of each product that a rule sends to our kernel, over that of cuBLAS and the op's pass."""
    pytest.importorskip("cupy", reason="the rules are the launcher's, which needs CuPy, not a GPU")
    from tinyforge.backends import gemm

    models = ("384x1024", "512x1376", "base", "large", "xl", "2b")
    monkeypatch.setattr(gemm, "processors", lambda: 132)
    ratios: dict[int, list[float]] = {2048: [], 16384: []}
    for gpu in ("h100", "h200"):
        found = json.loads((FOLDER.parent / f"results/gpu-gemm-rule-{gpu}.json").read_text("utf-8"))
        monkeypatch.setattr(gemm, "_gpu", lambda gpu=found["gpu"]: gpu)
        for r in found["rows"]:
            tile = gemm.by_rule(r["product"], r["m"], r["n"], r["k"])
            if tile and r["model"] in models and r["m"] in ratios:
                (us,) = (ours["us"] for ours in r["ours"] if ours["variant"] == list(astuple(tile)))
                ratios[r["m"]].append(us / r["cublas_us"])
    large, small = (f"{min(ratios[m]):.2f} to {max(ratios[m]):.2f}" for m in (16384, 2048))
    said = f"it takes {large} of the time of cuBLAS's product and the pass at 16,384 tokens, {small} at 2,048."
    assert said in page("gemm.md"), said
