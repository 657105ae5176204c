"""Decoding and prompts on a CPU next to llama.cpp: processor milliseconds, one thread, float32, one byte and four bits.

    python bench/decode_llama_cpp.py models/nanoeuler/storyteller --peer ~/.cache/tinyforge/world/clients/bin/python
    python bench/decode_llama_cpp.py MODEL --peer PYTHON --turns 9 --json results.json
    python bench/decode_llama_cpp.py MODEL --peer PYTHON --prompt 512 --tokens 0

--peer: a Python that has xllamacpp, llama.cpp's server as a package. The model is converted for it, to f32, q8_0 and
q4_0; ours keeps float32, or codes of int8 and int4. In turns each continues the same prompt by --tokens tokens,
greedily, and reads a prompt of --prompt tokens up to its first token. What counts is processor time, with which other
programs interfere less: for the peer that of its process, of tokens less a turn of one token. It reads /proc, so it
needs Linux.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.errors import Parser, run_command
from tinyforge.formats import convert, load
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder_numpy import NumpyDecoder

SERVER = Path(__file__).resolve().parent.parent / "tests" / "world" / "llama_cpp_server.py"
PROMPT = "Once upon a time there was a little girl who lived near the sea."


def processor_seconds(pid: int) -> float:
    """Of all threads that a process has."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return found / 1e9


class Times(NamedTuple):
    """Functions that return processor seconds: of `tokens` tokens, and of a prompt with its first token."""

    tokens: Callable[[], float]
    prompt: Callable[[], float]


@contextmanager
def llama_cpp(python: Path, model: Path, tokens: int, ids: list[int]) -> Iterator[Times]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([python, SERVER, model, "1"], text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        address = urlsplit(process.stdout.readline().split()[-1]).netloc

        def seconds(prompt: str | list[int], count: int, cached: bool) -> float:
            begun = processor_seconds(process.pid)
            connection = http.client.HTTPConnection(address, timeout=600)
            body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": cached}
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
            assert answer["tokens_predicted"] == count, answer
            assert cached or answer["timings"]["prompt_n"] == len(prompt), answer["timings"]
            return processor_seconds(process.pid) - begun

        try:
            yield Times(
                lambda: seconds(PROMPT, tokens + 1, True) - seconds(PROMPT, 1, True), lambda: seconds(ids, 1, False)
            )
        finally:
            process.stdin.close()
            process.terminate()


def ours(path: Path, weights: str, tokens: int, ids: list[int], kind: Callable[..., Any] = make_decoder) -> Times:
    loaded = load(path, get_backend("numpy", "fp32", workers=1), frozen=True, weights=weights)
    decoder, prompt = kind(loaded.model), loaded.tokenizer.encode(PROMPT)

    def first(prompt: list[int]) -> int:
        decoder.rewind_row(0, 0)
        return int(decoder.first(prompt)[0, 0, 0].argmax())

    def of_tokens() -> float:
        token = first(prompt)
        begun = time.process_time()
        for _ in range(tokens):
            token = int(decoder.step([[token]])[0, 0, 0].argmax())
        return time.process_time() - begun

    def of_prompt() -> float:
        begun = time.process_time()
        first(ids)
        return time.process_time() - begun

    return Times(of_tokens, of_prompt)


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.flag("--peer", Path, "a Python with xllamacpp", required=True, metavar="PYTHON")
    parser.flag("--tokens", 128, "of a turn, 0 for none")
    parser.flag("--prompt", 512, "tokens of the prompt, 0 for none")
    parser.add_argument("--turns", type=int, default=9, help="default: %(default)s")
    parser.flag("--json", Path, "write the figures to a file")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ids = np.random.default_rng(0).integers(300, 4000, max(args.prompt, 1)).tolist()
        runs = {
            "ours, f32": ours(args.model, "", args.tokens, ids),
            "ours, int8": ours(args.model, "int8", args.tokens, ids),
            "ours, int4": ours(args.model, "int4", args.tokens, ids),
            "ours by NumPy, f32": ours(args.model, "", args.tokens, ids, NumpyDecoder),
        }
        for kind in ("f32", "q8_0", "q4_0"):
            file = folder / f"{kind}.gguf"
            convert.main([str(args.model), str(file), "--type", kind])
            runs[f"llama.cpp, {kind}"] = stack.enter_context(llama_cpp(args.peer, file, args.tokens, ids))
        times: dict[str, list[float]] = {}
        for turn in range(args.turns + 1):
            for name, run in runs.items():
                tokens = 1e3 * run.tokens() / args.tokens if args.tokens else None
                prompt = 1e3 * run.prompt() if args.prompt else None
                for what, found in ((f"{name}, a token", tokens), (f"{name}, a prompt of {args.prompt}", prompt)):
                    if turn and found is not None:  # the first turn warms up
                        times.setdefault(what, []).append(found)
    found = {name: {"median_ms": median(each), "min_ms": min(each)} for name, each in times.items()}
    for name, row in found.items():
        print(f"{name:40} median {row['median_ms']:8.2f}  fastest {row['min_ms']:8.2f} ms of processor time")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
