"""Train, use and inspect a tokenizer.

    python -m tinyforge.tokenizers train FILE... --vocab-size 4096 --out tokenizer.json
    python -m tinyforge.tokenizers encode book.txt --tokenizer tokenizer.json > ids.txt
    python -m tinyforge.tokenizers encode book.txt --tokenizer tokenizer.json --out ids.npy
    python -m tinyforge.tokenizers decode ids.txt --tokenizer tokenizer.json
    python -m tinyforge.tokenizers inspect "Once upon a time" --tokenizer tokenizer.json

encode and decode read standard input if no file is named. train and encode read text block by block, and use all cores
for large texts. inspect shows how a text is split into pre-tokens and tokens, and the merges that make one of the
tokens. encode and decode also take the tokenizers of other programs: Hugging Face's tokenizer.json, SentencePiece's
tokenizer.model, llama2.c's tokenizer.bin.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, cycle
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from tinyforge.errors import TextParser, UserError, run_command
from tinyforge.files import writing, written_whole
from tinyforge.report import count_of
from tinyforge.tokenizers.bpe import Tokenizer
from tinyforge.tokenizers.load import load_tokenizer
from tinyforge.tokenizers.pieces import recut, split, to_utf8
from tinyforge.tokenizers.vocabulary import TextTokenizer

IDS_PER_LINE = 32
BLOCK = 1 << 20  # bytes read at a time
NPY = b"\x93NUMPY"  # the first bytes of a .npy file

# Dark text on two alternating light backgrounds, so that neighbours differ and spaces are visible.
COLOURS = ("\x1b[30;106m", "\x1b[30;103m")
PLAIN = "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    parser = TextParser(prog="python -m tinyforge.tokenizers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|encode|decode|inspect")

    train = commands.add_parser("train", help="learn a vocabulary from text files")
    train.add_argument("files", nargs="+", metavar="FILE", help="text in UTF-8")
    train.flag(
        "--vocab-size", int, "number of ids: 256 bytes, the merges, the special tokens", required=True, metavar="N"
    )
    train.flag("--out", str, "the tokenizer, as JSON", required=True, metavar="FILE")
    special = "a special token; may be repeated (default: <|endoftext|> and </s>)"
    train.flag("--special", [], special, action="append", metavar="TEXT")
    train.flag("--single-digits", False, "no token holds more than one digit")

    encode = commands.add_parser("encode", help="text or any bytes -> ids, in decimal")
    encode.flag("--out", str, "write the ids to a .npy file, with 16 or 32 bits each", metavar="FILE")
    decode = commands.add_parser("decode", help="ids, in decimal or in a .npy file -> text, byte for byte")
    for command in (train, encode):
        command.flag("--workers", int, "processes (default: one per core)", metavar="N")
    for command in (encode, decode):
        command.add_argument("file", nargs="?", default="-", metavar="FILE", help="default: standard input")
    inspect = commands.add_parser("inspect", help="show the pre-tokens and tokens of a text, and how a token is made")
    inspect.add_argument("text", metavar="TEXT")
    inspect.flag("--token", int, "show its merges (default: the text's longest token)", metavar="ID")
    for command in (encode, decode, inspect):
        command.flag("--tokenizer", str, "of train, or of another program", required=True, metavar="FILE")

    args = parser.parse_args(argv)
    if args.command == "train":
        run_train(args.files, args.vocab_size, args.out, args.special, args.workers, args.single_digits)
    elif args.command == "encode":
        run_encode(load_tokenizer(args.tokenizer), args.file, args.out, args.workers)
    elif args.command == "decode":
        run_decode(load_tokenizer(args.tokenizer), args.file)
    else:
        run_inspect(load_tokenizer(args.tokenizer), args.text, args.token)
    return 0


# --- input ---------------------------------------------------------------------------------------------------


def name_of(file: str) -> str:
    return "standard input" if file == "-" else file


def read_blocks(file: str) -> Iterator[bytes]:
    """The bytes of `file`, or of standard input for "-", in blocks."""
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as source:
            while block := source.read(BLOCK):
                yield block
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the path") from error


def read_text(file: str, errors: str) -> Iterator[str]:
    """The text of `file` in parts cut between two pieces, with its line ends unchanged.

    `errors`: "strict" or "surrogateescape", for bytes that are not UTF-8.
    """
    return recut(decode_blocks(read_blocks(file), errors, name_of(file)))


def decode_blocks(blocks: Iterable[bytes], errors: str, name: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    decoded = 0  # bytes before those that the decoder holds
    for block in chain(blocks, [b""]):
        held = len(decoder.getstate()[0])
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}: byte {decoded + error.start} is not UTF-8, expected text; convert the file to UTF-8"
            ) from error
        decoded += held + len(block) - len(decoder.getstate()[0])


# --- train, encode, decode ----------------------------------------------------------------------------------


def check_folder(out: str, what: str) -> None:
    """UserError now, not after minutes of work, if `out` cannot be written."""
    folder = Path(out).parent
    if not folder.is_dir():
        raise UserError(f"cannot write the {what} {out}: {folder} is not a folder; create it or choose another")


def run_train(
    files: list[str], vocab_size: int, out: str, specials: list[str], workers: int | None, single_digits: bool
) -> None:
    check_folder(out, "tokenizer")
    texts = chain.from_iterable(read_text(file, "strict") for file in files)
    options: dict[str, Any] = {"progress": sys.stderr.isatty(), "workers": workers, "single_digits": single_digits}
    if all(map(os.path.isfile, files)):
        options["size"] = sum(map(os.path.getsize, files))  # bytes; about as many as characters
    if specials:
        options["specials"] = tuple(specials)
    tokenizer = Tokenizer.train(texts, vocab_size, **options)
    tokenizer.save(out)
    print(
        f"{out}: {tokenizer.vocab_size} ids: 256 bytes, {len(tokenizer.merges)} merges, "
        f"{len(tokenizer.specials)} special tokens"
    )


def is_ours(tokenizer: TextTokenizer) -> TypeGuard[Tokenizer]:
    """Whether it is a byte-level BPE vocabulary whose ids are in our order."""
    return isinstance(tokenizer, Tokenizer) and tokenizer.byte_order is not None


def run_encode(tokenizer: TextTokenizer, file: str, out: str | None, workers: int | None) -> None:
    if out:
        check_folder(out, "ids")
    parts = read_text(file, "surrogateescape")
    # Only the pieces of our own patterns are known never to cross the edge of a part.
    arrays = tokenizer.encode_many(parts if is_ours(tokenizer) else ["".join(parts)], workers)
    if out:
        count = write_npy(Path(out), arrays, tokenizer.id_dtype)
        print(f"{out}: {count} ids, {tokenizer.id_dtype.itemsize} bytes each")
        return
    ids: list[int] = []
    for array in arrays:
        ids += array.tolist()
        full = len(ids) - len(ids) % IDS_PER_LINE
        print_ids(ids[:full])
        ids = ids[full:]
    print_ids(ids)


def print_ids(ids: list[int]) -> None:
    for start in range(0, len(ids), IDS_PER_LINE):
        print(*ids[start : start + IDS_PER_LINE])


def write_npy(path: Path, arrays: Iterable[npt.NDArray[Any]], dtype: np.dtype[Any]) -> int:
    """Write all ids as one array for `np.load`, and return their number. An old file stays until the new one is whole.

    The number is known only at the end: NumPy's header has room for any number, and is then written again.
    """
    count = 0
    header = {"descr": np.lib.format.dtype_to_descr(dtype.newbyteorder("<")), "fortran_order": False}
    with writing(f"the ids {path}"), written_whole(path) as partial, open(partial, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (0,)})
        for array in arrays:
            file.write(array.astype(dtype.newbyteorder("<"), copy=False).tobytes())
            count += len(array)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
    return count


def read_ids(data: bytes, name: str) -> list[int]:
    """The ids in a .npy file, or in decimal, separated by white space."""
    fix = "give a file that encode wrote"
    if data.startswith(NPY):
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except Exception as error:  # its header is parsed as a Python literal, which can fail in many ways
            raise UserError(f"{name}: a damaged .npy file ({' '.join(str(error).split())}); {fix}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            got = f"{array.ndim} dimensions of {array.dtype}"
            raise UserError(f"{name}: got {got}, expected one dimension of whole numbers; {fix}")
        return array.tolist()
    ids = []
    for number, word in enumerate(data.split(), start=1):
        if not word.isdigit() or len(word) > 18:
            got = ascii(word[:40].decode("utf-8", "replace"))
            raise UserError(
                f"{name}: got {got} as id number {number}, expected whole numbers separated by white space; {fix}"
            )
        ids.append(int(word))
    return ids


def run_decode(tokenizer: TextTokenizer, file: str) -> None:
    data = tokenizer.decode_bytes(read_ids(b"".join(read_blocks(file)), name_of(file)))
    if sys.stdout.isatty():
        # Unknown ids must not send control sequences to the terminal.
        print(visible(data, keep="\n\t"))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


# --- inspect ------------------------------------------------------------------------------------------------


def visible(data: bytes, keep: str = "") -> str:
    r"""`data` as text, with escapes (\n, \x1b, \xf0) for control characters, for bytes that are not UTF-8, and for
    characters that standard output cannot write."""
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


def side_by_side(parts: list[bytes], colour: bool) -> str:
    """The parts in a row, separated by background colours, or by quotation marks without colour."""
    if colour:
        return "".join(f"{c}{visible(part)}{PLAIN}" for c, part in zip(cycle(COLOURS), parts, strict=False))
    return " ".join(f"'{visible(part)}'" for part in parts)


def merges_of(tokenizer: Tokenizer, id: int) -> list[int]:
    """Ids of the merged tokens that `id` is made of, itself included, in the order learned."""
    found: set[int] = set()
    todo = [id]
    while todo:
        token = todo.pop()
        if 256 <= token < 256 + len(tokenizer.merges) and token not in found:
            found.add(token)
            todo += tokenizer.merges[token - 256]
    return sorted(found)


def run_inspect(tokenizer: TextTokenizer, text: str, token: int | None) -> None:
    if not is_ours(tokenizer):
        raise UserError(
            "inspect: got another program's tokenizer, expected one that train wrote; use encode for its ids"
        )
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # no-color.org
    pieces = list(chain.from_iterable(split(text, tokenizer.merging.pattern)))
    tokens = [tokenizer.encode(piece) for piece in pieces]
    ids = list(chain.from_iterable(tokens))
    if token is None and ids:
        token = max(ids, key=lambda id: int(tokenizer.byte_lengths[id]))
    elif token is not None:
        tokenizer.token_bytes(token)  # an unknown id is an error before anything is printed

    counts = count_of(len(to_utf8(text)), "byte"), count_of(len(pieces), "pre-token"), count_of(len(ids), "token")
    print(", ".join(counts))
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


if __name__ == "__main__":
    run_command(main)
