"""Time decoding: microseconds a token, and the share of the memory's bandwidth that it uses.

    python bench/decode.py                                                      small on the CPU, ours alone
    python bench/decode.py --config small --peer torch --json                   next to PyTorch, as one JSON object
    python bench/decode.py --config base --backend cupy --precision bf16 --position 256 --tokens 64 --peer torch
    python bench/decode.py --config base --backend cupy --precision bf16 --batch-size 64 --position 256
    python bench/decode.py --model llama --config TinyLlama-1.1B --backend cupy --precision bf16 --weights int4
    python bench/decode.py --model llama --config TinyLlama-1.1B --backend cupy --precision bf16 --peer torch --regional
    python bench/decode.py --checkpoint runs/sft                                a trained model: plain and speculative
    python bench/decode.py --checkpoint storyteller --peer llamacpp --weights int8 int4 --tokens 64 --rounds 9

Without a checkpoint the weights are random, without drafts: plain greedy decoding of `--tokens` tokens around
`--position`, with the cache filled before. Ours goes through the public generator (for a batch, `draw_blocks`, which is
what `generate_batch` runs). PyTorch's loop does the same and no more: a pass, argmax, the next pass, with nothing
copied to the host in between. On a CPU PyTorch is eager, once with one thread and once with --threads; ours has one. On
a GPU it is eager, compiled, and compiled under a CUDA graph (mode reduce-overhead); with --regional one of its layers
is compiled, and the graph records all of them and argmax. Weights are made on the device, in one or four bits a number
where `--weights` says so. All must agree on the logits at `--position`, ours with those of its model's own ops, to a
share of the largest one.

Bandwidth used (MBU): the bytes that a step must read, which are all weights but embeddings and heads 1 and up, and the
keys and values of every row, over the time and the rate of a large copy on the same device. What a CPU's caches
hold does not come from memory: for a small model the share can exceed 1 there. On a GPU, `of the floor` is the time in
which an H200, at the 4.28 TB/s of its copies, reads those bytes, over the time taken: a yardstick that is the same in
every run.

With a checkpoint: greedy and sampled decoding with 0 drafts and up, on the same prompts in turns; each prompt counts
with the fastest of its rounds, without its prefill.

With a checkpoint and --peer llamacpp (PyPI's xllamacpp): processor milliseconds of a greedy token, `--tokens` after a
short prompt, and of a prompt of `--prompt` tokens up to its first token, on one thread of a CPU. llama.cpp gets the
model in f32, and in q8_0 and q4_0 next to ours in int8 and int4. Its time includes that of sampling and of a request.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.harness import COMPILED, EAGER, GRAPH, LLAMA_CPP, OURS, Flags, LeftOut, Parity
from tinyforge.backends import Backend
from tinyforge.backends.workers import cores
from tinyforge.data.alpaca import Record, read_split
from tinyforge.data.world import Instruction, documents, instructions
from tinyforge.errors import UserError, run_command
from tinyforge.formats import convert, load, resolve_checkpoint
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.decoder_compiled import CompiledDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.generation import draw_blocks
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session, Stats
from tinyforge.models.llama.config import Config as LlamaConfig
from tinyforge.op import Param
from tinyforge.quantised import FOUR_BITS, KINDS
from tinyforge.tokenizers.chat_templates import render_prompt
from tinyforge.train.settings import PretrainSettings, config_of

COPY_BYTES = {"numpy": 256 << 20, "cupy": 2 << 30, "webgpu": 256 << 20}
COPY_ROUNDS = 7
FLOOR_BANDWIDTH = 4.28e12  # bytes per second, read and written, of a large copy on an H200
OPENING = 20  # tokens of a held-out text that a base model is asked to continue
SPECULATION_TOKENS = 80


@dataclass(frozen=True)
class Options:
    """What is timed: `tokens` new ones in each of `batch_size` rows, around `position`, `rounds` times."""

    config: Any
    batch_size: int
    position: int
    tokens: int
    rounds: int
    threads: int
    model: str = "nanoeuler"
    regional: bool = False

    @property
    def start(self) -> int:
        """Tokens that each row has before the first new one."""
        return self.position + 1 - self.tokens // 2

    @property
    def end(self) -> int:
        """Positions that a row needs."""
        return max(self.position + 1, self.start + self.tokens)

    def text(self) -> np.ndarray:
        """Random tokens, (batch_size, position + 1)."""
        return np.random.default_rng(0).integers(0, self.config.vocab, (self.batch_size, self.position + 1))


class Ours:
    def __init__(self, options: Options, model: Any) -> None:
        self.options, self.text = options, options.text()
        self.decoder = make_decoder(model, options.batch_size, min(options.config.context, options.end))
        self.session = Session(model, self.decoder) if options.batch_size == 1 else None
        self.sampling = Sampling(temperature=0, drafts=0, max_tokens=options.tokens)

    def logits(self) -> np.ndarray:
        """Of head 0 at `position`, (batch_size, V); leaves the cache filled up to it."""
        for row, tokens in enumerate(self.text.tolist()):
            self.decoder.prefill(row, tokens[:-1])
        logits = self.decoder.step(self.text[:, -1:])[:, 0, 0].copy()
        if self.session is not None:
            self.session.set_tokens(self.text[0].tolist())
        return logits

    def run(self, _: int = 0) -> None:
        """`tokens` new tokens for each row, from the cache's first `start` - 1 positions on."""
        start = self.options.start
        if self.session is not None:
            self.session.truncate(start)
            for _token in self.session.generate(self.sampling):
                pass
            return
        texts = self.text[:, :start].tolist()
        self.decoder.rewind([start - 1] * len(texts))
        for block in draw_blocks(self.decoder, texts, self.sampling, self.options.tokens):
            for text, new in zip(texts, block.ids.tolist(), strict=True):
                text += new


class Torch:
    def __init__(self, options: Options, model: Any, threads: int, mode: str | None) -> None:
        # Here and not at the top: torch is needed only when it is the peer.
        from bench.torch_decode import TorchDecoder

        self.decoder = TorchDecoder(model, options.batch_size, threads, mode, options.end, options.regional)
        self.text, begin = options.text(), options.start - 1
        self.first = self.decoder.on_device(self.text[:, begin : options.start])
        self.places = self.decoder.places(begin, options.tokens)

    def logits(self) -> np.ndarray:
        return self.decoder.fill(self.text)[:, -1].float().cpu().numpy()

    def run(self, _: int = 0) -> None:
        self.decoder.greedy(self.first, self.places)


Contender = Ours | Torch


def contenders_of(
    options: Options, model: Any, peer: str | None, quantised: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Contender], Parity, LeftOut]:
    """All whose logits agree, their caches filled up to the position; the agreement; and who was left out, with why.

    quantised: by name, models of ours with the same weights as codes, whose logits differ.
    """
    models = {OURS: model, **quantised}
    makers: dict[str, Any] = {name: partial(Ours, options, ours) for name, ours in models.items()}
    if peer:
        makers |= harness.by_threads(
            model.backend, partial(Torch, options, model), options.threads, (EAGER, COMPILED, GRAPH)
        )
    contenders, logits, left_out = harness.soft(makers, lambda contender: contender.logits())
    # Roundings of layers are independent: their errors add up by squares.
    tolerance = harness.LOGITS_TOLERANCE[model.backend.precision.name] * max(1, options.config.layers / 8) ** 0.5
    own = {name: by_own_ops(options, ours) for name, ours in models.items()}
    pairs = {name: (found, own.get(name, own[OURS])) for name, found in logits.items()}
    # As shares of the largest logit: a deep model's are large.
    shares = {name: float(np.abs(a - b).max() / np.abs(b).max()) for name, (a, b) in pairs.items()}
    said = "logits differ, as a share of the largest one, by " + ", ".join(f"{n} {x:.2g}" for n, x in shares.items())
    parity = harness.check_parity({OURS: 0.0, "": max(shares.values())}, tolerance, f"{said}:")
    return contenders, parity, left_out


def by_own_ops(options: Options, model: Any) -> np.ndarray:
    """The logits that `Ours.logits` should give, (batch_size, V), by the model's own forward."""
    h = model.hidden(model.backend.asarray(options.text().astype(np.int32)))
    return np.asarray(model.backend.to_numpy(model.logits(h[:, -1])), np.float32)


def copy_bandwidth(backend: Backend) -> float:
    """Bytes per second, read and written, of a large copy: the fastest of some."""
    half = COPY_BYTES[backend.name] // 2
    source, target = (backend.zeros((half // 4,), np.dtype(np.float32)) for _ in range(2))

    def copy(_: int) -> None:
        target[...] = source

    return 2 * half / min(harness.take_turns({"copy": copy}, COPY_ROUNDS, backend.synchronize)["copy"])


def bytes_per_step(options: Options, model: Any) -> int:
    """What a step must read: the weights it multiplies by, once, and each row's keys and values."""
    c, heads, count = options.config, model.heads.weight, model.prediction_heads
    size = model.backend.dtype.itemsize
    # One row on a GPU reads weights as they are stored, all else their numbers.
    by_code = model.backend.name == "cupy" and options.batch_size == 1

    def read(p: Param) -> int:
        if not by_code:
            return p.size * size
        stored: Any = p.stored
        halves = stored.scales.nbytes // 2 if p.weights == FOUR_BITS else 0  # the decoder has them in float16
        return int(stored.nbytes) - halves

    of = {p: read(p) for p in (*model.buffer.params, *model.buffer.frozen)}
    tables = {model.embedding.weight} | {b.attention.values.table for b in model.blocks if b.attention.values}
    looked_up = sum(of[table] for table in tables - {heads})
    weights = sum(of.values()) - looked_up - of[heads] // count * (count - 1)
    cache = 2 * c.layers * c.kv_heads * c.head_dim * (options.position + 1) * options.batch_size
    return weights + cache * size


def measure(options: Options, backend: Backend, peer: str | None, weights: Sequence[str] = ()) -> dict[str, Any]:
    """Microseconds of a step (one token in each row), by contender."""
    before = harness.machine()
    model, *others = (harness.random_model(options.model, options.config, backend, k) for k in ("", *weights))
    quantised = {f"{OURS}, {k} weights": other for k, other in zip(weights, others, strict=True)}
    contenders, parity, left_out = contenders_of(options, model, peer, quantised)
    bandwidth = copy_bandwidth(backend)
    floor = FLOOR_BANDWIDTH if backend.name == "cupy" else None
    runs = {name: made.run for name, made in contenders.items()}
    times = harness.take_turns(runs, options.rounds, backend.synchronize, between=harness.threads_of(contenders))
    seconds = {name: [t / options.tokens for t in found] for name, found in times.items()}
    results = harness.figures(seconds, "us", "step", options.batch_size)
    for name, found in results.items():
        size = bytes_per_step(options, quantised.get(name, model))
        rate = size / found["median_us"] * 1e6
        found |= {"gb_per_second": rate / 1e9, "mbu": rate / bandwidth, "of_the_floor": rate / floor if floor else None}
        found |= {"ours_over_this_by_min": min(seconds[OURS]) / min(seconds[name]), "bytes_per_step": size}
    size = bytes_per_step(options, model)
    measured: dict[str, Any] = {"bytes_per_step": size, "copy_gb_per_second": bandwidth / 1e9}
    measured["floor_us"] = 1e6 * size / floor if floor else None
    given: dict[str, Any] = {"model": options.model} if options.model != "nanoeuler" else {}
    given |= {"compiled": harness.COMPILED_PARTS[options.regional] if peer else None}
    given |= {"config": options.config.to_dict(), "batch_size": options.batch_size, "position": options.position}
    given |= {"tokens_per_round": options.tokens, "rounds": options.rounds}
    found = {**given, **measured, "parity": parity, "left_out": left_out, "results": results}
    return harness.environment(backend, peer, before) | found


COLUMNS = "median_us:.0f | min_us:.0f | tokens_per_second:,.0f | gb_per_second:.1f | mbu:.0%"
COLUMNS += " | ours_over_this:.2f"


def table(found: dict[str, Any]) -> list[str]:
    """The figures of `measure` for people."""
    rows, tokens, floor = found["batch_size"], found["tokens_per_round"], found["floor_us"]
    what = f"{rows} rows, {tokens} tokens around position {found['position']}, {found['rounds']} rounds"
    reads = f"{found['bytes_per_step'] / 1e6:.2f} MB a step; a copy does {found['copy_gb_per_second']:.1f} GB/s"
    lines = [("decoding", what), ("reads", reads)]
    if found.get("compiled"):
        lines.append(("torch.compile", found["compiled"]))
    if floor:
        lines.append(("floor", f"{floor:.0f} us a step, those bytes at {FLOOR_BANDWIDTH / 1e12} TB/s"))
    columns = COLUMNS + " | of_the_floor:.0%" * bool(floor)
    return harness.heading(found, *lines) + harness.rows(columns, found["results"], left_out=found["left_out"])


# --- a trained model --------------------------------------------------------------------------------------------------


def prompts_of(loaded: Any, count: int, files: Sequence[str]) -> list[list[int]]:
    """files: records whose held-out instructions are the prompts, rather than those of the built-in world."""
    if loaded.meta["kind"] == "pretrain":
        return [loaded.tokenizer.encode(d)[:OPENING] for d in documents("val", count, seed=0)]
    asked: Sequence[Instruction | Record] = [*instructions("val", count, seed=0)]
    if files:
        held_out = [record for records in read_split(files)[1] for record in records]
        asked = held_out[:: -(-len(held_out) // count)]
    return [loaded.tokenizer.encode(render_prompt(e.instruction, e.input)) for e in asked]


def speculate(loaded: Any, texts: Sequence[list[int]], sampling: Sampling, rounds: int) -> list[dict[str, Any]]:
    """The figures of each number of drafts."""
    session, stop = Session(loaded.model), frozenset(loaded.tokenizer.specials.values())
    drafts = range(loaded.model.prediction_heads)
    best, totals = np.full((len(drafts), len(texts)), np.inf), [Stats() for _ in drafts]
    replies: list[list[list[int]]] = [[] for _ in drafts]
    for turn in range(rounds):
        for i, text in enumerate(texts):
            session.set_tokens(text)
            session.stats = Stats()
            for _ in session.generate(replace(sampling, drafts=0, max_tokens=1)):  # the prefill, not counted
                pass
            for d in drafts:
                session.set_tokens(text)
                loaded.model.backend.synchronize()  # work queued for the last reply goes on after its end
                session.stats = stats = totals[d] if turn == 0 else Stats()
                before = stats.decode_seconds
                for _ in session.generate(replace(sampling, drafts=d, seed=i), stop):
                    pass
                best[d, i] = min(best[d, i], stats.first_seconds + stats.decode_seconds - before)
                if turn == 0:
                    replies[d].append(session.tokens[len(text) :])
    speeds = [t.tokens / seconds for t, seconds in zip(totals, best.sum(axis=1), strict=True)]
    found = []
    for d, of in enumerate(totals):
        row: dict[str, Any] = {name: getattr(of, name) for name in ("tokens", "tokens_per_pass", "acceptance")}
        row |= {"tokens_per_second": speeds[d], "over_plain": speeds[d] / speeds[0]}
        row["us_per_pass"] = 1e6 * best[d].sum() / of.passes
        found.append({"drafts": d, **row, "same_text_as_plain": replies[d] == replies[0]})
    return found


def measure_speculation(
    path: Path, backend: Backend, prompts: int, rounds: int, files: Sequence[str] = ()
) -> dict[str, Any]:
    """Tokens per second of a trained model by number of drafts, greedy and by the default sampling."""
    before, loaded = harness.machine(), load(path, backend)
    texts = [t for t in prompts_of(loaded, prompts, files) if len(t) < loaded.model.config.context]
    greedy, sampled = Sampling(temperature=0, max_tokens=SPECULATION_TOKENS), Sampling(max_tokens=SPECULATION_TOKENS)
    kinds = {"greedy": greedy, "sampled": sampled}
    return harness.environment(backend, None, before) | {
        "kind": loaded.meta["kind"],
        "step": loaded.meta.get("step"),
        "config": loaded.model.config.to_dict(),
        "prompts": len(texts),
        "max_tokens": SPECULATION_TOKENS,
        "rounds": rounds,
        "results": {kind: speculate(loaded, texts, sampling, rounds) for kind, sampling in kinds.items()},
    }


SPECULATION_COLUMNS = (
    "drafts | tokens:, | tokens_per_second:,.0f | over_plain=of plain:.2f | tokens_per_pass=a pass:.2f"
    " | us_per_pass=us a pass:.0f | shares=acceptance by head | same=same text"
)


def speculation_table(found: dict[str, Any]) -> list[str]:
    prompts = f"{found['prompts']} held-out prompts, up to {found['max_tokens']} tokens each"
    cases = [(kind, r) for kind, of_kind in found["results"].items() for r in of_kind]
    shares = [" ".join(f"{share:.2f}" for share in r["acceptance"]) for _, r in cases]
    named = [
        (kind, r | {"shares": share, "same": "yes" if r["same_text_as_plain"] else "no"})
        for (kind, r), share in zip(cases, shares, strict=True)
    ]
    lines = harness.heading(found, ("model", f"{found['kind']}, {prompts}, the fastest of {found['rounds']} rounds"))
    return lines + harness.rows(SPECULATION_COLUMNS, named)


# --- a trained model next to llama.cpp --------------------------------------------------------------------------------

BEGINNING = "Once upon a time there was a little girl who lived near the sea."
TYPES = {"": "f32", "int8": "q8_0", "int4": "q4_0"}  # llama.cpp's, by our weights
AGREE = 8  # first tokens that must be the same in f32
Complete = Callable[[list[int], int, bool], str]  # the greedy text of so many tokens after a prompt, cached or not


def completion(loaded: Any, decoder: Decoder) -> Complete:
    session = Session(loaded.model, decoder)

    def complete(prompt: list[int], tokens: int, cached: bool) -> str:
        session.truncate(len(session.tokens) if cached else 0)
        session.set_tokens(prompt)
        made = session.generate(Sampling(temperature=0, drafts=0, max_tokens=tokens))
        return str(loaded.tokenizer.decode([token.id for token in made]))

    return complete


def llama_cpp_completion(file: str, context: int) -> Complete:
    from bench.llama_cpp import started  # xllamacpp is needed only here

    server = started(file, rows=1, context=context)

    def complete(prompt: list[int], tokens: int, cached: bool) -> str:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": cached}
        answer = server.handle_completions(asked)
        assert answer["usage"]["completion_tokens"] == tokens, answer
        assert cached or answer["timings"]["prompt_n"] == len(prompt), answer
        return str(answer["choices"][0]["text"])

    return complete


def measure_next_to_llama_cpp(
    path: Path, backend: Backend, weights: Sequence[str], prompt: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Processor milliseconds of a token and of a prompt, by type of the weights and contender."""
    if backend.name != "numpy" or not set(weights) <= set(TYPES):
        raise UserError("--peer llamacpp: it is for --backend numpy, with --weights int8 and int4")
    before, results = harness.machine(), dict[str, Any]()
    for kind in ("", *weights):
        loaded = load(path, backend, frozen=True, weights=kind)
        short, decoder = loaded.tokenizer.encode(BEGINNING), make_decoder(loaded.model)
        long = np.random.default_rng(0).integers(0, loaded.model.config.vocab, prompt).tolist()
        texts = {OURS: completion(loaded, decoder)}
        if not kind and isinstance(decoder, CompiledDecoder):
            texts[f"{OURS}, NumPy"] = completion(loaded, NumpyDecoder(loaded.model))
        with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            file = f"{folder}/model.gguf"
            convert.main([str(path), file, "--type", TYPES[kind]])
            texts[LLAMA_CPP] = llama_cpp_completion(file, decoder.capacity)
            said = {name: text(short, AGREE, True).strip() for name, text in texts.items()}
            if not kind and len(set(said.values())) > 1:
                raise RuntimeError(f"parity: greedy texts differ: {said}")

            def turns(*work: Any, texts: dict[str, Complete] = texts) -> dict[str, list[float]]:
                runs = {name: partial(lambda text, _: text(*work), text) for name, text in texts.items()}
                return harness.take_turns(runs, rounds, clock=time.process_time)

            first, all_of = turns(short, 1, True), turns(short, tokens + 1, True)
            of_token = {k: [(b - a) / tokens for a, b in zip(first[k], all_of[k], strict=True)] for k in texts}
            results[f"a token, {TYPES[kind]}"] = harness.figures(of_token, "ms", "run", 1)
            results[f"a prompt, {TYPES[kind]}"] = harness.figures(turns(long, 1, False), "ms", "run", prompt)
            texts.clear()
    measured = {"checkpoint": path.name, "tokens": tokens, "prompt": prompt, "rounds": rounds}
    return harness.environment(backend, "llamacpp", before) | measured | {"results": results}


def llama_cpp_table(found: dict[str, Any]) -> list[str]:
    what = f"{found['checkpoint']}, {found['tokens']} tokens, a prompt of {found['prompt']}, {found['rounds']} rounds"
    rows = [(f"{title}: {name}", row) for title, of in found["results"].items() for name, row in of.items()]
    lines = harness.heading(found, ("model", what), ("milliseconds", "of processor time, one thread"))
    return lines + harness.rows("median_ms:.2f | min_ms:.2f | ours_over_this:.2f", rows)


def options_of(args: argparse.Namespace) -> Options:
    config: Any = config_of(PretrainSettings(model=args.model, config=args.config, set=args.set))
    if not isinstance(getattr(config, "trunk", config), LlamaConfig):
        raise UserError(f"--model {args.model}: the bytes of its step are not known; use nanoeuler, llama or moe")
    position = args.position
    if position < args.tokens // 2 or position - args.tokens // 2 + 1 + args.tokens > config.context:
        raise UserError(
            f"--position {position}: {args.tokens} tokens around it are not within the context of {config.context}; "
            "use another position, or fewer --tokens"
        )
    threads = args.threads or cores()
    return Options(config, args.batch_size, position, args.tokens, args.rounds, threads, args.model, args.regional)


def main(argv: Sequence[str] | None = None) -> int:
    p = Flags(__doc__)
    p.text("--model", "nanoeuler", "nanoeuler, llama or moe")
    p.shared("config")
    p.text("--set", (), "fields of the config, as dim=512", nargs="*", metavar="FIELD=VALUE")
    p.number("--batch-size", 1, "rows that are decoded together")
    p.number("--position", 64, "tokens before the one in the middle", 0)
    p.number("--tokens", 16, "tokens a round, around the position")
    p.number("--rounds", 30, "counted runs of each contender")
    p.text("--weights", [], "ours with such weights too", nargs="+", choices=KINDS)
    p.switch("--regional", "compile one layer of PyTorch's, not its model")
    p.shared("backend", "device", "precision", threads={"help": "threads of PyTorch (default: one a core)"})
    peers = "time PyTorch too, or with --checkpoint llama.cpp"
    p.shared(peer={"choices": ("torch", "llamacpp"), "help": peers})
    p.text("--checkpoint", metavar="DIR", help="time plain and speculative decoding of this model instead")
    p.number("--prompt", 512, "tokens of the prompt, next to llama.cpp")
    p.number("--prompts", 60, "held-out prompts, with --checkpoint")
    records = "records as given to sft.py, the last 20th of each file being the prompts, with --checkpoint"
    p.text("--instructions", [], f"{records} (default: built-in ones)", nargs="+", metavar="FILE")
    args = p.parse(argv)
    if (args.peer == "llamacpp") > bool(args.checkpoint) or (args.peer == "torch") and args.checkpoint:
        raise UserError(f"--peer {args.peer}: with --checkpoint the peer is llamacpp, without it torch")
    backend = harness.backend_of(args, 1)
    if args.peer == "llamacpp":
        path, sizes = resolve_checkpoint(args.checkpoint), (args.prompt, args.tokens, args.rounds)
        found = measure_next_to_llama_cpp(path, backend, args.weights, *sizes)
        return harness.publish(found, llama_cpp_table(found), args)
    options = options_of(args)
    if args.checkpoint:
        found = measure_speculation(Path(args.checkpoint), backend, args.prompts, args.rounds, args.instructions)
        return harness.publish(found, speculation_table(found), args)
    found = measure(options, backend, args.peer, args.weights)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
