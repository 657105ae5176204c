"""Talk to a trained NanoEuler.

    python -m models.nanoeuler.chat                         the newest fine-tuned run under runs/
    python -m models.nanoeuler.chat --prompt "What is 3 plus 4?"
    python -m models.nanoeuler.chat --checkpoint runs/pretrain      a base model continues the text

Ctrl-C ends the reply, not the session; Ctrl-D or /bye leaves.
"""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.alpaca import render_prompt
from models.nanoeuler.generate import Sampling, generate
from models.nanoeuler.runs import Loaded, load_model, newest_run
from tinyforge.backends import get_backend
from tinyforge.errors import UserError, run_command


def reply(loaded: Loaded, text: str, sampling: Sampling) -> Iterator[str]:
    """The model's reply (or, from a base model, the continuation) in pieces that never cut a character in two."""
    tokenizer = loaded.tokenizer
    prompt = render_prompt(text) if loaded.meta["kind"] == "sft" else text
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    stop = frozenset(tokenizer.specials.values())
    for token in generate(loaded.model, tokenizer.encode(prompt), sampling, stop):
        piece = decoder.decode(tokenizer.token_bytes(token))
        if piece:
            yield printable(piece)
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


def printable(text: str) -> str:
    """`text` without control characters (newline and tab stay): a model must not be able to steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def say(loaded: Loaded, text: str, sampling: Sampling) -> None:
    try:
        for piece in reply(loaded, text, sampling):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m models.nanoeuler.chat", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    d = Sampling()
    parser.add_argument("--checkpoint", metavar="DIR", help="a run or one of its checkpoints (default: newest)")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave")
    parser.add_argument("--temperature", type=float, default=d.temperature, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=d.top_k, help="0 for no limit (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=d.top_p, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=d.max_tokens, help="longest reply (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=d.seed, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.max_tokens, args.seed)
    path = Path(args.checkpoint) if args.checkpoint else newest_run(("sft", "pretrain"))
    if path is None:
        raise UserError("no trained model under runs/; run python recipes/pretrain.py, then python recipes/sft.py")
    loaded = load_model(path, get_backend("numpy", "fp32", workers=1))
    base = loaded.meta["kind"] != "sft"
    note = "a base model, not fine-tuned: it continues your text" if base else "fine-tuned"
    print(f"{loaded.path} ({note})", file=sys.stderr)
    if args.prompt is not None:
        say(loaded, args.prompt, sampling)
        return 0
    if not sys.stdin.isatty():
        try:
            text = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input is not {error.encoding} text at byte {error.start}; convert it to {error.encoding}"
            ) from error
        say(loaded, text, sampling)
        return 0
    print("Ctrl-C ends a reply; Ctrl-D or /bye leaves.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return 0
        if text == "/bye":
            return 0
        if text:
            try:
                say(loaded, text, sampling)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
