"""How this copy of tinyforge is started: from a checkout, or installed from a wheel.

Both hold the same files. Messages name commands as README does, `python recipes/pretrain.py`; a wheel has the command
`tinyforge train` in its place, and `as_typed` translates a message when it is shown there.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
IN_CHECKOUT = (PACKAGE.parent / "recipes" / "pretrain.py").is_file()
ROOT = PACKAGE.parent if IN_CHECKOUT else PACKAGE  # the folder of all that belongs to the project

# The subcommands of `tinyforge`: the module that runs each, and what it does.
COMMANDS = {
    "train": ("tinyforge.recipes.pretrain", "pretrain a model on text"),
    "sft": ("tinyforge.recipes.sft", "fine-tune on questions and answers"),
    "dpo": ("tinyforge.recipes.dpo", "learn from preferences"),
    "grpo": ("tinyforge.recipes.grpo", "learn from rewards"),
    "classify": ("tinyforge.recipes.classify", "learn classes of texts or images"),
    "evaluate": ("tinyforge.recipes.evaluate", "measure a model"),
    "ablation": ("tinyforge.recipes.ablation", "compare settings over seeds"),
    "chat": ("tinyforge.chat", "talk to a model"),
    "inspect": ("tinyforge.inspect", "what each head guesses"),
    "serve": ("tinyforge.serve", "answer over HTTP, as OpenAI's API does"),
    "web": ("tinyforge.web", "a page that runs a model in the browser"),
    "board": ("tinyforge.board", "curves of runs in a browser"),
    "convert": ("tinyforge.formats.convert", "models of Hugging Face, llama.cpp and llama2.c, in and out"),
    "hub": ("tinyforge.zoo.push", "publish a model on the Hugging Face hub"),
    "average": ("tinyforge.formats.average", "the mean of several models' weights"),
    "calibrate": ("tinyforge.recipes.calibrate", "fit a model's temperature to held-out text"),
    "models": ("tinyforge.zoo.command", "list the models, show one"),
    "text": ("tinyforge.tokenizers.command", "train and use a tokenizer"),
    "gradcheck": ("tinyforge.gradcheck", "check every gradient"),
    "doctor": ("tinyforge.doctor", "what this machine has"),
    "scaling": ("tinyforge.scaling", "what a step takes on many GPUs"),
    "data local": ("tinyforge.data.local", "a source of your own files"),
    "data gutenberg": ("tinyforge.data.gutenberg", "books"),
    "data fineweb_edu": ("tinyforge.data.fineweb_edu", "web pages"),
    "data tinystories": ("tinyforge.data.tinystories", "stories"),
    "data stories": ("examples.storyteller.stories", "stories retold"),
    "data alpaca": ("tinyforge.data.alpaca", "instructions"),
    "data evaluation": ("tinyforge.data.evaluation", "evaluation sets"),
    "data world": ("tinyforge.data.world", "the built-in corpus"),
    "data talk": ("tinyforge.data.talk", "small talk about the built-in corpus"),
    "data corpus": ("tinyforge.data.corpus", "sources filtered, without duplicates"),
    "data dropped": ("tinyforge.data.dropped", "what a corpus left out, and why"),
    "data quality": ("tinyforge.data.quality", "train a classifier of quality"),
    "data sentences": ("tinyforge.data.sentences", "single sentences of a corpus"),
    "data shards": ("tinyforge.data.shards", "a corpus as tokens"),
}
MODULES = {tuple(name.split()): module for name, (module, _) in COMMANDS.items()}
# Modules that are typed differently after `python -m`.
_TYPED = {
    "tinyforge.formats.convert": "tinyforge.formats convert",
    "tinyforge.formats.average": "tinyforge.formats average",
    "tinyforge.tokenizers.command": "tinyforge.tokenizers",
    "tinyforge.zoo.command": "models",
    "tinyforge.zoo.push": "tinyforge.formats hub",
}


def code_hash() -> str:
    """SHA-256 of the Python and CUDA sources, the same for a checkout and a wheel of it."""
    roots = {PACKAGE: PACKAGE}
    if IN_CHECKOUT:
        roots |= {PACKAGE.parent / name: PACKAGE.parent for name in ("models", "recipes", "data")}
    files = {p.relative_to(root).as_posix(): p for folder, root in roots.items() for p in folder.rglob("*")}
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.endswith((".py", ".cu", ".cuh")):
            digest.update(name.encode() + b"\0" + files[name].read_bytes())
    return digest.hexdigest()


def as_typed(text: str, in_checkout: bool = IN_CHECKOUT) -> str:
    """`text` with each command as it is typed here: unchanged in a checkout, unless this process is the command
    `tinyforge` itself; else `tinyforge` and its subcommand."""
    if in_checkout and Path(sys.argv[0].partition(" ")[0]).stem != "tinyforge":
        return text
    for words, module in MODULES.items():
        command = " ".join(("tinyforge", *words))
        if module.startswith("tinyforge.recipes."):
            text = re.sub(rf"(?:python )?\b{module.removeprefix('tinyforge.').replace('.', '/')}\.py\b", command, text)
        else:
            name = _TYPED.get(module, module).removeprefix("tinyforge.data.")
            name = f"data.{name}" if words[0] == "data" else name
            text = re.sub(rf"\bpython -m {re.escape(name)}\b(?!\.\w)", command, text)
    return text
