"""The command `tinyforge`: each subcommand is a module's `main`, with the same flags.

    tinyforge train --steps 500                 python recipes/pretrain.py --steps 500
    tinyforge chat --prompt "What is 3 plus 4?" python -m tinyforge.chat --prompt ...
    tinyforge data local notes/ --out source    python -m data.local ...
    source <(tinyforge completion bash)         completion; also for zsh and fish

`python -m tinyforge` is the same command where it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

# setup.py reads this table before there is anything to import: nothing of tinyforge is imported above the functions.
MODULES: dict[tuple[str, ...], str] = {
    ("train",): "tinyforge.recipes.pretrain",
    ("sft",): "tinyforge.recipes.sft",
    ("dpo",): "tinyforge.recipes.dpo",
    ("grpo",): "tinyforge.recipes.grpo",
    ("classify",): "tinyforge.recipes.classify",
    ("evaluate",): "tinyforge.recipes.evaluate",
    ("ablation",): "tinyforge.recipes.ablation",
    ("chat",): "tinyforge.chat",
    ("inspect",): "tinyforge.inspect",
    ("serve",): "tinyforge.serve",
    ("board",): "tinyforge.board",
    ("convert",): "tinyforge.formats.convert",
    ("average",): "tinyforge.formats.average",
    ("calibrate",): "tinyforge.formats.calibrate",
    ("models",): "tinyforge.zoo.command",
    ("text",): "tinyforge.tokenizers.command",
    ("gradcheck",): "tinyforge.gradcheck",
    ("doctor",): "tinyforge.doctor",
    ("scaling",): "tinyforge.scaling",
    ("data", "local"): "tinyforge.data.local",
    ("data", "gutenberg"): "tinyforge.data.gutenberg",
    ("data", "fineweb_edu"): "tinyforge.data.fineweb_edu",
    ("data", "tinystories"): "tinyforge.data.tinystories",
    ("data", "stories"): "tinyforge.data.stories",
    ("data", "alpaca"): "tinyforge.data.alpaca",
    ("data", "evaluation"): "tinyforge.data.evaluation",
    ("data", "world"): "tinyforge.data.world",
    ("data", "corpus"): "tinyforge.data.corpus",
    ("data", "shards"): "tinyforge.data.shards",
}
SUMMARIES = {
    "train": "pretrain a model on text",
    "sft": "fine-tune on questions and answers",
    "dpo": "learn from preferences",
    "grpo": "learn from rewards",
    "classify": "learn classes of texts or images",
    "evaluate": "measure a model",
    "ablation": "compare settings over seeds",
    "chat": "talk to a model",
    "inspect": "what each head guesses",
    "serve": "answer over HTTP, as OpenAI's API does",
    "board": "curves of runs in a browser",
    "convert": "models of Hugging Face, llama.cpp and llama2.c, in and out",
    "average": "the mean of several models' weights",
    "calibrate": "fit a model's temperature to held-out text",
    "models": "list the models, show one",
    "text": "train and use a tokenizer",
    "gradcheck": "check every gradient",
    "doctor": "what this machine has",
    "scaling": "what a step takes on many GPUs",
    "data local": "a source of your own files",
    "data gutenberg": "books",
    "data fineweb_edu": "web pages",
    "data tinystories": "stories",
    "data stories": "stories retold",
    "data alpaca": "instructions",
    "data evaluation": "evaluation sets",
    "data world": "the built-in corpus",
    "data corpus": "sources filtered, without duplicates",
    "data shards": "a corpus as tokens",
    "completion": "print a script for bash, zsh or fish",
}
SHELLS = ("bash", "zsh", "fish")


def module_of(words: tuple[str, ...]) -> str | None:
    """The module of a subcommand; None where this version has none."""
    name = MODULES[words]
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            name = f"{name}.__main__"
            found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return name if found else None


def present() -> Iterator[tuple[str, ...]]:
    return (words for words in MODULES if module_of(words))


def main(argv: Sequence[str] | None = None) -> int:
    from tinyforge import __version__
    from tinyforge.errors import UserError

    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in ([], ["-h"], ["--help"], ["help"]):
        print(usage())
        return 0
    if given == ["--version"]:
        print(f"tinyforge {__version__}")
        return 0
    if given[0] == "completion":
        return completion(given[1:])
    words: tuple[str, ...] = (given[0],)
    if words == ("data",):
        stages = ", ".join(w[1] for w in present() if w[0] == "data")
        if given[1:2] in ([], ["-h"], ["--help"]):
            print(f"usage: tinyforge data STAGE [FLAGS]\n\nStages: {stages}. Each has --help.")
            return 0
        words = ("data", given[1])
        if words not in MODULES:
            raise UserError(f"tinyforge data {given[1]}: no such stage; there are {stages}")
    elif given[0].startswith("-"):
        raise UserError(f"unrecognized arguments: {' '.join(given)}; see tinyforge --help")
    elif words not in MODULES:
        raise UserError(
            f"tinyforge {given[0]}: no such command; there are "
            f"{', '.join(dict.fromkeys(w[0] for w in present()))}, completion"
        )
    module = module_of(words)
    if module is None:
        raise UserError(f"tinyforge {' '.join(words)}: this version has no such command; see tinyforge --help")
    rest = given[len(words) :]
    before, sys.argv = sys.argv, [" ".join(("tinyforge", *words)), *rest]
    try:
        return imported(module).main(rest) or 0
    finally:
        sys.argv = before


def run() -> None:
    from tinyforge.errors import run_command

    run_command(main)


def imported(module: str) -> ModuleType:
    """The module of a subcommand. Raises UserError where the packages of its extra are not installed."""
    from tinyforge.errors import UserError

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in ("tinyforge", "models", "data", "recipes"):
            raise
        raise UserError(f"{module} needs the package {package}; pip install {package}") from error


def usage() -> str:
    lines = ["usage: tinyforge COMMAND [FLAGS]", "", "Language models from scratch. Each command has --help.", ""]
    for name in [*map(" ".join, present()), "completion"]:
        lines.append(f"  {name:<18} {SUMMARIES[name]}")
    return "\n".join(lines)


# --- completion


def flags_of(words: tuple[str, ...]) -> list[str]:
    """The flags of a subcommand, and the words of its own subcommands: its parser is asked, and not run."""
    from tinyforge.errors import Parser, UserError

    class Asked(Exception):
        pass

    def stop(parser: Parser, *_: object) -> None:
        raise Asked(parser)

    module, usual = module_of(words), Parser.parse_known_args
    if module is None:
        return []
    Parser.parse_known_args = stop  # type: ignore[method-assign, assignment]
    try:
        imported(module).main(["--help"])
    except Asked as asked:
        parser: Parser = asked.args[0]
        found = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
        inner = {word for action in parser._actions if isinstance(action.choices, dict) for word in action.choices}
        return [*sorted(inner), *sorted(found)]
    except UserError:
        return []  # its packages are missing: it has no flags here
    finally:
        Parser.parse_known_args = usual  # type: ignore[method-assign]
    return []


def completion(arguments: Sequence[str]) -> int:
    from tinyforge.errors import Parser

    parser = Parser(prog="tinyforge completion", description="Print a script that completes commands, flags and files.")
    parser.add_argument("shell", choices=SHELLS, help="source <(tinyforge completion bash); fish: ... | source")
    shell = parser.parse_args(arguments).shell
    table = {" ".join(words): flags_of(words) for words in present()}
    table["completion"] = list(SHELLS)
    print(fish(table) if shell == "fish" else bash(table, zsh=shell == "zsh"))
    return 0


def bash(table: dict[str, list[str]], zsh: bool) -> str:
    """A case for each command; a word that is not a flag is completed as a file. zsh reads bash's scripts."""
    first = " ".join(dict.fromkeys(name.split()[0] for name in table))
    stages = " ".join(name.split()[1] for name in table if name.startswith("data "))
    cases = "\n".join(f"    '{name}') words='{' '.join(words)}' ;;" for name, words in table.items())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_tinyforge() {{
  local name="${{COMP_WORDS[1]}}" words
  if [ "$COMP_CWORD" = 1 ]; then words='{first}'
  elif [ "$name" = data ] && [ "$COMP_CWORD" = 2 ]; then words='{stages}'
  else
    if [ "$name" = data ]; then name="data ${{COMP_WORDS[2]}}"; fi
    case "$name" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _tinyforge tinyforge"""


def fish(table: dict[str, list[str]]) -> str:
    lines = []
    for name, words in table.items():
        *outer, last = name.split()
        under = " ".join(["__fish_seen_subcommand_from", *outer]) if outer else "__fish_use_subcommand"
        lines.append(f"complete -c tinyforge -n '{under}' -a {last} -d '{SUMMARIES[name]}'")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in (*outer, last))
        for word in words:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c tinyforge -n '{seen}' {kind}")
    return "\n".join(["complete -c tinyforge -n __fish_use_subcommand -a data -d 'sources, corpora, shards'", *lines])
