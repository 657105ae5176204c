"""Train a tokenizer, use it, and look into it.

    python -m tinyforge.text.bpe train FILE... --vocab-size 4096 --out tokenizer.json
    python -m tinyforge.text.bpe encode book.txt --tokenizer tokenizer.json > ids.txt
    python -m tinyforge.text.bpe decode ids.txt --tokenizer tokenizer.json
    python -m tinyforge.text.bpe inspect "Once upon a time" --tokenizer tokenizer.json

encode and decode read standard input when no file is named. inspect shows how a text is cut into pre-tokens, how
these are cut into tokens, and the merges that make one of the tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import chain, cycle
from pathlib import Path

from tinyforge.errors import UserError
from tinyforge.text.bpe import Tokenizer, split, to_utf8

IDS_PER_LINE = 32

# Dark text on two light backgrounds in turn, so that neighbours differ and a space can be seen.
COLOURS = ("\x1b[30;106m", "\x1b[30;103m")
PLAIN = "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tinyforge.text.bpe", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|encode|decode|inspect")

    train = commands.add_parser("train", help="learn a vocabulary from text files")
    train.add_argument("files", nargs="+", metavar="FILE", help="text in UTF-8")
    train.add_argument("--vocab-size", type=int, required=True, metavar="N",
                       help="number of ids: 256 bytes, the merges, the special tokens")  # fmt: skip
    train.add_argument("--out", required=True, metavar="FILE", help="the tokenizer, as JSON")
    train.add_argument("--special", action="append", metavar="TEXT",
                       help="a special token; may be repeated (default: <|endoftext|> and </s>)")  # fmt: skip

    encode = commands.add_parser("encode", help="text or any bytes -> ids, in decimal")
    decode = commands.add_parser("decode", help="ids, in decimal with white space between -> text, byte for byte")
    for command in (encode, decode):
        command.add_argument("file", nargs="?", default="-", metavar="FILE", help="default: standard input")
    inspect = commands.add_parser("inspect", help="show the pre-tokens and tokens of a text, and how a token is made")
    inspect.add_argument("text", metavar="TEXT")
    inspect.add_argument("--token", type=int, metavar="ID", help="show its merges (default: the text's longest token)")
    for command in (encode, decode, inspect):
        command.add_argument("--tokenizer", required=True, metavar="FILE", help="a file that train wrote")

    args = parser.parse_args(argv)
    if args.command == "train":
        run_train(args.files, args.vocab_size, args.out, args.special)
    elif args.command == "encode":
        run_encode(Tokenizer.load(args.tokenizer), args.file)
    elif args.command == "decode":
        run_decode(Tokenizer.load(args.tokenizer), args.file)
    else:
        run_inspect(Tokenizer.load(args.tokenizer), args.text, args.token)
    return 0


def read_input(file: str) -> bytes:
    """All bytes of `file`, or of standard input for "-"."""
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the path") from error


def name_of(file: str) -> str:
    return "standard input" if file == "-" else file


# --- train, encode, decode ----------------------------------------------------------------------------------


def read_utf8(file: str) -> str:
    """Text of `file` with its line ends as they are: a tokenizer must see what `encode` will see."""
    try:
        return read_input(file).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name_of(file)}: got no UTF-8 at byte {error.start}, wanted text; convert the file to UTF-8"
        ) from error


def run_train(files: list[str], vocab_size: int, out: str, specials: list[str] | None) -> None:
    folder = Path(out).parent
    if not folder.is_dir():  # said now, not after minutes of training
        raise UserError(f"cannot write the tokenizer {out}: {folder} is no folder; create it or choose another")
    progress = sys.stderr.isatty()
    texts = (read_utf8(file) for file in files)
    if specials is None:
        tokenizer = Tokenizer.train(texts, vocab_size, progress=progress)
    else:
        tokenizer = Tokenizer.train(texts, vocab_size, tuple(specials), progress)
    tokenizer.save(out)
    print(f"{out}: {tokenizer.vocab_size} ids: 256 bytes, {len(tokenizer.merges)} merges, "
          f"{len(tokenizer.specials)} special tokens")  # fmt: skip


def run_encode(tokenizer: Tokenizer, file: str) -> None:
    ids = tokenizer.encode_bytes(read_input(file))
    for start in range(0, len(ids), IDS_PER_LINE):
        print(*ids[start : start + IDS_PER_LINE])


def run_decode(tokenizer: Tokenizer, file: str) -> None:
    ids = []
    for number, word in enumerate(read_input(file).split(), start=1):
        if not word.isdigit() or len(word) > 18:
            got = ascii(word[:40].decode("utf-8", "replace"))
            raise UserError(
                f"{name_of(file)}: got {got} as id number {number}, wanted whole numbers with white space between; "
                "give what encode printed"
            )
        ids.append(int(word))
    data = tokenizer.decode_bytes(ids)
    if sys.stdout.isatty():
        # Ids of unknown origin must not be able to steer the terminal.
        print(visible(data, keep="\n\t"))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


# --- inspect ------------------------------------------------------------------------------------------------


def visible(data: bytes, keep: str = "") -> str:
    r"""`data` as text, with control characters and bytes that are no character as escapes: \n, \x1b, \xf0.

    Escaped too is what standard output cannot write.
    """
    out = []
    for character in data.decode("utf-8", "surrogateescape"):
        if "\udc80" <= character <= "\udcff":
            out.append(f"\\x{ord(character) - 0xDC00:02x}")
        elif character.isprintable() or character in keep:
            out.append(character)
        else:
            out.append(character.encode("unicode_escape").decode())
    encoding = sys.stdout.encoding or "utf-8"
    return "".join(out).encode(encoding, "backslashreplace").decode(encoding)


def use_colour() -> bool:
    """A terminal, and no wish against it: see no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def side_by_side(parts: list[bytes], colour: bool) -> str:
    """The parts in a row: told apart by background, or by quotation marks where there is no colour."""
    if colour:
        return "".join(f"{c}{visible(part)}{PLAIN}" for c, part in zip(cycle(COLOURS), parts, strict=False))
    return " ".join(f"'{visible(part)}'" for part in parts)


def merges_of(tokenizer: Tokenizer, id: int) -> list[int]:
    """Ids of the tokens that merges make on the way to `id`, itself included, in the order learned."""
    found: set[int] = set()
    todo = [id]
    while todo:
        token = todo.pop()
        if 256 <= token < 256 + len(tokenizer.merges) and token not in found:
            found.add(token)
            todo += tokenizer.merges[token - 256]
    return sorted(found)


def run_inspect(tokenizer: Tokenizer, text: str, token: int | None) -> None:
    colour = use_colour()
    pieces = list(chain.from_iterable(split(text)))
    tokens = [tokenizer.encode(piece) for piece in pieces]
    ids = list(chain.from_iterable(tokens))
    if token is None and ids:
        token = max(ids, key=lambda id: int(tokenizer.byte_lengths[id]))
    elif token is not None:
        tokenizer.token_bytes(token)  # an unknown id is an error before anything is shown

    print(f"{len(to_utf8(text))} bytes, {len(pieces)} pre-tokens, {len(ids)} tokens")
    print("pre-tokens:", side_by_side(list(map(to_utf8, pieces)), colour))
    print("tokens:    ", side_by_side([tokenizer.token_bytes(id) for id in ids], colour))
    print("ids:       ", *ids)
    if token is None:
        return

    def shown(id: int) -> str:
        return side_by_side([tokenizer.token_bytes(id)], colour)

    print()
    made = merges_of(tokenizer, token)
    if not made:
        kind = "a byte" if token < 256 else "a special token"
        print(f"token {token} {shown(token)} is {kind}: no merge makes it")
        return
    count = "1 merge" if len(made) == 1 else f"{len(made)} merges"
    print(f"token {token} {shown(token)} is made by {count}, in the order learned:")
    for id in made:
        left, right = tokenizer.merges[id - 256]
        print(f"  merge {id - 256}: {shown(left)} + {shown(right)} -> {shown(id)}, id {id}")
