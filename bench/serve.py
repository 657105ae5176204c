"""Load a server: many streams at once, beside clients that vanish, send garbage and read slowly.

    python bench/serve.py                                   the shipped model on this CPU, 64 streams, five minutes
    python bench/serve.py --seconds 20 --streams 16         a quick look
    python bench/serve.py --checkpoint runs/sft --json load.json
    python bench/serve.py --no-http                         the scheduler alone, beside the decoder's own rate
    python bench/serve.py --no-http --config base --backend cupy --precision bf16 --streams 256 --max-tokens 256 \
        --seconds 20 --peer torch

Over HTTP: a server is started in a process of its own, on a free port of this machine. Each of a set of requests
(greedy and sampled, with and without drafts, chats and completions) is first made alone, one after the other: that
gives its text and the rate of serial requests. Then `--streams` clients stream requests from the set for `--seconds`,
without a pause, while others vanish in the middle, send what is no request, or read slowly. Every text must be the one
that the request had alone. At the end all rows must be free, and the memory where it was after a tenth of the time.
Time to the first token is from the request to the first piece of text. Beside the rates stands the server's processor
time for a token, which other programs on the machine change less.

With --no-http no server is needed (nor its libraries): random weights unless there is a checkpoint; each row's prompt
is `--prompt` tokens, its reply `--max-tokens`; as one ends another takes its place. The decoder's own rate is that of
`draw_blocks` with as many rows, at the same positions. --peer torch adds PyTorch's static batch, compiled on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.backends.workers import cores, cpu_model
from tinyforge.data.world import documents
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats import load
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.generation import draw_blocks
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import Scheduler
from tinyforge.models.nanoeuler.config import Config
from tinyforge.models.nanoeuler.model import NanoEuler
from tinyforge.params import named
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.train.settings import PretrainSettings, config_of

ROOT = Path(__file__).resolve().parent.parent
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"prompt":',
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n\xff\xfe",
    b"\x00" * 5000,
)


# --- over HTTP


@dataclass
class Stream:
    """What a client got of one request. ended: whether the stream was whole."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0
    ended: bool = False


@dataclass
class Found:
    """Of all clients together."""

    first: list[float] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    broken: int = 0
    misbehaved: dict[str, int] = field(default_factory=dict)


def works_of(count: int, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests: path and body. Some prompts share a beginning."""
    rng, texts, found = random.Random(0), list(documents("val", count, 0)), []
    for i, text in enumerate(texts):
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": i,
            "max_tokens": rng.randrange(max_tokens // 4, max_tokens),
            "ignore_eos": True,
            "temperature": rng.choice([0, 0, 0.8, 1.2]),
        }
        if rng.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 40}
        if rng.random() < 0.1:
            body["tinyforge"] = {"drafts": 3}
        words = texts[rng.randrange(4)][:60] + text[: rng.randrange(5, 60)]
        if i % 3:
            found.append(("/v1/completions", body | {"prompt": words}))
        else:
            found.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": words[-50:]}]}))
    return found


def head_of(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


async def ask(
    port: int, work: tuple[str, dict[str, Any]], pause: float = 0, leave_after: int | None = None
) -> Stream | int:
    """A streamed request; the status where it is not 200. pause: before each read. leave_after: pieces."""
    path, content = work
    body, begun, found = json.dumps(content).encode(), time.perf_counter(), Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    try:
        writer.write(head_of(path, len(body)) + body)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if status != 200:
            return status
        rest, pieces = b"", 0
        while True:
            if pause:
                await asyncio.sleep(pause)
            size = int(await reader.readline() or b"0", 16)
            if not size:
                return found  # without [DONE]: broken
            rest += await reader.readexactly(size)
            await reader.readexactly(2)
            while b"\n\n" in rest:
                event, rest = rest.split(b"\n\n", 1)
                if event == b"data: [DONE]":
                    found.ended, found.seconds = True, time.perf_counter() - begun
                    return found
                value = json.loads(event[6:])
                for choice in value.get("choices", ()):
                    piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    if piece and not found.text:
                        found.first = time.perf_counter() - begun
                    found.text += piece
                if value.get("usage"):
                    found.tokens = value["usage"]["completion_tokens"]
            pieces += 1
            if leave_after is not None and pieces > leave_after:
                return found
    except (asyncio.IncompleteReadError, ConnectionError, ValueError, IndexError):
        return found
    finally:
        writer.close()


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    return data.split(b"\r\n\r\n", 1)[1].decode()


async def metric(port: int) -> dict[str, float]:
    text = await get(port, "/metrics")
    return {name: float(value) for name, value in re.findall(r"^(\w+) ([-+.e\d]+)$", text, re.M)}


async def cpu_of(port: int) -> float:
    """Seconds of processor time that the server has taken."""
    return (await metric(port))["process_cpu_seconds_total"]


async def load_it(port: int, args: argparse.Namespace) -> dict[str, Any]:
    works, found, rng = works_of(args.works, args.max_tokens), Found(), random.Random(1)
    alone, serial_tokens = [], 0
    for work in works[:5]:  # warm-up
        await ask(port, work)
    cpu, begun = await cpu_of(port), time.perf_counter()
    for work in works:
        stream = await ask(port, work)
        if not isinstance(stream, Stream) or not stream.ended:
            raise UserError(f"the server does not answer a request made alone: {stream}; see its output")
        alone.append(stream.text)
        serial_tokens += stream.tokens
    serial, serial_cpu = serial_tokens / (time.perf_counter() - begun), (await cpu_of(port) - cpu) / serial_tokens
    until = time.perf_counter() + args.seconds

    async def good() -> None:
        while time.perf_counter() < until:
            number = rng.randrange(len(works))
            stream = await ask(port, works[number])
            if not isinstance(stream, Stream):
                found.refused += 1
                await asyncio.sleep(0.05)
                continue
            found.requests += 1
            found.tokens += stream.tokens
            if not stream.ended:
                found.broken += 1
            elif stream.text != alone[number]:
                found.wrong.append(f"{works[number]}: {stream.text!r}, alone {alone[number]!r}")
            else:
                found.first.append(stream.first)

    def counted(name: str) -> None:
        found.misbehaved[name] = found.misbehaved.get(name, 0) + 1

    async def vanishing() -> None:
        while time.perf_counter() < until:
            await ask(port, rng.choice(works), leave_after=rng.randrange(4))
            counted("vanished")
            await asyncio.sleep(0.1)

    async def garbage() -> None:
        while time.perf_counter() < until:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(rng.choice(GARBAGE))
                await asyncio.sleep(0.2)
                writer.close()
            except ConnectionError:
                pass
            counted("garbage")

    async def slow() -> None:
        while time.perf_counter() < until:
            number = rng.randrange(len(works))
            stream = await ask(port, works[number], pause=0.3)
            counted("slow readers")
            if isinstance(stream, Stream) and stream.ended and stream.text != alone[number]:
                found.wrong.append(f"slow reader, {works[number]}")

    async def memory() -> tuple[float, float]:
        await asyncio.sleep(0.1 * args.seconds)
        early = (await metric(port))["process_resident_memory_bytes"]
        await asyncio.sleep(0.85 * args.seconds)
        return early, (await metric(port))["process_resident_memory_bytes"]

    cpu = await cpu_of(port)
    begun, generated = time.perf_counter(), (await metric(port))["tinyforge_generated_tokens_total"]
    odd = [*(vanishing() for _ in range(4)), *(garbage() for _ in range(2)), *(slow() for _ in range(3))]
    remembered = asyncio.ensure_future(memory())
    await asyncio.gather(*(good() for _ in range(args.streams)), *odd)
    early, _ = await remembered
    load_cpu = await cpu_of(port) - cpu
    seconds = time.perf_counter() - begun
    await asyncio.sleep(3)
    end = await metric(port)
    made, first = end["tinyforge_generated_tokens_total"] - generated, sorted(found.first)
    if not first:
        raise UserError("no stream ended well; see the server's output")
    return {
        "serial_tokens_per_second": serial,
        "tokens_per_second": found.tokens / seconds,
        "generated_per_second": made / seconds,
        "server_cpu_us_per_token": {"serial": 1e6 * serial_cpu, "load": 1e6 * load_cpu / made},
        "ratio": found.tokens / seconds / serial,
        "requests": found.requests,
        "wrong": len(found.wrong),
        "broken": found.broken,
        "refused": found.refused,
        "misbehaved": found.misbehaved,
        "first_token_ms": {"median": 1e3 * median(first), "p99": 1e3 * first[int(0.99 * len(first))]},
        "resident_mib": {"after_a_tenth": early / 2**20, "end": end["process_resident_memory_bytes"] / 2**20},
        "rows_busy_at_end": end["tinyforge_rows_busy"],
        "outstanding_at_end": end["tinyforge_outstanding"],
        "examples_of_wrong": found.wrong[:3],
    }


def over_http(args: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tinyforge.serve",
        "--port",
        "0",
        "--rows",
        str(args.rows or args.streams),
        "--backend",
        args.backend,
        "--precision",
        args.precision,
    ]
    if args.checkpoint:
        command += ["--checkpoint", args.checkpoint]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise UserError("the server did not start; its line above says why")
        return asyncio.run(load_it(int(line.rsplit(":", 1)[1]), args))
    finally:
        server.terminate()
        server.wait(timeout=60)


# --- the scheduler alone


def alone(args: argparse.Namespace) -> dict[str, Any]:
    backend = get_backend(args.backend, args.precision, 1)
    if args.checkpoint:
        model = load(Path(args.checkpoint), backend).model
    else:
        config = config_of(PretrainSettings(config=args.config))
        assert isinstance(config, Config), "the default model is not NanoEuler"
        model = NanoEuler(config, backend)
        model.initialise(seed=0)
    rows, prompt, reply = args.streams, args.prompt, args.max_tokens
    if prompt + reply > model.config.context:
        raise UserError(
            f"--prompt {prompt} and --max-tokens {reply} do not fit into the context of "
            f"{model.config.context}; make them smaller"
        )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab, (4 * rows, prompt)).tolist()
    decoder = make_decoder(model, max(2, rows))
    sampling = Sampling(temperature=args.temperature, drafts=0, max_tokens=reply)

    def own_rate() -> float:
        """Tokens a second of the decoder alone: the prompts in the cache, a reply for every row."""
        texts = [list(p) for p in prompts[: decoder.batch]]
        texts += [[0, 0]] * (decoder.batch - len(texts))
        decoder.rewind([0] * decoder.batch)
        for row, text in enumerate(texts):
            decoder.prefill(row, text[:-1])
        backend.synchronize()
        begun = time.perf_counter()
        for drawn in draw_blocks(decoder, texts, sampling, reply):
            for text, new in zip(texts, drawn.ids.tolist(), strict=True):
                text += new
        backend.synchronize()
        return rows * reply / (time.perf_counter() - begun)

    def scheduled(seconds: float) -> tuple[float, list[float]]:
        """Tokens a second with `rows` requests at every time, and each one's time to its first token."""
        scheduler, count, alive, tokens, first = Scheduler(model, rows, decoder=decoder), 0, 0, 0, []
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds or scheduler.busy:
            while now < begun + seconds and alive < rows:
                scheduler.submit(prompts[count % len(prompts)], sampling)
                count, alive = count + 1, alive + 1
            for request, new in scheduler.step():
                tokens += len(new)
                if request.reason and request.first_token:
                    alive -= 1
                    first.append(request.first_token - request.submitted)
        return tokens / (time.monotonic() - begun), sorted(first)

    own_rate(), scheduled(min(5, args.seconds / 4))
    before = own_rate()
    rate, first = scheduled(args.seconds)
    own = median([before, own_rate(), own_rate()])
    found = {
        "decoder": type(decoder).__name__,
        "own_tokens_per_second": own,
        "tokens_per_second": rate,
        "ratio": rate / own,
        "first_token_ms": {"median": 1e3 * median(first), "p99": 1e3 * first[int(0.99 * len(first))]},
    }
    if args.peer:
        found["torch_tokens_per_second"] = torch_rate(args, model, prompts[:rows])
    return found


def torch_rate(args: argparse.Namespace, model: Any, prompts: list[list[int]]) -> float:
    """PyTorch's static batch: the same prompts in its cache, the same number of tokens, greedy."""
    from bench.torch_decode import TorchDecoder  # torch is needed only here

    gpu = model.backend.name == "cupy"
    decoder = TorchDecoder(
        model.config,
        named(model.buffer, model.buffer.masters, model.backend),
        batch=len(prompts),
        precision=args.precision,
        device="cuda" if gpu else "cpu",
        threads=cores(),
        compiled=gpu,
    )
    tokens = np.array(prompts)
    first = args.prompt - 1
    places = [(decoder.on_device(np.array([t])), t + 1) for t in range(first, first + args.max_tokens)]
    rates = []
    for _ in range(4):
        decoder.fill(tokens[:, :-1])
        ids = decoder.on_device(tokens[:, -1:])
        model.backend.synchronize()
        begun = time.perf_counter()
        decoder.greedy(ids, places).cpu()
        rates.append(len(prompts) * len(places) / (time.perf_counter() - begun))
    return median(rates[1:])


def table(found: dict[str, Any]) -> str:
    return "\n".join(f"{name:<26} {value}" for name, value in found["results"].items())


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--checkpoint", metavar="DIR", help="the model (default: the shipped one; random with --no-http)")
    p.add_argument("--config", default="small", help="preset of random weights, with --no-http (default: small)")
    p.add_argument("--streams", type=int, default=64, help="requests at a time (default: 64)")
    p.add_argument("--rows", type=int, help="of the server (default: as many as streams)")
    p.add_argument("--seconds", type=float, default=300, help="of load (default: 300)")
    p.add_argument("--works", type=int, default=150, help="different requests (default: 150)")
    p.add_argument("--max-tokens", type=int, default=80, help="longest reply (default: 80)")
    p.add_argument("--prompt", type=int, default=32, help="tokens, with --no-http (default: 32)")
    p.add_argument("--temperature", type=float, default=0.8, help="with --no-http (default: 0.8)")
    p.add_argument("--no-http", action="store_true", help="drive the scheduler directly")
    p.add_argument("--backend", default="numpy", help="numpy, cupy (default: numpy)")
    p.add_argument("--precision", default="fp32", help="fp32, and on a GPU tf32 or bf16 (default: fp32)")
    p.add_argument("--peer", choices=("torch",), help="time PyTorch's static batch too, with --no-http")
    add_json_flag(p)
    args = p.parse_args(argv)
    for name, least in (("streams", 1), ("works", 5), ("max_tokens", 8), ("prompt", 1), ("seconds", 1)):
        if not getattr(args, name) >= least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, wants {least} or more")
    check_before(args.json, args.peer)
    load_average = os.getloadavg()[0]
    results = alone(args) if args.no_http else over_http(args)
    found = {
        "device": {"cpu": cpu_model(), "cores": cores(), "load_average_before": load_average},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "backend": args.backend,
        "precision": args.precision,
        "streams": args.streams,
        "seconds": args.seconds,
        "results": results,
    }
    publish(found, table(found), args.json)
    return 1 if results.get("wrong") or results.get("broken") else 0


if __name__ == "__main__":
    run_command(main)
