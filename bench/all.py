"""Run all benchmarks that the figures of the README and docs/results come from, and compare with the committed results.

    bench/all.sh --list                               the parts for this machine, their commands and predicted times
    bench/all.sh                                      all of them, into build/results
    bench/all.sh --only train,decode --seconds 540    the parts of these names, as many as fit into nine minutes
    bench/all.sh --on cpu --text input.txt            the parts for a CPU

A part is one benchmark in its own process, with PyTorch in the same run where there is a peer. Its JSON file has the
same name as in docs/results and is written when the part ends. `all.json` holds all of them and is rewritten after
every part, so an interrupted run keeps its measurements. A part is stopped when it exceeds its limit (three times the
predicted time, or --limit) or the rest of --seconds; one that no longer fits is skipped, and the next one is tried.
Predictions are the seconds of `all.json` in --before if it has them, else estimates. Exit status 1 if a part failed or
was stopped.

At the end a table compares every measured figure with docs/results (or --before), and lists those that moved by more
than 2 %. Copy the files that you keep to docs/results, then run `python -m models page` and
`python docs/pictures/measured.py`.

Not included: results of training runs (base-run, sft-trials, ablation, grpo, loss-curve, evaluate, seeds) and of the
corpus, whose commands are in their pages, and what needs several GPUs (tests/gpu/several_gpus.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge.backends import gpu_is_there
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
ALL, LIMIT, MOVED = "all.json", 3.0, 0.02
INPUTS = {
    "text": "tiny Shakespeare, one text file",
    "shards": "a folder of token shards, vocabulary of up to 4,096",
    "pretrained": "a checkpoint of recipes/pretrain.py, preset small",
    "finetuned": "a checkpoint of recipes/sft.py, preset small",
}
# Figures that the table compares.
FIGURES = {
    *"median_ms median_us us ms seconds step_ms forward_us backward_us cpu_ms python_us peer_us cublas_us".split(),
    *"peak_memory_mib peak_mib planned_peak_mib ours_over_this ours_over_peer over_plain tokens_per_second".split(),
    *"tflop_per_second gb_per_second copy_gb_per_second worst worst_difference best_val_nats".split(),
}
NAMES = ("kernel", "product", "shape", "sets", "op", "drafts", "prompt", "name")  # keys that name an entry of a list


@dataclass(frozen=True)
class Part:
    """One benchmark. seconds: predicted for a fresh machine. In the command, {text} and the other INPUTS stand for
    files, and {config} for a file with the config NINE_MILLION, which is no preset."""

    name: str
    command: str
    seconds: float

    @property
    def file(self) -> str:
        return f"{self.name}.json"

    @property
    def needs(self) -> str:
        """One of INPUTS, or nothing."""
        return next((name for name in INPUTS if f"{{{name}}}" in self.command), "")

    def called(self, names: Sequence[str]) -> bool:
        """Whether one of the names is its own or a component of it, between dashes."""
        return any(f"-{name}-" in f"-{self.name}-" for name in names)


NINE_MILLION: dict[str, Any] = {"dim": 256, "heads": 4, "kv_heads": 2, "layers": 8, "hidden": 688}
NINE_MILLION |= {"vocab": 4096, "context": 512, "mtp_heads": 2, "mtp_weights": [1.0, 0.5]}
STEP = "bench/train_step.py --backend cupy --precision"
DECODE = "bench/decode.py --config base --backend cupy --precision bf16 --position 256 --tokens 64"


def parts_of(text: str) -> tuple[Part, ...]:
    """A part on each line: name, seconds, command."""
    lines = [line.split(maxsplit=2) for line in text.strip().splitlines()]
    return tuple(
        Part(name, command.replace("STEP", STEP).replace("DECODE", DECODE), float(seconds))
        for name, seconds, command in lines
    )


# The most important parts come first, since a budget cuts the end. Seconds are estimates from shorter runs.
GPU = parts_of("""
gpu-train-32x512        240 STEP bf16 --config base --batch-size 32 --seq-len 512 --peer torch
gpu-train-16x1024       240 STEP bf16 --config base --batch-size 16 --seq-len 1024 --peer torch
gpu-decode-base         150 DECODE --peer torch
gpu-prefill-base        240 bench/prefill.py --config base --backend cupy --precision bf16 --prompt 512 4096 \
--peer torch
gpu-train-9m            190 STEP bf16 --config {config} --batch-size 32 --seq-len 512 --steps 100 --capture --peer torch
gpu-train-small         160 STEP bf16 --config small --batch-size 32 --seq-len 128 --steps 100 --capture --peer torch
gpu-train-gpt2-124m     240 STEP bf16 --model gpt2 --config 124m --batch-size 16 --seq-len 1024 --peer torch
gpu-attention            60 bench/attention.py --shapes 32x512,16x1024,8x2048,4x4096,1x16384 --peer torch
gpu-decode-base-64      150 DECODE --peer torch --batch-size 64 --rounds 10
gpu-decode-base-weights  40 DECODE --weights int8 fp8
gpu-ops                  60 bench/ops.py
gpu-residual             15 bench/ops.py --residual
gpu-train-large         330 STEP bf16 --config large --batch-size 16 --seq-len 1024 --peer torch
gpu-train-tf32-32x512    90 STEP tf32 --config base --batch-size 32 --seq-len 512 --peer torch-eager
gpu-train-tf32-16x1024   90 STEP tf32 --config base --batch-size 16 --seq-len 1024 --peer torch-eager
gpu-train-fp8-32x512    240 STEP fp8 --config base --batch-size 32 --seq-len 512 --capture --peer torch
gpu-train-moe-32x512    330 STEP bf16 --model moe --config base --batch-size 32 --seq-len 512 --peer torch \
--beside nanoeuler:base
gpu-train-muon           60 STEP bf16 --config base --batch-size 32 --seq-len 512 --muon
gpu-train-documents      60 STEP bf16 --config base --batch-size 32 --seq-len 512 --steps 60 --documents 300
gpu-train-data           60 STEP bf16 --config base --batch-size 32 --seq-len 512 --steps 40 --data {shards}
gpu-attention-tf32       60 bench/attention.py --precision tf32 --peer torch
gpu-attention-documents  40 bench/attention.py --documents 300
gpu-grouped              40 bench/grouped.py
gpu-gemm                 60 bench/gemm.py
gpu-gemm-epilogues       20 bench/gemm.py --epilogues
gpu-serve-256            90 bench/serve.py --no-http --config base --backend cupy --precision bf16 --streams 256 \
--max-tokens 256 --seconds 15 --peer torch
gpu-serve-schema         60 bench/serve.py --no-http --config base --backend cupy --precision bf16 --streams 32 \
--max-tokens 256 --seconds 3 --schema all
gpu-grouped-mma          40 bench/grouped.py --file ops/grouped_mma.cu
gpu-scan-bf16            90 bench/scan.py --precision bf16 --peer torch
gpu-scan-fp32            90 bench/scan.py --precision fp32 --peer torch
gpu-lora                 60 bench/lora.py --backend cupy --precision bf16 --batch-size 4 --seq-len 512 --steps 20
gpu-qlora                60 bench/lora.py --backend cupy --precision bf16 --seq-len 2048 --rank 16 --dropout 0 \
--steps 6 --weights nf4 --set dim=4096 heads=32 kv_heads=8 layers=32 hidden=14336 vocab=128256 context=2048 tied=false
gpu-decode-8b-int4       75 bench/decode.py --model llama --config Llama-3.1-8B --set context=4096 --backend cupy \
--precision bf16 --weights int4 --position 256 --tokens 32 --rounds 5
webgpu-decode-base       30 bench/decode.py --config base --backend webgpu --weights int8 --rounds 8
gpu-speculation-small    60 bench/decode.py --backend cupy --precision bf16 --prompts 20 --rounds 3 \
--checkpoint {finetuned}
gpu-gradcheck           120 -m tinyforge.gradcheck --backend cupy
gpu-shakespeare-char    330 bench/shakespeare_char.py --data {text} --backend cupy --precision bf16 --peer torch
""")
CPU = parts_of("""
cpu-train-16x128         120 bench/train_step.py --config small --backend numpy --batch-size 16 --seq-len 128 \
--peer torch
cpu-prefill-small         30 bench/prefill.py --config small --backend numpy --prompt 512 --peer torch
cpu-decode-small          30 bench/decode.py --config small --backend numpy --peer torch
cpu-prefill-base         150 bench/prefill.py --config base --backend numpy --prompt 512 --workers 1 --threads 1 \
--peer torch
cpu-speculation-sft      240 bench/decode.py --backend numpy --checkpoint {finetuned}
cpu-speculation-pretrain  60 bench/decode.py --backend numpy --prompts 20 --rounds 6 --checkpoint {pretrained}
cpu-tokenizer            240 bench/tokenizer.py
""")


def figures(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The figures of a part's JSON, with names such as "results, tinyforge, median_ms"."""
    if isinstance(found, dict):
        for key, value in found.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key in FIGURES:
                yield f"{path}{key}", float(value)
            else:
                yield from figures(value, f"{path}{key}, ")
    elif isinstance(found, list):
        for i, value in enumerate(found):
            if isinstance(value, dict):
                called = next((str(value[name]) for name in NAMES if name in value), str(i))
                yield from figures(value, f"{path}{called}, ")


def compare(name: str, new: Any, old: Any | None) -> list[tuple[str, str, float | None, float]]:
    """(part, figure, old value, new value) of every figure of a part."""
    before = dict(figures(old)) if old is not None else {}
    return [(name, figure.removeprefix("results, "), before.get(figure), now) for figure, now in figures(new)]


def changes_table(rows: Sequence[tuple[str, str, float | None, float]]) -> list[str]:
    """Figures that are new or moved by more than MOVED; a last line counts the others."""
    lines = [f"{'part':<24} {'figure':<52} {'committed':>10} {'now':>10} {'change':>8}"]
    still = 0
    for part, figure, old, now in rows:
        if old is None:
            lines.append(f"{part:<24} {figure:<52} {'-':>10} {now:>10.4g} {'new':>8}")
        elif abs(now - old) <= MOVED * abs(old):
            still += 1
        else:
            change = f"{now / old - 1:+.1%}" if old else "-"
            lines.append(f"{part:<24} {figure:<52} {old:>10.4g} {now:>10.4g} {change:>8}")
    return [*lines, f"{still} figures moved by at most {MOVED:.0%}"]


def read(path: Path) -> Any | None:
    """The contents of a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_part(part: Part, command: Sequence[str], limit: float, out: Path) -> dict[str, Any]:
    """Run one part to its end or its limit; returns its entry of `all.json`."""
    target, log = out / part.file, out / f"{part.name}.log"
    target.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("wb") as output:
        # A session of its own, so that processes started by the benchmark end with it.
        process = subprocess.Popen(
            [sys.executable, *command, "--json", str(target)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "done" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "stopped"
        finally:
            end_all(process)
    result = read(target)
    if status == "done" and result is None:
        status = "failed"
    found = {"status": status, "seconds": time.monotonic() - started, "command": " ".join(command), "result": result}
    if status != "done":
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
        found["why"] = f"more than {limit:.0f} s" if status == "stopped" else lines[-1][:300]
    return found


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(parts: Sequence[Part], only: str | None) -> list[Part]:
    if only is None:
        return list(parts)
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if not any(part.called([name]) for part in parts):
            raise UserError(f"--only {name}: no part is called so; the parts are {', '.join(p.name for p in parts)}")
    return [part for part in parts if part.called(names)]


def attempt(
    part: Part, args: argparse.Namespace, inputs: dict[str, str], predicted: float, left: float, out: Path
) -> dict[str, Any]:
    """Run a part if it has its input and fits into the seconds that are left; its entry of `all.json`."""
    if part.needs and part.needs not in inputs:
        return {"status": "left out", "why": f"--{part.needs} names no file"}
    if left < predicted:
        return {"status": "left out", "why": f"{left:.0f} s are left, it takes about {predicted:.0f}"}
    config = out / f"{part.name}-config.json"
    if "{config}" in part.command:
        write_whole(config, json.dumps(NINE_MILLION) + "\n")
    limit = min(args.limit or LIMIT * predicted, left)
    print(f"{part.name}: about {predicted:.0f} s, at most {limit:.0f}", flush=True)
    return run_part(part, [word.format(**inputs, config=config) for word in part.command.split()], limit, out)


def measure(parts: Sequence[Part], args: argparse.Namespace, inputs: dict[str, str]) -> int:
    """Run the parts, write their results, print the table; returns how many failed or were stopped."""
    out, before = Path(args.out).resolve(), Path(args.before).resolve()
    out.mkdir(parents=True, exist_ok=True)
    predicted, began = predictions(parts, before), time.monotonic()
    state: dict[str, Any] = {"on": args.on, "parts": {}}
    rows: list[tuple[str, str, float | None, float]] = []
    try:
        for number, part in enumerate(parts, 1):
            left = args.seconds - (time.monotonic() - began) if args.seconds else float("inf")
            found = attempt(part, args, inputs, predicted[part.name], left, out)
            if found["status"] == "done":
                rows += compare(part.name, found["result"], read(before / part.file))
            state["parts"][part.name] = found
            write_whole(out / ALL, json.dumps(state, indent=2) + "\n")
            took = f" in {found['seconds']:.0f} s" if "seconds" in found else ""
            why = f", {found['why']}" if "why" in found else ""
            print(f"{number}/{len(parts)} {part.name}: {found['status']}{took}{why}", flush=True)
    finally:  # Ctrl-C too
        print("\n" + ("\n".join(changes_table(rows)) if rows else "no figure was measured: nothing to compare"))
    return sum(found["status"] in ("failed", "stopped") for found in state["parts"].values())


def predictions(parts: Sequence[Part], before: Path) -> dict[str, float]:
    """Seconds of each part: those of its last complete run, if known."""
    last = (read(before / ALL) or {}).get("parts", {})
    done = {name: found["seconds"] for name, found in last.items() if found.get("status") == "done"}
    return {part.name: done.get(part.name, part.seconds) for part in parts}


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.flag("--on", str, "which parts (default: gpu where there is one)", choices=("gpu", "cpu"))
    p.flag("--only", str, "the parts of these names, with commas: train, decode-base-64, ...", metavar="NAMES")
    p.flag("--list", False, "print the parts, their commands and times, and run nothing")
    p.flag("--seconds", float, "skip parts that would not fit into this time in all")
    p.flag("--limit", float, "seconds of a part (default: three times predicted)", metavar="S")
    p.flag("--out", "build/results", "where files go", metavar="DIR")
    p.flag("--before", "docs/results", "compared with", metavar="DIR")
    for name, what in INPUTS.items():
        p.add_argument(f"--{name}", metavar="PATH", help=what)
    args = p.parse_args(argv)
    for name in ("seconds", "limit"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UserError(f"--{name} is {getattr(args, name)}, expected a number above 0")
    inputs = {name: str(Path(given).resolve()) for name in INPUTS if (given := getattr(args, name))}
    for name, path in inputs.items():
        if not Path(path).exists():
            raise UserError(f"--{name}: {path} does not exist; name {INPUTS[name]}")
    args.on = args.on or ("gpu" if gpu_is_there() else "cpu")
    parts = chosen(GPU if args.on == "gpu" else CPU, args.only)
    predicted = predictions(parts, Path(args.before))
    if args.list:
        for part in parts:
            print(f"{part.name:<24} {predicted[part.name]:>5.0f} s  python {part.command}")
    total = sum(predicted[part.name] for part in parts if not part.needs or part.needs in inputs)
    print(f"{len(parts)} parts, about {total / 60:.0f} minutes", flush=True)
    if args.list:
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the part that runs is ended too
    return 1 if measure(parts, args, inputs) else 0


if __name__ == "__main__":
    run_command(main)
