"""Decoding on a CPU next to llama.cpp: processor milliseconds a token, one thread, float32 and one byte a weight.

    python bench/decode_llama_cpp.py models/nanoeuler/storyteller --peer ~/.cache/tinyforge/world/clients/bin/python
    python bench/decode_llama_cpp.py MODEL --peer PYTHON --turns 9 --json results.json

--peer: a Python that has xllamacpp, llama.cpp's server as a package. The model is converted for it, to f32 and q8_0;
ours keeps float32, or int8 codes. In turns each continues the same prompt by --tokens tokens, greedily. What counts is
processor time, with which other programs interfere less: for the peer that of its process, less a turn of one token.
It reads /proc, so it needs Linux.
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
from typing import Any
from urllib.parse import urlsplit

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

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


@contextmanager
def llama_cpp(python: Path, model: Path, tokens: int) -> Iterator[Callable[[], float]]:
    """A function that returns the processor seconds of `tokens` tokens."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([python, SERVER, model, "1"], text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        address = urlsplit(process.stdout.readline().split()[-1]).netloc

        def seconds(count: int) -> float:
            begun = processor_seconds(process.pid)
            connection = http.client.HTTPConnection(address, timeout=600)
            body = {"prompt": PROMPT, "n_predict": count, "temperature": 0, "ignore_eos": True}
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
            assert answer["tokens_predicted"] == count, answer
            return processor_seconds(process.pid) - begun

        try:
            yield lambda: seconds(tokens + 1) - seconds(1)
        finally:
            process.stdin.close()
            process.terminate()


def ours(path: Path, weights: str, tokens: int, kind: Callable[..., Any] = make_decoder) -> Callable[[], float]:
    loaded = load(path, get_backend("numpy", "fp32", workers=1), frozen=True, weights=weights)
    decoder, prompt = kind(loaded.model), loaded.tokenizer.encode(PROMPT)

    def seconds() -> float:
        decoder.rewind_row(0, 0)
        token = int(decoder.first(prompt)[0, 0, 0].argmax())
        begun = time.process_time()
        for _ in range(tokens):
            token = int(decoder.step([[token]])[0, 0, 0].argmax())
        return time.process_time() - begun

    return seconds


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, required=True, metavar="PYTHON", help="a Python with xllamacpp")
    parser.add_argument("--tokens", type=int, default=128, help="of a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            "ours, f32": ours(args.model, "", args.tokens),
            "ours, int8": ours(args.model, "int8", args.tokens),
            "ours by NumPy, f32": ours(args.model, "", args.tokens, NumpyDecoder),
        }
        for kind in ("f32", "q8_0"):
            file = folder / f"{kind}.gguf"
            convert.main([str(args.model), str(file), "--type", kind])
            runs[f"llama.cpp, {kind}"] = stack.enter_context(llama_cpp(args.peer, file, args.tokens))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(args.turns + 1):
            for name, run in runs.items():
                seconds = run()
                if turn:  # the first warms up
                    times[name].append(1e3 * seconds / args.tokens)
    found = {name: {"median_ms": median(each), "min_ms": min(each)} for name, each in times.items()}
    for name, row in found.items():
        print(f"{name:20} median {row['median_ms']:6.2f}  fastest {row['min_ms']:6.2f} ms of processor time a token")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
