"""Convert trained models between our checkpoints, Hugging Face directories, GGUF, and llama2.c's .bin files.

    python -m tinyforge.hub convert runs/sft my-model                       our checkpoint, for transformers
    python -m tinyforge.hub convert runs/sft small --format tinyforge --dtype bf16      to give away, with its card
    python -m tinyforge.hub convert SmolLM2-135M smol --format tinyforge    to fine-tune it here
    python -m tinyforge.hub convert stories260K.bin stories                 the tokenizer lies beside it
    python -m tinyforge.hub convert runs/sft model.gguf --type q8_0         for llama.cpp; Ollama's Modelfile beside it
    python -m tinyforge.hub convert runs/sft model.bin                      for llama2.c's run.c

Parts that a format cannot hold, such as the later output heads of NanoEuler, are left out and named on stderr.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.errors import Parser
from tinyforge.files import read_text
from tinyforge.hub.foreign import is_foreign
from tinyforge.hub.gguf_file import TYPES
from tinyforge.hub.pretrained import FORMATS, save_pretrained
from tinyforge.hub.runs import load


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m tinyforge.hub convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", metavar="SRC",
                        help="a run, a checkpoint, a Hugging Face directory, a .gguf or a .bin file")  # fmt: skip
    parser.add_argument("target", metavar="DST", help="the directory, or the .gguf or .bin file, to write")
    parser.add_argument("--format", choices=list(FORMATS), default="",
                        help="format of DST (default: by its suffix, .gguf or .bin for llama2c, else hf)")  # fmt: skip
    parser.add_argument("--type", "--dtype", dest="dtype", choices=TYPES, default="f32",
                        help="type of the stored weights; f16, q8_0, q4_0: gguf alone (default: f32)")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="FILE", help="SRC's tokenizer, where it does not lie beside it")
    args = parser.parse_args(argv)
    source, target = Path(args.source), Path(args.target)
    backend = get_backend("numpy", "fp32", workers=1)
    found = load(source, backend, Path(args.tokenizer) if args.tokenizer else None)
    save_pretrained(found.model, found.tokenizer, target, format=args.format, dtype=args.dtype, meta=found.meta,
                    card=_card_of(found.path, args.dtype))  # fmt: skip
    files = target.iterdir() if target.is_dir() else [target]
    print(f"wrote {target}, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB; "
          f"python -m tinyforge.chat --checkpoint {target}")  # fmt: skip
    return 0


def _card_of(path: Path, dtype: str) -> str:
    """The card of a model of ours, which lies in it or in its run's directory; "" where there is none."""
    if is_foreign(path):
        return ""
    places = [path, path.parent] if path in checkpoint.steps(path.parent) else [path]
    found = next((file for place in places if (file := place / checkpoint.CARD).is_file()), None)
    text = read_text(found, "the card") if found else ""
    return re.sub(r"(Weights\s+are )float32", r"\1bfloat16", text) if dtype == "bf16" else text
