"""Convert trained models between our checkpoints, Hugging Face directories, GGUF, and llama2.c's .bin files.

    python -m tinyforge.formats convert runs/sft my-model  our checkpoint, for transformers
    python -m tinyforge.formats convert runs/sft small --format tinyforge --dtype bf16  to publish, with its card
    python -m tinyforge.formats convert runs/sft small --format tinyforge --dtype int8  one byte per weight
    python -m tinyforge.formats convert storyteller storyteller.gguf  a model of the repository
    python -m tinyforge.formats convert HuggingFaceTB/SmolLM2-135M smol --format tinyforge  from the hub
    python -m tinyforge.formats convert stories260K.bin stories  with the tokenizer next to it
    python -m tinyforge.formats convert runs/sft model.gguf --type q8_0  for llama.cpp; Ollama's Modelfile next to it
    python -m tinyforge.formats convert runs/sft model.gguf --type q4_0 --calibrate text.txt  a smaller loss: see below
    python -m tinyforge.formats convert runs/sft model.bin  for llama2.c's run.c
    python -m tinyforge.formats convert runs/sft my-adapter --adapter  the adapter of a run with --lora, for PEFT

An adapter, ours or PEFT's, is merged into its base; --adapter writes it alone.

--calibrate rounds each matrix by the inputs that it gets from a text: the file is of the same size and type, and closer
to the model on such text. `--weights int4` keeps its numbers.

What is left out is named on stderr: parts that a format cannot hold, such as NanoEuler's later output heads, and the
files, keys and tensors of another program's model that nothing here reads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_text
from tinyforge.formats.feedback import TOKENS, round_to_text
from tinyforge.formats.foreign import is_foreign, spec_of_model
from tinyforge.formats.lost import lost
from tinyforge.formats.pretrained import FORMATS, check_target, next_command, save_opened
from tinyforge.formats.runs import open_model, resolve_checkpoint, write_adapter
from tinyforge.tensors import CALLED
from tinyforge.terminal import one_line

MOST_TEXT = 32 * TOKENS  # characters that are encoded


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.formats convert", description=__doc__)
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a run, a checkpoint, a Hugging Face directory, a .gguf or .bin file, a PEFT adapter, "
        "owner/name[@revision] on the Hugging Face hub, or a model of the repository: small, storyteller",
    )
    parser.add_argument("target", metavar="DST", help="the directory, or the .gguf or .bin file, to write")
    formats = "format of DST (default: by its suffix, .gguf or .bin for llama2c, else hf)"
    parser.flag("--format", str, formats, default="", choices=list(FORMATS))
    parser.add_argument(
        "--type",
        "--dtype",
        dest="dtype",
        default="f32",
        choices=list(dict.fromkeys(name for types in FORMATS.values() for name in types)),
        help="type of the stored weights; f16 and q8_0 to q4_K for gguf only, int8 for tinyforge only (default: f32)",
    )
    parser.flag("--tokenizer", str, "SRC's tokenizer, if it is not next to it", metavar="FILE")
    parser.flag("--base", str, "the base of SRC, if SRC is an adapter whose base has moved", metavar="PATH")
    parser.flag(
        "--calibrate",
        str,
        f"with --type q4_0: a UTF-8 text, of which the first {TOKENS:,} tokens choose how numbers are rounded",
        metavar="FILE",
    )
    parser.flag("--adapter", False, "write only SRC's adapter, in PEFT's format")
    args = parser.parse_args(argv)
    source, target = resolve_checkpoint(args.source), Path(args.target)
    base = resolve_checkpoint(args.base) if args.base else None
    if args.adapter:
        if args.format or args.dtype != "f32" or args.tokenizer or args.calibrate:
            raise UserError(
                "--adapter writes PEFT's format in f32; leave out --format, --dtype, --tokenizer and --calibrate"
            )
        write_adapter(source, target, base)
        print(f"wrote {target}, {megabytes(target):.1f} MB")
        return 0
    format = check_target(target, args.format, args.dtype)  # before a large model is read
    if args.calibrate and args.dtype != "q4_0":
        raise UserError(f"--calibrate is for --type q4_0, got {args.dtype}; leave out --calibrate")
    text = read_text(Path(args.calibrate), "the text of --calibrate") if args.calibrate else ""
    opened = open_model(source, Path(args.tokenizer) if args.tokenizer else None, base)
    if args.calibrate and opened.spec.learns != "text":
        raise UserError(f"--calibrate is for models of next tokens; {source} learns {opened.spec.learns}; leave it out")
    found = opened.build(get_backend("numpy", "fp32", workers=1))
    if args.calibrate:
        tokens = round_to_text(found.model, found.tokenizer.encode(text[:MOST_TEXT]))
        print(f"rounded by {tokens:,} tokens of {args.calibrate}")
    save_opened(found, found.model, target, card_of(found.path, args.dtype), format, args.dtype)
    for line in lost(opened.unread, opened.published, target, format):
        print(f"note: {one_line(line)}", file=sys.stderr)
    print(f"wrote {target}, {megabytes(target):.1f} MB; {next_command(spec_of_model(found.model), target)}")
    return 0


def megabytes(target: Path) -> float:
    """The size of a file, or of the files in a directory."""
    files = target.iterdir() if target.is_dir() else [target]
    return sum(file.stat().st_size for file in files) / 1e6


def card_of(path: Path, dtype: str) -> str:
    """The card of one of our models, from its directory or its run's; "" if there is none."""
    if is_foreign(path):
        return ""
    places = [path, path.parent] if path in checkpoint.steps(path.parent) else [path]
    found = next((file for place in places if (file := place / checkpoint.CARD).is_file()), None)
    text = read_text(found, "the card") if found else ""
    stored = "|".join(map(re.escape, CALLED.values()))
    return re.sub(rf"(Weights\s+are )(?:{stored})", rf"\1{CALLED[dtype]}", text) if dtype in CALLED else text


if __name__ == "__main__":
    run_command(main)
