"""Errors that a user meets, and how a command shows them.

A `UserError` is a fault in the user's input (a file, a flag, a checkpoint), not a bug in this code. Its message is one
line: what, got, expected, fix. Commands read their flags with a `Parser`, which raises it too, and run their `main`
through `run_command`, which prints that line and exits with status 2. A bug still shows its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tinyforge import requirements
from tinyforge.invocation import ROOT, as_typed
from tinyforge.terminal import one_line


class UserError(Exception):
    """A fault the user can fix. The message is one line that says what is wrong and what to do next.

    status: the exit status of a command that fails with it.
    """

    status = 2


def first_line(error: BaseException) -> str:
    """Of an error's text, or what kind it is if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def errors_in(what: object) -> Iterator[None]:
    """Begin the message of a UserError with what it is about, such as a file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


class Parser(argparse.ArgumentParser):
    """argparse's parser, except that a wrong flag raises `UserError`, where argparse prints its usage and exits.

    So does an empty value: an empty path would mean the current folder. A docstring as `description` keeps its lines.
    takes_text: positional arguments are text, which may be empty.
    """

    takes_text = False

    def __init__(self, *args: Any, **options: Any) -> None:
        # A description of several lines, a module's docstring, is laid out already; argparse would wrap it anew.
        if "\n" in (options.get("description") or ""):
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **options)
        self.prog = as_typed(self.prog)
        self._former: dict[str, str] = {}
        self.bounds: dict[str, tuple[float, float]] = {}  # of numbers, by flag

    def flag(
        self, name: str, value: Any, help: str, least: float = -math.inf, most: float = math.inf, **more: Any
    ) -> None:
        """Add a flag. value: the type of what is given, or the default, which the help then ends with; False makes a
        switch, and [] takes several values: after one flag, or with action="append" one a flag. least, most: bounds of
        numbers. more: other options of `add_argument`."""
        if (least, most) != (-math.inf, math.inf):
            self.bounds[name] = least, most
        if value is False:
            self.add_argument(name, action="store_true", help=help)
        elif value == []:
            several: dict[str, Any] = {} if "action" in more else {"nargs": "+"}
            self.add_argument(name, default=[], help=help, **several, **more)
        elif isinstance(value, type):
            self.add_argument(name, type=value, help=help, **more)
        else:
            shown = f"{help} (default: %(default)s)".lstrip()
            self.add_argument(name, type=type(value), default=value, help=shown, **more)

    def add_former(self, old: str, new: str) -> None:
        """Accept `old`, the name in earlier versions of the flag `new`, and say on stderr what to write."""
        self._former[old] = new

    def format_help(self) -> str:
        return as_typed(super().format_help())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [self._renamed(word) for word in (sys.argv[1:] if args is None else args)]
        for before, word in zip(["", *given], given, strict=False):
            if self.takes_text and not word and not before.startswith("--"):
                continue
            if not word or (word.startswith("--") and word.endswith("=")):
                flag = word[:-1] or before
                self.error(
                    f"{f'argument {flag}' if flag.startswith('--') else 'an argument'} is empty, expected a value"
                )
        found, rest = super().parse_known_args(given, namespace)
        for flag, (least, most) in self.bounds.items():
            value = getattr(found, flag.strip("-").replace("-", "_"))
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not least <= number <= most:  # so that NaN is refused
                    expected = f"{least} or more" if most == math.inf else f"{least} to {most}"
                    raise UserError(f"{flag} is {number}, expected {expected}")
        return found, rest

    def _renamed(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        new = self._former.get(flag)
        if new is None:
            return word
        print(f"warning: {flag} is deprecated; write {new}", file=sys.stderr)
        return new + equals + value

    def error(self, message: str) -> NoReturn:
        words, near = message.split(), []
        if words[:2] == ["unrecognized", "arguments:"]:
            flags, first = self._option_string_actions, words[2]
            near = [f"{flag} {first}" for flag in ("--checkpoint", "--base", "--data") if flag in flags]
            if first.startswith("-"):
                near = difflib.get_close_matches(first.partition("=")[0], flags, 1)
        hint = f"did you mean {' or '.join(near)}? See" if near else "see"
        raise UserError(f"{' '.join(words)}; {hint} {self.prog} --help")


class TextParser(Parser):
    """A parser whose positional argument is text."""

    takes_text = True


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main`, turning a `UserError` into one line on stderr and exit status 2."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # Python has None for what is closed
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    try:
        status = main() or 0
        sys.stdout.flush()
        sys.exit(status)
    except UserError as error:
        print(f"error: {one_line(as_typed(str(error)))}", file=sys.stderr)  # it may quote a file's content
        sys.exit(error.status)
    except MemoryError as error:  # NumPy's, and CuPy's for a GPU
        cause = one_line(str(error)) or "no memory is left"
        print(
            f"error: out of memory: {cause}; a checkpoint that was saved is intact. Use a smaller --batch-size (with "
            "--grad-accum for as large a step), or a smaller --seq-len",
            file=sys.stderr,
        )
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "tinyforge").partition(".")[0]
        if package in ("tinyforge", "bench", "examples"):  # a bug
            raise
        print(f"error: {requirements.not_installed([package], ROOT)}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != "Query interrupted":  # so DuckDB calls Ctrl-C
            raise
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has closed it (`... | head`): not worth a traceback.
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # Python would write what is left at its end.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        print("error: no space is left on the disk that the output goes to; free some", file=sys.stderr)
        sys.exit(1)
