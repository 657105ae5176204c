"""The server next to llama.cpp's on the same .gguf file: a shared beginning, long prompts, a queue.

    python bench/serve_llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf --peer ~/.cache/tinyforge/world/clients/bin/python
    python bench/serve_llama_cpp.py MODEL --peer PYTHON --threads 2 --json results.json

--peer: a Python that has xllamacpp, llama.cpp's server as a package. Each server runs alone, with --threads threads.

prefix: milliseconds to the first token of a prompt of some 450 tokens; with other last lines, the median of five.
long: the same of a short prompt, alone and while 2 clients send prompts of some 450 tokens: median and worst.
queue: 12 requests of 16 tokens at once: tokens per second, and milliseconds to the first token.
llama.cpp computes with the weights as stored, in 4 bits; this server in fp32, so speeds of one stream differ.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge.backends.workers import cores
from tinyforge.data.world import documents
from tinyforge.errors import Parser, run_command

ROOT = Path(__file__).resolve().parent.parent
LONG = 1800  # characters, some 450 tokens
HOGS, SHORT, QUEUED, TOKENS = 2, 5, 12, 16
SLOTS = 8


@contextmanager
def serving(command: Sequence[str | Path], threads: int) -> Iterator[str]:
    """A server's address. It ends with its standard input, or by a signal."""
    own = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=own, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.stdin.close()
            process.terminate()


def ask(url: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Seconds to the first piece of a completion, and its tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    begun, first, made = time.perf_counter(), 0.0, 0
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - begun
            made = ((json.loads(line[6:]).get("usage") or {}).get("completion_tokens")) or made
    connection.close()
    return first, made


def measure(url: str) -> dict[str, Any]:
    text = " ".join(documents("val", 400, 0))

    def part(number: int) -> str:
        return text[number * LONG // 3 :][:LONG]

    ask(url, "Hello", 4)  # what the first request loads
    found: dict[str, Any] = {}
    first, *later = (ask(url, part(0) + f"\nQuestion {i}: who?", 1)[0] for i in range(1 + SHORT))
    found["prefix_ms"] = {"first": 1e3 * first, "second": 1e3 * median(later)}
    alone = [ask(url, f"{i} is a number", 1)[0] for i in range(SHORT)]
    ended, sent = threading.Event(), [0]

    def hog(number: int) -> None:
        for i in range(1000):
            if ended.is_set():
                return
            ask(url, f"{number} {i} " + part(1 + number), 1)
            sent[0] += 1

    hogs = [threading.Thread(target=hog, args=(i,), daemon=True) for i in range(HOGS)]
    for thread in hogs:
        thread.start()
    time.sleep(1)
    begun = time.perf_counter()
    busy = [ask(url, f"{i} is no number", 1)[0] for i in range(SHORT)]
    passed = time.perf_counter() - begun
    ended.set()
    for thread in hogs:
        thread.join()
    found["short_ms"] = {
        name: {"median": 1e3 * median(times), "worst": 1e3 * max(times)}
        for name, times in (("alone", alone), ("with_long_prompts", busy))
    }
    found["long_prompts_meanwhile_per_s"] = sent[0] / passed
    results: list[tuple[float, int]] = []
    queue = [
        threading.Thread(
            target=lambda i=i: results.append(ask(url, f"Story {i}: {part(9)[i * 40 : i * 40 + 90]}", TOKENS))
        )
        for i in range(QUEUED)
    ]
    begun = time.perf_counter()
    for thread in queue:
        thread.start()
    for thread in queue:
        thread.join()
    firsts = sorted(first for first, _ in results)
    found["queue"] = {
        "tokens_per_second": sum(made for _, made in results) / (time.perf_counter() - begun),
        "first_ms": {"median": 1e3 * median(firsts), "worst": 1e3 * firsts[-1]},
    }
    return found


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.flag("--peer", Path, "a Python with xllamacpp", required=True, metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=cores(), help="of each server (default: the cores)")
    parser.flag("--json", Path, "write the figures to a file")
    args = parser.parse_args()
    commands: dict[str, list[str | Path]] = {
        "ours": [sys.executable, "-m", "tinyforge.serve", "--checkpoint", args.model, "--port", "0"],
        "llama.cpp": [args.peer, ROOT / "tests" / "world" / "llama_cpp_server.py", args.model, str(args.threads)],
    }
    found = {}
    for name, command in commands.items():
        with serving([*command, "--rows", str(SLOTS)] if name == "ours" else command, args.threads) as url:
            found[name] = measure(url)
        print(name, json.dumps(found[name], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
