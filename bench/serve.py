"""Load a server: many streams at once, together with clients that vanish, send garbage and read slowly.

    python bench/serve.py                                   the shipped model on this CPU, 64 streams, five minutes
    python bench/serve.py --seconds 20 --streams 16         a quick look
    python bench/serve.py --checkpoint runs/sft --json load.json
    python bench/serve.py --checkpoint SmolLM2-135M-Instruct.Q4_1.gguf --peer llamacpp --threads 1
    python bench/serve.py --no-http                         the scheduler alone, next to the decoder's own rate
    python bench/serve.py --no-http --config base --backend cupy --precision bf16 --streams 256 --max-tokens 256 \
        --seconds 20 --peer torch

Over HTTP: a server is started as another process, on a free port of this machine. Each of a set of requests (greedy and
sampled, with and without drafts, chats and completions, a third by a JSON schema, or as --schema says) is first made
alone, one after the other: that gives its text and the rate of serial requests. Then `--streams` clients stream
requests from the set for `--seconds`, without a pause, while others vanish in the middle, send what is no request, or
read slowly. Every text must be the one that the request had alone. At the end all rows must be free, and the memory
where it was after a tenth of the time.
Time to the first token is from the request to the first piece of text. The server's processor time for a token is
measured too: other programs on the machine change it less.

With --peer llamacpp (PyPI's xllamacpp) this server and llama.cpp's take turns over HTTP, with the same .gguf file (ours
computes in fp32) and --threads threads: milliseconds to the first token of a prompt of some 450 tokens and, with other
last lines, of the next ones; of a short prompt, alone and while 2 clients send long ones; then 12 requests at once for
8 rows, of 16 tokens each.

With --no-http no server is needed (nor its libraries): random weights unless there is a checkpoint; each row's prompt
is `--prompt` tokens, its reply `--max-tokens`; as one ends another takes its place. The decoder's own rate is that of
`draw_blocks` with as many rows, at the same positions. --schema all adds the rate with a JSON schema for every text, in
turns with the rate without. --peer torch adds PyTorch's static batch, compiled on a GPU.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from tinyforge.backends.workers import cores
from tinyforge.data.world import documents
from tinyforge.errors import UserError, run_command
from tinyforge.formats import load, resolve_checkpoint
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.generation import draw_blocks
from tinyforge.infer.grammar import Constraint, Grammars
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import Scheduler
from tinyforge.tokenizers import load_tokenizer

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
    """What a client received of one request. ended: whether the stream was complete."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    ended: bool = False

    def add(self, event: bytes, begun: float) -> None:
        if event == b"data: [DONE]":
            self.ended = True
            return
        value = json.loads(event[6:])
        for choice in value.get("choices", ()):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if piece and not self.text:
                self.first = time.perf_counter() - begun
            self.text += piece
        if value.get("usage"):
            self.tokens = value["usage"]["completion_tokens"]


SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 3, "maxItems": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 1000},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["names", "count", "color"],
}


ENDLESS = {"type": "array", "items": SCHEMA, "minItems": 1000}
"""So that texts have all of their tokens."""


def works_of(count: int, max_tokens: int, schema: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests: path and body. Some prompts share a beginning. schema: which have one: none, third, all."""
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
        if schema == "all" or (schema == "third" and i % 3 == 2):
            body["response_format"] = {"type": "json_object", "schema": SCHEMA}
        words = texts[rng.randrange(4)][:60] + text[: rng.randrange(5, 60)]
        if i % 3:
            found.append(("/v1/completions", body | {"prompt": words}))
        else:
            found.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": words[-50:]}]}))
    return found


async def ask(
    port: int, work: tuple[str, dict[str, Any]], pause: float = 0, leave_after: float = float("inf")
) -> Stream | int:
    """A streamed request; the status where it is not 200. pause: before each read. leave_after: pieces."""
    path, content = work
    body, begun, found = json.dumps(content).encode(), time.perf_counter(), Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if status != 200:
            return status
        rest, pieces = b"", 0
        while not found.ended and pieces <= leave_after:
            if pause:
                await asyncio.sleep(pause)
            size = int(await reader.readline() or b"0", 16)
            if not size:
                break  # without [DONE]: broken
            *events, rest = (rest + await reader.readexactly(size)).split(b"\n\n")
            await reader.readexactly(2)
            for event in events:
                found.add(event, begun)
            pieces += 1
        return found
    except (asyncio.IncompleteReadError, ConnectionError, ValueError, IndexError):
        return found
    finally:
        writer.close()


async def metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).split(b"\r\n\r\n", 1)[1].decode()
    writer.close()
    return {name: float(value) for name, value in re.findall(r"^(\w+) ([-+.e\d]+)$", text, re.M)}


CPU, RESIDENT = "process_cpu_seconds_total", "process_resident_memory_bytes"


class Clients:
    """Good and bad clients of the server at `port`, and what they received."""

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self.port, self.works, self.rng = port, works_of(args.works, args.max_tokens, args.schema), random.Random(1)
        self.alone: list[str] = []
        self.first: list[float] = []
        self.wrong: list[str] = []
        self.tokens = self.requests = self.refused = self.broken = 0
        self.misbehaved: Counter[str] = Counter()
        self.until = 0.0

    def on(self) -> bool:
        return time.perf_counter() < self.until

    async def one_by_one(self) -> tuple[float, float]:
        """Each request alone: tokens a second, and the server's processor time for a token."""
        for work in self.works[:5]:  # warm-up
            await ask(self.port, work)
        cpu, begun, tokens = (await metrics(self.port))[CPU], time.perf_counter(), 0
        for work in self.works:
            stream = await ask(self.port, work)
            if not isinstance(stream, Stream) or not stream.ended:
                raise UserError(f"the server does not answer a request made alone: {stream}; see its output")
            self.alone.append(stream.text)
            tokens += stream.tokens
        seconds = time.perf_counter() - begun
        return tokens / seconds, ((await metrics(self.port))[CPU] - cpu) / tokens

    async def good(self) -> None:
        while self.on():
            number = self.rng.randrange(len(self.works))
            stream = await ask(self.port, self.works[number])
            if not isinstance(stream, Stream):
                self.refused += 1
                await asyncio.sleep(0.05)
                continue
            self.requests += 1
            self.tokens += stream.tokens
            if not stream.ended:
                self.broken += 1
            elif stream.text != self.alone[number]:
                self.wrong.append(f"{self.works[number]}: {stream.text!r}, alone {self.alone[number]!r}")
            else:
                self.first.append(stream.first)

    async def vanishing(self) -> None:
        while self.on():
            await ask(self.port, self.rng.choice(self.works), leave_after=self.rng.randrange(4))
            self.misbehaved["vanished"] += 1
            await asyncio.sleep(0.1)

    async def garbage(self) -> None:
        while self.on():
            with suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(self.rng.choice(GARBAGE))
                await asyncio.sleep(0.2)
                writer.close()
            self.misbehaved["garbage"] += 1

    async def slow(self) -> None:
        while self.on():
            number = self.rng.randrange(len(self.works))
            stream = await ask(self.port, self.works[number], pause=0.3)
            self.misbehaved["slow readers"] += 1
            if isinstance(stream, Stream) and stream.ended and stream.text != self.alone[number]:
                self.wrong.append(f"slow reader, {self.works[number]}")


async def load_it(port: int, args: argparse.Namespace) -> dict[str, Any]:
    clients = Clients(port, args)
    serial, serial_cpu = await clients.one_by_one()
    before, begun, early = await metrics(port), time.perf_counter(), 0.0
    clients.until = begun + args.seconds

    async def memory() -> None:
        nonlocal early
        await asyncio.sleep(0.1 * args.seconds)
        early = (await metrics(port))[RESIDENT]

    bad = [*(clients.vanishing() for _ in range(4)), *(clients.garbage() for _ in range(2))]
    bad += [clients.slow() for _ in range(3)]
    await asyncio.gather(*(clients.good() for _ in range(args.streams)), *bad, memory())
    cpu, seconds = (await metrics(port))[CPU] - before[CPU], time.perf_counter() - begun
    await asyncio.sleep(3)
    end, first = await metrics(port), sorted(clients.first)
    made = end["tinyforge_generated_tokens_total"] - before["tinyforge_generated_tokens_total"]
    if not first:
        raise UserError("no stream ended well; see the server's output")
    rate = clients.tokens / seconds
    found: dict[str, Any] = {"serial_tokens_per_second": serial, "tokens_per_second": rate}
    found |= {"generated_per_second": made / seconds, "ratio": rate / serial}
    found["server_cpu_us_per_token"] = {"serial": 1e6 * serial_cpu, "load": 1e6 * cpu / made}
    found |= {"requests": clients.requests, "wrong": len(clients.wrong), "broken": clients.broken}
    found |= {
        "refused": clients.refused,
        "misbehaved": dict(clients.misbehaved),
        "first_token_ms": first_token_ms(first),
    }
    found["resident_mib"] = {"after_a_tenth": early / 2**20, "end": end[RESIDENT] / 2**20}
    found |= {f"{name}_at_end": end[f"tinyforge_{name}"] for name in ("rows_busy", "outstanding")}
    return found | {"examples_of_wrong": clients.wrong[:3]}


def first_token_ms(seconds: list[float]) -> dict[str, float]:
    """Of sorted seconds."""
    return {"median": 1e3 * median(seconds), "p99": 1e3 * seconds[int(0.99 * len(seconds))]}


@contextmanager
def serving(command: Sequence[Any], threads: int | None) -> Iterator[int]:
    """The port of a server, a process of its own that prints its address. threads: of BLAS."""
    own = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)) if threads else {}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=os.environ | own, text=True, **pipes)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise UserError("the server did not start; its line above says why")
        yield int(line.rsplit(":", 1)[1])
    finally:
        server.terminate()
        server.wait(timeout=60)


def over_http(args: argparse.Namespace) -> dict[str, Any]:
    flags = f"--port 0 --rows {args.rows or args.streams} --backend {args.backend} --precision {args.precision}"
    command = ["-m", "tinyforge.serve", *flags.split()]
    command += ["--checkpoint", args.checkpoint] if args.checkpoint else []
    with serving(command, args.threads) as port:
        return asyncio.run(load_it(port, args))


# --- next to llama.cpp's server

LONG = 1800  # characters, some 450 tokens
HOGS, SHORT, QUEUED, TOKENS, ROWS = 2, 5, 12, 16, 8


async def waits(port: int, turn: int) -> dict[str, float]:
    """Milliseconds to first tokens, and rates. turn: no prompt begins as one of another turn."""
    text = " ".join(documents("val", 400, 0))

    async def first(prompt: str, tokens: int = 1) -> float:
        body = {"prompt": f"{turn}. {prompt}", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        stream = await ask(port, ("/v1/completions", body | {"stream": True}))
        if not isinstance(stream, Stream) or not stream.first:
            raise UserError(f"a server does not answer: {stream}; see its output")
        return 1e3 * stream.first

    def part(number: int) -> str:
        return text[number * LONG // 3 :][:LONG]

    async def hog(number: int) -> None:
        while not ended.is_set():
            await first(f"{number} {len(sent)} {part(1 + number)}")
            sent.append(number)

    await first("Hello", 4)  # what the first request loads
    prefix, *later = [await first(f"{part(0)}\nQuestion {i}: who?") for i in range(1 + SHORT)]
    alone, sent, ended = [await first(f"{i} is a number") for i in range(SHORT)], list[int](), asyncio.Event()
    hogs = [asyncio.create_task(hog(i)) for i in range(HOGS)]
    await asyncio.sleep(1)
    begun = time.perf_counter()
    busy = [await first(f"{i} is no number") for i in range(SHORT)]
    long_rate = len(sent) / (time.perf_counter() - begun)
    ended.set()
    await asyncio.gather(*hogs)
    begun = time.perf_counter()
    queue = [first(f"Story {i}: {part(9)[i * 40 : i * 40 + 90]}", TOKENS) for i in range(QUEUED)]
    queued = await asyncio.gather(*queue)
    rate = QUEUED * TOKENS / (time.perf_counter() - begun)
    found = {"long_first_ms": prefix, "long_next_ms": median(later), "short_ms": median(alone)}
    found |= {"short_busy_ms": median(busy), "short_busy_worst_ms": max(busy), "long_per_second_meanwhile": long_rate}
    return found | {"queue_tokens_per_second": rate, "queue_ms": median(queued), "queue_worst_ms": max(queued)}


def next_to_llama_cpp(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By figure: the medians of ours and of llama.cpp's server, and all turns."""
    model, threads = Path(args.checkpoint).resolve(), args.threads or cores()
    own = ["-m", "tinyforge.serve", "--port", "0", "--rows", str(ROWS), "--backend", "numpy", "--checkpoint", model]
    commands = {harness.OURS: own, harness.LLAMA_CPP: [ROOT / "bench" / "llama_cpp.py", model, str(threads)]}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        ports = {name: stack.enter_context(serving(command, threads)) for name, command in commands.items()}
        for turn in range(args.rounds):
            for name, port in ports.items():
                turns[name].append(asyncio.run(waits(port, turn)))
    found: dict[str, dict[str, Any]] = {}
    for figure in turns[harness.OURS][0]:
        of = {name: [each[figure] for each in found_by] for name, found_by in turns.items()}
        found[figure] = {name: median(values) for name, values in of.items()} | {"turns": of}
    return found


# --- the scheduler alone


class Alone:
    """The scheduler and its decoder, driven directly: each row has a prompt and a reply of fixed lengths."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.backend, self.rows = args, harness.backend_of(args, 1), args.streams
        if args.checkpoint:
            self.model: Any = load(resolve_checkpoint(args.checkpoint), self.backend).model
        else:
            self.model = harness.nanoeuler(harness.nanoeuler_config(args.config), self.backend)
        config = self.model.config
        if args.prompt + args.max_tokens > config.context:
            raise UserError(
                f"--prompt {args.prompt} and --max-tokens {args.max_tokens} do not fit into the context of "
                f"{config.context}; make them smaller"
            )
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, config.vocab, (4 * self.rows, args.prompt)).tolist()
        self.decoder = make_decoder(self.model, max(2, self.rows))
        self.sampling = Sampling(temperature=args.temperature, drafts=0, max_tokens=args.max_tokens)
        self.constraint: Constraint | None = None
        if args.schema == "all":
            tokenizer = load_tokenizer(ROOT / "models" / "nanoeuler" / "small" / "tokenizer.json")
            self.constraint = Grammars(tokenizer, (), config.vocab).compile("json_schema", json.dumps(ENDLESS))

    def own_rate(self) -> float:
        """Tokens a second of the decoder alone: the prompts in the cache, a reply for every row."""
        decoder = self.decoder
        texts = [list(p) for p in self.prompts[: decoder.batch]]
        texts += [[0, 0]] * (decoder.batch - len(texts))
        decoder.rewind([0] * decoder.batch)
        for row, text in enumerate(texts):
            decoder.prefill(row, text[:-1])

        def decode(_: int) -> None:
            for block in draw_blocks(decoder, texts, self.sampling, self.args.max_tokens):
                for text, new in zip(texts, block.ids.tolist(), strict=True):
                    text += new

        return self.rate(decode)

    def rate(self, decode: Callable[[int], Any]) -> float:
        """Tokens a second of a reply in every row."""
        [[seconds]] = harness.take_turns({"": decode}, 1, self.backend.synchronize, warm_up=0).values()
        return self.rows * self.args.max_tokens / seconds

    def scheduled(self, seconds: float, constraint: Constraint | None = None) -> tuple[float, list[float]]:
        """Tokens a second with `rows` requests at every time, and each one's time to its first token, sorted."""
        scheduler, count, alive, tokens = Scheduler(self.model, self.rows, decoder=self.decoder), 0, 0, 0
        first: list[float] = []
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds or scheduler.busy:
            while now < begun + seconds and alive < self.rows:
                prompt, bound = self.prompts[count % len(self.prompts)], constraint and constraint.copy()
                scheduler.submit(prompt, self.sampling, constraint=bound)
                count, alive = count + 1, alive + 1
            for request, new in scheduler.step():
                tokens += len(new)
                if request.reason and request.first_token:
                    alive -= 1
                    first.append(request.first_token - request.submitted)
        return tokens / (time.monotonic() - begun), sorted(first)

    def bound(self) -> float:
        """Tokens a second by the schema."""
        return self.scheduled(self.args.seconds, self.constraint)[0]

    def torch_rate(self) -> float:
        """PyTorch's static batch: the same prompts in its cache, the same number of tokens, greedy."""
        from bench.torch_decode import TorchDecoder  # torch is needed only here

        mode = "reduce-overhead" if self.backend.name == "cupy" else None
        decoder, tokens = TorchDecoder(self.model, self.rows, cores(), mode), np.array(self.prompts[: self.rows])
        places, ids = decoder.places(self.args.prompt - 1, self.args.max_tokens), decoder.on_device(tokens[:, -1:])
        rates = []
        for _ in range(4):
            decoder.fill(tokens[:, :-1])
            rates.append(self.rate(lambda _: decoder.greedy(ids, places).cpu()))
        return median(rates[1:])

    def measure(self) -> dict[str, Any]:
        self.own_rate(), self.scheduled(min(5, self.args.seconds / 4))
        before = self.own_rate()
        rate, first = self.scheduled(self.args.seconds)
        own = median([before, self.own_rate(), self.own_rate()])
        found = {
            "decoder": type(self.decoder).__name__,
            "own_tokens_per_second": own,
            "tokens_per_second": rate,
            "ratio": rate / own,
            "first_token_ms": first_token_ms(first),
        }
        if self.constraint:
            rates = [(self.scheduled(self.args.seconds)[0], self.bound()) for _ in range(3)]
            plain, bound = (median(column) for column in zip(*rates, strict=True))
            found |= {"plain_tokens_per_second": plain, "schema_tokens_per_second": bound, "schema": bound / plain}
        return found | ({"torch_tokens_per_second": self.torch_rate()} if self.args.peer else {})


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, "")
    p.text("--checkpoint", metavar="DIR", help="the model (default: the shipped one; random with --no-http)")
    p.shared(config={"help": "preset of random weights, with --no-http"})
    p.number("--streams", 64, "requests at a time")
    p.number("--rows", None, "of the server (default: as many as streams)")
    p.number("--seconds", 300.0, "of load")
    p.number("--works", 150, "different requests", 5)
    p.number("--max-tokens", 80, "longest reply", 8)
    p.number("--prompt", 32, "tokens, with --no-http")
    p.number("--temperature", 0.8, "with --no-http", 0)
    p.text("--schema", "third", "which texts follow a JSON schema", choices=("none", "third", "all"))
    p.switch("--no-http", "drive the scheduler directly")
    p.shared("precision", backend={"default": "numpy"})
    p.shared(threads={"help": "of the servers (default: one a core)"})
    p.number("--rounds", 3, "counted turns next to llama.cpp")
    peers = "llama.cpp's server instead of a load, or PyTorch's static batch, with --no-http"
    p.shared(peer={"choices": ("torch", "llamacpp"), "help": f"measure {peers}"})
    args = p.parse(argv)
    if args.peer and (args.peer == "torch") != args.no_http:
        raise UserError(f"--peer {args.peer}: with --no-http the peer is torch, without it llamacpp")
    if args.peer == "llamacpp" and Path(args.checkpoint or "").suffix != ".gguf":
        raise UserError(
            "--peer llamacpp: both read --checkpoint FILE.gguf; python -m tinyforge.formats convert writes it"
        )
    before = harness.machine()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    if args.peer == "llamacpp":
        results = next_to_llama_cpp(args)
        given = {"rounds": args.rounds, "threads": args.threads or cores()}
        versions["xllamacpp"] = version("xllamacpp")
        named = {name: {"ours": row[harness.OURS], "peer": row[harness.LLAMA_CPP]} for name, row in results.items()}
        lines = harness.rows("ours=tinyforge:,.1f | peer=llama.cpp:,.1f", named)
    else:
        results = Alone(args).measure() if args.no_http else over_http(args)
        given = {name: getattr(args, name) for name in ("backend", "precision", "streams", "seconds", "schema")}
        lines = [f"{name:<26} {value}" for name, value in results.items()]
    found = {"device": before, "versions": versions, **given, "results": results}
    harness.publish(found, lines, args)
    return 1 if results.get("wrong") or results.get("broken") else 0


if __name__ == "__main__":
    run_command(main)
