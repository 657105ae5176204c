"""The command `tinyforge`: each subcommand is a module's `main`, with the same flags.

    tinyforge train --steps 500                 python recipes/pretrain.py --steps 500
    tinyforge chat --prompt "What is 3 plus 4?" python -m tinyforge.chat --prompt ...
    tinyforge data local notes/ --out source    python -m data.local ...
    source <(tinyforge completion bash)         completion; also for zsh and fish

`python -m tinyforge` is the same command where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from tinyforge.invocation import COMMANDS, MODULES

SUMMARIES = {name: summary for name, (_, summary) in COMMANDS.items()}
SUMMARIES["completion"] = "print a script for bash, zsh or fish"


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
        folder = MODULES[words].replace(".", "/")
        where = (
            f"it is an example of the repository, {folder}.py"
            if folder.startswith("examples/")
            else "see tinyforge --help"
        )
        raise UserError(f"tinyforge {' '.join(words)}: this version has no such command; {where}")
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
        if not package or package == "tinyforge":
            raise
        raise UserError(f"{module} needs the package {package}; pip install {package}") from error


def usage() -> str:
    lines = ["usage: tinyforge COMMAND [FLAGS]", "", "Language models from scratch. Each command has --help.", ""]
    for name in [*map(" ".join, present()), "completion"]:
        lines.append(f"  {name:<18} {SUMMARIES[name]}")
    return "\n".join(lines)


# --- completion


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each subcommand's name and parser, which is asked for, and not run; not those whose packages are missing."""
    from tinyforge.errors import Parser, UserError

    class Asked(Exception):
        pass

    def stop(parser: Parser, *_: object) -> None:
        raise Asked(parser)

    usual = Parser.parse_known_args
    Parser.parse_known_args = stop  # type: ignore[method-assign, assignment]
    try:
        for words in present():
            try:
                imported(module_of(words) or "").main(["--help"])
            except Asked as asked:
                yield " ".join(words), asked.args[0]
            except UserError:
                continue
    finally:
        Parser.parse_known_args = usual  # type: ignore[method-assign]


def known_values() -> dict[str, list[str]]:
    """What flags and arguments accept by name, next to files and other names."""
    from tinyforge.backends import PRECISIONS
    from tinyforge.data.evaluation import TASKS, TEXT_TASKS
    from tinyforge.registry import models

    specs = models()
    return {
        "--model": list(specs),
        "--config": list(dict.fromkeys(preset for spec in specs.values() for preset in spec.presets)),
        "--backend": ["auto", *dict.fromkeys(name for p in PRECISIONS.values() for name in p.backends)],
        "--precision": list(PRECISIONS),
        "--tasks": [*TASKS, *TEXT_TASKS],
        "NAME|PATH": list(specs),
    }


def completion(arguments: Sequence[str]) -> int:
    from tinyforge.completion import SHELLS, Words, script, words_of
    from tinyforge.errors import Parser
    from tinyforge.formats import shipped_models

    parser = Parser(prog="tinyforge completion", description="Print a script that completes commands, flags and files.")
    parser.add_argument("shell", choices=SHELLS, help="source <(tinyforge completion bash); fish: ... | source")
    shell = parser.parse_args(arguments).shell
    table: dict[str, Words] = {}
    for command, found in parsers():
        table |= words_of(command, found, known_values())
    table["completion"] = Words(arguments=list(SHELLS))
    print(script(shell, table, list(shipped_models()), SUMMARIES))
    return 0
