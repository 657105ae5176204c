'''Talk to a trained model, any that predicts tokens from left to right.

    python -m tinyforge.chat                            the newest run under runs/, else the storyteller
    python -m tinyforge.chat --prompt "What is 3 plus 4?"
    echo "What is 3 plus 4?" | python -m tinyforge.chat
    python -m tinyforge.chat --checkpoint runs/pretrain         a base model continues the text
    python -m tinyforge.chat --checkpoint small                 the other model that comes with the repository

Ctrl-C stops a reply and keeps the conversation; Ctrl-D or /bye leaves; """ begins and ends a text of several lines;
/help lists the commands. With --prompt or piped input only the reply is printed.

By default the temperature, the cuts, the penalty and the longest reply are those of the generation_config.json next to
the model's weights, if there is one, as in transformers and vLLM. A flag changes one setting and keeps the others.
'''

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats import Loaded, add_checkpoint_flag, add_computing_flags, hub, load, resolve_checkpoint
from tinyforge.formats.generation import FIELDS, FILE
from tinyforge.formats.runs import add_template_flag, with_template
from tinyforge.infer.causal_lm import check_causal_lm
from tinyforge.infer.conversation import Conversation
from tinyforge.infer.sampling import Sampling
from tinyforge.registry import models
from tinyforge.report import count_of
from tinyforge.terminal import printable
from tinyforge.tokenizers.chat_templates import ChatTemplate

BLOCK = '"""'
DEFAULTS = Sampling(max_tokens=400)  # the storyteller's stories take up to 350
SETTINGS = {
    "temperature": "0 is greedy",
    "top_k": "most likely tokens kept, 0 for all",
    "top_p": "probability mass kept",
    "min_p": "least probability kept, relative to the highest",
    "repetition_penalty": "above 1, repeated words become less likely",
    "max_tokens": "longest reply",
    "seed": "of the random choices",
    "drafts": "tokens drafted ahead: changes the speed, not the distribution",
}


def conversation_with(loaded: Loaded, system: str = "") -> Conversation:
    return Conversation(loaded.model, loaded.tokenizer, loaded.template, system)


def show(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(printable(piece), end="", flush=True)


class Leave(Exception):
    """The user says goodbye."""


class Repl:
    """The loop on a terminal: reads lines, prints replies, runs commands."""

    def __init__(self, loaded: Loaded, sampling: Sampling, system: str = "") -> None:
        self.loaded = loaded
        self.conversation = conversation_with(loaded, system)
        self.sampling = sampling
        self.asked = 0  # added to the seed: every reply draws other numbers, and every session the same
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        # Every method named do_X is the command /X; its docstring is its line in /help.
        self.commands: dict[str, Callable[[list[str]], None]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def run(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history, where the platform has it
        while True:
            try:
                line = self.read("> ", "1;32").strip()
                if line.startswith("/"):
                    self.obey(line)
                elif text := self.whole(line):
                    self.reply(text)
            except UserError as error:
                self.note(f"error: {error}")
            except KeyboardInterrupt:
                print()
                self.note("Ctrl-D or /bye leaves")
            except (EOFError, Leave):
                print()
                return

    def read(self, prompt: str, code: str) -> str:
        return decoded(lambda: input(self.painted(prompt, code, prompt=True)))

    def whole(self, line: str) -> str:
        """A message: its first line, or the lines between two \"\"\"."""
        if not line.startswith(BLOCK):
            return line
        lines = [line.removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self.read(". ", "32"))
        return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")

    def reply(self, text: str) -> None:
        sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + self.asked)
        self.asked += 1
        pieces = self.conversation.ask(text, sampling)
        try:
            first = next(pieces, "")
            self.note(self.conversation.notice)  # print what was left out before the reply
            self.conversation.notice = ""
            show([first])
            show(pieces)
            print()
        except KeyboardInterrupt:
            pieces.close()
            print(self.painted(" [stopped]", "2"))
        self.note(self.conversation.notice)

    def note(self, text: str) -> None:
        """A line about the conversation, not of it."""
        if text:
            print(self.painted(printable(text), "2"))

    def painted(self, text: str, code: str, prompt: bool = False) -> str:
        if not self.colour:
            return text
        # readline counts a prompt's characters; \1 and \2 enclose those of zero width.
        before, after = ("\1", "\2") if prompt else ("", "")
        return f"{before}\x1b[{code}m{after}{text}{before}\x1b[0m{after}"

    # --- commands

    def obey(self, line: str) -> None:
        name, _, text = line[1:].partition(" ")
        try:
            arguments = [text.strip()] * bool(text.strip()) if name == "system" else shlex.split(text)
        except ValueError as error:
            raise UserError(f"{line}: {error}; close the quotation mark") from error
        if name not in self.commands:
            raise UserError(f"/{name} is not a command; /help lists them")
        self.commands[name](arguments)

    def do_help(self, arguments: list[str]) -> None:
        """this list"""
        for name, command in self.commands.items():
            self.note(f"  /{name:<7} {command.__doc__}")
        self.note(f"  {BLOCK}      begins and ends a text of several lines")
        self.note("  Ctrl-C   stops a reply; Ctrl-D leaves")

    def do_bye(self, arguments: list[str]) -> None:
        """leave"""
        raise Leave

    def do_clear(self, arguments: list[str]) -> None:
        """forget the conversation"""
        self.conversation.clear()
        self.note("forgotten")

    def do_system(self, arguments: list[str]) -> None:
        """/system TEXT sets the system prompt; alone, it shows it; /system "" removes it"""
        if arguments:
            text = arguments[0]
            quoted = text[0] == text[-1] == '"' and text.count('"') == 2
            self.conversation.system = text[1:-1] if quoted else text
        shown = self.conversation.system or "none is given, so the template's own holds, if it has one"
        self.note(f"system prompt: {shown}")

    def do_undo(self, arguments: list[str]) -> None:
        """take the last question and its reply back"""
        turn = self.conversation.undo()
        self.note(f"taken back: {turn.user}")

    def do_retry(self, arguments: list[str]) -> None:
        """answer the last question again, with other random numbers"""
        if self.sampling.temperature == 0:
            self.note("temperature is 0: the reply will be the same; /set temperature 0.7 varies it")
        self.reply(self.conversation.undo().user)

    def do_set(self, arguments: list[str]) -> None:
        """/set NAME VALUE changes how replies are sampled; alone, it shows the names"""
        if not arguments:
            return self.do_show(arguments)
        name, value = arguments if len(arguments) == 2 else (arguments[0], "")
        if name not in SETTINGS:
            raise UserError(f"/set {name}: no such setting; there are {', '.join(SETTINGS)}")
        kind = type(getattr(self.sampling, name))
        try:
            self.sampling = dataclasses.replace(self.sampling, **{name: kind(value)})
        except ValueError:
            raise UserError(
                f"/set {name}: got {value!r}, expected a number, e.g. /set {name} {getattr(self.sampling, name)}"
            ) from None
        if name == "seed":
            self.asked = 0

    def do_show(self, arguments: list[str]) -> None:
        """the model, the settings, and how full the context is"""
        conversation = self.conversation
        self.note(f"  model               {hub.called(self.loaded.path)}")
        for name, meaning in SETTINGS.items():
            self.note(f"  {name:<19} {getattr(self.sampling, name)!s:<6} {meaning}".rstrip())
        if own := self.own():
            self.note(f"  {own}")
        (seen, tokens), turns = conversation.seen(), len(conversation.turns)
        left_out = "" if seen == turns else f"; the model sees the last {seen} of them"
        self.note(f"  turns               {turns}: {tokens} of {conversation.context} tokens{left_out}")

    def own(self) -> str:
        """The settings that are still the model's own; "" if none are."""
        own = [
            f"{name} {value}"
            for name, value in self.loaded.generation.fields.items()
            if getattr(self.sampling, name) == value
        ]
        return f"{', '.join(own)}: from its {FILE}" if own else ""

    def do_stats(self, arguments: list[str]) -> None:
        """tokens per second, time to the first token, drafts accepted"""
        s = self.conversation.stats
        self.note(
            f"  {count_of(s.tokens, 'token')} at {s.tokens_per_second:,.0f} per second; the last reply began "
            f"after {1e3 * s.first_seconds:.1f} ms"
        )
        self.note(f"  prompts: {count_of(s.prefilled, 'token')} read, {s.reused} found in the cache")
        if s.drafted:
            shares = ", ".join(f"head {k}: {share:.0%}" for k, share in enumerate(s.acceptance, start=1))
            self.note(f"  {s.tokens_per_pass:.2f} tokens per pass; drafts accepted: {shares}")

    def do_save(self, arguments: list[str]) -> None:
        """/save FILE writes the conversation"""
        path = self.file(arguments, "save")
        self.conversation.save(path)
        self.note(f"saved {count_of(len(self.conversation.turns), 'turn')} to {path}")

    def do_load(self, arguments: list[str]) -> None:
        """/load FILE continues a saved conversation"""
        self.conversation.load(self.file(arguments, "load"))
        for turn in self.conversation.turns:
            self.note(f"> {turn.user}")
            print(printable(turn.reply))

    def file(self, arguments: list[str], command: str) -> Path:
        if len(arguments) != 1:
            raise UserError(f"/{command} expects one file name, e.g. /{command} talk.json")
        return Path(arguments[0]).expanduser()


def once(loaded: Loaded, text: str, sampling: Sampling, system: str = "", asked: str | None = None) -> None:
    """Print one reply, and nothing else, on standard output. asked: the template of --template, for the note."""
    conversation = conversation_with(loaded, system)
    if asked:
        print(f"note: chat template: {asked}", file=sys.stderr)
    elif isinstance(loaded.template, ChatTemplate):
        print("note: chat template: the model's own; --template takes another", file=sys.stderr)
    elif loaded.template.name == "plain":
        print("note: the model has no chat template and continues the text; --template takes one", file=sys.stderr)
    show(conversation.ask(text, sampling))
    print(flush=True)
    if conversation.notice:
        print(conversation.notice, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.chat", description=__doc__)
    add_checkpoint_flag(parser)
    parser.flag("--prompt", str, "answer this and leave", metavar="TEXT")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: the chat template's own)")
    add_template_flag(parser)
    add_computing_flags(parser)
    for name, meaning in SETTINGS.items():
        default = getattr(DEFAULTS, name)
        own = "the model's, else " if name in FIELDS.values() else ""
        parser.flag(f"--{name.replace('_', '-')}", type(default), f"{meaning} (default: {own}{default})")
    args = parser.parse_args(argv)
    given = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    dataclasses.replace(DEFAULTS, **given)  # reports a wrong value before the model is loaded
    path = resolve_checkpoint(args.checkpoint, for_chat=True)
    backend = get_backend(args.backend, args.precision, workers=1)
    loaded = with_template(
        load(path, backend, frozen=True, weights=args.weights), args.template, args.template_variables
    )
    check_causal_lm(loaded.model)
    loaded.model.mostly_decodes = True
    sampling = loaded.generation.sampling(DEFAULTS, **given)
    if args.prompt is not None:
        once(loaded, args.prompt, sampling, args.system, args.template)
    elif not sys.stdin.isatty():
        once(loaded, decoded(sys.stdin.read).strip(), sampling, args.system, args.template)
    else:
        base = loaded.template.name == "plain"
        note = "a base model without a chat template: it continues your text" if base else "fine-tuned"
        for spec in models().values():
            if loaded.path == spec.bundled:
                note = "comes with the repository; it knows a small world of people, things and numbers"
            elif loaded.path == spec.bundled_for_chat:
                note = "comes with the repository; it tells stories: Tell me a story about a dog named Max"
        repl = Repl(loaded, sampling, args.system)
        called = hub.called(loaded.path)
        repl.note(f"{called} ({note}). /help lists the commands; Ctrl-C stops a reply; Ctrl-D or /bye leaves.")
        repl.note(repl.own())
        repl.run()
    return 0


def decoded(read: Callable[[], str]) -> str:
    """What `read` returns of the standard input."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not {error.encoding} text at byte {error.start}; convert it to {error.encoding}"
        ) from error


if __name__ == "__main__":
    run_command(main)
