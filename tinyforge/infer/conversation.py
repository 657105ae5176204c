"""A conversation: its turns, rendered as one text that the model continues.

    conversation = Conversation(model, tokenizer, TEMPLATES["alpaca"])
    for piece in conversation.ask("What is 3 plus 4?", sampling): ...
    conversation.turns[-1].reply

The template renders the turns as in the model's training; a base model sees plain text. Earlier turns stay cached, so
that a turn costs only its own tokens. When the context is full, the oldest turns are left out.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from tinyforge.errors import UserError
from tinyforge.files import read_json, shown, write_whole, writing
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session, Stats
from tinyforge.infer.stream import stream_text
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import AnyTemplate
from tinyforge.tokenizers.chat_templates import Turn as Message

FORMAT, VERSION = "tinyforge-chat", 1
READ = (FORMAT, "nanoeuler-chat")  # the second is what earlier versions wrote, the same otherwise
ROOM_FOR_REPLY = 4  # a quarter of the context, unless max_tokens is smaller


@dataclass(frozen=True)
class Turn:
    """A question and its reply: the text, and the tokens that the model generated, None for a turn from a file."""

    user: str
    reply: str
    tokens: tuple[int, ...] | None = None


class Conversation:
    """The turns with a model, oldest first. `notice` says what was left out in the last turn, or is empty.

    system: the system prompt; without one a template may have its own.
    """

    def __init__(self, model: CausalLM, tokenizer: TextTokenizer, template: AnyTemplate, system: str = "") -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.system = system
        self.session = Session(model)
        self.turns: list[Turn] = []
        self.notice = ""
        self._first = 0  # the oldest turn in the context

    @property
    def context(self) -> int:
        return self.session.decoder.capacity

    def seen(self) -> tuple[int, int]:
        """How many turns, the newest ones, are still in the context, and how many tokens they take."""
        first, ids = self._fitting([], self.context)
        return len(self.turns) - first, len(ids)

    @property
    def stats(self) -> Stats:
        return self.session.stats

    def ask(self, text: str, sampling: Sampling) -> Generator[str]:
        """Yield the reply in pieces that never split a character, and append it as a turn.

        The caller may stop at any piece, also by an exception: the reply is then what has been generated.
        """
        if not text.strip():
            raise UserError("the prompt is empty; give at least one character")
        ids = self._fit(text, min(sampling.max_tokens, self.context // ROOM_FOR_REPLY))
        self.session.set_tokens(ids)
        pieces: list[str] = []
        try:
            stop = self.template.stop_ids(self.tokenizer)
            tokens = (token.id for token in self.session.generate(sampling, stop))
            for piece in stream_text(tokens, self.tokenizer):
                pieces.append(piece)
                yield piece
            if len(self.session.tokens) == self.context:
                ends = f"the reply ends here: the context of {self.context} tokens is full"
                self.notice = f"{self.notice}; {ends}" if self.notice else ends
        finally:
            self.turns.append(Turn(text, "".join(pieces), tuple(self.session.tokens[len(ids) :])))

    def _fit(self, text: str, room: int) -> list[int]:
        """The ids of the turns that fit, the new one last, with `room` left for the reply."""
        self.notice = ""
        limit = self.context - room
        new = self._encode_one(text)
        if len(new) > limit:
            text = self._shortened(text, len(new), limit)
        first, ids = self._fitting([(text, None)], limit)
        dropped = first - self._first
        self._first = first
        if dropped and not self.notice:
            turns = "the oldest turn was" if dropped == 1 else f"the {dropped} oldest turns were"
            self.notice = f"the context of {self.context} tokens is full: {turns} left out"
        return ids

    def _fitting(self, new: list[Message], limit: int) -> tuple[int, list[int]]:
        """The first of as many turns as fit into `limit` tokens with the new one, and the ids of all."""

        def ids_from(first: int) -> list[int]:
            turns: list[Message] = [(t.user, t.reply if t.tokens is None else t.tokens) for t in self.turns[first:]]
            return self.template.encode(self.tokenizer, [*turns, *new], self.system)

        ids = ids_from(self._first)
        if len(ids) <= limit:
            return self._first, ids
        first = len(self.turns)
        ids = ids_from(first)
        while first > self._first and len(longer := ids_from(first - 1)) <= limit:
            first, ids = first - 1, longer
        return first, ids

    def _shortened(self, text: str, tokens: int, limit: int) -> str:
        """A text without its beginning, so that alone it fits into `limit` tokens. tokens: of the whole text."""
        ids = self.tokenizer.encode(text)
        kept = ids[max(1, tokens - limit) :]
        # Decoded and encoded again, the kept ids can merge differently: drop more of them until the text fits.
        while kept and len(self._encode_one(self.tokenizer.decode(kept))) > limit:
            kept = kept[1:]
        if not kept:
            raise UserError(f"the context of {self.context} tokens has no room for a prompt; use another model")
        left_out = len(ids) - len(kept)
        self.notice = f"that is {tokens} tokens, {limit} fit: the first {left_out} tokens were left out"
        return self.tokenizer.decode(kept)

    def _encode_one(self, text: str) -> list[int]:
        """The ids of a prompt alone."""
        return self.template.encode(self.tokenizer, [(text, None)], self.system)

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self._first = 0

    def undo(self) -> Turn:
        """Remove and return the last turn."""
        if not self.turns:
            raise UserError("there is no turn to undo; say something first")
        self._first = min(self._first, len(self.turns) - 1)
        return self.turns.pop()

    # --- files

    def save(self, path: Path) -> None:
        """Write the turns as JSON. Never replaces a file that is not a saved conversation."""
        with writing(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.exists():
                _check_replaceable(path)
        turns = [{"user": turn.user, "reply": turn.reply} for turn in self.turns]
        content = json.dumps({"format": FORMAT, "version": VERSION, "turns": turns}, indent=1) + "\n"
        with writing(path):
            write_whole(path, content)

    def load(self, path: Path) -> None:
        """Replace the turns by those of a file written by `save`."""
        self.turns = [Turn(user, reply) for user, reply in _read(path)]
        self._first = 0


def _check_replaceable(path: Path) -> None:
    try:
        _read(path)
    except UserError as error:
        cause = str(error).partition(";")[0]
        raise UserError(f"not saved: another file has this name ({cause}); choose another name") from error


def _read(path: Path) -> list[tuple[str, str]]:
    content = read_json(path, "the saved conversation", fix="choose another file")
    if content.get("format") not in READ:
        raise UserError(f"{path} is not a saved conversation (no format {FORMAT}); choose another file")
    if (version := content.get("version")) != VERSION:
        raise UserError(f"{path} has version {shown(version)}, this program reads {VERSION}; save it again")
    turns = content.get("turns")
    if not isinstance(turns, list):
        raise UserError(f"{path}: got no list of turns; the file is damaged, choose another")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("user", "reply")):
            raise UserError(f"{path}: turn {number} expects the texts 'user' and 'reply'; fix or remove it")
    return [(turn["user"], turn["reply"]) for turn in turns]
